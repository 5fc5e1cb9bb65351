"""Triton, nvcc and cuDNN under the name cuda: their entry points say in one sentence that they need a GPU."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from openreg_ops.device.refusals import refuse
from openreg_ops.torch_patches.import_hooks import after_import

__all__ = ["register"]


def _refuse_nvcc() -> None:
    def refused(*path: str) -> NoReturn:
        refuse("a CUDA extension", "nvcc, the CUDA toolkit's compiler")

    sys.modules["torch.utils.cpp_extension"]._join_cuda_home = refused


def _refuse_triton() -> None:
    def run(kernel: Any, *args: Any, **options: Any) -> NoReturn:
        refuse(
            f"the Triton kernel {kernel.fn.__name__}",
            "Triton's compiler for GPUs (TRITON_INTERPRET=1 runs it on the CPU)",
        )

    sys.modules["triton.runtime.jit"].JITFunction.run = run


def register() -> None:
    """Install the sentences. PyTorch itself does without these tools."""
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # PyTorch's warns that it was built without cuDNN
    after_import("torch.utils.cpp_extension", _refuse_nvcc)
    after_import("triton.runtime.jit", _refuse_triton)
    after_import(
        "torch.utils._triton", lambda: setattr(sys.modules["torch.utils._triton"], "has_triton", lambda: False)
    )
