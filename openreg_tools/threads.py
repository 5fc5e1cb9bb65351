"""A mode in the threads that a program starts: PyTorch's modes see only the thread that enters them."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["InThreads"]


class InThreads:
    """While active, a thread that starts runs under this mode, too, also in a pool of threads.

    A thread that outlives the context keeps the mode, which must then pass all calls on.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode

    def __enter__(self) -> InThreads:
        self._start, mode = threading.Thread.start, self._mode
        before = self._start

        def start(thread: threading.Thread) -> None:
            run = thread.run

            def run_in_mode() -> None:
                _push_mode(mode)  # not mode.__enter__(), which keeps what it restores on the mode
                try:
                    run()
                finally:
                    _pop_mode()

            thread.run = run_in_mode
            before(thread)

        threading.Thread.start = start
        return self

    def __exit__(self, *exception: Any) -> None:
        threading.Thread.start = self._start
