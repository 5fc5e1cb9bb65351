"""cross_entropy and its backward, both operators, and what linear_cross_entropy shares with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss of predicting `target` by the softmax of `logits`, whose last dimension is the classes.

    For a row x of logits with target t, s = label_smoothing and z = z_loss:
    loss = lse - (1 - s) * x[t] - s * mean(x) + z * lse**2,  lse = log(sum(exp(x)))

    Args:
        logits: `[..., V]`, float32, float64, float16 or bfloat16; any strides. The classes come last, as language
            models have them, not second as in `torch.nn.functional.cross_entropy`.
        target: `[...]`, int64 or int32; each in [0, V) or ignore_index.
        ignore_index: a row with this target has loss 0, no gradient through its loss, and no part in the mean.
        label_smoothing: in [0, 1], the part of the target spread evenly over the classes.
        z_loss: the weight of the squared logsumexp, which keeps logits from drifting.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
    Returns:
        loss: `[]`, or `[...]` for "none"; float32 (float64 for float64 logits), contiguous. The mean of no rows is
            NaN, as torch's, and its gradient is 0.
        logsumexp: `[...]`, dtype of loss, contiguous, of ignored rows too.
    Raises:
        RuntimeError: logits has no dimension, no class or another dtype; target has another shape, dtype or device;
            label_smoothing is outside [0, 1]; reduction is another word.
        IndexError: a target is neither a class nor ignore_index; names the first such target and its row, counted
            over all leading dimensions. On other devices the error is that of `Tensor.gather`, and in backward that of
            `Tensor.scatter`.

    Differentiable any number of times in logits, through loss and logsumexp both. Only logits, target and logsumexp
    are kept for backward, which writes the gradient in one pass. The half types are computed in float32, and the
    loss is not rounded to them. Autocast runs it in float32.
    Sources: label smoothing, Szegedy et al. 2015, arXiv:1512.00567; z-loss, Chowdhery et al. 2022, arXiv:2204.02311.
    """
    return torch.ops.openreg.cross_entropy.default(
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )


