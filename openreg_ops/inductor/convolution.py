"""The strides of a convolution's result in graphs, under every backend of torch.compile and in torch.export.

FakeTensor, which predicts results without computing them, asks PyTorch which kernel a convolution will run, and in
which memory format. For this device PyTorch answers convolution_overrideable, whose results FakeTensor expects to be
contiguous, and the CPU's small kernels keep channels_last only for CPU tensors. But the device runs the CPU's kernels.

Written against torch 2.13 and 2.15; tests/graph/test_convolution.py says what breaks without each answer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from openreg_ops.identity import identity


def register() -> None:
    """Answer both questions as for the CPU."""
    select, determine = torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format

    @functools.wraps(select)
    def select_conv_backend(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        if "bias" in options:
            options["bias"] = _on_cpu(options["bias"])
        return select(_on_cpu(x), _on_cpu(weight), *args, **options)

    @functools.wraps(determine)
    def determine_memory_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
        return determine(_on_cpu(x), _on_cpu(weight), backend)

    torch._C._select_conv_backend = select_conv_backend
    torch._C._conv_determine_backend_memory_format = determine_memory_format


def _on_cpu(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or x.device.type != identity.name:
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")
