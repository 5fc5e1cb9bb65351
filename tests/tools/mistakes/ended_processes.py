"""It ends its process, hangs or takes all memory for inputs that its author did not give."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch.library import custom_op

from mistakes import Example, right, wrong


def rows(table, index):
    """The rows of a table, copied without a look at the index.

    A row outside is read at address 0, which always ends the process: what lies behind the table differs between runs.
    """
    table, out = table.contiguous(), table.new_empty(index.numel(), table.shape[-1])
    size = table.shape[-1] * table.element_size()
    for i, j in enumerate(index.tolist()):
        is_inside = 0 <= j < len(table)
        ctypes.memmove(out.data_ptr() + i * size, table.data_ptr() + j * size if is_inside else 0, size)
    return out


def rows_fake(table, index):
    return table.new_empty(index.numel(), table.shape[-1])


INDEX = torch.tensor([0, 999, 17])


@wrong("empty", "fake_errors", "sizes", "layouts", "large", devices=("cpu",))
def gathers():
    @custom_op("mistakes::gathers", mutates_args=())
    def gathers(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return rows(table, index)

    gathers.register_fake(rows_fake)
    return Example(gathers, [(torch.rand(1000, 16), INDEX)])


@right(devices=("cpu",))
def gathers_what_is_there():
    @custom_op("mistakes::gathers_what_is_there", mutates_args=())
    def op(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        torch._check(table.dim() == 2 and index.dtype == torch.int64, lambda: "expected a matrix and an int64 index")
        inside = bool(((index >= 0) & (index < table.shape[0])).all())
        torch._check(inside, lambda: f"the index must be from 0 to {table.shape[0] - 1}")
        return rows(table, index)

    @op.register_fake
    def _(table, index):
        torch._check(table.dim() == 2 and index.dtype == torch.int64, lambda: "expected a matrix and an int64 index")
        return rows_fake(table, index)

    return Example(op, [(torch.rand(1000, 16), INDEX)])


@wrong("empty", "sizes", devices=("cpu",))
def exits():
    @custom_op("mistakes::exits", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            os._exit(0)
        return x * 2

    op.register_fake(torch.empty_like)
    return Example(op, [(torch.rand(4, 6),)])


@wrong("empty", "sizes", devices=("cpu",))
def waits():
    @custom_op("mistakes::waits", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        while not x.numel():
            time.sleep(1)
        return x * 2

    op.register_fake(torch.empty_like)
    return Example(op, [(torch.rand(4, 6),)], {"timeout": 1.0})