def cross_entropy_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The gradient that `cross_entropy` gives logits, as a function of independent tensors.

    For a row, with g the gradient of its loss (0 if ignored), h that of its logsumexp, p = exp(x - logsumexp):
    grad = (g * (1 + 2 * z * logsumexp) + h) * p - g * ((1 - s) * onehot(t) + s / V)

    Args:
        grad_loss: shape and dtype of loss, or None for zeros.
        grad_logsumexp: shape and dtype of logsumexp, or None for zeros.
        logits, target: as `cross_entropy` got them.
        logsumexp: as `cross_entropy` gave it.
        ignore_index, label_smoothing, z_loss, reduction: as `cross_entropy` got them.
    Returns:
        grad_logits: `[..., V]`, dtype of logits, contiguous.
    Raises:
        RuntimeError, IndexError: as `cross_entropy`, and for another shape, dtype or device of the other tensors.

    Differentiable any number of times in the gradients, logits and logsumexp.
    """
    return torch.ops.openreg.cross_entropy_backward.default(
        grad_loss,
        grad_logsumexp,
        logits,
        target,
        logsumexp,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )


# ---- checks: linear_cross_entropy calls these too ----


def check_target(name: str, x_name: str, x: Tensor, target: Tensor) -> None:
    op.check_same_device(name, x_name, x, "target", target)
    torch._check(
        target.dtype in (torch.int64, torch.int32),
        lambda: (
            f"{name}: expected target of int64 or int32, but got {op.dtype_name(target.dtype)}; convert it with .to()"
        ),
    )
    op.check_shape(name, "target", target, x.shape[:-1], f"that of {x_name} without its last dimension")


def check_options(name: str, label_smoothing: float, reduction: str) -> None:
    torch._check(
        0 <= label_smoothing <= 1,
        lambda: f"{name}: expected label_smoothing in [0, 1], but got {label_smoothing:g}",
    )
    torch._check(
        reduction in ("mean", "sum", "none"),
        lambda: f'{name}: expected reduction "mean", "sum" or "none", but got "{reduction}"',
    )


def _check(name: str, logits: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    op.check_floating(name, "logits", logits)
    torch._check(
        logits.dim() >= 1,
        lambda: (
            f"{name}: expected logits of at least one dimension, the classes, but got a scalar; use logits.unsqueeze(0)"
        ),
    )
    torch._check(
        logits.shape[-1] > 0,
        lambda: f"{name}: expected logits of at least one class, but got shape {list(logits.shape)}",
    )
    check_target(name, "logits", logits, target)
    check_options(name, label_smoothing, reduction)


def _check_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    label_smoothing: float,
    reduction: str,
) -> None:
    name = "cross_entropy_backward"
    _check(name, logits, target, label_smoothing, reduction)
    loss_shape = target.shape if reduction == "none" else torch.Size()
    for x_name, x, shape, of in (
        ("logsumexp", logsumexp, target.shape, "that of target"),
        ("grad_loss", grad_loss, loss_shape, "that of its cross_entropy output"),
        ("grad_logsumexp", grad_logsumexp, target.shape, "that of target"),
    ):
        if x is not None:
            op.check_same_device(name, "logits", logits, x_name, x)
            op.check_dtype(name, x_name, x, op.acc_dtype(logits.dtype), "its cross_entropy output")
            op.check_shape(name, x_name, x, shape, of)


@torch.library.register_fake("openreg::cross_entropy")
def fake(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    _check("cross_entropy", logits, target, label_smoothing, reduction)
    logsumexp = logits.new_empty(target.shape, dtype=op.acc_dtype(logits.dtype))
    return logsumexp.new_empty(target.shape if reduction == "none" else ()), logsumexp


@torch.library.register_fake("openreg::cross_entropy_backward")
def fake_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    _check_backward(grad_loss, grad_logsumexp, logits, target, logsumexp, label_smoothing, reduction)
    return logits.new_empty(logits.shape)


def loss_of(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """loss and logsumexp, of plain operators, in the dtype of logits."""
    logsumexp = op.logsumexp(logits)
    valid = target != ignore_index
    index = torch.where(valid, target, 0).long().unsqueeze(-1)
    loss = logsumexp - (1 - label_smoothing) * logits.gather(-1, index).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    if z_loss:
        loss = loss + z_loss * logsumexp.square()
    loss = torch.where(valid, loss, 0)
    if reduction != "none":
        loss = loss.sum() / valid.sum() if reduction == "mean" else loss.sum()
    return loss, logsumexp.contiguous()


@op.reference("cross_entropy")
def reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    _check("cross_entropy", logits, target, label_smoothing, reduction)
    wide = logits.to(op.acc_dtype(logits.dtype))
    loss, logsumexp = loss_of(wide, target, ignore_index, label_smoothing, z_loss, reduction)
    return loss.contiguous(), logsumexp


@op.reference("cross_entropy_backward")
def reference_backward(
    grad_loss: Tensor | None,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    _check_backward(grad_loss, grad_logsumexp, logits, target, logsumexp, label_smoothing, reduction)
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


# Batching: a reduction is of one sample's rows, so the kernels run without one and it is made here.


@op.batched("cross_entropy")
def batched(
    in_dims: Sequence[int | None], logits: Tensor, target: Tensor, *, reduction: str = "mean", **options: Any
) -> Any:
    logits, target = op.all_batch_first(in_dims, (logits, target))
    loss, logsumexp = torch.ops.openreg.cross_entropy(logits, target, reduction="none", **options)
    if reduction != "none":
        loss = loss.unsqueeze(-1).flatten(1).sum(-1)
        if reduction == "mean":
            loss = loss / count_of(target, **options)
    return (loss, logsumexp), (0, 0)


@op.batched("cross_entropy_backward")
def batched_backward(
    in_dims: Sequence[int | None], *inputs: Tensor | None, reduction: str = "mean", **options: Any
) -> Any:
    given = [(x, dim) for x, dim in zip(inputs, in_dims, strict=True) if x is not None]
    moved = iter(op.all_batch_first([dim for _, dim in given], [x for x, _ in given]))
    grad_loss, grad_logsumexp, logits, target, logsumexp = (x if x is None else next(moved) for x in inputs)
    if grad_loss is not None and reduction != "none":
        if reduction == "mean":
            grad_loss = grad_loss / count_of(target, **options).clamp_min(1)
        grad_loss = grad_loss.reshape(-1, *[1] * (target.dim() - 1)).expand(target.shape)
    grad = torch.ops.openreg.cross_entropy_backward(
        grad_loss, grad_logsumexp, logits, target, logsumexp, reduction="none", **options
    )
    return grad, 0


def count_of(target: Tensor, ignore_index: int = -100, **_: Any) -> Tensor:
    """How many targets of each sample count."""
    return (target != ignore_index).unsqueeze(-1).flatten(1).sum(-1)


# ---- samples ----


@op.samples("cross_entropy")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 7)):
        yield torch.randn(shape, dtype=dtype, device=device), torch.randint(shape[-1], shape[:-1]).to(device)


@op.samples("cross_entropy_backward")
def samples_backward(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for logits, target in samples(device, dtype):
        logsumexp = logits.to(op.acc_dtype(dtype)).logsumexp(-1)
        yield torch.randn_like(logsumexp.sum()), torch.randn_like(logsumexp), logits, target, logsumexp
