"""linear_cross_entropy, and the operator that computes its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from openreg_ops.meta import op
from openreg_ops.meta.cross_entropy import (
    all_counts,
    cross_entropy_backward,
    loss_of,
    reduce,
    rows_at,
    summed,
)


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = op.acc_dtype(x.dtype)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


@op.operator()
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The loss of a language model's last layer, `cross_entropy` of its logits, without holding them.

    logits = x @ weight.T + bias,  loss = cross_entropy(logits, target)[0]

    Args:
        x: `[..., D]`, float32, float64, float16 or bfloat16; any strides.
        weight: `[V, D]`, dtype of x, as in `torch.nn.Linear`.
        target: `[...]`, int64 or int32; each in [0, V) or ignore_index.
        bias: `[V]`, dtype of x.
        ignore_index, label_smoothing, z_loss, reduction: as in `cross_entropy`. Ignored rows cost nothing.
    Returns:
        loss: `[]`, or `[...]` for "none"; float32 (float64 for a float64 x). The mean of no rows is NaN.
    Raises:
        RuntimeError: x has no dimension or another dtype; weight, bias or target has another shape, dtype or device;
            label_smoothing is outside [0, 1]; reduction is unknown.
        IndexError: a target is neither a class nor ignore_index, as in `cross_entropy`.

    Differentiable once in x, weight and bias. Forward takes chunks of 512 rows and immediately computes each chunk's
    share of the gradients, if they are needed; backward multiplies them by the gradient of the loss. For "none",
    backward recomputes the logits. The gradients of a float16 x are kept in float32 until then, because loss scaling
    comes too late to protect them. In bfloat16, where the processor multiplies it (AVX-512 BF16, AMX) and there are more than
    32 rows, the gradients of the logits are rounded to bfloat16 before a product, as in eager mode. Differentiating the
    gradients is an error: use `cross_entropy` of `torch.nn.functional.linear`. On other devices the plain operators run;
    they have all derivatives and hold the logits.
    Autocast runs it in its lower precision, like the product; sums and the loss stay in float32.
    Results do not depend on the number of threads.
    Sources: Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009.

    Example:
        >>> x, weight = torch.zeros(2, 4), torch.ones(10, 4)
        >>> openreg_ops.linear_cross_entropy(x, weight, torch.tensor([1, 7]))  # log(10)
        tensor(2.3026)
    """
    loss, _ = loss_of(_logits(x, weight, bias), target, ignore_index, label_smoothing, z_loss, reduction)
    return loss.contiguous()


@linear_cross_entropy.fake
def _loss(x, target, reduction):
    return x.new_empty(target.shape if reduction == "none" else (), dtype=op.acc_dtype(x.dtype))


@linear_cross_entropy.batched
def _(in_dims, x, weight, target, bias, *, reduction, **options):
    if in_dims[1] is not None or in_dims[3] is not None:  # the kernel takes one layer for all rows
        return NotImplemented
    x, target = op.all_batch_first((in_dims[0], in_dims[2]), (x, target))
    loss = torch.ops.openreg.linear_cross_entropy(x, weight, target, bias, reduction="none", **options)
    return reduce(loss, target, options["ignore_index"], reduction), 0


@linear_cross_entropy.samples
def samples(device, dtype):
    for shape, classes, *bias in (((4, 6), 5), ((3,), 7, True), ((2, 3, 4), 9, True)):
        x, weight = op.normal(device, dtype, shape, (classes, shape[-1]))
        target = torch.randint(classes, shape[:-1]).to(device)
        yield x, weight, target, *(torch.randn(classes, dtype=dtype, device=device) for _ in bias)


