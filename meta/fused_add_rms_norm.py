"""fused_add_rms_norm and its backward, both operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and scale the sum to unit root-mean-square over its last dimension.

    sum = x + residual
    y = sum * rstd * weight,  rstd = (mean(sum**2, -1) + eps) ** -0.5

    Args:
        x: `[..., N]`, float32, float64, float16 or bfloat16; any strides.
        residual: shape and dtype of x.
        weight: `[N]`, dtype of x.
        eps: added to the mean square.
    Returns:
        y: `[..., N]`, dtype of x, contiguous; what the next layer reads.
        sum: `[..., N]`, dtype of x, contiguous; the residual from here on.
    Raises:
        RuntimeError: x has no dimension or another dtype; residual is not like x; weight is not `[N]`, or its dtype
            or device is not x's.

    Differentiable any number of times in x, residual and weight, through y and sum both. The half types are computed
    in float32; y is of the sum as rounded to its dtype. Autocast runs it in float32.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; vLLM's `fused_add_rms_norm`, which writes y over x and sum over
    residual, where this one leaves its arguments alone.
    """
    return torch.ops.openreg.fused_add_rms_norm.default(x, residual, weight, eps)


def fused_add_rms_norm_backward(
    grad_y: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients that `fused_add_rms_norm` gives its arguments, as a function of sum.

    With g = grad_y * weight:
    grad_x = grad_sum + rstd * g - rstd**3 * mean(g * sum, -1) * sum,  which is the residual's gradient too
    grad_weight = sum(grad_y * sum * rstd) over all rows

    Args:
        grad_y: shape and dtype of sum.
        grad_sum: shape and dtype of sum; None is zero.
        sum: `[..., N]`, as `fused_add_rms_norm` gave it.
        weight, eps: as `fused_add_rms_norm` got them.
    Returns:
        grad_x: `[..., N]`, dtype of sum, contiguous.
        grad_weight: `[N]`, dtype of sum, contiguous; it does not depend on the number of threads.
    Raises:
        RuntimeError: as `fused_add_rms_norm`, and for a grad_y or grad_sum of another shape, dtype or device.

    Differentiable any number of times in all four tensors.
    """
    return torch.ops.openreg.fused_add_rms_norm_backward.default(grad_y, grad_sum, sum, weight, eps)


def _check_row(name: str, x_name: str, x: Tensor, weight: Tensor) -> None:
    op.check_floating(name, x_name, x)
    torch._check(
        x.dim() >= 1,
        lambda: f"{name}: expected {x_name} of at least one dimension, but got a scalar; use {x_name}.unsqueeze(0)",
    )
    op.check_same_device(name, x_name, x, "weight", weight)
    op.check_dtype(name, "weight", weight, x.dtype, x_name)
    op.check_shape(name, "weight", weight, x.shape[-1:], f"the last dimension of {x_name}")


def _check_like(name: str, x_name: str, x: Tensor, of: str, y: Tensor) -> None:
    op.check_same_device(name, of, y, x_name, x)
    op.check_dtype(name, x_name, x, y.dtype, of)
    op.check_shape(name, x_name, x, y.shape, f"that of {of}")


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    name = "fused_add_rms_norm"
    _check_row(name, "x", x, weight)
    _check_like(name, "residual", residual, "x", x)


def _check_backward(grad_y: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor) -> None:
    name = "fused_add_rms_norm_backward"
    _check_row(name, "sum", sum, weight)
    _check_like(name, "grad_y", grad_y, "sum", sum)
    if grad_sum is not None:
        _check_like(name, "grad_sum", grad_sum, "sum", sum)


@torch.library.register_fake("openreg::fused_add_rms_norm")
def fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("openreg::fused_add_rms_norm_backward")
def fake_backward(
    grad_y: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, grad_sum, sum, weight)
    return sum.new_empty(sum.shape), weight.new_empty(weight.shape)


@op.reference("fused_add_rms_norm")
def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight)
    sum = x + residual
    wide = sum.to(op.acc_dtype(x.dtype))
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y.to(x.dtype).contiguous(), sum.contiguous()


@op.reference("fused_add_rms_norm_backward")
def reference_backward(
    grad_y: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, grad_sum, sum, weight)
    acc = op.acc_dtype(sum.dtype)
    wide, grad = sum.to(acc), grad_y.to(acc)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    g = grad * weight
    grad_x = rstd * g - rstd**3 * (g * wide).mean(-1, keepdim=True) * wide
    if grad_sum is not None:
        grad_x = grad_sum + grad_x
    grad_weight = (grad * wide * rstd).sum_to_size(weight.shape)
    return grad_x.to(sum.dtype).contiguous(), grad_weight.to(weight.dtype)


@op.batched("fused_add_rms_norm")
def batched(in_dims: Sequence[int | None], x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    if in_dims[2] is not None:  # the kernel takes one weight for all rows
        return NotImplemented
    rows = op.all_batch_first(in_dims[:2], (x, residual))
    return torch.ops.openreg.fused_add_rms_norm(*rows, weight, eps), (0, 0)


@op.batched("fused_add_rms_norm_backward")
def batched_backward(in_dims: Sequence[int | None], *_inputs: Any) -> Any:
    return NotImplemented  # each sample has a grad_weight of its own, where the kernel adds up all rows


@op.samples("fused_add_rms_norm")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape, *eps in (((4, 6),), ((5,), 1e-3), ((2, 3, 4, 7),)):
        yield *(torch.randn(s, dtype=dtype, device=device) for s in (shape, shape, shape[-1:])), *eps


@op.samples("fused_add_rms_norm_backward")
def samples_backward(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        grad_y, grad_sum, sum = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
        weight = torch.randn(shape[-1:], dtype=dtype, device=device)
        yield grad_y, grad_sum, sum, weight, 1e-3
        yield grad_y, None, sum, weight, 1e-3
