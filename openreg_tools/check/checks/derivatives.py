"""Checks of derivatives: that they are complete or raise an error, and that they are correct."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from openreg_tools.check.case import Case, attached, cotangents, pull, skip, unlike_gradients
from openreg_tools.check.checks.common import (
    LACKING,
    WARNED,
    needs_derivative,
    refuse_or_fail,
    refused,
    unless_generated,
)
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers


def is_zero(x: Tensor | None) -> bool:
    return x is None or not x.count_nonzero()


def slope(case: Case, which: int, tensors: list[Tensor], outs: Sequence[int] | None = None) -> float:
    """The derivative of the weighted outputs along a fixed direction of one tensor, by finite differences.

    Of the function that has the intended gradient, if there is one.
    """
    x = tensors[which]
    step = {torch.float64: 1e-6, torch.complex128: 1e-6}.get(x.dtype, 1e-2)
    direction = cotangents([x])[0]
    ends = []
    for sign in (1, -1):
        moved = [y.detach().clone() for y in tensors]
        moved[which] = moved[which] + sign * step * direction
        every = [out for out in case.outputs(moved, case.intended) if has_numbers(out)]
        weighted = [
            (out.to(torch.complex128 if out.is_complex() else torch.float64).cpu() * c.cpu()).sum().real
            for i, (out, c) in enumerate(zip(every, cotangents(every), strict=True))
            if outs is None or i in outs
        ]
        ends.append(sum(float(w) for w in weighted))
    return (ends[0] - ends[1]) / (2 * step)


# ---- complete, or an error ----


def derivative(case: Case) -> None:
    """Computes `Case.derivative`: a silent or partial gradient is a failure, an error that says so is not."""
    if not any(case.wanted):
        skip("no floating tensor argument")
    if not case.has_kernel("Autograd", f"Autograd{case.key}", "CompositeImplicitAutograd"):
        _not_asked(case)
    tensors = case.fresh(grad=True, dtype=case.wide)
    remedy = (
        "register a derivative (torch.library.register_autograd, or an autograd::Function at the Autograd key), or "
        "refuse: raise in an Autograd kernel, as torch::autograd::autogradNotImplementedFallback does"
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            every = case.run(*tensors)
        except Exception as error:
            refuse_or_fail(case, error, "a call whose inputs require a gradient", remedy)
        outs = [out for out in every if has_numbers(out)]
        if not outs:
            skip("no floating output")
        if not attached(outs):
            for i, flag in enumerate(case.wanted):
                if flag and abs(slope(case, i, tensors)) > 1e-3:
                    _not_asked(case)
                    case.fail(
                        f"it depends on {case.names[i]}, which requires a gradient, but its output does not; a program's "
                        "gradient leaves the operator out, without an error or a warning",
                        remedy,
                    )
            skip("its outputs do not depend on the values of its inputs")
        _written_unseen(case, tensors, every)
        try:
            grads = pull(outs, tensors)
        except Exception as error:
            refuse_or_fail(case, error, "backward", "fix the backward")
    warned = any(WARNED in str(w.message) for w in heard)
    nodes = {out.grad_fn.name() for out in attached(outs) if out.grad_fn is not None}
    if warned or any("WarnNotImplemented" in name for name in nodes):
        _not_asked(case)
        case.fail(
            "it has no derivative, its output says requires_grad, and backward only warns and leaves the operator out: a "
            "program gets a partial gradient",
            remedy,
        )
    connected = [k for k, out in enumerate(outs) if out.requires_grad]
    for i, got in zip(case.of(range(len(tensors))), grads, strict=True):
        if is_zero(got) and abs(slope(case, i, tensors, connected)) > 1e-3:
            case.fail(
                f"the gradient of {case.names[i]} is {'missing' if got is None else 'zero'}, but the output depends on "
                f"{case.names[i]}",
                "return the gradient of every argument that requires one (needs_input_grad), or raise",
            )


def _not_asked(case: Case) -> None:
    """Warn, and no more, if an operator that writes leaves a gradient out that the sample does not ask for."""
    written = [argument.name for argument in case.schema.arguments if argument.is_write]
    if written and not any(x.requires_grad for x in case.leaves):
        case.warn(
            f"it writes to {' and '.join(written)} without telling autograd, so a gradient does not pass through, without "
            "an error",
            "document that it has no derivative, or make it functional and give it one. If programs need its gradient, "
            "say so with requires_grad in the sample, and this becomes a failure",
        )


def _written_unseen(case: Case, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Fail if a tensor that the operator wrote still has the gradient of its old contents."""
    for i, out in zip(case.written, outs[len(outs) - len(case.written) :], strict=True):
        untouched = out.grad_fn is not None and out.grad_fn.name().startswith("CloneBackward")
        if untouched and case.wanted[i] and differs([out], [tensors[i]]):
            name = case.names[i]
            _not_asked(case)
            case.fail(
                f"it writes to {name}, which requires a gradient, without telling autograd: the gradient passes as if "
                f"{name} were unchanged, without an error",
                "make the operator functional and give it a derivative, or raise in a kernel at the Autograd key when "
                f"{name} requires a gradient",
            )


