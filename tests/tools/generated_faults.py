"""Operators with one fault each, and one without: test_generated.py holds the search to find them.

The fault is the device's alone, except for `shared_out`, which has one kernel for both.
"""

from __future__ import annotations

import os

import torch

_library = torch.library.Library("faulty", "DEF")


def _define(schema: str, right, wrong) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, right, "CPU")
    _library.impl(name, wrong, "PrivateUse1")


def _negated(x):
    return -x


def _contiguous(x):
    """The strides of a contiguous tensor of this shape."""
    return torch.empty(x.shape, device="meta").stride()


def _for_empty(x):
    return -x if x.numel() else torch.zeros(1, dtype=x.dtype, device=x.device)


def _for_permuted(x):
    """Reads the memory in order, whatever the strides say."""
    needed, there = x.numel(), x.untyped_storage().nbytes() // max(1, x.element_size()) - x.storage_offset()
    return -(x.as_strided(x.shape, _contiguous(x)) if needed <= there else x)


def _for_offset(x):
    return -x.as_strided(x.shape, x.stride(), 0)


def _copied(x):
    return x.clone()


def _for_nan(x):
    return torch.where(x == x, x, torch.zeros_like(x))


def _times(x, y):
    return x * y


def _for_host_scalar(x, y):
    return x + y if y.device.type == "cpu" else x * y


def _assigned_(x, y):
    return x.copy_(y)


def _for_alias_(x, y):
    """Clears its output before it reads the other argument."""
    return x.zero_().copy_(y)


def _negated_out(x, *, out):
    return out.resize_(x.shape).copy_(-x)


def _for_permuted_out(x, *, out):
    out.resize_(x.shape)
    out.as_strided(out.shape, _contiguous(out)).copy_(-x)
    return out


def _for_wide_out(x, *, out):
    """Ignores the strides of an out= tensor of four dimensions."""
    return _for_permuted_out(x, out=out) if x.dim() > 3 and min(x.shape) > 1 else _negated_out(x, out=out)


def _aborting(x):
    if x.dtype == torch.float64:
        os.abort()
    return -x


_define("right(Tensor x) -> Tensor", _negated, _negated)
_define("empty(Tensor x) -> Tensor", _negated, _for_empty)
_define("permuted(Tensor x) -> Tensor", _negated, _for_permuted)
_define("offset(Tensor x) -> Tensor", _negated, _for_offset)
_define("nan(Tensor x) -> Tensor", _copied, _for_nan)
_define("host_scalar(Tensor x, Tensor y) -> Tensor", _times, _for_host_scalar)
_define("alias_(Tensor(a!) x, Tensor y) -> Tensor(a!)", _assigned_, _for_alias_)
_define("permuted_out.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _negated_out, _for_permuted_out)
_define("shared_out.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _for_permuted_out, _for_permuted_out)
_define("wide_out.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _negated_out, _for_wide_out)
_define("crash(Tensor x) -> Tensor", _negated, _aborting)
