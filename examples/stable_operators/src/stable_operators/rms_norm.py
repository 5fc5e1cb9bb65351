"""rms_norm and its backward: the functions that users call, and everything that is not a kernel. The kernels are in
csrc/rms_norm.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from stable_operators.registration import (
    check_dtype,
    check_floating,
    check_like,
    check_same_device,
    check_shape,
    normal,
    register,
    whole_batch,
    wide,
)


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

    Differentiable any number of times in x and weight, through both y and rstd. The half types are computed in float32.
    Autocast runs it in float32.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    return torch.ops.stable_operators.rms_norm.default(x, weight, eps)


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
    return torch.ops.stable_operators.rms_norm_backward.default(grad_y, x, weight, rstd)


# ---- checks, and the mathematics in plain PyTorch ----


def _check(name, x, weight, eps=1e-6):
    check_floating(name, "x", x)
    torch._check(
        x.dim() >= 1,
        lambda: f"{name}: expected x of at least one dimension, but got a scalar; use x.unsqueeze(0)",
    )
    check_same_device(name, "x", x, "weight", weight)
    check_dtype(name, "weight", weight, x.dtype, "x")
    check_shape(name, "weight", weight, x.shape[-1:], "the last dimension of x")


def _check_backward(name, grad_y, x, weight, rstd):
    _check(name, x, weight)
    check_like(name, "grad_y", grad_y, "x", x)
    check_same_device(name, "x", x, "rstd", rstd)
    check_dtype(name, "rstd", rstd, wide(x.dtype), "its rms_norm output")
    check_shape(name, "rstd", rstd, x.shape[:-1], "the same as x without its last dimension")


def _reference(x, weight, eps=1e-6):
    w = x.to(wide(x.dtype))
    rstd = (w.square().mean(-1) + eps).rsqrt()
    y = w * rstd.unsqueeze(-1) * weight
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def _reference_backward(grad_y, x, weight, rstd):
    w, grad, r = x.to(rstd.dtype), grad_y.to(rstd.dtype), rstd.unsqueeze(-1)
    g = grad * weight
    grad_x = r * g - r**3 * (g * w).mean(-1, keepdim=True) * w
    grad_weight = _sum_to(grad * w * r, weight)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


def _sum_to(x, like):
    """x.sum_to_size(like.shape), which would read sizes; `like` is 1-dimensional, or has the rank of x with sizes of
    1."""
    if like.dim() == x.dim():
        dims = [i for i, size in enumerate(like.shape[:-1]) if i > 0 and isinstance(size, int) and size == 1]
    else:
        dims = list(range(x.dim() - 1))
    return x.sum(dims, keepdim=like.dim() == x.dim()) if dims else x


# ---- the derivative ----


def _save(ctx, inputs, output):
    x, weight = inputs[:2]
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)
    if not x.requires_grad:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_y, grad_rstd):
    x, weight, rstd = ctx.saved_tensors
    grad_x = grad_weight = None
    if grad_y is not None:
        grad_x, grad_weight = rms_norm_backward(grad_y, x, weight, rstd)
    if grad_rstd is not None:  # d rstd / dx = -rstd**3 * x / n
        through_rstd = ((grad_rstd * rstd**3 / -x.shape[-1]).unsqueeze(-1) * x).to(x.dtype)
        grad_x = through_rstd if grad_x is None else grad_x + through_rstd
    return grad_x, grad_weight


# ---- torch.vmap: the kernel takes one weight for all rows, and sums its gradient over all ----


def _batched(size, mapped, x, weight, eps=1e-6):
    if not mapped[1]:
        return rms_norm(x, weight, eps)
    x, weight = whole_batch(size, mapped[:2], (x, weight))
    return _reference(x, _for_rows(weight, x), eps)


def _batched_backward(size, mapped, *args):
    grad_y, x, weight, rstd = whole_batch(size, mapped, args)
    grad_x, grad_weight = _reference_backward(grad_y, x, _for_rows(weight, x), rstd)
    return grad_x, grad_weight.reshape(weight.shape).contiguous()


def _for_rows(weight, x):
    """Each weight of a batch `[B, N]` for all rows of its x: `[B, 1, …, N]`."""
    return weight.reshape(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[-1])


# ---- registration ----


def _samples(device, dtype):
    for shape, *eps in (((4, 6),), ((5,), 1e-3), ((2, 3, 4, 7),)):
        yield *normal(device, dtype, shape, shape[-1:]), *eps


def _samples_backward(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        rstd = torch.rand(shape[:-1], dtype=wide(dtype), device=device) + 0.5
        yield *normal(device, dtype, shape, shape, shape[-1:]), rstd


def _at_least_float32(tensors):
    return torch.float64 if all(x.dtype == torch.float64 for x in tensors) else torch.float32


rms_norm.reference = register(
    "rms_norm",
    reference=_reference,
    fake=lambda x, weight, eps=1e-6: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide(x.dtype))),
    check=_check,
    batched=_batched,
    samples=_samples,
    derivative=(_save, _backward),
    autocast=_at_least_float32,
)
rms_norm_backward.reference = register(
    "rms_norm_backward",
    reference=_reference_backward,
    fake=lambda grad_y, x, weight, rstd: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    check=_check_backward,
    batched=_batched_backward,
    samples=_samples_backward,
)