def backward(case: Case) -> str | None:
    """Asking for a gradient gives the complete gradient, or an error."""
    if not case.has_derivative:
        raise case.derivative
    tensors = case.fresh(grad=True, dtype=case.wide)
    outs = [out for out in case.run(*tensors) if has_numbers(out)]
    apart = [k for k, out in enumerate(outs) if not out.requires_grad]
    for i, flag in enumerate(case.wanted):
        if apart and flag and abs(slope(case, i, tensors, apart)) > 1e-3:
            case.warn(
                f"output {apart[0]} depends on {case.names[i]} but does not require a gradient; everything computed from it "
                "is left out of a program's gradient",
                "differentiate it too, or document that autograd treats it as a constant",
            )
    with torch.no_grad():
        if any(out.requires_grad for out in case.function(raw=True)(*case.fresh())):
            case.fail("an output requires a gradient under torch.no_grad()", "do not record a graph there")
    return case.derivative.sentence or None


# ---- registration ----


def autograd_registration(case: Case) -> str | None:
    """A derivative is registered with autograd, not the work of operators that the kernel happens to call."""
    if not any(case.wanted) or case.derivative.status not in ("pass", "fail"):
        skip("there is no derivative: see backward")
    if case.has_kernel(f"Autograd{case.key}", "Autograd", "CompositeImplicitAutograd"):
        return
    torch._C._set_autograd_fallback_mode("nothing")
    tensors = [x.detach() if i in case.written else x for i, x in enumerate(case.fresh(grad=True))]
    try:
        outs = case.function(raw=True)(*tensors)
    except NotImplementedError:
        return
    given = {id(x) for x in tensors}
    if any(out.requires_grad and id(out) not in given for out in outs):
        case.fail(
            f"an output requires a gradient, but no kernel is registered at Autograd{case.key}",
            "register the derivative with torch.library.register_autograd, or an autograd function at the Autograd key, not "
            "at the device's",
        )


# ---- finite differences ----

_SMALL = 48  # up to this many elements, every column of a Jacobian is checked


def _wide_leaves(case: Case) -> tuple[list[Tensor], dict[str, float]]:
    """Leaf tensors for finite differences, with the step and tolerances for their dtype."""
    tensors = [x.contiguous() if 0 in x.stride() else x for x in case.fresh(dtype=case.wide)]
    halves = (torch.float16, torch.bfloat16)
    if any(x.dtype in halves for x in (*case.of(tensors), *case.outputs(tensors))):
        skip("it does not compute in float64, and finite differences in a half type are meaningless")
    return case.leaf(tensors), {} if case.wide else dict(eps=1e-3, atol=2e-2, rtol=2e-2)


def _finite_differences(case: Case, check: Callable[..., bool], what: str, remedy: str) -> str | None:
    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(filter(has_numbers, case.run(*tensors)))

    tensors, options = _wide_leaves(case)
    count = sum(x.numel() for x in case.of(tensors))
    if not count:
        skip("the sample is empty")
    try:
        check(function, tensors, fast_mode=count > _SMALL and bool(case.wide), **options)
    except GradcheckError as error:
        text = re.split(r"numerical: ?\n?tensor|\nThe max per-element|, but got", str(error))[0]
        case.fail(f"{what}: {' '.join(text.split())[:300].rstrip(' ,')}", remedy)
    return None if case.wide else "in float32, because it does not take float64"


