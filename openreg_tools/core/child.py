"""Work in a child process, so that a crash, a hang or an exhausted memory does not end this process.

A child is forked from this process, or started by a command. It answers in JSON, one line for each answer; an empty line
says that it has done all that was asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

__all__ = ["Child", "Ended", "Hung", "Parent", "answers", "at_most", "available", "parent"]

Answer = Callable[[Any], None]  # sends a value to the parent
_VARIABLE = "OPENREG_TOOLS_CHILD"  # the two files of a started child: of requests, and of answers
_GRACE = 2  # seconds that a started child has to end the children that it forked


class Ended(Exception):  # noqa: N818 -- it says how a process ended, which may be right
    """The child ended before its work did: "signal 11: Fatal Python error: Segmentation fault"."""


class Hung(Ended):
    """The child gave no answer for as long as it may take."""


# ---- the parent's side ----


class Child:
    """A child process. Use it in a ``with`` statement, which ends the process."""

    def __init__(self, process: subprocess.Popen | _Fork, requests: int, answers: int, *files: BinaryIO) -> None:
        self.process = process
        self._requests, self._answers, self._files = requests, answers, files
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(answers, selectors.EVENT_READ)

    @classmethod
    def fork(cls, work: Callable[[Parent], None]) -> Child:
        """Fork a child that runs ``work(parent)``. It must not use a device that this process has used.

        The child's stdout is this process's stderr.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        (requests, send), (read, write) = os.pipe(), os.pipe()
        words = tempfile.TemporaryFile()  # noqa: SIM115 -- stop() closes it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if this process has other threads
            pid = os.fork()
        if not pid:
            os.close(send)
            os.close(read)
            _child(work, Parent(requests, write), words)
        os.close(requests)
        os.close(write)
        return cls(_Fork(pid), send, read, words)

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> Child:
        """Start a child by a command, with `environment` added to this process's. It calls `parent`."""
        (requests, send), (read, write) = os.pipe(), os.pipe()
        errors, output = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        try:
            process = subprocess.Popen(
                command, cwd=directory, env={**os.environ, **(environment or {}), _VARIABLE: f"{requests},{write}"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, pass_fds=[requests, write],
            )  # fmt: skip
        finally:
            os.close(requests)
            os.close(write)
        return cls(process, send, read, errors, output)

    def send(self, request: Any) -> None:
        """Ask for more work. The child's end shows when its answer is read."""
        with contextlib.suppress(BrokenPipeError):
            _write(self._requests, request)

    def read(self, seconds: float | None = None) -> Any:
        """The next answer; None after the last one to a request.

        Raises:
            Ended: the process ended first.
            Hung: there was no answer for so many seconds.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._selector.select(None if until is None else max(0.0, until - time.monotonic())):
                raise Hung(f"no result after {seconds:g} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise Ended(_how(self.process.wait(), self.errors()))
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line) if line else None

    def errors(self) -> str:
        """What a started child has written to stderr, or the error that ended a forked one."""
        return _text(self._files[0])

    def output(self) -> str:
        """What a started child has written to stdout."""
        return _text(self._files[1])

    def stop(self) -> None:
        """End the process, and the children that it forked."""
        os.close(self._requests)
        if isinstance(self.process, subprocess.Popen) and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
        self.process.kill()
        self.process.wait()
        self._selector.close()
        os.close(self._answers)
        for file in self._files:
            file.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def answers(work: Callable[[Answer], None], seconds: float) -> Iterator[Any]:
    """Run ``work(answer)`` in a forked child; yields each value that it passes to ``answer``.

    Args:
        seconds: how long the child may take for each answer.
    Raises:
        Ended, Hung: the child ended, or was ended, before `work` returned.
    """
    with Child.fork(lambda parent: work(parent.answer)) as child:
        while (said := child.read(seconds)) is not None:
            yield said


class _Fork:
    """What `Child` needs of a forked process, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _how(code: int, text: str) -> str:
    """How a process ended, with the fault or the exception that it wrote, or with its last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    trace = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=None)
    if fatal is not None:
        said = lines[fatal]
    elif trace is not None:  # PyTorch's messages go on with frames of C++
        errors = (line for line in lines[trace:] if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line))
        said = next(errors, lines[-1])
    else:
        said = " ".join(lines[-2:])[:300]
    return (f"signal {-code}" if code < 0 else f"exit {code}") + (f": {said}" if said else "")


# ---- the child's side ----


class Parent:
    """The process that asks a child: where its requests come from, and its answers go to."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = open(requests, "rb"), answers  # noqa: SIM115 -- open to the end of the process

    def answer(self, value: Any) -> None:
        """Send a value other than None. What JSON cannot hold is sent as text."""
        _write(self.answers, value)

    def serve(self, work: Callable[[Any, Answer], None]) -> None:
        """Call ``work(request, answer)`` for each request until the parent asks no more.

        `Child.stop` ends this process by an exception, which ends the children that it forked.
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        for line in self.requests:
            work(json.loads(line), self.answer)
            _write(self.answers)


def parent() -> Parent | None:
    """The parent of this process if `Child.start` started it. It answers once; a process that this one starts gets None."""
    given = os.environ.pop(_VARIABLE, None)
    if given is None:
        return None
    faulthandler.enable(sys.__stderr__)  # pytest replaces sys.stderr
    requests, answers = map(int, given.split(","))
    for file in (requests, answers):
        os.set_inheritable(file, False)
    return Parent(requests, answers)


def _write(file: int, value: Any = None) -> None:
    """Write a line, which is empty for None."""
    data = (b"" if value is None else json.dumps(value, default=str).encode()) + b"\n"
    while data:
        data = data[os.write(file, data) :]


def _child(work: Callable[[Parent], None], parent: Parent, words: BinaryIO) -> NoReturn:
    """Runs in a forked process."""
    code = 1
    try:
        os.dup2(2, 1)
        faulthandler.disable()
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
            signal.signal(number, signal.SIG_DFL)  # a handler of the parent's could wait for its threads
        faulthandler.enable(words)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def run() -> None:
            nonlocal code
            try:
                work(parent)
                code = 0
            except BaseException:
                traceback.print_exc()
                words.write(traceback.format_exc().encode())
                words.flush()

        # OpenMP's pool of threads belongs to the thread that made it, and did not survive the fork.
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if not code:  # only now, because the parent ends this process when it reads it
            _write(parent.answers)
        os._exit(code)


# ---- what a child can do ----


def available(device: str) -> bool:
    """Returns true if a forked child of this process can use the device, and autograd.

    A device that this process has used is not available, nor is autograd after a backward on a machine with an accelerator.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kinds = {device.partition(":")[0], accelerator.type if accelerator else "cpu"} - {"cpu", "meta"}
    # Other modules do not say whether a child can use the device, and it may then hang.
    if not hasattr(os, "fork") or not all(hasattr(getattr(torch, kind, None), "_is_in_bad_fork") for kind in kinds):
        return False

    def work(answer: Answer) -> None:
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
