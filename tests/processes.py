"""Runs programs in their own process, to test how they end, or environment variables, which the device reads once.

`python()` starts a program as subprocess.run does, but without the seconds that importing torch takes: each worker of the
tests keeps processes that have imported torch, or torch and the device, and that fork for each program. `Popen` does so for a
program that the test talks to.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Read by Python, the loader or torch before a program begins: a program for which one differs starts from nothing.
READ_EARLY = ("COVERAGE", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH_")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Among these, those that the fork obeys.
OBEYED = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", AUTOLOAD}


def python(
    *arguments: str | Path,
    cwd: str | Path = ".",
    input: str = "",
    timeout: float = 600,
    dynamo: bool = False,
    opinfo: bool = False,
    destructors: bool = False,
    nested: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -P ARGUMENTS`` (``-c CODE …``, ``-m MODULE …`` or ``FILE …``), with `environment` added to this one.

    stdout and stderr are in the result; after `timeout` seconds it is killed, and subprocess.TimeoutExpired is raised.
    `dynamo` is for a program that compiles: Dynamo is imported already, which takes a second. `opinfo` is for one that
    reads PyTorch's test database, which takes three. `destructors` is for a program whose end is tested: what torch has
    loaded is destroyed too. `nested` is for a program that starts others with subprocess.Popen([sys.executable, …]) or
    multiprocessing's method "spawn": they fork too, and so do those that they start.
    """
    words = [str(argument) for argument in arguments]
    env = {**os.environ, **environment}
    options = words[0].startswith("-") and words[0] not in ("-c", "-m")
    if options or not _may_fork(env):
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, env=env, cwd=cwd, input=input, capture_output=True, text=True, timeout=timeout)
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(input)
        stdin.seek(0)
        loads = env.get(AUTOLOAD) != "0" and words[:2] != ["-m", "openreg_tools"]
        # The device reads its variables as it is loaded.
        device = loads and not any(name.startswith("OPENREG_") and name != "OPENREG_DEVICE" for name in env)
        imports = {"device": device, "dynamo": dynamo or opinfo, "opinfo": opinfo, "destructors": destructors}
        server = _server(env.get("OPENREG_DEVICE", ""), **imports)
        request = {
            "arguments": words,
            "env": env,
            "cwd": str(Path(cwd).absolute()),
            "nested": nested,
            "numbers": [0, 1, 2],
        }
        process = _Forked(server, request, [stdin.fileno(), out.fileno(), err.fileno()])
        try:
            status = process.wait(timeout)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        said = [_all(file) for file in (out, err)]
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *said)
    return subprocess.CompletedProcess(words, status, *said)


def _all(file: io.TextIOBase) -> str:
    file.seek(0)
    return file.read()


def _may_fork(env: Mapping[str, str]) -> bool:
    """Returns true if a program with this environment may come from a server, which has this process's."""
    return _early(env) == _early(os.environ) and not any(name.startswith("COVERAGE") for name in env) and _may_name(env)


def _may_name(env: Mapping[str, str]) -> bool:
    """Returns true unless the device gets another name, and a program reads variables that a server has read for it."""
    if env.get("OPENREG_DEVICE", "") in ("", "openreg"):
        return True
    others = any(name.startswith(("CUDA_", "OPENREG_")) and name != "OPENREG_DEVICE" for name in env)
    return env["OPENREG_DEVICE"] == "cuda" and env.get(AUTOLOAD) != "0" and not others


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_EARLY) and name not in OBEYED}


# ---- the side that asks ----


