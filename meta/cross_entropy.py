"""cross_entropy and its backward, both operators, and what linear_cross_entropy shares with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op

# ---- forward ----


def loss_of(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor]:
    """loss and logsumexp, from plain operators, in the dtype of logits."""
    logsumexp = op.logsumexp(logits)
    valid = target != ignore_index
    index = torch.where(valid, target, 0).long().unsqueeze(-1)
    loss = logsumexp - (1 - label_smoothing) * logits.gather(-1, index).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    loss = loss + z_loss * logsumexp.square()  # NaN for an infinite logit, as in torch, also without a z-loss
    loss = torch.where(valid, loss, 0)
    if reduction != "none":
        loss = loss.sum() / valid.sum() if reduction == "mean" else loss.sum()
    return loss, logsumexp.contiguous()


@op.operator()
def cross_entropy(
    logits: Tensor, target: Tensor, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of predicting `target` by the softmax of `logits`, whose last dimension is the classes.

    For a row x of logits with target t, s = label_smoothing and z = z_loss:
    loss = lse - (1 - s) * x[t] - s * mean(x) + z * lse**2,  lse = log(sum(exp(x)))

    Args:
        logits: `[..., V]`, float32, float64, float16 or bfloat16; any strides. The classes come last, as in language
            models, not second as in `torch.nn.functional.cross_entropy`.
        target: `[...]`, int64 or int32; each in [0, V) or ignore_index.
        ignore_index: a row with this target has loss 0, no gradient through its loss, and does not count in the mean.
        label_smoothing: in [0, 1], the share of the target spread evenly over the classes.
        z_loss: the weight of the squared logsumexp, which keeps logits from drifting.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
    Returns:
        loss: `[]`, or `[...]` for "none"; float32 (float64 for float64 logits), contiguous. The mean of no rows is NaN,
            as in torch, and its gradient is 0.
        logsumexp: `[...]`, dtype of loss, contiguous, including ignored rows.
    Raises:
        RuntimeError: logits has no dimension, no class or another dtype; target has another shape, dtype or device;
            label_smoothing is outside [0, 1]; reduction is unknown.
        IndexError: a target is neither a class nor ignore_index; names the first such target and its row, counted
            over all leading dimensions. On other devices the error comes from `Tensor.gather`, and in backward from
            `Tensor.scatter`.

    Differentiable any number of times in logits, through both loss and logsumexp. Only logits, target and logsumexp
    are kept for backward, which writes the gradient in one pass. The half types are computed in float32, and the
    loss is not rounded to them. Autocast runs it in float32.
    Sources: label smoothing, Szegedy et al. 2015, arXiv:1512.00567; z-loss, Chowdhery et al. 2022, arXiv:2204.02311.

    Example:
        >>> logits, target = torch.zeros(2, 10), torch.tensor([1, 7])
        >>> loss, logsumexp = openreg_ops.cross_entropy(logits, target)
        >>> loss  # log(10)
        tensor(2.3026)
    """
    wide = logits.to(op.acc_dtype(logits.dtype))
    loss, logsumexp = loss_of(wide, target, ignore_index, label_smoothing, z_loss, reduction)
    return loss.contiguous(), logsumexp


@cross_entropy.fake
def _(logits, target, reduction):
    logsumexp = logits.new_empty(target.shape, dtype=op.acc_dtype(logits.dtype))
    return logsumexp.new_empty(target.shape if reduction == "none" else ()), logsumexp


@cross_entropy.samples
def samples(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 7)):
        yield torch.randn(shape, dtype=dtype, device=device), torch.randint(shape[-1], shape[:-1]).to(device)


# ---- backward ----


