"""The chunked `linear_cross_entropy` of tensors in half types accumulates in float32, as on CUDA and on the CPU."""

from __future__ import annotations

import torch
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

from openreg_ops.identity import identity

__all__ = ["register"]

_auto_acc_dtype = LinearCrossEntropyOptions._resolve_auto_acc_dtype


def _resolve_auto_acc_dtype(dtype: torch.dtype, device: torch.device | None) -> torch.dtype | None:
    """The dtype that the policy "auto" accumulates in: for the device that of the CPU, whose kernels it runs."""
    ours = device is not None and device.type == identity.name
    return _auto_acc_dtype(dtype, torch.device("cpu") if ours else device)


def register() -> None:
    LinearCrossEntropyOptions._resolve_auto_acc_dtype = staticmethod(_resolve_auto_acc_dtype)
