"""Automatic mixed precision: the functions that ``torch.autocast`` needs from a device module."""

from __future__ import annotations

import torch

from openreg_ops.identity import identity

__all__ = [
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
]


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may use on the device."""
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    """Returns true if autocast is on for the device."""
    return torch.is_autocast_enabled(identity.name)


def set_autocast_enabled(enabled: bool) -> None:
    """Turn autocast for the device on if `enabled`, else off."""
    torch.set_autocast_enabled(identity.name, enabled)


def get_autocast_dtype() -> torch.dtype:
    """The dtype that autocast uses on the device."""
    return torch.get_autocast_dtype(identity.name)


def set_autocast_dtype(dtype: torch.dtype) -> None:
    """Set the dtype that autocast uses on the device, one of `get_amp_supported_dtype`."""
    if dtype not in get_amp_supported_dtype():
        raise ValueError(f"autocast on openreg supports {get_amp_supported_dtype()}, but got {dtype}")
    torch.set_autocast_dtype(identity.name, dtype)
