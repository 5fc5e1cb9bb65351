"""Autocast without a device's name means the device, as it means CUDA where there is CUDA.

`torch.is_autocast_enabled()`, `torch.set_autocast_enabled(enabled)`, `torch.get_autocast_gpu_dtype()` and
`torch.set_autocast_gpu_dtype(dtype)` ask and tell CUDA. PyTorch's modules and libraries call them so. Calls that name a
device go to PyTorch's functions unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.jit._builtins import _register_builtin

__all__ = ["register"]

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_gpu_dtype, _set_gpu_dtype = torch.get_autocast_gpu_dtype, torch.set_autocast_gpu_dtype


def _device() -> str:
    """The device that a call means if it names none."""
    if _is_enabled("openreg"):
        return "openreg"
    return "cuda" if _is_enabled("cuda") or torch.cuda.is_available() else "openreg"


def is_autocast_enabled(*arguments: Any, **options: Any) -> bool:
    """Returns true if autocast is on for a device type; without one, if it is on for the device or for CUDA."""
    if arguments or options:
        return _is_enabled(*arguments, **options)
    return _is_enabled("openreg") or _is_enabled("cuda")


def set_autocast_enabled(*arguments: Any, **options: Any) -> None:
    """`torch.set_autocast_enabled`. Without a device, for the device."""
    if len(arguments) + len(options) == 1 and _device() == "openreg":
        arguments = ("openreg", *arguments)
    _set_enabled(*arguments, **options)


def get_autocast_gpu_dtype() -> torch.dtype:
    """`torch.get_autocast_gpu_dtype`, of the device."""
    return _gpu_dtype() if _device() == "cuda" else torch.get_autocast_dtype("openreg")


def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
    """`torch.set_autocast_gpu_dtype`, of the device."""
    _set_gpu_dtype(dtype) if _device() == "cuda" else torch.set_autocast_dtype("openreg", dtype)


def register() -> None:
    """Install the four functions in `torch` and `torch._C`. TorchScript's operator is in csrc/aten/autocast.cpp."""
    for function in (is_autocast_enabled, set_autocast_enabled, get_autocast_gpu_dtype, set_autocast_gpu_dtype):
        setattr(torch, function.__name__, function)
        setattr(torch._C, function.__name__, function)
    _register_builtin(is_autocast_enabled, "aten::is_autocast_enabled")
