"""rms_norm and its backward, both operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


@op.operator(batch_first=["x"], inner=1)  # the kernel takes one weight for all rows
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

    Differentiable any number of times in x and weight, through both y and rstd. The half types are computed in
    float32. Autocast runs it in float32.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> y, rstd = openreg_ops.rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
        >>> y
        tensor([0.8485, 1.1314])
    """
    wide = x.to(op.acc_dtype(x.dtype))
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    y = wide * rstd.unsqueeze(-1) * weight
    return y.to(x.dtype).contiguous(), rstd.contiguous()


@rms_norm.fake
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=op.acc_dtype(x.dtype))


@rms_norm.samples
def _(device, dtype):
    for shape, *eps in (((4, 6),), ((5,), 1e-3), ((2, 3, 4, 7),)):
        yield *op.normal(device, dtype, shape, shape[-1:]), *eps


@op.operator()  # vmap maps the reference: each sample has its own grad_weight
def rms_norm_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `rms_norm` gives x and weight through y, as a function of four independent tensors.

    With g = grad_y * weight:
    grad_x = rstd * g - rstd**3 * mean(g * x, -1) * x,  grad_weight = sum(grad_y * x * rstd) over all rows

    Args:
        grad_y: `[..., N]`, dtype of x.
        x, weight: as passed to `rms_norm`.
        rstd: as returned by `rms_norm`.
    Returns:
        grad_x: `[..., N]`, dtype of x, contiguous.
        grad_weight: `[N]`, dtype of x, contiguous; it does not depend on the number of threads.
    Raises:
        RuntimeError: as `rms_norm`, and for a grad_y or rstd of another shape, dtype or device.

    Differentiable any number of times in all four.
    """
    wide, grad, r = x.to(rstd.dtype), grad_y.to(rstd.dtype), rstd.unsqueeze(-1)
    g = grad * weight
    grad_x = r * g - r**3 * (g * wide).mean(-1, keepdim=True) * wide
    grad_weight = (grad * wide * r).sum_to_size(weight.shape)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


@rms_norm_backward.fake
def _(x, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@rms_norm_backward.sharded
def _(x):
    for d in range(x.dim() - 1):
        yield dict(grad_y=d, x=d, rstd=d), (d, op.SUM)


@rms_norm_backward.samples
def _(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        rstd = torch.rand(shape[:-1], dtype=op.acc_dtype(dtype), device=device) + 0.5
        yield *op.normal(device, dtype, shape, shape, shape[-1:]), rstd
