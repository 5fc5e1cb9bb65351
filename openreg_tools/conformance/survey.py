"""Attempts that may crash or hang: `survey` makes them in a forked child."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from openreg_tools.conformance import opinfo

__all__ = ["Outcome", "at_most", "survey"]


@dataclasses.dataclass
class Outcome:
    """How one attempt of `survey` ended."""

    kind: str  # "returned", "raised", "crashed" or "hung"
    message: str = ""


def survey(
    count: int, attempt: Callable[[int], Any], enough: int | None = None, seconds: float = 10.0
) -> Iterator[tuple[int, Outcome]]:
    """Make attempts 0 to count - 1 in a forked child. When one ends the child or hangs, fork another.

    Ends early once `enough` have returned, or three have hung. The attempts must not use a device that the parent has used.
    """
    first = returned = hung = 0
    while first < count and (enough is None or hung < 3):
        for i, outcome in _forked(range(first, count), attempt, seconds):
            yield i, outcome
            first = i + 1
            hung += outcome.kind == "hung"
            returned += outcome.kind == "returned"
            if enough is not None and returned >= enough:
                return


def _forked(which: range, attempt: Callable[[int], Any], seconds: float) -> Iterator[tuple[int, Outcome]]:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _serve(os.fdopen(write, "w", buffering=1), which, attempt)
    os.close(write)
    at, buffer, running = which.start, b"", False
    try:
        while True:
            if not select.select([read], [], [], seconds)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                child = 0
                yield at, Outcome("hung", f"no result after {seconds:g} s")
                return
            data = os.read(read, 1 << 16)
            if not data:
                _, status = os.waitpid(child, 0)
                child = 0
                if running:
                    died = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {status >> 8}"
                    yield at, Outcome("crashed", died)
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                at, *outcome = json.loads(line)
                running = not outcome
                if outcome:
                    yield at, Outcome(*outcome)
    finally:
        os.close(read)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve(answers: Any, which: range, attempt: Callable[[int], Any]) -> None:
    """The child's side; does not return."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        warnings.simplefilter("ignore")
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE):
            signal.signal(number, signal.SIG_DFL)  # a handler of the parent's could wait for its threads
        with at_most(4 << 30):
            for i in which:
                answers.write(json.dumps([i]) + "\n")
                try:
                    attempt(i)
                    answers.write(json.dumps([i, "returned"]) + "\n")
                except Exception as error:
                    answers.write(json.dumps([i, "raised", opinfo.first_line(error)]) + "\n")
    finally:
        answers.flush()
        os._exit(0)


@contextlib.contextmanager
def at_most(more: int) -> Iterator[None]:
    """Limit the process to `more` bytes of additional address space, so that a huge size is an error."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
