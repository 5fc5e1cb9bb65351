"""Operators that PyTorch implements only for CUDA, as compositions of operators that the device has.

Each function computes on the device, so stream order, async mode and graphs need nothing else. It accepts what CUDA's
kernel accepts, and raises CUDA's errors. `MISSING` says why the device lacks the others.
"""

from __future__ import annotations

import torch

from openreg_ops import _C
from openreg_ops.cuda_operators import attention, batch_norm, cells, int4, others, products
from openreg_ops.cuda_operators.missing import MISSING
from openreg_ops.cuda_operators.registry import KERNELS, without_autocast
from openreg_ops.identity import identity
from openreg_ops.torch_patches.import_hooks import after_import

__all__ = [
    "KERNELS",
    "MISSING",
    "attention",
    "batch_norm",
    "cells",
    "int4",
    "others",
    "products",
    "register",
]

_library = torch.library.Library("aten", "IMPL", identity.dense)


def register() -> None:
    """Register the kernels with PyTorch, and the reasons with the error for operators without a kernel."""
    for name, function in KERNELS.items():
        _library.impl(name, without_autocast(function))
    _C.set_missing_reasons(MISSING)
    after_import("torch._meta_registrations", products.correct_baddbmm)
    after_import("torch._meta_registrations", attention.correct_fused_attention)
