"""Scaled dot product attention of jagged nested tensors, for which PyTorch considers only CUDA's algorithms."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from openreg_ops.identity import identity
from openreg_ops.torch_patches.import_hooks import after_import

__all__ = ["register"]


def register() -> None:
    """Let jagged tensors use the device's flash and memory-efficient attention, once PyTorch has to choose."""
    after_import("torch.nested._internal.sdpa", _replace_choices)


def _replace_choices() -> None:
    """Replace the two functions that say which of them can run: a build of PyTorch without CUDA answers no for every
    device.

    The device's kernels accept what CUDA's accept, so the rules are CUDA's. PyTorch itself checks what depends on the
    sequences.
    """
    module = sys.modules["torch.nested._internal.sdpa"]
    halves = (torch.float16, torch.bfloat16)
    for name, enabled, dtypes in (
        ("can_use_flash_attention", torch.backends.cuda.flash_sdp_enabled, halves),
        ("can_use_efficient_attention", torch.backends.cuda.mem_efficient_sdp_enabled, (*halves, torch.float32)),
    ):
        setattr(module, name, _choice(module, name, enabled, dtypes))


def _choice(module: types.ModuleType, name: str, enabled: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    original = getattr(module, name)

    def can_use(params: Any, debug: bool = False) -> bool:
        query = params.query
        if query.device.type != identity.name:
            return original(params, debug)
        able = query.dtype in dtypes and query.dim() == 4 and params.attn_mask is None
        if debug and not able:
            module.log.warning(
                "On openreg it takes query of 4 dimensions and of %s, and no mask, but got %s of %d dimensions.",
                ", ".join(map(str, dtypes)),
                query.dtype,
                query.dim(),
            )
        return able and enabled()

    return can_use
