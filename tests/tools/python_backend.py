"""A backend in Python alone: tensors that hold a tensor of the CPU, and one fallback for every operator.

tests/tools/test_ladder.py runs the ladder on it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("snake")


class SnakeTensor(torch.Tensor):
    """A tensor of the device; `host` has its values."""

    host: torch.Tensor


def wrapped(host: torch.Tensor) -> SnakeTensor:
    """A tensor of the device that holds one of the CPU."""
    made = torch._C._acc.create_empty_tensor(host.size(), host.dtype)
    made.__class__ = SnakeTensor
    made.host = host
    return made


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the tensors of the CPU."""
    inside = {id(x.host): x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, SnakeTensor)}
    args, kwargs = _pytree.tree_map(lambda x: x.host if isinstance(x, SnakeTensor) else x, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    found = op(*args, **kwargs)
    return _pytree.tree_map_only(torch.Tensor, lambda x: inside[id(x)] if id(x) in inside else wrapped(x), found)


def copy(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A copy between the CPU and the device."""
    hosts = [x.host if isinstance(x, SnakeTensor) else x for x in (source, to)]
    hosts[1].copy_(hosts[0])
    return to


_every = torch.library.Library("_", "IMPL")
_every.fallback(fallback, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_aten.impl("empty.memory_format", functools.partial(fallback, torch.ops.aten.empty), "PrivateUse1")
_aten.impl("empty_strided", functools.partial(fallback, torch.ops.aten.empty_strided), "PrivateUse1")
_aten.impl("_copy_from", copy, "PrivateUse1")
