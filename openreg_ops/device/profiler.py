"""``torch.openreg.profiler``: ranges in profiles of the device, under the names of ``torch.cuda.nvtx``.

The profiler itself is ``torch.profiler``, with ``ProfilerActivity.PrivateUse1`` for the device's kernels and copies
(csrc/backend/profiler.cpp). Like ``torch.profiler.record_function``, a range appears on the host, and on each stream
for as long as the work launched in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from openreg_ops import _C

__all__ = ["emit_ranges", "mark", "range", "range_pop", "range_push"]


def range_push(msg: str) -> None:
    """Open a range named `msg` on the calling thread, nested in the open ones."""
    _C.range_push(msg)


def range_pop() -> None:
    """Close the range that the calling thread opened last. Raises RuntimeError if none is open."""
    _C.range_pop()


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


class emit_ranges:
    """Context manager: while a profile runs, every operator of every thread is a range on the device's streams too.

    Like ``torch.autograd.profiler.emit_nvtx``, with ``torch.profiler`` instead of Nsight. Ranges have the same names:
    "aten::mul, seq = 3, op_id = 12". An operator of the forward pass and its backward share `seq`.

    Args:
        enabled: if False, does nothing.
        record_shapes: append the shapes of the arguments, ", sizes = [[2, 3], []]".
    """

    _entered = False

    def __init__(self, enabled: bool = True, record_shapes: bool = False) -> None:
        self.enabled = enabled
        self.record_shapes = record_shapes

    def __enter__(self) -> emit_ranges:
        if self.enabled:
            if emit_ranges._entered:
                raise RuntimeError("emit_ranges is not reentrant; leave the one that is active first")
            emit_ranges._entered = True
            _C.emit_ranges(True, self.record_shapes)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.enabled:
            _C.emit_ranges(False, False)
            emit_ranges._entered = False
