"""fake_quantize and its backward, both operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


def _along(values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """`values`, one for each index of x along axis, in a shape that broadcasts with x."""
    return values if axis is None else values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])


@op.operator()
def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, axis: int | None = None
) -> Tensor:
    """Quantize x to integers and back, with a gradient that lets a network train through it.

    y = scale * clamp(round(x / scale), quant_min - zero_point, quant_max - zero_point)

    Rounds half to even, and x / scale as x * (1 / scale), as `torch.fake_quantize_per_tensor_affine` does. NaN stays
    NaN.

    Args:
        x: any shape and strides, float32, float64, float16 or bfloat16.
        scale: one positive number, shape `[]`; with axis, `[N]` for N indices along it. float32 (float64 for a
            float64 x). Its values are not checked: for zero or less, the result is what the formula gives.
        zero_point: int32, shape of scale.
        quant_min, quant_max: the smallest and largest integer, such as -128 and 127.
        axis: the dimension along which each index has its own scale and zero_point.
    Returns:
        y: shape and dtype of x, contiguous.
    Raises:
        RuntimeError: another shape, dtype or device; quant_min beyond quant_max; an axis that x does not have.

    The gradient is deliberately not the derivative, which is 0: rounding counts as the identity (straight-through
    estimator). x's passes where round(x / scale) + zero_point is in range, and is 0 outside. scale is learnable, as
    in LSQ: its gradient is the sum over dy * (round(x / scale) - x / scale) in range, and dy times the bound,
    quant_min - zero_point or quant_max - zero_point, outside; multiply it by LSQ's 1 / sqrt(numel * quant_max)
    with `scale_gradient(scale, …)`. Differentiable any number of times, in both modes, and linear in dy only: a second
    derivative in x or scale is 0 except through what is computed from y.

    The half types are computed in float32. Autocast runs it in float32.
    Source: Bengio et al. 2013, arXiv:1308.3432; Esser et al. 2020, arXiv:1902.08153.
    """
    s, z = _along(scale, x, axis), _along(zero_point, x, axis).to(scale.dtype)
    low, high = quant_min - z, quant_max - z
    wide = x.to(s.dtype)
    steps = wide.detach() * s.detach().reciprocal()
    kept = steps.round().clamp(low, high)
    inside = kept == steps.round()
    # The value as a constant, plus zeros that carry the gradients, so no gradient comes from dividing by a scale of
    # zero.
    zero = wide - wide.detach()
    zero_of_scale = (s - s.detach()).where(s.isfinite(), 0)
    to_scale = (kept - steps.where(inside, 0)).where(s.isfinite(), 0)
    y = kept * s.detach() + zero.where(inside, 0) + zero_of_scale * to_scale
    return y.to(x.dtype).contiguous()


@fake_quantize.batched
def _(in_dims, x, scale, zero_point, quant_min, quant_max, axis):
    if in_dims[1] is not None or in_dims[2] is not None:  # the kernel takes one scale for all samples
        return NotImplemented
    axis = axis if axis is None or axis < 0 else axis + 1
    return torch.ops.openreg.fake_quantize(x.movedim(in_dims[0], 0), scale, zero_point, quant_min, quant_max, axis), 0


@fake_quantize.fake
def _(x):
    return x.new_empty(x.shape)


def _placed(x, axis):
    """Each dimension of x, and where a scale is placed with it: with the one along axis, or the same everywhere."""
    for d in range(x.dim()):
        yield d, 0 if axis is not None and d == axis % x.dim() else None


@fake_quantize.sharded
def _(x, axis):
    for d, of_scale in _placed(x, axis):
        yield dict(x=d, scale=of_scale, zero_point=of_scale), (d,)


@fake_quantize.samples
def samples(device, dtype):
    wide = dict(device=device, dtype=op.acc_dtype(dtype))
    for shape, axis in (((4, 6), None), ((5,), None), ((2, 3, 4, 4), 1)):
        channels = () if axis is None else (shape[axis],)
        scale, zero_point = torch.rand(channels, **wide) + 0.2, torch.ones(channels, dtype=torch.int32, device=device)
        # Representable in bfloat16: rounding x to it must not move x into another step.
        x = torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
        yield x, scale, zero_point, -4, 3, axis


@op.operator()
def fake_quantize_backward(
    grad_y: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients that `fake_quantize` gives x and scale.

    With t = round(x / scale) and k = clamp(t, quant_min - zero_point, quant_max - zero_point):
    grad_x = where(t == k, grad_y, 0)
    grad_scale = sum(grad_y * (k - where(t == k, x / scale, 0))) over all x of one scale; 0 if it is not finite

    Args:
        grad_y: shape and dtype of x.
        x, scale, zero_point, quant_min, quant_max, axis: as passed to `fake_quantize`.
    Returns:
        grad_x: shape and dtype of x, contiguous.
        grad_scale: shape and dtype of scale; it does not depend on the number of threads.
    Raises:
        RuntimeError: as `fake_quantize`, and for a grad_y of another shape, dtype or device.

    Differentiable any number of times in grad_y; in x and scale it counts as constant.
    """
    s, z = _along(scale.detach(), x, axis), _along(zero_point, x, axis).to(scale.dtype)
    steps = x.detach().to(s.dtype) * s.reciprocal()
    kept = steps.round().clamp(quant_min - z, quant_max - z)
    inside = kept == steps.round()
    to_scale = (grad_y.to(s.dtype) * (kept - steps.where(inside, 0))).where(s.isfinite(), 0)
    shared = [d for d in range(x.dim()) if axis is None or d != axis % x.dim()]
    return grad_y.where(inside, 0).contiguous(), to_scale.sum(shared) if shared else to_scale


@fake_quantize_backward.fake
def _(x, scale):
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


@fake_quantize_backward.sharded
def _(x, axis):
    for d, of_scale in _placed(x, axis):
        summed = op.SUM if of_scale is None else of_scale
        yield dict(grad_y=d, x=d, scale=of_scale, zero_point=of_scale), (d, summed)


@fake_quantize_backward.samples
def _(device, dtype):
    for x, *rest in samples(device, dtype):
        yield torch.randn_like(x), x, *rest