@op.operator()  # vmap maps the reference: each sample has its own grad_weight
def linear_cross_entropy_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, grad_loss: Tensor | None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of `linear_cross_entropy` together with the gradients of x, weight and bias.

    With g the gradient that `cross_entropy` gives the logits:
    grad_x = g @ weight,  grad_weight = g.T @ x,  grad_bias = sum(g) over all rows

    Args:
        x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction: as for `linear_cross_entropy`.
        grad_loss: shape and dtype of loss, or None for ones.
        wanted: which of the gradients of x, weight and bias.
    Returns:
        loss: as for `linear_cross_entropy`, not multiplied by grad_loss.
        grad_x, grad_weight, grad_bias: shapes of x, weight and bias, contiguous, dtype of x but float32 for float16;
            `[0]` if not wanted.
    Raises:
        RuntimeError, IndexError: as `linear_cross_entropy`, and for another shape, dtype or device of grad_loss, or if
            the gradient of a bias is wanted without one.

    Not differentiable on openreg.
    """
    options: dict[str, Any] = dict(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction
    )
    logits = _logits(x, weight, bias)
    loss, logsumexp = loss_of(logits, target, **options)
    by = torch.ones_like(loss) if grad_loss is None else grad_loss
    g = cross_entropy_backward.reference(by, None, logits, target, logsumexp, **options)
    rows, dtype = g.reshape(-1, weight.shape[0]), _gradient_dtype(x.dtype)
    nothing = x.new_empty(0, dtype=dtype)
    return (
        loss.contiguous(),
        (g @ weight.to(g.dtype)).to(dtype).contiguous() if wanted[0] else nothing,
        (rows.mT @ x.to(g.dtype).reshape(-1, x.shape[-1])).to(dtype).contiguous() if wanted[1] else nothing.clone(),
        rows.sum(0).to(dtype) if wanted[2] else nothing.clone(),
    )


@linear_cross_entropy_gradients.fake
def _(x, weight, target, bias, reduction, wanted):
    grads = (
        x.new_empty(tensor.shape if tensor is not None and want else 0, dtype=_gradient_dtype(x.dtype))
        for tensor, want in zip((x, weight, bias), wanted, strict=True)
    )
    return _loss(x, target, reduction), *grads


@linear_cross_entropy_gradients.samples
def _(device, dtype):
    for x, weight, target, *_ in samples(device, dtype):
        bias = torch.randn(weight.shape[0], dtype=dtype, device=device)
        yield x, weight, target, bias, torch.randn((), dtype=op.acc_dtype(dtype), device=device)


# ---- DTensors: rows stay sharded, and so does the vocabulary ----
# Along a dimension of the mesh, the devices have some of the rows, or some of the classes (weight and bias sharded
# along dimension 0). With sharded classes, they exchange three numbers per row and the maximum, never the weight or the
# logits.

_CHUNK = 512  # rows


def _of_classes(
    shards: Any, at: list[str | None], x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor,
    total: int, grad_loss: Tensor | None, wanted: Sequence[bool], ignore_index: int, label_smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of each row, and this device's share of the gradients; it has `classes` of `total` classes.

    Plain operators on chunks of rows: only the logits of one chunk and this device's classes are held.
    """
    rows, targets, wide = x.reshape(-1, x.shape[-1]), target.reshape(-1).long(), op.acc_dtype(x.dtype)
    valid = targets != ignore_index
    wrong = valid & ((targets < 0) | (targets >= total))
    if is_fake(wrong):
        torch._assert_async(~wrong.any(), "linear_cross_entropy: expected targets that are classes, or ignore_index")
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(
            f"linear_cross_entropy: expected targets in [0, {total}), the classes, or ignore_index {ignore_index}, but got "
            f"{int(targets[row])} in row {row}"
        )
    losses, grads_x = [], []
    grad_weight, grad_bias = weight.new_zeros(weight.shape, dtype=wide), weight.new_zeros(weight.shape[:1], dtype=wide)
    for start in range(0, len(rows), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        logits, counts = _logits(rows[chunk], weight, bias), valid[chunk]
        sums = logits.sum(-1)
        if not len(classes):  # more devices than classes: use one class with no weight
            logits = logits.new_full((len(logits), 1), -math.inf)
        top = shards.reduce(logits.amax(-1), at, "max")
        top = torch.where(top.isinf(), 0, top)
        place = torch.where(counts, targets[chunk], 0)
        mine = torch.isin(place, classes)
        place = place - classes[:1].sum()
        index = torch.where(mine, place, 0).unsqueeze(-1)
        picked = torch.where(mine, logits.gather(-1, index).squeeze(-1), 0)
        exps = (logits - top.unsqueeze(-1)).exp().sum(-1)
        exps, picked, sums = shards.reduce(torch.stack([exps, picked, sums]), at).unbind()
        logsumexp = exps.log() + top
        loss = logsumexp - (1 - label_smoothing) * picked
        if label_smoothing:
            loss = loss - label_smoothing * sums / total
        if z_loss:
            loss = loss + z_loss * logsumexp.square()
        losses.append(torch.where(counts, loss, 0))
        if not any(wanted):
            continue
        by = torch.where(counts, 1 if grad_loss is None else grad_loss.expand(target.shape).reshape(-1)[chunk], 0)
        by = by.to(wide).unsqueeze(-1)
        g = (1 + 2 * z_loss * logsumexp).unsqueeze(-1) * (logits - logsumexp.unsqueeze(-1)).exp()
        g = g - label_smoothing / total
        g = g.scatter_add(-1, index, -(1 - label_smoothing) * mine.to(wide).unsqueeze(-1))
        g = by * g[:, : len(classes)]
        if wanted[0]:
            grads_x.append(g @ weight.to(wide))
        if wanted[1]:
            grad_weight += g.mT @ rows[chunk].to(wide)
        if wanted[2]:
            grad_bias += g.sum(0)
    loss = torch.cat([x.new_empty(0, dtype=wide), *losses]).reshape(target.shape)
    grad_x = torch.cat([x.new_empty(0, x.shape[-1], dtype=wide), *grads_x]).reshape(x.shape) if wanted[0] else grad_bias
    dtype = _gradient_dtype(x.dtype)
    return loss, grad_x.to(dtype), grad_weight.to(dtype), grad_bias.to(dtype)


@linear_cross_entropy_gradients.distributed
def _on_shards(
    shards: Any, x: Any, weight: Any, target: Any, bias: Any, grad_loss: Any, ignore_index: int, label_smoothing: float,
    z_loss: float, reduction: str, wanted: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    options: dict[str, Any] = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    classes = [at == 0 for at in shards.at(weight)]
    at = [None if of_classes else d for d, of_classes in zip(rows_at(shards, x, target), classes, strict=True)]
    of_weight = [0 if of_classes else None for of_classes in classes]
    here, targets = shards.local(x, at), shards.local(target, at)
    layer = shards.local(weight, of_weight), shards.local(bias, of_weight)
    grad_loss = shards.local(grad_loss, at if reduction == "none" else [None for _ in at])
    mean, count = reduction == "mean", None
    if mean:
        count = all_counts(shards, targets, at, ignore_index)
        by = here.new_ones((), dtype=op.acc_dtype(x.dtype)) if grad_loss is None else grad_loss
        grad_loss = by / count.clamp_min(1)
    if any(classes):
        loss, *grads = _of_classes(
            shards, summed(of_weight), here, layer[0], targets, layer[1], shards.part(weight.shape[0], of_weight),
            weight.shape[0], grad_loss, wanted, **options,
        )  # fmt: skip
        loss = loss if reduction == "none" else loss.sum()
    else:
        options["reduction"] = "sum" if mean else reduction
        if any(wanted):
            loss, *grads = torch.ops.openreg.linear_cross_entropy_gradients(
                here, layer[0], targets, layer[1], grad_loss, wanted=wanted, **options
            )
        else:
            loss, grads = torch.ops.openreg.linear_cross_entropy(here, layer[0], targets, layer[1], **options), ()
    loss = loss / count if mean else loss
    loss = shards.join(loss, at, target.shape) if reduction == "none" else shards.join(loss, summed(at))
    to_x = [op.SUM if of_classes else d for d, of_classes in zip(at, classes, strict=True)]
    to_weight = [0 if of_classes else of_rows for of_rows, of_classes in zip(summed(at), classes, strict=True)]
    joined = [
        shards.join(grad, to, like.shape) if want else shards.join(grad.new_empty(0), [None for _ in at])
        for grad, want, to, like in zip(grads, wanted, (to_x, to_weight, to_weight), (x, weight, bias), strict=False)
    ]
    return loss, *joined


@linear_cross_entropy.distributed
def _(shards, x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction):
    options = ignore_index, label_smoothing, z_loss, reduction
    return _on_shards(shards, x, weight, target, bias, None, *options, wanted=(False,) * 3)[0]
