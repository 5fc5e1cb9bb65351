"""``copy.deepcopy`` keeps a tensor's metadata (see Note [Metadata] in csrc/backend/serialization.cpp): PyTorch's own version
rebuilds a tensor from its storage, without it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from openreg_ops import _C

__all__ = ["register"]


def register() -> None:
    """Install the patch."""
    original = torch.Tensor.__deepcopy__

    @functools.wraps(original)
    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        copy = original(self, memo)
        if self.device.type == "openreg" and isinstance(copy, torch.Tensor):
            _C.copy_metadata(self, copy)
        return copy

    torch.Tensor.__deepcopy__ = __deepcopy__
