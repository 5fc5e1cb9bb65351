"""The parts of batch normalization over several processes, torch.nn.SyncBatchNorm.

Statistics are float32 for narrower inputs; otherwise they have the dtype of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import dtype_name, expect, expect_tensor, kernel


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _expect_real(op: str, name: str, x: Tensor | None) -> None:
    expect_tensor(op, name, x)
    if x is not None and (x.is_complex() or x.dtype == torch.bool):
        raise RuntimeError(f"{op}: expected {name} of real numbers, but got {dtype_name(x)}")


def _expect_input(op: str, x: Tensor) -> None:
    _expect_real(op, "input", x)
    if not x.is_floating_point():
        raise RuntimeError(f"{op}: expected a floating-point input, but got {dtype_name(x)}; convert it with .to()")
    if x.dim() < 2:
        raise RuntimeError(f"{op}: expected an input [N, C, ...], but got one of {x.dim()} dimensions")


def _expect_channels(op: str, input: Tensor, required: dict[str, Tensor], optional: dict[str, Tensor | None]) -> None:
    """Raise unless each tensor has one value for each channel of `input`."""
    given = {name: x for name, x in optional.items() if x is not None}
    for name, x in {**required, **given}.items():
        _expect_real(op, name, x)
        if x.numel() != input.size(1):
            raise RuntimeError(
                f"{op}: expected {name} of {input.size(1)} values, one for each channel of input, but got shape "
                f"{list(x.shape)}"
            )


def _expect_backward(
    op: str, grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, **sums: Tensor
) -> None:
    _expect_input(op, input)
    _expect_real(op, "grad_out", grad_out)
    if grad_out.shape != input.shape:
        given, wanted = list(grad_out.shape), list(input.shape)
        raise RuntimeError(f"{op}: expected grad_out of the shape of input, {wanted}, but got {given}")
    _expect_channels(op, input, {"mean": mean, "invstd": invstd, **sums}, {"weight": weight})


def _channels(values: Tensor, input: Tensor) -> Tensor:
    """Each channel's value, broadcast to all of its elements."""
    return _widened(values).view(1, -1, *[1] * (input.dim() - 2))


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


@kernel("batch_norm_stats")
def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean of each channel, and 1 / sqrt(var + eps)."""
    _expect_input("batch_norm_stats", input)
    var, mean = torch.var_mean(_widened(input), _all_but_channels(input), correction=0)
    return mean, torch.rsqrt(var + eps)


@kernel("batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The statistics of all processes, from those of each, [processes, C], and its number of values, [processes]."""
    op = "batch_norm_gather_stats_with_counts"
    for name, x in (("mean", mean), ("invstd", invstd), ("counts", counts)):
        _expect_real(op, name, x)
    expect(
        mean.dim() == 2 and invstd.shape == mean.shape and counts.numel() == mean.size(0),
        f"{op}: expected mean and invstd [processes, C] and a count for each process, but got {list(mean.shape)}, "
        f"{list(invstd.shape)} and {list(counts.shape)}",
    )
    means = _widened(mean)
    count = counts.to(means.dtype).view(-1, 1)
    total = count.sum(0)
    whole = (means * count).sum(0) / total
    var = _widened(invstd).pow(-2) - eps
    squares = ((var + (means - whole).square()) * count).sum(0)  # of the distances from the mean
    for running, now in ((running_mean, whole), (running_var, squares / (total - 1))):
        if running is not None:
            _expect_real(op, "running statistics", running)
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    return whole, torch.rsqrt(squares / total + eps)


@kernel("batch_norm_gather_stats")
def batch_norm_gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    """`batch_norm_gather_stats_with_counts` for processes with `count` values each."""
    op = "batch_norm_gather_stats"
    _expect_real(op, "mean", mean)
    expect(mean.dim() == 2, f"{op}: expected mean [processes, C], but got {list(mean.shape)}")
    counts = _widened(mean).new_full((mean.size(0),), count)
    return batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


@kernel("batch_norm_elemt", "batch_norm_elemt.out")
def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """(input - mean) * invstd * weight + bias."""
    op = "batch_norm_elemt"
    _expect_input(op, input)
    _expect_channels(op, input, {"mean": mean, "invstd": invstd}, {"weight": weight, "bias": bias})
    out = torch.empty_like(input) if out is None else out
    _expect_real(op, "out", out)
    says = f"{op}: expected out of shape {list(input.shape)}, the same as input, but got {list(out.shape)}"
    expect(out.shape == input.shape, says)
    result = (_widened(input) - _channels(mean, input)) * _channels(invstd, input)
    if weight is not None:
        result = result * _channels(weight, input)
    if bias is not None:
        result = result + _channels(bias, input)
    return out.copy_(result)


@kernel("batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The sums of grad_out and of grad_out * (input - mean), and the gradients of weight and bias."""
    _expect_backward("batch_norm_backward_reduce", grad_out, input, mean, invstd, weight)
    dims, dy = _all_but_channels(input), _widened(grad_out)
    sums = dy.sum(dims)
    sums_xmu = (dy * (_widened(input) - _channels(mean, input))).sum(dims)
    dtype = input.dtype if weight is None else weight.dtype
    return (
        sums if input_g else None,
        sums_xmu if input_g else None,
        (sums_xmu * invstd).to(dtype) if weight_g else None,
        sums.to(dtype, copy=True) if bias_g else None,
    )


@kernel("batch_norm_backward_elemt")
def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input, from the sums of all processes and the number of values in each."""
    op = "batch_norm_backward_elemt"
    _expect_backward(op, grad_out, input, mean, invstd, weight, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu)
    _expect_real(op, "count", count)
    total = count.sum().to(_widened(mean).dtype)
    slope = _widened(sum_dy_xmu) / total * invstd.square()
    grad = (
        _widened(grad_out)
        - _channels(sum_dy / total, input)
        - (_widened(input) - _channels(mean, input)) * _channels(slope, input)
    )
    grad = grad * _channels(invstd if weight is None else invstd * weight, input)
    return torch.empty_like(input).copy_(grad)