@functools.cache
def _server(name: str = "", **imports: bool) -> socket.socket:
    """A process that forks for programs, in which the device has this name."""
    kept = {name: value for name, value in os.environ.items() if name not in OBEYED - {"PYTHONPATH"}}
    env = kept | {"OPENREG_DEVICE": name}  # PYTHONPATH decides which checkout's device the server imports
    env[AUTOLOAD] = str(int(imports["device"]))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
    words = [str(theirs.fileno()), *(name for name, wanted in imports.items() if wanted)]
    _servers.append(
        subprocess.Popen(
            [sys.executable, "-P", __file__, *words], env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
    )
    theirs.close()
    return ours  # whose end is the server's


_servers: list[subprocess.Popen] = []


class _Forked:
    """A process that the server has forked, with these files by these numbers."""

    def __init__(self, server: socket.socket, request: dict[str, Any], files: list[int]) -> None:
        self.status: int | None = None
        self.keeper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(server, [json.dumps(request).encode()], [theirs.fileno(), *files])
        theirs.close()
        self.pid = int(self.keeper.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises TimeoutError."""
        if self.status is None:
            self.keeper.settimeout(timeout)
            try:
                self.status = os.waitstatus_to_exitcode(int(self.keeper.recv(64)))
            except BlockingIOError:
                raise TimeoutError from None
            self.keeper.close()
        return self.status


class Popen(subprocess.Popen):
    """``python -m MODULE …`` and ``python FILE.py …`` fork from `server`, and any other command starts as usual."""

    HANDLED = {"cwd", "env", "pass_fds", "stderr", "stdin", "stdout"}
    server: socket.socket
    forked: _Forked | None = None
    # What subprocess.Popen.__init__ would set, for its other methods.
    _child_created = _communication_started = text_mode = False
    _input, _sigint_wait_secs = None, 0.25

    def __init__(self, args: list[str], **options: Any) -> None:
        words = args[2:] if args[:2] == [sys.executable, "-P"] else args[1:]
        env = options.get("env") or {**os.environ}
        if (
            args[0] != sys.executable
            or not (words and (words[0] == "-m" or words[0].endswith(".py")))
            or not self.HANDLED.issuperset(options)
            or not _may_fork(env)
        ):
            super().__init__(args, **options)
            return
        self.args, self.returncode = args, None
        ours, theirs, opened = [], [], []
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            match options.get(name):
                case None:
                    given, mine = number, None
                case subprocess.PIPE:
                    ends = os.pipe()
                    given, kept = ends if number == 0 else ends[::-1]
                    mine = open(kept, "rb" if number else "wb")
                    opened.append(given)
                case subprocess.DEVNULL:
                    given, mine = os.open(os.devnull, os.O_RDWR), None
                    opened.append(given)
                case int() as given:
                    mine = None
                case file:
                    given, mine = file.fileno(), None
            theirs.append(given)
            ours.append(mine)
        self.stdin, self.stdout, self.stderr = ours
        passed = [*options.get("pass_fds", ())]
        cwd = str(Path(options.get("cwd") or ".").absolute())
        first = cwd if words[0] == "-m" else str(Path(cwd, words[0]).parent)
        path = [] if args[1] == "-P" else [first]
        numbers = [0, 1, 2, *passed]
        request = {"arguments": words, "env": env, "cwd": cwd, "path": path, "numbers": numbers, "nested": True}
        self.forked = _Forked(self.server, request, [*theirs, *passed])
        self.pid = self.forked.pid
        for file in opened:
            os.close(file)

    def wait(self, timeout: float | None = None) -> int:
        if self.forked is None:
            return super().wait(timeout)
        try:
            self.returncode = self.forked.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode

    def poll(self) -> int | None:
        if self.forked is None:
            return super().poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None


def forking() -> type[Popen]:
    """A subprocess.Popen for a test whose programs read PyTorch's test database."""
    return type("Popen", (Popen,), {"server": _server(device=False, dynamo=True, opinfo=True, destructors=False)})


# ---- the side that forks ----


def _serve(server: socket.socket) -> dict | None:
    """For each request, fork a process that forks the program, and that tells its process and then its status. In the
    program, return the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the programs
    while True:
        message, files, _, _ = socket.recv_fds(server, 1 << 19, 32)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    server.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if process := os.fork():
        keeper = socket.socket(fileno=files[0])
        for file in files[1:]:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):  # nobody asks any more
            keeper.send(str(process).encode())
            keeper.send(str(os.waitpid(process, 0)[1]).encode())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = json.loads(message)
    os.close(files[0])
    _take(files[1:], request["numbers"])
    return request


def _take(files: list[int], numbers: list[int]) -> None:
    """Give the files the numbers that the program knows them by."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _prepare() -> None:
    """Import what the programs import."""
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
    if "opinfo" in sys.argv:
        from torch.testing._internal import common_methods_invocations  # noqa: F401 -- forks have it
    if "destructors" not in sys.argv:
        _end_after_own_destructors()
        kept |= {name: module for name, module in sys.modules.items() if name not in ("__main__", "builtins", "sys")}
    gc.freeze()  # a collection in a fork, as at its exit, would copy the pages, which takes a second


def _keep_at_exit(modules: dict[str, types.ModuleType]) -> None:
    """Make a fork end without clearing these modules, which would copy their memory. It clears the program's own."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    atexit.register(lambda: [sys.modules.pop(name, None) for name in modules])


def _end_after_own_destructors() -> None:
    """Make a fork end without running torch's destructors, which take 0.2 seconds. The program's own still run."""
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)
    library.__cxa_atexit(library.fflush, None, None)  # called before _exit, because it is registered after it


def _nest() -> dict | None:
    """Let the program's Popen ask a process that forks now, and forks again for each. In such a fork, return its request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if process := os.fork():
        theirs.close()
        atexit.register(lambda: (ours.close(), os.waitpid(process, 0)))
        Popen.server = ours
        subprocess.Popen = Popen
        _fork_what_is_spawned()
        return None
    ours.close()
    return _serve(theirs)


def _fork_what_is_spawned() -> None:
    """Let processes of multiprocessing's method "spawn" fork from `Popen.server`."""
    from multiprocessing import popen_spawn_posix, util  # here, because a server's programs import it for their exit

    forked: dict[int, _Forked] = {}
    spawn, poll = util.spawnv_passfds, popen_spawn_posix.Popen.poll

    def start(path: bytes, args: list[str], passed: list[int]) -> int:
        if "--multiprocessing-fork" not in args or not _may_fork(os.environ):
            return spawn(path, args, passed)
        words, numbers = args[args.index("-c") :], [0, 1, 2, *passed]
        request = {"arguments": words, "env": {**os.environ}, "cwd": os.getcwd(), "numbers": numbers, "nested": True}
        process = _Forked(Popen.server, request, numbers)
        forked[process.pid] = process
        return process.pid

    def ended(self: Any, flag: int = os.WNOHANG) -> int | None:
        if self.pid not in forked:
            return poll(self, flag)
        if self.returncode is None:
            with contextlib.suppress(TimeoutError):
                self.returncode = forked[self.pid].wait(0 if flag == os.WNOHANG else None)
        return self.returncode

    util.spawnv_passfds, popen_spawn_posix.Popen.poll = start, ended


def _become(request: dict) -> None:
    """Run the program of the request, as the interpreter does after it has imported torch."""
    while request.get("nested") and (asked := _nest()):
        request = asked
    sys.stdin = open(0, closefd=False)  # the old one is of the server
    os.chdir(request["cwd"])
    of_server = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in sys.path if path not in of_server]
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if action := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)
    first = request.get("path", [])
    sys.path[:0] = first + [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    import torch

    of_tools = request["arguments"][:2] == ["-m", "openreg_tools"]  # which import torch without backends
    if torch._is_device_backend_autoload_enabled() and not of_tools and "openreg_ops" not in sys.modules:
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


if __name__ == "__main__":
    _prepare()
    if request := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _become(request)