@op.operator()
def cross_entropy_backward(
    grad_loss: Tensor | None, grad_logsumexp: Tensor | None, logits: Tensor, target: Tensor, logsumexp: Tensor, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The gradient that `cross_entropy` gives logits, as a function of independent tensors.

    For a row, with g the gradient of its loss (0 if ignored), h the gradient of its logsumexp, p = exp(x - logsumexp):
    grad = (g * (1 + 2 * z * logsumexp) + h) * p - g * ((1 - s) * onehot(t) + s / V)

    Args:
        grad_loss: shape and dtype of loss, or None for zeros.
        grad_logsumexp: shape and dtype of logsumexp, or None for zeros.
        logits, target: as passed to `cross_entropy`.
        logsumexp: as returned by `cross_entropy`.
        ignore_index, label_smoothing, z_loss, reduction: as passed to `cross_entropy`.
    Returns:
        grad_logits: `[..., V]`, dtype of logits, contiguous.
    Raises:
        RuntimeError, IndexError: as `cross_entropy`, and for another shape, dtype or device of the other tensors.

    Differentiable any number of times in the gradients, logits and logsumexp.
    """
    p = (logits.to(logsumexp.dtype) - logsumexp.unsqueeze(-1)).exp()
    grad = torch.zeros_like(p) if grad_logsumexp is None else grad_logsumexp.unsqueeze(-1) * p
    valid = target != ignore_index
    one_hot = torch.zeros_like(p).scatter(-1, torch.where(valid, target, 0).long().unsqueeze(-1), 1)
    if grad_loss is not None:
        count = valid.sum().clamp_min(1) if reduction == "mean" else 1
        g = torch.where(valid, grad_loss / count, 0).unsqueeze(-1)
        smooth = (1 - label_smoothing) * one_hot + label_smoothing / logits.shape[-1]
        grad = grad + g * ((1 + 2 * z_loss * logsumexp).unsqueeze(-1) * p - smooth)
    return grad.to(logits.dtype).contiguous()


@cross_entropy_backward.fake
def _(logits):
    return logits.new_empty(logits.shape)


@cross_entropy_backward.samples
def _(device, dtype):
    for logits, target in samples(device, dtype):
        logsumexp = logits.to(op.acc_dtype(dtype)).logsumexp(-1)
        yield torch.randn_like(logsumexp.sum()), torch.randn_like(logsumexp), logits, target, logsumexp


# ---- DTensors: rows stay sharded, and a mean is over the rows of all devices ----


def rows_at(shards: Any, x: Any, target: Any) -> list[int | None]:
    """The sharded dimension of rows, for each dimension of the mesh: of x, or else of target, which has only rows."""
    every = zip(shards.at(x), shards.at(target), strict=True)
    return [next((at for at in along if isinstance(at, int) and at < target.dim()), None) for along in every]


def summed(at: Sequence[int | None]) -> list[str | None]:
    return [None if dim is None else op.SUM for dim in at]


def all_counts(shards: Any, target: Tensor, at: Sequence[int | None], ignore_index: int) -> Tensor:
    """How many targets count on all devices; this device has those in `target`."""
    return shards.reduce((target != ignore_index).sum(), summed(at))


@cross_entropy.distributed
def _(shards, logits, target, ignore_index, label_smoothing, z_loss, reduction):
    at = rows_at(shards, logits, target)
    here, targets = shards.local(logits, at), shards.local(target, at)
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    mean, shape = reduction == "mean", target.shape
    loss, logsumexp = torch.ops.openreg.cross_entropy(here, targets, reduction="sum" if mean else reduction, **options)
    if mean:
        loss = loss / all_counts(shards, targets, at, ignore_index)
    loss = shards.join(loss, at, shape) if reduction == "none" else shards.join(loss, summed(at))
    return loss, shards.join(logsumexp, at, shape)


@cross_entropy_backward.distributed
def _(
    shards, grad_loss, grad_logsumexp, logits, target, logsumexp, ignore_index, label_smoothing, z_loss, reduction
):  # fmt: skip
    at = rows_at(shards, logits, target)
    here, targets = shards.local(logits, at), shards.local(target, at)
    grad_loss = shards.local(grad_loss, at if reduction == "none" else [None for _ in at])
    if reduction == "mean" and grad_loss is not None:
        grad_loss = grad_loss / all_counts(shards, targets, at, ignore_index).clamp_min(1)
    grad = torch.ops.openreg.cross_entropy_backward(
        grad_loss, shards.local(grad_logsumexp, at), here, targets, shards.local(logsumexp, at),
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
        reduction="sum" if reduction == "mean" else reduction,
    )  # fmt: skip
    return shards.join(grad, at, logits.shape)


# ---- batching: a reduction covers one sample's rows, so the kernels run without one, and it is computed here ----


def counts(target: Tensor, ignore_index: int) -> Tensor:
    """How many targets of each sample count."""
    return (target != ignore_index).unsqueeze(-1).flatten(1).sum(-1)


def reduce(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The loss of each sample from the losses of its rows."""
    if reduction == "none":
        return loss
    total = loss.unsqueeze(-1).flatten(1).sum(-1)
    return total / counts(target, ignore_index) if reduction == "mean" else total


@cross_entropy.batched
def _(in_dims, logits, target, *, reduction, **options):
    logits, target = op.all_batch_first(in_dims, (logits, target))
    loss, logsumexp = torch.ops.openreg.cross_entropy(logits, target, reduction="none", **options)
    return (reduce(loss, target, options["ignore_index"], reduction), logsumexp), (0, 0)


@cross_entropy_backward.batched
def _(in_dims, *inputs, reduction, **options):
    grad_loss, *others = op.all_batch_first(in_dims, inputs)
    target = others[2]
    if grad_loss is not None and reduction != "none":
        if reduction == "mean":
            grad_loss = grad_loss / counts(target, options["ignore_index"]).clamp_min(1)
        grad_loss = grad_loss.reshape(-1, *[1] * (target.dim() - 1)).expand(target.shape)
    return torch.ops.openreg.cross_entropy_backward(grad_loss, *others, reduction="none", **options), 0
