"""``torch.openreg._sanitizer``: finds missing waits, as ``torch.cuda._sanitizer`` does.

A race raises `OpenregSanitizerErrors` at the access that is out of order. The error has both accesses, the stack traces
of both and of the allocation, and the remedy; docs/streams.md shows one. The sanitizer looks at order, not at time, so it
finds races in every launch mode. OPENREG_SANITIZER=1 turns it on for the main thread of a process.

history.py       the clocks of streams, the accesses to memory, and the races among them
operators.py     the modes that show it a thread's operators
report.py        accesses, and the errors that describe two racing ones
graphs.py        mistakes with captured graphs; graph_hooks.py and graph_report.py are its parts
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from openreg_ops import _C

if TYPE_CHECKING:
    from openreg_ops.sanitizer.history import (
        GraphError,
        OpenregSanitizerErrors,
        Races,
        SynchronizationError,
        UnsynchronizedAccessError,
    )

    Report = Callable[[list[UnsynchronizedAccessError]], None]

__all__ = [
    "GraphError",
    "OpenregSanitizerErrors",
    "SynchronizationError",
    "UnsynchronizedAccessError",
    "disable_openreg_sanitizer",
    "enable_openreg_sanitizer",
    "sanitize",
]

_races: Races | None = None
_users = 0  # threads that have it on
_lock = threading.Lock()
_thread = threading.local()  # .modes, while it is on in the thread


def __getattr__(name: str) -> Any:
    # Import history.py on demand: its import of torch.cuda._sanitizer makes CUDA report every allocation to Python.
    if name in __all__:
        from openreg_ops.sanitizer import history

        return getattr(history, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable_openreg_sanitizer(report: Report | None = None) -> None:
    """Check the calling thread from now on, and the backward passes that it starts; twice is once.

    Other threads are checked once they call this too. For best results call it before the first tensor is made.
    `report`, if given, is called with the `UnsynchronizedAccessError`s of an access instead of raising; the first
    thread's holds for all.
    """
    global _races, _users
    if getattr(_thread, "modes", None):
        return
    from openreg_ops.sanitizer import graph_hooks, history, operators

    with _lock:
        if _races is None:
            _races = history.Races(report)
            _C.observe(True, _races.answers)
            graph_hooks.watch(_races.captures)
        _users += 1
    _thread.modes = (operators.SanitizerFunctionMode(_races), operators.SanitizerDispatchMode(_races))
    for mode in _thread.modes:
        mode.__enter__()


def disable_openreg_sanitizer() -> None:
    """Stop checking the calling thread; what is known of the program's order is forgotten with the last thread."""
    global _races, _users
    modes = getattr(_thread, "modes", None)
    if not modes:
        return
    from openreg_ops.sanitizer import graph_hooks

    _thread.modes = None
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    with _lock:
        _users -= 1
        if not _users:
            _races = None
            _C.observe(False)
            graph_hooks.unwatch()


@contextlib.contextmanager
def sanitize(report: Report | None = None) -> Iterator[None]:
    """``with torch.openreg._sanitizer.sanitize():`` checks its body, unless the thread is checked already.

    `report` is as in `enable_openreg_sanitizer`.

    Example:
        >>> x = torch.ones(3, device="openreg")
        >>> side = torch.openreg.Stream()
        >>> with torch.openreg._sanitizer.sanitize():
        ...     x += 1
        ...     with side:
        ...         try:
        ...             y = x * 2  # side has not waited
        ...         except torch.openreg._sanitizer.OpenregSanitizerErrors as race:
        ...             print(type(race.errors[0]).__name__)
        UnsynchronizedAccessError
    """
    if getattr(_thread, "modes", None):
        yield
        return
    enable_openreg_sanitizer(report)
    try:
        yield
    finally:
        disable_openreg_sanitizer()


def _saved(storage: torch.UntypedStorage) -> None:
    """Check the host's read of a storage that is about to be written to a file: no operator reads it."""
    modes = getattr(_thread, "modes", None)
    if modes and modes[0].races.on and storage.device.type == "cpu":
        with torch._C._DisableTorchDispatch():
            x = torch.empty(0, dtype=torch.uint8).set_(storage.untyped())
        modes[0].read("torch.save", x)


# torch.save, pickle and torch.package ask the taggers of torch.serialization about each storage; this one knows none.
torch.serialization.register_package(-1, _saved, lambda storage, location: None)


def _after_fork() -> None:
    """A child made by fork() has its parent's modes but cannot use the device: it continues without them."""
    if _races is not None:
        _races.on = False


os.register_at_fork(after_in_child=_after_fork)


def _from_environment() -> None:
    """Turn it on if OPENREG_SANITIZER says so."""
    if os.environ.get("OPENREG_SANITIZER") == "1":
        enable_openreg_sanitizer()
