"""adamw_step_: one step of AdamW on many tensors at once. `openreg_ops.AdamW` is the optimizer that calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from openreg_ops.meta import op


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
    exp_avg += (g - exp_avg) * (1 - beta1),  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g**2
    param = param * (1 - lr * weight_decay)
            - lr / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2**t)) + eps),  step = t
    With amsgrad, max_exp_avg_sq, the maximum of all exp_avg_sq so far, stands in that last line.

    Args:
        params: float32, float64, float16 or bfloat16, one dtype or several; any shapes and strides.
        grads: shapes and dtypes of params. They are not changed.
        exp_avgs: shapes of params; their dtypes, or float32 for a half type.
        exp_avg_sqs: shapes of params, dtypes of exp_avgs.
        max_exp_avg_sqs: the same with amsgrad, else empty.
        state_steps: a float32 scalar for each parameter: the steps done. This step is added.
        lr: a number, or a float32 or float64 scalar tensor (the overload tensor_lr).
        grad_scale: a float32 scalar to divide gradients by, as a GradScaler keeps it.
        found_inf: a float32 scalar; where it is not 0, nothing is changed, steps neither.
    Raises:
        RuntimeError: lists of different lengths; shapes, dtypes or devices do not fit; two tensors that are written
            to share memory (asked on openreg only); with gradients enabled, a tensor requires one: use
            `torch.no_grad()`; a tensor carries a tangent; under `torch.vmap`.

    Not differentiable. The half types are computed in float32 and rounded once. Autocast passes by. Under
    `torch.compile` it is functionalized, and written in place by Inductor. All tensors are one launch, and the
    result does not depend on the number of threads.
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101; torch.optim.AdamW, with which it agrees to rounding, and whose
    torch._fused_adamw_ it follows, except that it counts the steps itself and leaves the gradients as they are.

    `torch.library.opcheck` has four tests. test_schema and test_faketensor run as they are. test_aot_dispatch_dynamic
    runs where no argument requires a gradient; with one, it would differentiate, which is refused.
    test_autograd_registration, the other way round, looks at arguments that do, and passes on the CPU; it knows no
    device but cpu, cuda and xpu.
    """
    overload = "tensor_lr" if isinstance(lr, Tensor) else "default"
    getattr(torch.ops.openreg.adamw_step_, overload)(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


_NAME = "adamw_step_"


def _check_scalar(name: str, x: Tensor, param: Tensor) -> None:
    op.check_same_device(_NAME, "params[0]", param, name, x)
    torch._check(
        x.dtype == torch.float32 and x.dim() == 0,
        lambda: (
            f"{_NAME}: expected {name} of float32 and no dimension, but got {op.dtype_name(x.dtype)} "
            f"of shape {list(x.shape)}"
        ),
    )


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    amsgrad: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **_options: Any,
) -> None:
    if isinstance(lr, Tensor):
        if params:
            op.check_same_device(_NAME, "params[0]", params[0], "lr", lr)
        torch._check(
            lr.dtype in (torch.float32, torch.float64) and lr.dim() == 0,
            lambda: (
                f"{_NAME}: expected lr of float32 or float64 and no dimension, but got {op.dtype_name(lr.dtype)} "
                f"of shape {list(lr.shape)}"
            ),
        )
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "max_exp_avg_sqs": max_exp_avg_sqs}
    if not amsgrad:
        del lists["max_exp_avg_sqs"]
    for name, each in [*lists.items(), ("", max_exp_avg_sqs), ("state_steps", state_steps)]:
        if not name:
            torch._check(
                amsgrad or not each,
                lambda each=each: f"{_NAME}: expected no max_exp_avg_sqs without amsgrad, but got {len(each)}",
            )
            continue
        torch._check(
            len(each) == len(params),
            lambda name=name, each=each: (
                f"{_NAME}: expected {len(params)} {name}, as there are params, but got {len(each)}"
            ),
        )
    for i, (param, exp_avg) in enumerate(zip(params, exp_avgs, strict=True)):
        name, wide = f"params[{i}]", op.acc_dtype(param.dtype)
        op.check_floating(_NAME, name, param)
        op.check_same_device(_NAME, "params[0]", params[0], name, param)
        for list_name, each in lists.items():
            of = f"{list_name}[{i}]"
            op.check_same_device(_NAME, name, param, of, each[i])
            op.check_shape(_NAME, of, each[i], param.shape, f"that of {name}")
            if list_name == "grads":
                op.check_dtype(_NAME, of, each[i], param.dtype, name)
            elif list_name == "exp_avgs":
                torch._check(
                    exp_avg.dtype in (param.dtype, wide),
                    lambda param=param, name=name, wide=wide, of=of, exp_avg=exp_avg: (
                        f"{_NAME}: expected {of} of {op.dtype_name(param.dtype)}, the dtype of {name}"
                        f"{'' if wide == param.dtype else ' (or float32)'}, but got {op.dtype_name(exp_avg.dtype)}; "
                        "convert one with .to()"
                    ),
                )
            else:
                op.check_dtype(_NAME, of, each[i], exp_avg.dtype, f"exp_avgs[{i}]")
        _check_scalar(f"state_steps[{i}]", state_steps[i], params[0])
    for name, scalar in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if params and scalar is not None:
            _check_scalar(name, scalar, params[0])


