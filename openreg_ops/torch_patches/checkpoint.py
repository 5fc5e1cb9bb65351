"""Activation checkpointing restores the random numbers of the device whenever a tensor of it is among the arguments.

If tensors of several types of devices are, PyTorch takes CUDA, or else the first of them, which may be "meta".
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

__all__ = ["register"]

_original = torch.utils.checkpoint._infer_device_type


@functools.wraps(_original)
def _infer_device_type(*args: Any) -> str:
    inferred = _original(*args)  # warns of several types
    types = {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    return "openreg" if inferred != "cuda" and "openreg" in types else inferred


def register() -> None:
    torch.utils.checkpoint._infer_device_type = _infer_device_type
