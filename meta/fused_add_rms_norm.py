"""fused_add_rms_norm and its backward, both operators."""

from __future__ import annotations

from torch import Tensor

from openreg_ops.meta import op


@op.operator(batch_first=["x", "residual"], inner=1)  # the kernel takes one weight for all rows
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

    Differentiable any number of times in x, residual and weight, through both y and sum. The half types are computed
    in float32; y is computed from the sum as rounded to its dtype. Autocast runs it in float32.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; vLLM's `fused_add_rms_norm`, which writes y over x and sum over
    residual; this operator leaves its arguments alone.

    Example:
        >>> x, residual = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0])
        >>> y, total = openreg_ops.fused_add_rms_norm(x, residual, torch.ones(2), 0.0)
        >>> total, y
        (tensor([3., 4.]), tensor([0.8485, 1.1314]))
    """
    sum = x + residual
    wide = sum.to(op.acc_dtype(x.dtype))
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y.to(x.dtype).contiguous(), sum.contiguous()


@fused_add_rms_norm.fake
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@fused_add_rms_norm.samples
def _(device, dtype):
    for shape, *eps in (((4, 6),), ((5,), 1e-3), ((2, 3, 4, 7),)):
        yield *op.normal(device, dtype, shape, shape, shape[-1:]), *eps


@op.operator()  # vmap maps the reference: each sample has its own grad_weight
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
        sum: `[..., N]`, as returned by `fused_add_rms_norm`.
        weight, eps: as passed to `fused_add_rms_norm`.
    Returns:
        grad_x: `[..., N]`, dtype of sum, contiguous.
        grad_weight: `[N]`, dtype of sum, contiguous; it does not depend on the number of threads.
    Raises:
        RuntimeError: as `fused_add_rms_norm`, and for a grad_y or grad_sum of another shape, dtype or device.

    Differentiable any number of times in all four tensors.
    """
    acc = op.acc_dtype(sum.dtype)
    wide, grad = sum.to(acc), grad_y.to(acc)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    g = grad * weight
    grad_x = rstd * g - rstd**3 * (g * wide).mean(-1, keepdim=True) * wide
    if grad_sum is not None:
        grad_x = grad_sum + grad_x
    grad_weight = (grad * wide * rstd).sum_to_size(weight.shape)
    return grad_x.to(sum.dtype).contiguous(), grad_weight.to(weight.dtype)


@fused_add_rms_norm_backward.fake
def _(sum, weight):
    return sum.new_empty(sum.shape), weight.new_empty(weight.shape)


@fused_add_rms_norm_backward.sharded
def _(sum):
    for d in range(sum.dim() - 1):
        yield dict(grad_y=d, grad_sum=d, sum=d), (d, op.SUM)


@fused_add_rms_norm_backward.samples
def _(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        grad_y, grad_sum, sum, weight = op.normal(device, dtype, shape, shape, shape, shape[-1:])
        yield grad_y, grad_sum, sum, weight, 1e-3
        yield grad_y, None, sum, weight, 1e-3
