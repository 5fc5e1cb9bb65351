"""Work in a forked child process, so that a crash, a hang or an exhausted memory does not end this process."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

__all__ = ["Ended", "Hung", "answers", "at_most", "available"]


class Ended(Exception):  # noqa: N818 -- it says how a process ended, which may be right
    """The child ended before its work did: "signal 11: Fatal Python error: Segmentation fault"."""


class Hung(Ended):
    """The child gave no answer for as long as it may take."""


def answers(work: Callable[[Callable[[Any], None]], None], seconds: float) -> Iterator[Any]:
    """Run ``work(answer)`` in a forked child; yields each value, which JSON can hold, that it passes to ``answer``.

    Args:
        seconds: how long the child may take for each answer.
    Raises:
        Ended, Hung: the child ended, or was ended, before `work` returned.

    The child's stdout is the parent's stderr. `work` must not use a device that this process has used.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    with tempfile.TemporaryFile() as words:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if this process has other threads
            child = os.fork()
        if not child:
            os.close(read)
            _child(work, write, words)
        os.close(write)
        try:
            buffer = b""
            until = time.monotonic() + seconds
            while True:
                if not select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise Hung(f"no result after {seconds:g} s")
                data = os.read(read, 1 << 16)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                if lines:
                    until = time.monotonic() + seconds  # also counts from here if the caller took long
            code, child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0
            if code != _DONE:
                raise Ended(_how(code, words))
        finally:
            os.close(read)
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


_DONE = 77  # the exit status of a child whose work has returned; a library that calls exit(0) ends it early


def _how(code: int, words: BinaryIO) -> str:
    words.seek(0)
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith(("Fatal Python error", "Error: "))), "")
    return (f"signal {-code}" if code < 0 else f"exit {code}") + (f": {said.removeprefix('Error: ')}" if said else "")


def _child(work: Callable[..., None], write: int, words: BinaryIO) -> NoReturn:
    """The child's side."""
    code = 1
    try:
        os.dup2(2, 1)
        faulthandler.disable()
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
            signal.signal(number, signal.SIG_DFL)  # a handler of the parent's could wait for its threads
        faulthandler.enable(words)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def answer(value: Any) -> None:
            data = json.dumps(value).encode() + b"\n"
            while data:
                data = data[os.write(write, data) :]

        def run() -> None:
            nonlocal code
            try:
                work(answer)
                code = _DONE
            except BaseException as error:
                traceback.print_exc()
                words.write(f"Error: {type(error).__name__}: {error}\n".encode())
                words.flush()

        # OpenMP's pool of threads belongs to the thread that made it, and did not survive the fork.
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def available(device: str) -> bool:
    """Whether a forked child of this process can use the device, and autograd.

    A device that this process has used is not available, nor is autograd after a backward on a machine with an accelerator.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kinds = {device.partition(":")[0], accelerator.type if accelerator else "cpu"} - {"cpu", "meta"}
    # Other modules do not say whether a child can use the device, and it may then hang.
    if not hasattr(os, "fork") or not all(hasattr(getattr(torch, kind, None), "_is_in_bad_fork") for kind in kinds):
        return False

    def work(answer: Callable[[Any], None]) -> None:
        for kind in kinds:
            if getattr(torch, kind)._is_in_bad_fork():
                return
        try:
            torch.empty(1, device=device)
            torch.ones(1, requires_grad=True).sum().backward()
            answer(True)
        except RuntimeError:
            return

    try:
        return next(answers(work, 60), False)
    except Ended:
        return False


@contextlib.contextmanager
def at_most(more: int | None = None) -> Iterator[None]:
    """Limit the process to `more` bytes of additional memory, so that a huge size is an error.

    The default is three quarters of the machine's free memory. Memory that is mapped shared does not count. Without /proc,
    there is no limit.
    """
    import resource

    if not os.path.exists("/proc/self/status"):
        yield
        return

    def field(file: str, name: str) -> int:
        with open(file) as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    more = field("/proc/meminfo", "MemAvailable:") * 3 // 4 if more is None else more
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (field("/proc/self/status", "VmData:") + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
