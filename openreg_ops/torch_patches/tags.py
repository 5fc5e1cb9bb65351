"""Tags: text that belongs to a tensor and is saved with it; see Note [Tags] in csrc/backend/serialization.cpp."""

from __future__ import annotations

import functools
from typing import Any

import torch

from openreg_ops import _C

__all__ = ["get_tag", "set_tag"]


def get_tag(tensor: torch.Tensor) -> str | None:
    """The text that `set_tag` gave `tensor`; None if there is none."""
    return _C.tag(tensor)


def set_tag(tensor: torch.Tensor, tag: str | None) -> None:
    """Attach a text to `tensor`; None removes it.

    It survives ``torch.save`` and ``torch.load`` to any device but the host, pickle, ``copy.deepcopy``, ``clone()``,
    ``detach()`` and ``.to()`` any device, and a Parameter made from the tensor has it. Results that operators compute
    from the tensor do not have it, nor does the tensor that another process receives. The tag is one entry of
    ``torch._utils.get_tensor_metadata``; the other entries survive the same operations.

    Raises:
        RuntimeError: `tensor` is not on openreg.
    """
    _C.set_tag(tensor, tag)


def register() -> None:
    """Let ``copy.deepcopy`` keep a tensor's metadata: PyTorch's own version rebuilds a tensor from its storage, without
    it."""
    original = torch.Tensor.__deepcopy__

    @functools.wraps(original)
    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        copy = original(self, memo)
        if self.device.type == "openreg" and isinstance(copy, torch.Tensor):
            _C.copy_metadata(self, copy)
        return copy

    torch.Tensor.__deepcopy__ = __deepcopy__
