"""The worker processes that run operators for `conformance`, so that a crash ends only one of them."""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from openreg_tools import backends
from openreg_tools.core.child import Child, Ended, Hung

__all__ = ["Worker", "on_workers"]

START = 600  # seconds that a worker may take to import torch, on a machine that is busy with other programs


class Worker:
    """A worker process, restarted after it dies."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.child: Child | None = None

    def start(self) -> None:
        a = self.arguments
        packages = [backend.package for backend in backends.registered()]
        imports = [word for name in dict.fromkeys([*packages, *a.modules]) for word in ("--import", name)]
        words = ["conformance", "--worker", "--device", a.device, "--threads", str(a.threads), *imports]
        self.child = Child.start([sys.executable, "-P", "-m", "openreg_tools", *words])
        self.child.send({"load": [suite for suite in getattr(a, "suites", ()) if suite != "schemas"]})
        try:
            while self.child.read(START) is not None:
                pass
        except Ended as error:
            self.stop()
            raise RuntimeError(f"the worker did not start: {error}") from None

    def stop(self) -> None:
        if self.child:
            self.child.stop()
            self.child = None

    def ask(self, request: Any, steps: bool = False) -> dict[str, Any]:
        """The answer to a request; or how the process ended, "crash" or "timeout", its message, and where it was.

        Args:
            steps: the time limit holds for each step that the worker announces, and not for the whole request.
        """
        if self.child is None:
            self.start()
        until, last = time.monotonic() + self.arguments.timeout, {"at": "start"}
        self.child.send(request)
        found: dict[str, Any] = {}
        try:
            while (answer := self.child.read(max(0.0, until - time.monotonic()))) is not None:
                if "at" in answer:
                    last = answer
                    until = time.monotonic() + self.arguments.timeout if steps else until
                else:
                    found = answer
            return found
        except Hung:
            kind, message = "timeout", f"no result after {self.arguments.timeout:g} s"
        except Ended as error:
            kind, message = "crash", str(error)
        self.stop()
        return {**last, "ended": kind, "message": message}


def on_workers(todo: Iterable[Any], workers: Iterable[Worker], work: Callable[[Worker, Any], None]) -> None:
    """Call ``work(worker, item)`` for every item, on a thread for each worker. Raises the first error.

    After an error or an interrupt, no thread takes another item. An interrupt does not wait for items in progress.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in todo:
        items.put(item)
    errors: list[BaseException] = []

    def serve(worker: Worker) -> None:
        try:
            while not errors:
                work(worker, items.get_nowait())
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
