"""scale_gradient: the identity, with a scaled gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """A view of x whose gradient is `scale` times the output's; -1 makes it a gradient reversal layer.

    y = x;  dx = scale * dy

    Args:
        x: any tensor.
        scale: any number; 0 stops the gradient, though x still gets one, of zeros.
    Returns:
        A view of x. Writing to it writes to x; when both require a gradient, autograd refuses that write, as it
        does for every view that a custom function made.

    Differentiable any number of times, in both modes and under `torch.func`; the gradient is deliberately not the
    derivative. Runs as it stands on every device. Autocast leaves the dtype alone.
    Source: Ganin & Lempitsky 2015, arXiv:1409.7495, section 3.1.
    """
    return torch.ops.openreg.scale_gradient.default(x, scale)


# See Note [Identity operators] in csrc/ops/op.h.
@torch.library.register_fake("openreg::scale_gradient")
def fake(x: Tensor, scale: float) -> Tensor:
    return torch.ops.aten.alias.default(x)


@op.batched("scale_gradient")
def batched(in_dims: Sequence[int | None], x: Tensor, scale: float) -> Any:
    return torch.ops.openreg.scale_gradient(x, scale), in_dims[0]


def reference(x: Tensor, scale: float) -> Tensor:
    """The same value and gradient, of plain operators; the result is fresh memory."""
    return x.detach() + scale * (x - x.detach())


@op.samples("scale_gradient")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield torch.randn(shape, dtype=dtype, device=device), -0.5
