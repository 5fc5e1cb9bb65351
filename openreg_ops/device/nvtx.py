"""``torch.openreg.nvtx``: ``torch.cuda.nvtx`` for this device; ``torch.profiler`` shows the ranges, as Nsight does CUDA's.

Like ``torch.profiler.record_function``, a range appears on the host, and on each stream for as long as the work launched
in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from openreg_ops import _C

__all__ = ["emit_ranges", "mark", "range", "range_end", "range_pop", "range_push", "range_start"]


def range_push(msg: str) -> int:
    """Open a range named `msg` on the calling thread, nested in the open ones; returns its depth, from 0."""
    return _C.range_push(msg)


def range_pop() -> int:
    """Close the range that the calling thread opened last and return its depth, from 0. Raises RuntimeError if none is
    open."""
    return _C.range_pop()


def range_start(msg: str) -> int:
    """Open a range named `msg` that any thread may close and that may overlap others; returns the handle for `range_end`.

    A profile shows it on this thread from here to `range_end`, and on each stream for as long as the work that any
    thread launched in the meantime. A range that is still open when the profile stops is not shown.
    """
    return _C.range_start(msg)


def range_end(range_id: int) -> None:
    """Close the range with the handle `range_id` from `range_start`. Raises RuntimeError if it is already closed."""
    _C.range_end(range_id)


def mark(msg: str) -> None:
    """An instantaneous range named `msg`."""
    range_push(msg)
    range_pop()


@contextlib.contextmanager
def range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """Context manager or decorator: a range named ``msg.format(*args, **kwargs)``."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


_emitting = False


@contextlib.contextmanager
def emit_ranges(enabled: bool = True, record_shapes: bool = False) -> Iterator[None]:
    """Context manager: while a profile runs, every operator of every thread is a range on the device's streams too.

    Like ``torch.autograd.profiler.emit_nvtx``, with ``torch.profiler`` instead of Nsight. Ranges have the same names:
    "aten::mul, seq = 3, op_id = 12". An operator of the forward pass and its backward share `seq`.

    Args:
        enabled: if False, does nothing.
        record_shapes: append the shapes of the arguments, ", sizes = [[2, 3], []]".
    """
    global _emitting
    if not enabled:
        yield
        return
    if _emitting:
        raise RuntimeError("emit_ranges is not reentrant; leave the one that is active first")
    _emitting = True
    _C.emit_ranges(True, record_shapes)
    try:
        yield
    finally:
        _C.emit_ranges(False, False)
        _emitting = False
