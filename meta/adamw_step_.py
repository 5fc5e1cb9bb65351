"""adamw_step_: one step of AdamW on many tensors at once. `openreg_ops.AdamW` is the optimizer that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from openreg_ops.meta import op


def _call(*lists, lr, **options):
    packet = torch.ops.openreg.adamw_step_
    return (packet.tensor_lr if isinstance(lr, Tensor) else packet.default)(*lists, lr=lr, **options)


@op.operator(differentiable=False, call=_call)
def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Advance every parameter and its state by one step of AdamW, in place.

    With g = grad / grad_scale, negated to maximize, and t = step + 1:
    exp_avg = beta1 * exp_avg + (1 - beta1) * g,  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g**2
    param = param * (1 - lr * weight_decay)
            - lr / (1 - beta1**t) * (exp_avg / (sqrt(exp_avg_sq / (1 - beta2**t)) + eps)),  step = t
    With amsgrad, max_exp_avg_sq, the maximum of all exp_avg_sq so far, replaces exp_avg_sq in the last line.

    Args:
        params: float32, float64, float16 or bfloat16, one dtype or several; any shapes and strides.
        grads: shapes and dtypes of params. They are not changed.
        exp_avgs: shapes of params; their dtypes, or float32 for a half type.
        exp_avg_sqs: shapes of params, dtypes of exp_avgs.
        max_exp_avg_sqs: the same with amsgrad, else empty.
        state_steps: a float32 scalar for each parameter: the steps done, incremented by this one.
        lr: a number, or a float32 or float64 scalar tensor (the overload tensor_lr).
        grad_scale: a float32 scalar to divide gradients by, as a GradScaler keeps it.
        found_inf: a float32 scalar; if it is not 0, nothing changes, including the steps.
    Raises:
        RuntimeError: the lists have different lengths; shapes, dtypes or devices do not match; two written tensors
            share memory (checked only on openreg); with gradients enabled, a tensor requires one: use
            `torch.no_grad()`; a tensor carries a tangent; under `torch.vmap`.

    Not differentiable. The half types are computed in float32 and rounded once. Autocast does not affect it. Under
    `torch.compile` it is functionalized, and Inductor writes in place. All tensors share one launch, and the result
    does not depend on the number of threads.
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101; torch.optim.AdamW, with which it agrees to rounding, and whose
    torch._fused_adamw_ it follows, except that it counts the steps itself and leaves the gradients as they are.

    `torch.library.opcheck` has four tests. test_schema and test_faketensor run unchanged. test_aot_dispatch_dynamic
    runs if no argument requires a gradient; otherwise it would differentiate, which is an error.
    test_autograd_registration, in contrast, needs arguments that require a gradient, and passes on the CPU; it supports
    only cpu, cuda and xpu.
    """
    if found_inf is not None and found_inf.item():
        return
    lr, tops = float(lr), max_exp_avg_sqs if amsgrad else [None] * len(params)
    tensors = zip(params, grads, exp_avgs, exp_avg_sqs, tops, state_steps, strict=True)
    for param, grad, exp_avg, exp_avg_sq, top, step in tensors:
        wide = op.acc_dtype(param.dtype)
        g = grad.to(wide) if grad_scale is None else grad.to(wide) / grad_scale
        g = -g if maximize else g
        step += 1
        t = step.item()
        m = exp_avg.to(wide) + (g - exp_avg) * (1 - beta1)
        v = exp_avg_sq.to(wide) * beta2 + (1 - beta2) * g * g
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        if top is not None:
            v = torch.maximum(top.to(wide), v)
            top.copy_(v)
        denominator = v.sqrt() / sqrt(1 - beta2**t) + eps
        param.copy_(param.to(wide) * (1 - lr * weight_decay) - lr / (1 - beta1**t) * m / denominator)


@adamw_step_.batched
def _(*_, **_options):
    raise RuntimeError(
        "adamw_step_: expected no vmap, because samples share the steps and options; call it outside vmap on tensors "
        "that hold all samples, which it updates element by element"
    )


@adamw_step_.sharded
def _(params, max_exp_avg_sqs):
    """Each parameter is updated on its devices, with its state there; its gradient moves there."""
    at = [param.at for param in params]
    tops = at if max_exp_avg_sqs else []
    yield dict(params=at, grads=at, exp_avgs=at, exp_avg_sqs=at, max_exp_avg_sqs=tops), ()


@adamw_step_.samples
def _(device, dtype):
    from openreg_ops.testing import Sample

    def tensors() -> list[Tensor]:
        return [torch.rand(shape, dtype=dtype, device=device) for shape in ((4, 6), (5,))]

    for amsgrad in (False, True):
        steps = [torch.ones((), device=device) for _ in range(2)]
        options = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=amsgrad, maximize=False)
        lists = tensors(), tensors(), tensors(), tensors(), tensors() if amsgrad else [], steps
        yield Sample(*lists, **options)
