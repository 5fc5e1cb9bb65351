"""linear_cross_entropy, and the operator that computes its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op
from openreg_ops.meta.cross_entropy import check_options, check_target, cross_entropy_backward, loss_of, reduce


def _check(name, x, weight, target, bias, label_smoothing, reduction):
    op.check_floating(name, "x", x)
    op.check_rows(name, "x", x)
    op.check_same_device(name, "x", x, "weight", weight)
    op.check_dtype(name, "weight", weight, x.dtype, "x")

    def sentence() -> str:
        return (
            f"{name}: expected weight of shape [classes, {x.shape[-1]}], at least one class by the last dimension of x, "
            f"but got {list(weight.shape)}"
        )

    torch._check(weight.dim() == 2 and weight.shape[1] == x.shape[-1], sentence)
    torch._check(weight.shape[0] > 0, sentence)
    check_target(name, "x", x, target)
    if bias is not None:
        op.check_same_device(name, "x", x, "bias", bias)
        op.check_dtype(name, "bias", bias, x.dtype, "x")
        op.check_shape(name, "bias", bias, weight.shape[:1], "the classes of weight")
    check_options(name, label_smoothing, reduction)


def _check_gradients(name, x, weight, target, bias, grad_loss, label_smoothing, reduction, wanted):
    _check(name, x, weight, target, bias, label_smoothing, reduction)
    torch._check(
        bias is not None or not wanted[2],
        lambda: f"{name}: wanted asks for the gradient of a bias, but got none; pass bias",
    )
    if grad_loss is not None:
        op.check_same_device(name, "x", x, "grad_loss", grad_loss)
        op.check_dtype(name, "grad_loss", grad_loss, op.acc_dtype(x.dtype), "its loss")
        op.check_shape(name, "grad_loss", grad_loss, target.shape if reduction == "none" else (), "that of its loss")


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = op.acc_dtype(x.dtype)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


@op.operator(check=_check)
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The loss of a language model's last layer, `cross_entropy` of its logits, without holding them.

    logits = x @ weight.T + bias,  loss = cross_entropy(logits, target)[0]

    Args:
        x: `[..., D]`, float32, float64, float16 or bfloat16; any strides.
        weight: `[V, D]`, dtype of x, as `torch.nn.Linear` has it.
        target: `[...]`, int64 or int32; each in [0, V) or ignore_index.
        bias: `[V]`, dtype of x.
        ignore_index, label_smoothing, z_loss, reduction: as in `cross_entropy`. Ignored rows cost nothing.
    Returns:
        loss: `[]`, or `[...]` for "none"; float32 (float64 for a float64 x). The mean of no rows is NaN.
    Raises:
        RuntimeError: x has no dimension or another dtype; weight, bias or target has another shape, dtype or device;
            label_smoothing is outside [0, 1]; reduction is another word.
        IndexError: a target is neither a class nor ignore_index, as in `cross_entropy`.

    Differentiable once in x, weight and bias. Forward takes chunks of 512 rows and computes a chunk's share of the
    gradients at once, where they are wanted; backward multiplies them by the gradient of the loss. For "none" backward
    computes the logits again. The gradients of a float16 x are kept in float32 until then, because a loss that is
    scaled for its gradients' sake is scaled too late here. To differentiate the gradients is an error: use
    `cross_entropy` of `torch.nn.functional.linear`. On other devices the plain operators run, which have all
    derivatives and hold the logits.
    Autocast runs it in its lower precision, as it runs the product; sums and the loss stay in float32.
    Results do not depend on the number of threads.
    Sources: Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009.
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


@op.operator(check=_check_gradients)  # vmap maps the reference: each sample has a grad_weight of its own
def linear_cross_entropy_gradients(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, grad_loss: Tensor | None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of `linear_cross_entropy` together with the gradients that it gives x, weight and bias.

    With g the gradient that `cross_entropy` gives the logits:
    grad_x = g @ weight,  grad_weight = g.T @ x,  grad_bias = sum(g) over all rows

    Args:
        x, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction: as for `linear_cross_entropy`.
        grad_loss: shape and dtype of loss, or None for ones.
        wanted: which of the gradients of x, weight and bias.
    Returns:
        loss: as of `linear_cross_entropy`, not multiplied by grad_loss.
        grad_x, grad_weight, grad_bias: shapes of x, weight and bias, contiguous, dtype of x but float32 for float16;
            `[0]` where not wanted.
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
        x.new_empty(each.shape if each is not None and want else 0, dtype=_gradient_dtype(x.dtype))
        for each, want in zip((x, weight, bias), wanted, strict=True)
    )
    return _loss(x, target, reduction), *grads


@linear_cross_entropy_gradients.samples
def _(device, dtype):
    for x, weight, target, *_ in samples(device, dtype):
        bias = torch.randn(weight.shape[0], dtype=dtype, device=device)
        yield x, weight, target, bias, torch.randn((), dtype=op.acc_dtype(dtype), device=device)
