"""What a tool needs in programs of several threads: its mode in the threads that start, and their turns."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["InThreads", "Turn"]

_PATIENCE = 1.0  # seconds


class Turn:
    """A reentrant lock for one operator at a time: the error of a kernel then belongs to the operator that waits for it.

    A kernel may itself wait for another thread's operator. After a second without the lock, other threads go on
    without it until its owner has finished.
    """

    def __init__(self) -> None:
        self._lock, self._local = threading.RLock(), threading.local()
        self._stuck = False

    def __enter__(self) -> None:
        taken = self._lock.acquire(timeout=0.0 if self._stuck else _PATIENCE)
        self._stuck = not taken
        self._local.__dict__.setdefault("taken", []).append(taken)

    def __exit__(self, *exception: Any) -> None:
        if self._local.taken.pop():
            self._stuck = False
            self._lock.release()


class InThreads:
    """A mode in the threads that a program starts: PyTorch's modes see only the thread that enters them.

    While active, a thread that starts runs under this mode, too, also in a pool of threads.

    A thread that outlives the context keeps the mode, which must then pass all calls on.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode, self._active = mode, False

    def __enter__(self) -> InThreads:
        self._before, self._active = threading.Thread.start, True
        before = self._before

        def start(thread: threading.Thread) -> None:
            if self._active and thread.ident is None:
                with contextlib.suppress(AttributeError):  # of a class that does not let itself be changed
                    thread.run = self._in_mode(thread, thread.run)
            before(thread)

        self._start = threading.Thread.start = start
        return self

    def _in_mode(self, thread: threading.Thread, run: Any) -> Any:
        def run_in_mode() -> None:
            thread.__dict__.pop("run", None)
            _push_mode(self._mode)  # not mode.__enter__(), which keeps what it restores on the mode
            try:
                run()
            finally:
                _pop_mode()

        return run_in_mode

    def __exit__(self, *exception: Any) -> None:
        self._active = False
        if threading.Thread.start is self._start:  # else another has replaced it since, and calls this one
            threading.Thread.start = self._before