def gradcheck(case: Case) -> str | None:
    """Gradients agree with finite differences, or with the intended gradient."""
    needs_derivative(case)
    if case.intended:
        return _as_intended(case)
    return _finite_differences(
        case,
        torch.autograd.gradcheck,
        "its gradient is not the derivative",
        "fix the formula of the backward; it must also take gradients that are undefined or not contiguous. If the gradient "
        "differs on purpose, such as a straight-through gradient, declare it with intended_gradient=",
    )


def _as_intended(case: Case) -> str:
    """Compare the gradient with that of the function that has the intended one."""
    shapes = [list(out.shape) for out in case.expected]
    outs = [list(out.shape) for out in case.outputs(case.fresh(), case.intended)]
    if outs != shapes:
        case.fail(
            f"the function given as intended_gradient returns shapes {outs}, and the operator {shapes}",
            "return what the operator returns; only the gradient counts",
        )
    got, expected = (case.gradients_of(case.fresh(dtype=case.wide), function) for function in (None, case.intended))
    if wrong := unlike_gradients(case.asked, got, expected):
        case.fail(
            f"{wrong}, which the function given as intended_gradient has",
            "fix the formula of the backward, or the function given as intended_gradient=",
        )
    return "against intended_gradient"


def gradgradcheck(case: Case) -> str | None:
    """Second derivatives agree with finite differences, or raise an error of the operator itself."""
    needs_derivative(case)
    tensors, _ = _wide_leaves(case)
    outs = attached(case.run(*tensors))
    given = [c.requires_grad_() for c in cotangents(outs)]
    remedy = (
        "compute the backward with differentiable operators, give the backward operator its own derivative, or "
        "refuse second derivatives with torch.autograd.function.once_differentiable"
    )
    grads = torch.autograd.grad(outs, case.of(tensors), given, create_graph=True, allow_unused=True)
    known = [g for g in grads if g is not None and g.requires_grad]
    if len(known) < sum(g is not None for g in grads):
        # A constant gradient is correct if it stays the same for different inputs and output gradients.
        other = [(x.detach() * 1.25 + 0.125).requires_grad_(x.requires_grad) for x in tensors]
        again = pull(case.run(*other), other, lambda outs: [2 * c.detach() for c in given])
        for name, g, h in zip(case.asked, grads, again, strict=True):
            if g is not None and not g.requires_grad and differs([g], [h]):
                case.fail(
                    f"its backward is not differentiable: the gradient of {name} does not require a gradient under "
                    "create_graph=True, so second derivatives leave it out without an error",
                    remedy,
                )
    if not known:
        return "the gradient is constant"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            # Unlike torch.autograd.grad, it also runs nodes that lead to no leaf, such as that of once_differentiable.
            torch.autograd.backward(known, cotangents(known))
        except Exception as error:
            lacking = LACKING.search(str(error))
            name = (lacking[1] or lacking[2].replace(".", "::", 1)) if lacking else case.schema.name
            if name != case.schema.name:
                case.warn(
                    f"its backward is not differentiable: it calls {name}, which has no derivative, so double backward ends "
                    f"in that operator's error: {all_lines(error)}",
                    remedy,
                )
            refuse_or_fail(case, error, "the second derivative", remedy)
    if said := next((str(w.message) for w in heard if WARNED in str(w.message)), ""):
        named = re.search(r"(\w+::\w+)", said)
        case.fail(
            f"its backward is not differentiable: it calls {named[1] if named else 'an operator'}, which has no derivative, "
            "and double backward only warns and leaves it out",
            remedy,
        )
    return _finite_differences(
        case, torch.autograd.gradgradcheck, "its backward is not differentiable: the second derivative is wrong", remedy
    )


# ---- torch.func ----


