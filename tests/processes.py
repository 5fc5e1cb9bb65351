"""Runs programs in their own process, to test how they end, or environment variables, which the device reads once.

`python()` starts a program as subprocess.run does, but without the seconds that importing torch takes: each worker of the
tests keeps one process that has imported torch and no device, and that forks for each program.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

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
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -P ARGUMENTS`` (``-c CODE …``, ``-m MODULE …`` or ``FILE …``), with `environment` added to this one.

    stdout and stderr are in the result; after `timeout` seconds it is killed, and subprocess.TimeoutExpired is raised.
    `dynamo` is for a program that compiles: Dynamo is imported already, which takes a second. `destructors` is for a
    program whose end is tested: what torch has loaded is destroyed too.
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
        request = {"folder": name, "arguments": words, "env": env, "cwd": str(Path(cwd).absolute())}
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
    import torch  # noqa: F401

    if "dynamo" in sys.argv:
        sys.modules["triton"] = None  # graphs of this device do not use it, and its end needs what gc.freeze() keeps
        import torch._dynamo  # noqa: F401
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list()  # compiles programs and starts processes to load them
        del sys.modules["triton"]
    if "destructors" not in sys.argv:
        _end_after_own_destructors()
    gc.freeze()  # a collection in a fork, as at its exit, would copy the pages, which takes a second
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            return json.loads(Path(line.strip()).read_text())
        print(process, flush=True)
        print(os.waitpid(process, 0)[1], flush=True)
    return None


def _end_after_own_destructors() -> None:
    """Make a fork end without running torch's destructors, which take 0.2 seconds. The program's own still run."""
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)
    library.__cxa_atexit(library.fflush, None, None)  # called before _exit, because it is registered after it


def _become(request: dict) -> None:
    """Run the program of the request, as the interpreter does after it has imported torch."""
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDWR), (2, "stderr", os.O_RDWR)):
        file = os.open(os.path.join(request["folder"], name), flags | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0)  # the old one has read ahead
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if action := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
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


if __name__ == "__main__" and (request := _serve()):
    _become(request)
