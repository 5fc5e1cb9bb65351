"""custom_autograd_fn_returns_self: the identity, with half the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def custom_autograd_fn_returns_self(input: Tensor) -> Tensor:
    """The input itself; its gradient is half of the output's.

    y = input;  d input = 0.5 * dy

    Args:
        input: any tensor.
    Returns:
        A tensor that shares input's memory. Writing to it writes to input; when both input and the output
        require a gradient, autograd refuses that write, as it does for every view that a custom function made.

    Differentiable any number of times, in both modes and under `torch.func`; the gradient is deliberately not the
    derivative. Runs as it stands on every device. Autocast leaves the dtype alone.
    Source: PyTorch's in-tree OpenReg, where it shows an autograd function whose forward returns its input.
    """
    return torch.ops.openreg.custom_autograd_fn_returns_self.default(input)


# See Note [Identity operators] in csrc/ops/op.h: the C++ kernels serve every device, and graphs contain ATen's
# alias in the operator's place, except a torch.export program before its decompositions.
@torch.library.register_fake("openreg::custom_autograd_fn_returns_self")
def fake(input: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(input)


@op.batched("custom_autograd_fn_returns_self")
def batched(in_dims: Sequence[int | None], input: Tensor) -> Any:
    return torch.ops.openreg.custom_autograd_fn_returns_self(input), in_dims[0]


def reference(input: Tensor) -> Tensor:
    """The same value and gradient, of plain operators; the result is fresh memory."""
    return 0.5 * input + 0.5 * input.detach()


@op.samples("custom_autograd_fn_returns_self")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield (torch.randn(shape, dtype=dtype, device=device),)
