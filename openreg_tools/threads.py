"""A mode in the threads that a program starts: PyTorch's modes see only the thread that enters them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["InThreads"]


class InThreads:
    """While active, a thread that starts runs under this mode, too, also in a pool of threads.

    A thread that outlives the context keeps the mode, which must then pass all calls on.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode, self._active = mode, False
        self._local, self._numbers = threading.local(), itertools.count(1)

    def number(self) -> int:
        """The number of the calling thread, in the order in which threads started; 0 for any other."""
        return getattr(self._local, "number", 0)

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
        number = next(self._numbers)

        def run_in_mode() -> None:
            thread.__dict__.pop("run", None)
            self._local.number = number
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
