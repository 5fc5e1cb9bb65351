"""Runs programs in their own process, to test how they end, or environment variables, which the device reads once.

`python()` starts a program as subprocess.run does, but without the seconds that importing torch takes: each worker of the
tests keeps one process that has imported torch and no device, and that forks for each program.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Read by Python, the loader or torch before a program begins: a program for which one differs starts from nothing.
READ_EARLY = ("COVERAGE", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH_")
# Among these, those that the fork obeys.
OBEYED = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "TORCH_DEVICE_BACKEND_AUTOLOAD"}


def python(
    *arguments: str | Path,
    cwd: str | Path = ".",
    input: str = "",
    timeout: float = 600,
    dynamo: bool = False,
    destructors: bool = False,
    nested: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -P ARGUMENTS`` (``-c CODE …``, ``-m MODULE …`` or ``FILE …``), with `environment` added to this one.

    stdout and stderr are in the result; after `timeout` seconds it is killed, and subprocess.TimeoutExpired is raised.
    `dynamo` is for a program that compiles: Dynamo is imported already, which takes a second. `destructors` is for a
    program whose end is tested: what torch has loaded is destroyed too. `nested` is for a program that starts others
    with subprocess.Popen([sys.executable, "-m", …]): they fork too.
    """
    words = [str(each) for each in arguments]
    env = {**os.environ, **environment}
    options = words[0].startswith("-") and words[0] not in ("-c", "-m")
    imports_torch_itself = words[:2] == ["-m", "openreg_tools"] and env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
    covered = any(name.startswith("COVERAGE") for name in env)
    if options or imports_torch_itself or covered or _early(env) != _early(os.environ):
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, env=env, cwd=cwd, input=input, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stdin").write_text(input)
        files = [f"{name}/{each}" for each in ("stdin", "stdout", "stderr")]
        request = {"files": files, "arguments": words, "env": env, "cwd": str(Path(cwd).absolute()), "nested": nested}
        (folder / "request").write_text(json.dumps(request))
        server = _server(dynamo, destructors)
        print(folder / "request", file=server.stdin, flush=True)
        process = int(server.stdout.readline())
        began, timer = time.monotonic(), threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
        timer.start()
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        timer.cancel()
        out, err = ((folder / each).read_text() for each in ("stdout", "stderr"))
    if status == -signal.SIGKILL and time.monotonic() - began >= timeout:
        raise subprocess.TimeoutExpired(words, timeout, out, err)
    return subprocess.CompletedProcess(words, status, out, err)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_EARLY) and name not in OBEYED}


@functools.cache
def _server(dynamo: bool, destructors: bool) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in OBEYED}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-P", __file__, *["dynamo"] * dynamo, *["destructors"] * destructors]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.stdin.close)
    return server


def _serve() -> dict | None:
    """Fork for each request, and tell its process and then its status. In a fork, return the request."""
    kept: dict[str, types.ModuleType] = {}
    if "destructors" not in sys.argv:
        _keep_at_exit(kept)  # before torch, so that what its modules do at exit comes first
    import torch  # noqa: F401

    if "dynamo" in sys.argv:
        sys.modules["triton"] = None  # graphs of this device do not use it, and its end needs what gc.freeze() keeps
        import torch._dynamo  # noqa: F401
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list()  # compiles programs and starts processes to load them
        del sys.modules["triton"]
    if "destructors" not in sys.argv:
        _end_after_own_destructors()
        kept |= {name: module for name, module in sys.modules.items() if name not in ("__main__", "builtins", "sys")}
    gc.freeze()  # a collection in a fork, as at its exit, would copy the pages, which takes a second
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            return json.loads(Path(line.strip()).read_text())
        print(process, flush=True)
        print(os.waitpid(process, 0)[1], flush=True)
    return None


def _keep_at_exit(modules: dict[str, types.ModuleType]) -> None:
    """Make a fork end without clearing these modules, which would copy their memory. It clears the program's own."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    atexit.register(lambda: [sys.modules.pop(name, None) for name in modules])


def _end_after_own_destructors() -> None:
    """Make a fork end without running torch's destructors, which take 0.2 seconds. The program's own still run."""
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)
    library.__cxa_atexit(library.fflush, None, None)  # called before _exit, because it is registered after it


def _become(request: dict) -> None:
    """Run the program of the request, as the interpreter does after it has imported torch."""
    for number, name in enumerate(request["files"]):
        file = os.open(name, (os.O_RDWR if number else os.O_RDONLY) | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if request.get("nested"):
        request = _nest() or request
    sys.stdin = open(0, closefd=False)  # the old one has read ahead
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if action := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)
    first = request.get("path", [])
    sys.path[:0] = first + [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    import torch

    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    match request["arguments"]:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [file, *rest]:
            sys.argv = [file, *rest]
            runpy.run_path(os.path.abspath(file), run_name="__main__")  # spawned workers find it by this


# ---- the processes that a program starts ----


def _nest() -> dict | None:
    """Let the program's Popen ask a process that forks now, and forks again for each. In such a fork, return its request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if process := os.fork():
        theirs.close()
        atexit.register(lambda: (ours.close(), os.waitpid(process, 0)))
        _Popen.server = ours
        subprocess.Popen = _Popen
        return None
    ours.close()
    while True:
        message, files, _, _ = socket.recv_fds(theirs, 1 << 18, 16)
        if not message:
            os._exit(0)
        if (process := os.fork()) == 0:
            theirs.close()
            return _take(json.loads(message), files)
        for file in files:
            os.close(file)
        theirs.send(str(process).encode())
        theirs.send(str(os.waitpid(process, 0)[1]).encode())


def _take(request: dict, files: list[int]) -> dict:
    """Give the files the numbers that the program knows them by."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    return request | {"files": []}


class _Popen(subprocess.Popen):
    """``python -m MODULE …`` forks, and any other command starts as usual."""

    server: socket.socket
    _child_created = False  # for __del__

    def __init__(self, args: list[str], **options: Any) -> None:
        self.forked = args[:2] == [sys.executable, "-m"] and _early(options.get("env") or {}) == _early(os.environ)
        if not self.forked:
            super().__init__(args, **options)
            return
        self.returncode = None
        opened = [os.open(os.devnull, os.O_RDONLY)] if options["stdin"] == subprocess.DEVNULL else []
        given = [*(opened or [options["stdin"]]), options["stdout"], options["stderr"], *options["pass_fds"]]
        numbers, cwd = [0, 1, 2, *options["pass_fds"]], str(options["cwd"])
        request = {"numbers": numbers, "arguments": args[1:], "env": options["env"], "cwd": cwd, "path": [cwd]}
        files = [file if isinstance(file, int) else file.fileno() for file in given]
        socket.send_fds(self.server, [json.dumps(request).encode()], files)
        for file in opened:
            os.close(file)
        self.pid = int(self.server.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.forked and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self.server.recv(64)))
        return self.returncode if self.forked else super().wait(timeout)

    def kill(self) -> None:
        if not self.forked:
            super().kill()
        elif self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__" and (request := _serve()):
    _become(request)