@torch.library.register_fake("openreg::adamw_step_")
def fake(*lists: Sequence[Tensor], **options: Any) -> None:
    _check(*lists, **options)


fake_tensor_lr = torch.library.register_fake("openreg::adamw_step_.tensor_lr")(fake)


@op.reference("adamw_step_", differentiable=False)
def reference(
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
    lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    _check(*lists, lr=lr, amsgrad=amsgrad, grad_scale=grad_scale, found_inf=found_inf)
    if found_inf is not None and found_inf.item():
        return
    lr, tops = float(lr), max_exp_avg_sqs if amsgrad else [None] * len(params)
    each = zip(params, grads, exp_avgs, exp_avg_sqs, tops, state_steps, strict=True)
    for param, grad, exp_avg, exp_avg_sq, top, step in each:
        wide = op.acc_dtype(param.dtype)
        g = grad.to(wide) if grad_scale is None else grad.to(wide) / grad_scale
        g = -g if maximize else g
        step += 1
        t = step.item()
        m = torch.lerp(exp_avg.to(wide), g, 1 - beta1)
        v = exp_avg_sq.to(wide) * beta2 + (1 - beta2) * g * g
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        if top is not None:
            v = torch.maximum(top.to(wide), v)
            top.copy_(v)
        denominator = v.sqrt() / math.sqrt(1 - beta2**t) + eps
        param.copy_(param.to(wide) * (1 - lr * weight_decay) - lr / (1 - beta1**t) * m / denominator)


reference_tensor_lr = op.reference("adamw_step_.tensor_lr", differentiable=False)(reference)


@op.batched("adamw_step_")
def batched(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "adamw_step_: expected no vmap, because samples share the steps and options; call it outside of vmap on tensors "
        "that hold all samples, which it updates element by element"
    )


batched_tensor_lr = op.batched("adamw_step_.tensor_lr")(batched)


@op.samples("adamw_step_")
def samples(device: str, dtype: torch.dtype) -> Iterator[Any]:
    from openreg_ops.testing import Sample

    def tensors() -> list[Tensor]:
        return [torch.rand(shape, dtype=dtype, device=device) for shape in ((4, 6), (5,))]

    for amsgrad in (False, True):
        steps = [torch.ones((), device=device) for _ in range(2)]
        options = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=amsgrad, maximize=False)
        lists = tensors(), tensors(), tensors(), tensors(), tensors() if amsgrad else [], steps
        yield Sample(*lists, **options)
