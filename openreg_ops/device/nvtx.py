"""``torch.openreg.nvtx``: ``torch.cuda.nvtx`` for this device; ``torch.profiler`` shows the ranges, as Nsight does CUDA's."""

from __future__ import annotations

from openreg_ops import _C
from openreg_ops.device.profiler import mark, range

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]


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
