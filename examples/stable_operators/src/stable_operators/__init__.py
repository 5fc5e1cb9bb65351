"""Two operators whose kernels are in one binary for many versions of PyTorch: torch.ops.stable_operators."""

import importlib.util

import torch

torch.ops.load_library(importlib.util.find_spec("stable_operators._C").origin)

from stable_operators.rms_norm import rms_norm, rms_norm_backward  # noqa: E402
from stable_operators.swiglu import swiglu, swiglu_backward  # noqa: E402

__all__ = ["rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"]