def _of_leaves(case: Case, tensors: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The floating outputs as a function of the tensors whose gradient the sample asks for."""
    wanted = case.of(range(len(tensors)))

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        moved = dict(zip(wanted, leaves, strict=True))
        outs = case.run(*[moved.get(i, x) for i, x in enumerate(tensors)])
        return tuple(out for out in outs if has_numbers(out))

    return forward


def weighted(outs: Iterable[Tensor]) -> Tensor:
    """The sum of all outputs, each multiplied by its cotangent."""
    outs = list(outs)
    return sum((out * c).sum() for out, c in zip(outs, cotangents(outs), strict=True))


def forward_ad(case: Case) -> str | None:
    """Forward-mode derivatives agree with backward, or raise an error."""
    if case.derivative.status not in ("pass", "refused"):
        skip("there is no derivative to check: see backward")
    forward = torch.autograd.forward_ad
    tensors = case.fresh(dtype=case.wide)
    directions = cotangents(case.of(tensors))
    with forward.dual_level():
        rest = iter(directions)
        duals = [forward.make_dual(x, next(rest)) if flag else x for x, flag in zip(tensors, case.wanted, strict=True)]
        try:
            outs = [out for out in case.run(*duals) if has_numbers(out)]
        except Exception as error:
            refuse_or_fail(case, error, "a call with forward-mode tangents", "fix the jvp formula")
        pairs = [forward.unpack_dual(out) for out in outs]
    weights = cotangents([p.primal for p in pairs])
    got = sum(float((p.tangent * w).sum().real) for p, w in zip(pairs, weights, strict=True) if p.tangent is not None)
    if case.has_derivative:
        grads = case.gradients_of(case.fresh(dtype=case.wide))
        products = [float((g * d.conj()).sum().real) for g, d in zip(grads, directions, strict=True) if g is not None]
        expected, size, close = sum(products), sum(map(abs, products)), 1e-6 if case.wide else 2e-2
    else:
        expected = sum(slope(case, i, tensors) for i in case.of(range(len(tensors))))
        size, close = abs(expected), 5e-2
    if abs(got - expected) <= close * max(size, 1e-3):
        return None
    if all(p.tangent is None for p in pairs) or got == 0:
        case.warn(
            "forward-mode AD (torch.func.jvp, make_dual) silently loses the tangent: the output has none, and its derivative "
            "is not zero",
            "custom_op does not accept a jvp formula; document that, or wrap the call in a "
            "torch.autograd.Function with one. In C++, an autograd::Function refuses by itself",
        )
    if not case.has_derivative:
        _not_asked(case)
    case.fail(
        f"forward-mode AD gives {got:.6g} where backward gives {expected:.6g}",
        "fix the jvp formula",
    )


_FUNC = (
    "write the derivative as a torch.autograd.Function with forward(x, …), setup_context(ctx, inputs, output) and "
    "backward(ctx, grad), let its forward call the operator, and have programs call its apply. "
    "torch.library.register_autograd takes a setup_context, but before PyTorch has fixed pytorch/pytorch#168393 the Function "
    "that it makes has none. PyTorch refuses a C++ torch::autograd::Function under torch.func"
)


def func_grad(case: Case) -> str | None:
    """torch.func.grad and torch.func.vjp give the gradients that backward gives."""
    needs_derivative(case)
    if any(x.is_complex() for x in (*case.leaves, *case.expected)):
        skip("torch.func.grad is for real numbers")
    kept = [out.requires_grad for out in case.run(*case.fresh(grad=True)) if has_numbers(out)]
    tensors = case.fresh()
    leaves, forward = case.of(tensors), _of_leaves(case, tensors)

    def loss(*leaves: Tensor) -> Tensor:
        return weighted([out for out, keep in zip(forward(*leaves), kept, strict=True) if keep])

    def loss_of_vjp(*leaves: Tensor) -> Tensor:
        outs, _ = torch.func.vjp(forward, *leaves)
        return weighted([out for out, keep in zip(outs, kept, strict=True) if keep])

    for what, function in (
        ("torch.func.grad", loss),
        ("torch.func.grad of the outputs of torch.func.vjp", loss_of_vjp),
    ):
        try:
            got = torch.func.grad(function, tuple(range(len(leaves))))(*leaves)
        except Exception as error:
            unless_generated(case, error)
            if function is loss and refused(error):
                case.warn(f"backward gives its gradient, but torch.func.grad raises {all_lines(error)}", _FUNC)
            refuse_or_fail(case, error, what, _FUNC)
        if wrong := unlike_gradients(case.asked, got, case.gradients):
            case.fail(f"under {what} {wrong}, which backward gives", _FUNC)
    return None
