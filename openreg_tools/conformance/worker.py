"""The worker processes that run operators for `conformance`, so that a crash ends only one of them; and its progress."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from openreg_tools import backends
from openreg_tools.conformance.report import Record

START = 600  # seconds that a worker may take to import torch, on a machine that is busy with other programs


def shown_code(code: int) -> str:
    """How a process ended, from what `Popen.wait` returns."""
    return f"signal {-code}" if code < 0 else f"exit {code}"


def serving() -> Callable[..., None]:
    """Prepares a worker process; returns the function that sends an answer. What operators print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    return answer


class Worker:
    """A worker process, restarted after it dies."""

    flags: tuple[str, ...] = ("-P",)  # of Python
    late = ""  # how a process ended after it had answered

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen | None = None

    def words(self) -> list[str]:
        """The command that the process runs, without the modules that it imports."""
        a = self.arguments
        options = [
            "--suites",
            *a.suites,
            "--samples",
            str(a.samples),
            "--checks",
            *a.checks,
            "--threads",
            str(a.threads),
        ]
        return ["conformance", "--worker", "--device", a.device, *options]

    def start(self) -> None:
        self.stderr = tempfile.TemporaryFile()
        command = [sys.executable, *self.flags, "-m", "openreg_tools", *self.words()]
        packages = [backend.package for backend in backends.registered()]
        command += [
            word for module in dict.fromkeys([*packages, *self.arguments.modules]) for word in ("--import", module)
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        until = time.monotonic() + START
        while (answer := self.read(until)) and "ready" not in answer:
            pass
        if answer is None:
            code = self.process.wait()
            self.stop()
            raise RuntimeError(f"the worker did not start: {shown_code(code)}: {self.last_words()}")

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.selector.close()
            self.process = None

    def read(self, deadline: float) -> Record | None:
        """The next answer; None at the end of the process, TimeoutError at the deadline."""
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            if not got:
                return None
            self.buffer += got
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def exchange(self, line: str, last: str) -> tuple[Record | None, str, str, str]:
        """The answer to a line, which has the field `last`; or how the process ended, its message, and where it was.

        Where a call runs on the reference first, the device has the time limit to itself, and twice the reference's time.
        """
        if self.process is None:
            self.start()
        start, where = time.monotonic(), "start"
        until = start + self.arguments.timeout
        self.send(line)
        try:
            while answer := self.read(until):
                if last in answer:
                    return answer, "", "", where
                if "died" in answer:  # a process that this one forked; another follows
                    ended = f"{shown_code(answer['died'])}: {self.last_words()}"
                    if where != "start" or self.late:
                        return None, "crash", ended, where
                    self.late = ended
                if "ready" in answer:
                    self.send(line)
                where = answer.get("at", where)
                if where == "device":
                    now = time.monotonic()
                    until = max(until, now + self.arguments.timeout + 2 * (now - start))
            kind, message = "crash", f"{shown_code(self.process.wait())}: {self.last_words()}"
        except TimeoutError:
            kind, message = "timeout", f"no result after {self.arguments.timeout} s"
        self.stop()
        return None, kind, message, where

    def run(self, name: str, dtype: str) -> Record:
        start = time.monotonic()
        answer, kind, message, where = self.exchange(f"{name} {dtype}", "operator")
        if answer is not None:
            return answer
        check, _, sample = where.partition(", sample ")
        failure = {"check": check, "kind": kind, "sample": int(sample or -1), "message": message}
        return {
            "operator": name, "dtype": dtype, "ran": {}, "failures": [failure], "notes": {},
            "seconds": round(time.monotonic() - start, 3),
        }  # fmt: skip

    def last_words(self) -> str:
        """The last output of a process that died: its error, or the fault that ended it."""
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr.read().decode(errors="replace").splitlines() if line.strip()]
        self.stderr.seek(0)  # a forked process that follows writes its own
        self.stderr.truncate()
        for i, line in enumerate(lines):
            if line.startswith("Fatal Python error"):
                return line
            if line.startswith("Traceback"):  # PyTorch's messages go on with frames of C++
                return next(
                    (each for each in lines[i:] if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", each)), lines[-1]
                )
        return " ".join(lines[-2:])[:300]


def on_workers(todo: Iterable[Any], workers: Iterable[Worker], each: Callable[[Worker, Any], None]) -> None:
    """Call ``each(worker, item)`` for every item, on a thread for each worker. Raises the first error.

    After an error or an interrupt, no thread takes another item. An interrupt does not wait for items in progress.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in todo:
        items.put(item)
    errors: list[BaseException] = []

    def serve(worker: Worker) -> None:
        try:
            while not errors:
                each(worker, items.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        errors.append(interrupt)
        raise
    if errors:
        raise errors[0]


class Progress:
    """A bar on a terminal, a line every half minute elsewhere.

    Args:
        total: how many cases there are.
        noun: what is found in some: "differ", "findings".
        out: where to write.
    """

    def __init__(self, total: int, noun: str, out: TextIO) -> None:
        self.total, self.noun, self.out, self.done, self.found = total, noun, out, 0, 0
        self.start = self.shown = time.monotonic()
        self.live = out.isatty()

    def step(self, count: int, found: int, name: str) -> None:
        """`count` more cases, of `name`, are done."""
        self.done += count
        self.found += found
        now = time.monotonic()
        if now - self.shown < (0.1 if self.live else 30) and self.done < self.total:
            return
        self.shown = now
        left = (now - self.start) / max(1, self.done) * (self.total - self.done)
        filled = 20 * self.done // self.total
        text = (
            f"[{'#' * filled}{'.' * (20 - filled)}] {self.done}/{self.total} {self.found} {self.noun}, "
            f"{left / 60:.0f} min left  {name}"
        )
        print(f"\r{text:<79.79}" if self.live else text, end="" if self.live else "\n", file=self.out, flush=True)
        if self.live and self.done >= self.total:
            print(file=self.out)
