"""The index of a device given in any of PyTorch's forms; every part of ``torch.openreg`` uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.identity import identity

__all__ = ["constant", "current_device", "device_index", "maybe_exchange_device"]


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` while it traces; ``torch.compiler.assume_constant_result`` without importing Dynamo."""
    function._dynamo_marked_constant = True
    return function


@constant
def _checked(index: int) -> int:
    return _C.checked_index(index)


def current_device() -> int:
    """The index of the calling thread's current device."""
    return torch.accelerator.current_device_index()  # compiled graphs guard on this


def maybe_exchange_device(device: int) -> int:
    """Make `device` current unless it is negative. Returns the device that was current."""
    return _C.exchange_device(device) if device >= 0 else current_device()


def device_index(device: torch.types.Device = None) -> int:
    """The checked index for a device given in any of PyTorch's forms; None or no index is the current one."""
    if device is None:
        return _checked(current_device())
    if isinstance(device, int):
        return current_device() if device == -1 else _checked(device)
    device = torch.device(device)
    if device.type != identity.name:
        raise ValueError(
            f"expected a device of type {identity.name}, but got {device}; pass an index, {identity.name!r} or "
            f"'{identity.name}:N'"
        )
    return _checked(current_device() if device.index is None else device.index)
