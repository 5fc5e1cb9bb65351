"""Tags: a text that belongs to a tensor and is saved with it; see Note [Tags] in csrc/backend/serialization.cpp."""

from __future__ import annotations

import torch

from openreg_ops import _C

__all__ = ["get_tag", "set_tag"]


def get_tag(tensor: torch.Tensor) -> str | None:
    """The text that `set_tag` gave `tensor`; None if there is none."""
    return _C.tag(tensor)


def set_tag(tensor: torch.Tensor, tag: str | None) -> None:
    """Give `tensor` a text; None takes it away.

    It survives ``torch.save`` and ``torch.load`` to any device but the host, pickle, ``clone()``, ``detach()`` and
    ``.to()`` any device, and a Parameter made of the tensor has it, also after ``copy.deepcopy``. What operators compute
    from the tensor, its own ``copy.deepcopy`` and another process that it is sent to do not.

    Raises:
        RuntimeError: `tensor` is not on openreg.
    """
    _C.set_tag(tensor, tag)
