"""Storages under the name cuda, for which a PyTorch without CUDA has no code."""

from __future__ import annotations

from typing import Any

import torch

from openreg_ops import _C

__all__ = ["register"]

_resize = torch.UntypedStorage.resize_


def _new(cls: type[torch.UntypedStorage], *args: Any, device: torch.types.Device = None, **kwargs: Any) -> Any:
    if device is None or torch.device(device).type != "cuda":
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)
    if args and not hasattr(type(args[0]), "__index__"):
        return torch.tensor(args[0], dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(*(args or kwargs.values() or (0,)), dtype=torch.uint8, device=device).untyped_storage()


def _resized(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _resize(self, size)
    _C.resize_storage(self, size)
    return self


def register() -> None:
    """Install the patches."""
    torch.UntypedStorage.__new__ = _new
    torch.UntypedStorage.resize_ = _resized
