"""rms_norm and its backward, both operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Scale x to unit root-mean-square over its last dimension.

    y = x * rstd * weight,  rstd = (mean(x**2, -1) + eps) ** -0.5

    Args:
        x: `[..., N]`, float32, float64, float16 or bfloat16; any strides.
        weight: `[N]`, dtype of x.
        eps: added to the mean square.
    Returns:
        y: `[..., N]`, dtype of x, contiguous.
        rstd: `[...]`, float32 (float64 for a float64 x), contiguous.
    Raises:
        RuntimeError: x has no dimension or another dtype; weight is not `[N]`, or its dtype or device is not x's.

    Differentiable any number of times in x and weight, through y and rstd both. The half types are computed in
    float32. Autocast runs it in float32.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    return torch.ops.openreg.rms_norm.default(x, weight, eps)


def rms_norm_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `rms_norm` gives x and weight through y, as a function of four independent tensors.

    With g = grad_y * weight:
    grad_x = rstd * g - rstd**3 * mean(g * x, -1) * x,  grad_weight = sum(grad_y * x * rstd) over all rows

    Args:
        grad_y: `[..., N]`, dtype of x.
        x, weight: as `rms_norm` got them.
        rstd: as `rms_norm` gave it.
    Returns:
        grad_x: `[..., N]`, dtype of x, contiguous.
        grad_weight: `[N]`, dtype of x, contiguous; it does not depend on the number of threads.
    Raises:
        RuntimeError: as `rms_norm`, and for a grad_y or rstd of another shape, dtype or device.

    Differentiable any number of times in all four.
    """
    return torch.ops.openreg.rms_norm_backward.default(grad_y, x, weight, rstd)


def _check(name: str, x: Tensor, weight: Tensor) -> None:
    op.check_floating(name, "x", x)
    torch._check(
        x.dim() >= 1,
        lambda: f"{name}: expected x of at least one dimension, but got a scalar; use x.unsqueeze(0)",
    )
    op.check_same_device(name, "x", x, "weight", weight)
    op.check_dtype(name, "weight", weight, x.dtype, "x")
    op.check_shape(name, "weight", weight, x.shape[-1:], "the last dimension of x")


def _check_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> None:
    name = "rms_norm_backward"
    _check(name, x, weight)
    op.check_same_device(name, "x", x, "grad_y", grad_y)
    op.check_dtype(name, "grad_y", grad_y, x.dtype, "x")
    op.check_shape(name, "grad_y", grad_y, x.shape, "that of x")
    op.check_same_device(name, "x", x, "rstd", rstd)
    op.check_dtype(name, "rstd", rstd, op.acc_dtype(x.dtype), "its rms_norm output")
    op.check_shape(name, "rstd", rstd, x.shape[:-1], "that of x without its last dimension")


@torch.library.register_fake("openreg::rms_norm")
def fake(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=op.acc_dtype(x.dtype))


@torch.library.register_fake("openreg::rms_norm_backward")
def fake_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, x, weight, rstd)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@op.reference("rms_norm")
def reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    wide = x.to(op.acc_dtype(x.dtype))
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    y = wide * rstd.unsqueeze(-1) * weight
    return y.to(x.dtype).contiguous(), rstd.contiguous()


@op.reference("rms_norm_backward")
def reference_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, x, weight, rstd)
    wide, grad, r = x.to(rstd.dtype), grad_y.to(rstd.dtype), rstd.unsqueeze(-1)
    g = grad * weight
    grad_x = r * g - r**3 * (g * wide).mean(-1, keepdim=True) * wide
    grad_weight = (grad * wide * r).sum_to_size(weight.shape)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


@op.batched("rms_norm")
def batched(in_dims: Sequence[int | None], x: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    if in_dims[1] is not None:  # the kernel takes one weight for all rows
        return NotImplemented
    return torch.ops.openreg.rms_norm(x.movedim(in_dims[0], 0), weight, eps), (0, 0)


@op.batched("rms_norm_backward")
def batched_backward(in_dims: Sequence[int | None], *_inputs: Tensor) -> Any:
    return NotImplemented  # each sample has a grad_weight of its own, where the kernel adds up all rows


@op.samples("rms_norm")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape, *eps in (((4, 6),), ((5,), 1e-3), ((2, 3, 4, 7),)):
        yield (*(torch.randn(s, dtype=dtype, device=device) for s in (shape, shape[-1:])), *eps)


@op.samples("rms_norm_backward")
def samples_backward(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        grad_y, x, weight = (torch.randn(s, dtype=dtype, device=device) for s in (shape, shape, shape[-1:]))
        yield grad_y, x, weight, torch.rand(shape[:-1], dtype=op.acc_dtype(dtype), device=device) + 0.5
