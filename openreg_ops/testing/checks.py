"""The checks of `checker.check`, in the order of the report: one function each, with a section in docs/checker.md.

A check passes by returning, with a note or without, and ends in any other way by fail(), warn(), refuse() or skip().
The first line of its docstring is what the report says it holds.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.autograd.gradcheck import GradcheckError

from openreg_ops.testing.checker import (
    SEED,
    Case,
    Outcome,
    cotangents,
    differentiable,
    gradients,
    last_line,
    name_of,
)

CHECKS: dict[str, Callable[[Case], str | None]] = {}
Check = Callable[[Case], str | None]


def row(function: Check) -> Check:
    """Make a function a check of its name."""
    CHECKS[function.__name__] = function
    return function


def fail(sentence: str, remedy: str) -> NoReturn:
    raise Outcome("fail", sentence, remedy)


def warn(sentence: str, remedy: str = "") -> NoReturn:
    raise Outcome("warn", sentence, remedy)


def refuse(sentence: str) -> NoReturn:
    raise Outcome("refused", sentence)


def skip(reason: str) -> NoReturn:
    raise Outcome("skip", reason)


# ---- what an error means ----

# An operator, or PyTorch, says that something is not supported; any other error is an accident.
_REFUSAL = re.compile(
    r"not (yet |currently )?(been )?(implemented|supported)|(n't|not) (yet )?(have )?support|unsupported|not differentiable"
    r"|no autograd formula|(no|not? have an?) (second |double |higher[- ]order )?(derivative|gradient|backward|forward)"
    r"|once_differentiable|cannot use C\+\+|must override the setup_context|generate_vmap_rule|vmap",
    re.IGNORECASE,
)
# The error of a derivative that another operator lacks, by PyTorch's or the device's fallback.
_LACKING = re.compile(
    r"(?<!the )derivative for (\w+::\w+)[.\w]* is not implemented"
    r"|backward through (\w+\.\w+)[.\w]* but no autograd formula"
)
_WARNED = "autograd kernel was not registered"


def refused(error: BaseException) -> bool:
    return isinstance(error, NotImplementedError) or bool(_REFUSAL.search(str(error)))


def refuse_or_fail(case: Case, error: BaseException, what: str, remedy: str) -> NoReturn:
    """End as refused if the error says so, else as failed."""
    if refused(error):
        refuse(last_line(error))
    fail(f"{case.name}: {what} raised {last_line(error)}", remedy)


def needs_derivative(case: Case) -> None:
    if case.derivative.status != "pass":
        skip("there is no derivative to check: see backward")


# ---- comparing ----

_TOLERANCE = {  # rtol and atol; atol is that of numbers about 1, and grows with the largest
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-9,
    torch.complex64: 2e-5,
}


def tolerance(*tensors: Tensor) -> float:
    """That of the coarsest of their dtypes; 0 for whole numbers."""
    return max((_TOLERANCE.get(x.dtype, 0.1) for x in tensors if differentiable(x)), default=0.0)


def differs(
    actual: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    what: str = "output",
    exact: bool = False,
    dtype: bool = True,
    coarse: float = 0,
) -> str:
    """What differs first between two lists of tensors, as "output 0 is …"; "" if nothing does."""
    if len(actual) != len(expected):
        return f"there are {len(actual)} {what}s instead of {len(expected)}"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a is None or e is None:
            if not (_zero(a) and _zero(e)):
                return f"{what} {i} is {'missing' if a is None else 'there'}, and was not to be"
            continue
        if a.shape != e.shape:
            return f"{what} {i} has shape {list(a.shape)} instead of {list(e.shape)}"
        if dtype and a.dtype != e.dtype:
            return f"{what} {i} is {_dtype(a)} instead of {_dtype(e)}"
        if a.is_meta or e.is_meta or not a.numel():
            continue
        a, e = (x.detach().to_dense() if x.layout != torch.strided else x.detach() for x in (a, e))
        near = 0.0 if exact else max(tolerance(a, e), coarse)
        wide = torch.complex128 if a.is_complex() or e.is_complex() else torch.float64
        if differentiable(a) or differentiable(e):
            x, y = a.cpu().to(wide), e.cpu().to(wide)
            finite = y[y.isfinite()].abs()
            same = torch.isclose(x, y, rtol=near, atol=near * max(1.0, finite.max().item() if len(finite) else 1.0))
            same |= x.isnan() & y.isnan()
        else:
            x, y = a.cpu(), e.cpu()
            same = x == y
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            got, was = (f"{z[at].item():.6g}" if differentiable(z) else str(z[at].item()) for z in (x, y))
            if got == was:
                got, was = repr(x[at].item()), repr(y[at].item())
            wrong = same.numel() - int(same.sum())
            return f"{what} {i} differs in {wrong} of {same.numel()} elements: {got} instead of {was} at {list(at)}"
    return ""


def _zero(x: Tensor | None) -> bool:
    return x is None or not x.count_nonzero()


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def plain(case: Case, tensors: Sequence[Tensor], function: Any = None) -> list[Tensor]:
    """The outputs without autograd, kept apart from what may overwrite them."""
    with torch.no_grad():
        return _detached((function or case.run)(*tensors))


def by_reference(case: Case, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The outputs of the reference, or of the operator's CPU kernel; None if there is neither."""
    function = reference_of(case)
    return plain(case, [x.detach().cpu() for x in tensors], function) if function else None


def reference_of(case: Case) -> Callable[..., tuple[Tensor, ...]] | None:
    if case.reference:
        return case.function(op=case.reference)
    host = not any(isinstance(c, torch.device) for c in case.constants.values())
    if case.device.type != "cpu" and host and case.has_computed_kernel("CPU"):
        return case.function()
    return None


# ---- layouts: the values are kept, the strides are not ----


def _permuted(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x.clone()


def _padded(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return torch.stack([x, x, x])[1]
    return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def _stepped(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 1]


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x) if x.dim() and x.shape[0] else x


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    x = x if x.dim() >= 4 else x.expand(*(2, 3)[: 4 - x.dim()], *x.shape)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": _permuted,
    "padded": _padded,
    "stepped": _stepped,
    "expanded": _expanded,
    "channels-last": _channels_last,
}


def layouts_of(case: Case, **options: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """The sample as it is, in every layout, and with only its first tensor permuted."""
    yield "the sample's", case.fresh(**options)
    for name, layout in LAYOUTS.items():
        yield name, [layout(x) if x.layout == torch.strided else x for x in case.fresh(**options)]
    tensors = case.fresh(**options)
    if len(tensors) > 1 and tensors[0].dim() > 1:
        yield "one permuted and otherwise contiguous", [_permuted(tensors[0]), *tensors[1:]]


def resized(tensors: Sequence[Tensor], old: int, new: int) -> list[Tensor]:
    """Every dimension of size `old` made `new` long, by repeating or leaving out."""
    out = []
    for x in tensors:
        for d, size in enumerate(x.shape):
            if size == old:
                x = x.index_select(d, torch.arange(new, device=x.device) % max(old, 1))
        out.append(x)
    return out


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """The different sizes of more than one, those of the largest tensor first."""
    ordered = sorted(tensors, key=lambda x: -x.dim())
    return list(dict.fromkeys(size for x in ordered for size in x.shape if size > 1))


# ---- schema, values ----


@row
def runs(case: Case) -> str | None:
    """The operator accepts the sample."""
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except Exception as error:
        fail(f"{case.name}: the sample was refused: {last_line(error)}", "give samples that the operator accepts")


@row
def schema(case: Case) -> str | None:
    """It writes to nothing, and shares memory with nothing, but what its schema says."""
    variants = [("", case.fresh()), (" padded", [_padded(x) for x in case.fresh()])]
    variants.append((" larger", [x * 3 + 1 if differentiable(x) else x for x in case.fresh()]))
    for which, tensors in variants:
        tensors = [x for x in tensors]
        try:
            _schema_of(case, tensors, which)
        except Outcome:
            raise
        except Exception:
            if not which:
                raise
    if case.derivative.status == "pass":
        tensors = case.fresh(grad=True)
        outs = [out for out in case.run(*tensors) if out.requires_grad]
        given = cotangents(outs)
        before = [_memory(x) for x in (*tensors, *given)]
        torch.autograd.grad(outs, case.of(tensors), given, allow_unused=True)
        for i, (x, was) in enumerate(zip((*tensors, *given), before, strict=True)):
            if not torch.equal(_memory(x), was):
                what = case.names[i] if i < len(tensors) else f"the gradient of output {i - len(tensors)}"
                fail(
                    f"{case.name}: its backward writes to {what}, which others still use",
                    "compute into fresh memory in the backward: clone what is to be changed",
                )


def _schema_of(case: Case, tensors: list[Tensor], which: str) -> None:
    memory, versions = [_memory(x) for x in tensors], [x._version for x in tensors]
    with torch.no_grad():
        outs = list(case.function(raw=True)(*tensors))
    arguments = {argument.name: argument for argument in case.schema.arguments}
    infos = [arguments[name.partition("[")[0]].alias_info for name in case.names]
    for x, name, info, before, version in zip(tensors, case.names, infos, memory, versions, strict=True):
        changed = not torch.equal(_memory(x), before)
        if info is None or not info.is_write:
            remedy = (
                f"write to a copy ({name}.clone()), or declare the mutation: Tensor(a!) {name} in the schema, "
                f'mutates_args=("{name}",) in custom_op'
            )
            if changed:
                fail(
                    f"{case.name}: the schema says that {name} is not written to, but the call changed the memory "
                    f"of a{which} {name} of shape {list(x.shape)}",
                    remedy,
                )
            if x._version != version:
                fail(
                    f"{case.name}: the schema says that {name} is not written to, but its version counter went from "
                    f"{version} to {x._version}: it is written to and put back",
                    remedy,
                )
        elif changed and x._version == version:
            fail(
                f"{case.name}: it writes to {name}, as its schema says, but the version counter of {name} stays at "
                f"{version}, so autograd uses the changed {name} where it saved the old one, without an error",
                "register a kernel at ADInplaceOrView that calls torch.autograd.graph.increment_version (bump_version "
                "in C++) after the call; custom_op(mutates_args=…) does it by itself",
            )
    returned = _returned(case, outs)
    for i, (out, info) in enumerate(zip(outs, returned, strict=True)):
        mine = _storage(out)
        if mine is None:
            continue
        shared = False
        for x, name, other in zip(tensors, case.names, infos, strict=True):
            declared = info is not None and other is not None and bool(info.before_set & other.before_set)
            if _storage(x) == mine:
                shared = shared or declared
                if not declared:
                    fail(
                        f"{case.name}: output {i} shares the memory of {name}, and the schema does not say so",
                        f"return a copy, or declare the view: Tensor(a) {name} and -> Tensor(a) in the schema",
                    )
        if info is not None and not shared:
            said = f"{case.name}: the schema says that output {i} is an alias of an input, but it is memory of its own"
            remedy = "return the input or its view, or take the (a) out of the schema's return"
            fail(said, remedy) if info.is_write else warn(said, remedy)
        for j in range(i):
            if _storage(outs[j]) == mine and (info is None or returned[j] is None):
                fail(
                    f"{case.name}: outputs {j} and {i} share memory, and the schema does not say so",
                    "return a copy of one; two outputs must not share memory",
                )


def _returned(case: Case, outs: Sequence[Tensor]) -> list[Any]:
    """The alias annotation of each output."""
    kinds = [(r.alias_info, str(r.type)) for r in case.schema.returns if "Tensor" in str(r.type)]
    if any(kind.startswith("List") for _, kind in kinds):
        return [kinds[0][0] if len(kinds) == 1 else None] * len(outs)
    return [info for info, _ in kinds]


def _memory(x: Tensor) -> Tensor:
    """Every byte of its storage, what lies between and around its elements included."""
    if x.layout != torch.strided:
        return x.detach().to_dense().cpu().clone()
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage()).cpu().clone()


def _storage(x: Tensor) -> int | None:
    return x.untyped_storage()._cdata if x.layout == torch.strided and x.numel() else None


@row
def reference(case: Case) -> str | None:
    """Outputs and gradients are those of the reference, or of its own CPU kernel."""
    function = reference_of(case)
    if not function:
        skip("no reference was given" + ("" if case.device.type == "cpu" else ", and the operator has no CPU kernel"))
    remedy = "one of the two is wrong; try the sample by hand, or give a reference in float64"
    kernel = "the reference" if case.reference else "its CPU kernel"
    expected = plain(case, case.fresh(device="cpu"), function)
    coarse = tolerance(*case.leaves)
    if wrong := differs(case.expected, expected, dtype=not case.reference, coarse=coarse):
        fail(f"{case.name}: {wrong}, which {kernel} gives", remedy)
    if case.derivative.status != "pass":
        return f"outputs only; against {kernel}"
    try:
        host = gradients(function, case.fresh(grad=True, device="cpu"), case.wanted)
    except RuntimeError as error:
        if refused(error):
            return f"outputs only, as {kernel} has no gradient"
        raise
    if not any(x is not None for x in host):
        return f"outputs only, as {kernel} has no gradient"
    if wrong := differs(case.gradients, host, "the gradient of differentiable argument", coarse=coarse * 4):
        fail(f"{case.name}: {wrong}, which {kernel} gives", remedy)
    return f"against {kernel}"


# ---- opcheck ----


def _opcheck(case: Case, test: str) -> None:
    tensors = case.fresh(grad=case.derivative.status in ("pass", "fail") and test != "test_schema")
    for i in case.written:  # a leaf that requires a gradient cannot be written to
        tensors[i] = tensors[i].detach()
    args, kwargs = case.arguments(tensors)
    try:
        torch.library.opcheck(case.op, args, kwargs, test_utils=test)
    except Exception as error:
        fail(f"{case.name}: opcheck's {test} says: {last_line(error)}", f"see {test} of torch.library.opcheck")


@row
def opcheck_schema(case: Case) -> str | None:
    """torch.library.opcheck's test_schema."""
    _opcheck(case, "test_schema")


@row
def opcheck_autograd_registration(case: Case) -> str | None:
    """torch.library.opcheck's test_autograd_registration, on every device."""
    if not any(case.wanted):
        skip("no floating tensor argument")
    if case.device.type in ("cpu", "cuda", "xpu"):
        return _opcheck(case, "test_autograd_registration")
    # PyTorch's own knows three devices; this is what it does.
    if case.has_kernel(f"Autograd{case.key}", "Autograd", "CompositeImplicitAutograd"):
        return None
    torch._C._set_autograd_fallback_mode("nothing")
    tensors = case.fresh(grad=True)
    with contextlib.suppress(NotImplementedError):
        outs = case.function(raw=True)(*tensors)
        given = {id(x) for x in tensors}
        if case.derivative.status == "pass" and any(out.requires_grad and id(out) not in given for out in outs):
            fail(
                f"{case.name}: an output requires a gradient, but no kernel is registered at Autograd{case.key}",
                "register the autograd function at the Autograd key, not at the device's",
            )


@row
def opcheck_faketensor(case: Case) -> str | None:
    """torch.library.opcheck's test_faketensor."""
    _opcheck(case, "test_faketensor")


@row
def opcheck_aot_dispatch_dynamic(case: Case) -> str | None:
    """torch.library.opcheck's test_aot_dispatch_dynamic."""
    _opcheck(case, "test_aot_dispatch_dynamic")


# ---- derivatives ----


def _slope(case: Case, which: int, tensors: list[Tensor], outs: Sequence[int] | None = None) -> float:
    """The derivative of the weighted outputs along a fixed direction of one tensor, by finite difference."""
    x = tensors[which]
    step = {torch.float64: 1e-6, torch.complex128: 1e-6}.get(x.dtype, 1e-2)
    direction = cotangents([x])[0]
    ends = []
    for sign in (1, -1):
        moved = [y.detach().clone() for y in tensors]
        moved[which] = moved[which] + sign * step * direction
        every = [out for out in plain(case, moved) if differentiable(out)]
        weighted = [
            (out.to(torch.complex128 if out.is_complex() else torch.float64).cpu() * c.cpu()).sum().real
            for i, (out, c) in enumerate(zip(every, cotangents(every), strict=True))
            if outs is None or i in outs
        ]
        ends.append(sum(float(w) for w in weighted))
    return (ends[0] - ends[1]) / (2 * step)


def derivative(case: Case) -> None:
    """What `Case.derivative` caches: a silent or partial gradient is a failure, an error that says so is not."""
    if not any(case.wanted):
        skip("no floating tensor argument")
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
        outs = [out for out in every if differentiable(out)]
        if not outs:
            skip("no floating output")
        attached = [out for out in outs if out.requires_grad]
        if not attached:
            for i, flag in enumerate(case.wanted):
                if flag and abs(_slope(case, i, tensors)) > 1e-3:
                    fail(
                        f"{case.name}: it depends on {case.names[i]}, which requires a gradient, but its output does "
                        "not; a program's gradient leaves the operator out, without an error or a warning",
                        remedy,
                    )
            skip("its outputs do not depend on the values of its inputs")
        _written_unseen(case, tensors, every)
        try:
            grads = torch.autograd.grad(attached, case.of(tensors), cotangents(attached), allow_unused=True)
        except Exception as error:
            refuse_or_fail(case, error, "backward", "mend the backward")
    warned = any(_WARNED in str(w.message) for w in heard)
    nodes = {out.grad_fn.name() for out in attached if out.grad_fn is not None}
    if warned or any("WarnNotImplemented" in name for name in nodes):
        fail(
            f"{case.name}: it has no derivative, its output says requires_grad, and backward only warns and leaves "
            "the operator out: a program gets a partial gradient",
            remedy,
        )
    mine = iter(grads)
    for i, flag in enumerate(case.wanted):
        got = next(mine) if flag else None
        connected = [k for k, out in enumerate(outs) if out.requires_grad]
        if flag and _zero(got) and abs(_slope(case, i, tensors, connected)) > 1e-3:
            fail(
                f"{case.name}: the gradient of {case.names[i]} is {'missing' if got is None else 'zero'}, but the output "
                f"depends on {case.names[i]}",
                "return the gradient of every argument that requires one (needs_input_grad), or raise",
            )


def _written_unseen(case: Case, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Fails if what the operator wrote has the gradient of what was there before."""
    for i, out in zip(case.written, outs[len(outs) - len(case.written) :], strict=True):
        untouched = out.grad_fn is not None and out.grad_fn.name().startswith("CloneBackward")
        if untouched and case.wanted[i] and differs([out], [tensors[i]]):
            name = case.names[i]
            fail(
                f"{case.name}: it writes to {name}, which requires a gradient, and autograd is not told: the gradient "
                f"passes as if {name} were as before, without an error",
                "make the operator functional and give it a derivative, or raise in a kernel at the Autograd key when "
                f"{name} requires a gradient",
            )


@row
def backward(case: Case) -> str | None:
    """Asking for a gradient gives all of it, or an error."""
    if case.derivative.status != "pass":
        raise case.derivative
    tensors = case.fresh(grad=True, dtype=case.wide)
    outs = [out for out in case.run(*tensors) if differentiable(out)]
    apart = [k for k, out in enumerate(outs) if not out.requires_grad]
    for i, flag in enumerate(case.wanted):
        if apart and flag and abs(_slope(case, i, tensors, apart)) > 1e-3:
            warn(
                f"{case.name}: output {apart[0]} depends on {case.names[i]} but does not require a gradient; what is "
                "computed from it is left out of a program's gradient",
                "differentiate it too, or document that it is a constant for autograd",
            )
    with torch.no_grad():
        if any(out.requires_grad for out in case.function(raw=True)(*case.fresh())):
            fail(f"{case.name}: an output requires a gradient under torch.no_grad()", "keep no graph there")


def _wide_leaves(case: Case) -> tuple[list[Tensor], dict[str, float]]:
    """Leaves for finite differences, and the step and tolerances that their dtype allows."""
    tensors = [x.contiguous() if 0 in x.stride() else x for x in case.fresh(dtype=case.wide)]
    if any(x.dtype in (torch.float16, torch.bfloat16) for x in case.of(tensors)):
        skip("it takes no float64, and finite differences of a half type say nothing")
    return case.leaf(tensors), {} if case.wide else dict(eps=1e-3, atol=2e-2, rtol=2e-2)


_SMALL = 48  # elements up to which every column of a Jacobian is looked at


def _finite_differences(case: Case, check: Callable[..., bool], what: str, remedy: str) -> str | None:
    tensors, options = _wide_leaves(case)
    if not sum(x.numel() for x in case.of(tensors)):
        skip("the sample is empty")
    fast = sum(x.numel() for x in case.of(tensors)) > _SMALL and bool(case.wide)
    try:
        check(case.run, tensors, fast_mode=fast, **options)
    except GradcheckError as error:
        text = re.split(r"numerical: ?\n?tensor|\nThe max per-element|, but got", str(error))[0]
        fail(f"{case.name}: {what}: {' '.join(text.split())[:300].rstrip(' ,')}", remedy)
    return None if case.wide else "in float32, as it takes no float64"


@row
def gradcheck(case: Case) -> str | None:
    """Gradients agree with finite differences."""
    needs_derivative(case)
    return _finite_differences(
        case,
        torch.autograd.gradcheck,
        "its gradient is not the derivative",
        "mend the formula of the backward; it must also take gradients that are undefined or not contiguous",
    )


@row
def gradgradcheck(case: Case) -> str | None:
    """Second derivatives agree with finite differences, or are refused by an error of its own."""
    needs_derivative(case)
    tensors, _ = _wide_leaves(case)
    outs = [out for out in case.run(*tensors) if out.requires_grad]
    given = [c.requires_grad_() for c in cotangents(outs)]
    leaves = case.of(tensors)
    remedy = (
        "compute the backward with differentiable operators, give the backward operator a derivative of its own, or "
        "refuse second derivatives by torch.autograd.function.once_differentiable"
    )
    grads = torch.autograd.grad(outs, leaves, given, create_graph=True, allow_unused=True)
    attached = [g for g in grads if g is not None and g.requires_grad]
    if len(attached) < sum(g is not None for g in grads):
        # A constant gradient is right when it stays the same for other inputs and other gradients of the output.
        other = [(x.detach() * 1.25 + 0.125).requires_grad_(x.requires_grad) for x in tensors]
        again = torch.autograd.grad(
            [out for out in case.run(*other) if out.requires_grad],
            case.of(other),
            [2 * c.detach() for c in given],
            allow_unused=True,
        )
        for name, g, h in zip(
            [n for n, w in zip(case.names, case.wanted, strict=True) if w], grads, again, strict=True
        ):
            if g is not None and not g.requires_grad and differs([g], [h]):
                fail(
                    f"{case.name}: its backward is not differentiable: the gradient of {name} does not require a "
                    "gradient under create_graph=True, so second derivatives leave it out without an error",
                    remedy,
                )
    if not attached:
        return "the gradient is constant"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            torch.autograd.grad(attached, [*leaves, *given], cotangents(attached), allow_unused=True)
        except Exception as error:
            lacking = _LACKING.search(str(error))
            name = (lacking[1] or lacking[2].replace(".", "::", 1)) if lacking else case.schema.name
            if lacking and name != case.schema.name:
                fail(
                    f"{case.name}: its backward is not differentiable: it calls {name}, which has no derivative, so "
                    f"double backward ends in that operator's error: {last_line(error)}",
                    remedy,
                )
            refuse_or_fail(case, error, "the second derivative", remedy)
    if any(_WARNED in str(w.message) for w in heard):
        named = re.search(r"(\w+::\w+)", str(next(w.message for w in heard if _WARNED in str(w.message))))
        fail(
            f"{case.name}: its backward is not differentiable: it calls {named[1] if named else 'an operator'}, which "
            "has no derivative, and double backward only warns and leaves it out",
            remedy,
        )
    return _finite_differences(
        case, torch.autograd.gradgradcheck, "its backward is not differentiable: the second derivative is wrong", remedy
    )


@row
def forward_ad(case: Case) -> str | None:
    """Forward-mode derivatives agree with those of backward, or are refused by an error."""
    if case.derivative.status not in ("pass", "refused"):
        skip("there is no derivative to check: see backward")
    forward = torch.autograd.forward_ad
    tensors = case.fresh(dtype=case.wide)
    directions = cotangents(case.of(tensors))
    with forward.dual_level():
        rest = iter(directions)
        duals = [forward.make_dual(x, next(rest)) if flag else x for x, flag in zip(tensors, case.wanted, strict=True)]
        try:
            outs = [out for out in case.run(*duals) if differentiable(out)]
        except Exception as error:
            refuse_or_fail(case, error, "a call with forward-mode tangents", "mend the jvp formula")
        pairs = [forward.unpack_dual(out) for out in outs]
    weights = cotangents([p.primal for p in pairs])
    got = sum(float((p.tangent * w).sum().real) for p, w in zip(pairs, weights, strict=True) if p.tangent is not None)
    if case.derivative.status == "pass":
        leaves = case.fresh(grad=True, dtype=case.wide)
        grads = gradients(case.run, leaves, case.wanted)
        products = [float((g * d.conj()).sum().real) for g, d in zip(grads, directions, strict=True) if g is not None]
        size = sum(abs(p) for p in products)
        expected = sum(products)
    else:
        expected = sum(_slope(case, i, tensors) for i, flag in enumerate(case.wanted) if flag)
        size = abs(expected)
    close = (1e-6 if case.wide else 2e-2) if case.derivative.status == "pass" else 5e-2
    if abs(got - expected) <= close * max(size, 1e-3):
        return None
    if all(p.tangent is None for p in pairs) or got == 0:
        warn(
            f"{case.name}: forward-mode AD (torch.func.jvp, make_dual) silently loses the tangent: the output has none, "
            "and its derivative is not zero",
            "custom_op has no place for a jvp formula; say so in the documentation, or wrap the call in a "
            "torch.autograd.Function with one. In C++, an autograd::Function refuses by itself",
        )
    fail(
        f"{case.name}: forward-mode AD gives {got:.6g} where backward gives {expected:.6g}",
        "mend the jvp formula",
    )


# ---- compile and fake kernels ----


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No logs of compilers, and no suppressed errors."""
    import torch._dynamo as dynamo

    with dynamo.config.patch(suppress_errors=False, verbose=False):
        yield


def _compiled(case: Case, dynamic: bool) -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(case.function(), backend="aot_eager", fullgraph=True, dynamic=dynamic)


@row
def compile(case: Case) -> str | None:  # noqa: A001 -- a check's name is its function's
    """Compiled outputs, their strides, and gradients are the eager ones, for static and dynamic shapes."""
    remedy = "mend the fake kernel or the derivative: compile trusts both without running the kernel"
    if case.seeded:
        skip("its numbers are random")
    with _quiet():
        for dynamic in (False, True):
            shapes = "dynamic" if dynamic else "static"
            grad = case.derivative.status == "pass"
            try:
                function = _compiled(case, dynamic)
                outs = function(*case.fresh(grad=grad))
            except Exception as error:
                fail(f"{case.name}: torch.compile with {shapes} shapes raised {last_line(error)}", remedy)
            if wrong := differs(outs, case.expected):
                fail(f"{case.name}: under torch.compile with {shapes} shapes {wrong}, which eager gives", remedy)
            if wrong := _strides_differ(outs, list(case.run(*case.fresh()))):
                fail(f"{case.name}: under torch.compile {wrong}", remedy)
            if grad:
                got = gradients(function, case.fresh(grad=True), case.wanted)
                if wrong := differs(got, case.gradients, "the gradient of differentiable argument"):
                    fail(f"{case.name}: under torch.compile with {shapes} shapes {wrong}, which eager gives", remedy)
        if case.derivative.status == "refused":
            leaves = case.fresh(grad=True)
            with contextlib.suppress(Exception):
                got = gradients(_compiled(case, False), leaves, case.wanted)
                fail_silently = not any(g is not None for g in got)
                if fail_silently or got:
                    return _lost(case, "torch.compile")
    return None


def _lost(case: Case, where: str) -> NoReturn:
    raise _Lost(
        "fail",
        f"{case.name}: eager refuses the gradient by an error, but under {where} there is none and the gradient is wrong",
        "refuse in a kernel at the Autograd key, which transforms and compilers see too",
    )


class _Lost(Outcome, BaseException):
    """An outcome that passes contextlib.suppress(Exception)."""


def _strides_differ(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.layout == e.layout == torch.strided and _strides(a) != _strides(e):
            return f"output {i} has strides {tuple(a.stride())} instead of {tuple(e.stride())}"
    return ""


def _strides(x: Tensor) -> tuple[int, ...]:
    """Those that say something: a dimension of one element may have any."""
    return tuple(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1) if x.numel() else ()


def _fake(
    case: Case, tensors: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Fake inputs and the fake kernel's outputs."""
    mode = mode or FakeTensorMode()
    with mode, torch.no_grad():
        fakes = [mode.from_tensor(x) for x in tensors]
        return fakes, list(case.run(*fakes))


_ALLOCATE = (
    "allocate in the fake kernel what the kernel allocates: torch.empty_like(x) keeps the order of x's strides, "
    "x.new_empty(x.shape) is contiguous"
)


@row
def fake_layouts(case: Case) -> str | None:
    """The fake kernel gives shape, dtype, device and strides of the kernel, in every layout of the inputs."""
    tried = []
    for layout, tensors in layouts_of(case):
        try:
            with torch.no_grad():
                outs = list(case.run(*tensors))
        except Exception:
            continue
        tried.append(layout)
        inputs = ", ".join(
            f"{n} {list(x.shape)} of strides {x.stride()}" for n, x in zip(case.names, tensors, strict=True)
        )
        where = f"for inputs in {layout} layout ({inputs})"
        try:
            fakes, fake = _fake(case, tensors)
        except Exception as error:
            fail(
                f"{case.name}: {where} the fake kernel raised {last_line(error)}",
                "register a fake kernel (torch.library.register_fake) that takes what the kernel takes",
            )
        if len(fake) != len(outs):
            fail(f"{case.name}: {where} the fake kernel gives {len(fake)} outputs, the kernel {len(outs)}", _ALLOCATE)
        for i, (real, said) in enumerate(zip(outs, fake, strict=True)):
            for what, a, b in (
                ("shape", list(real.shape), list(said.shape)),
                ("dtype", _dtype(real), _dtype(said)),
                ("device", str(real.device), str(said.device)),
                ("layout", str(real.layout), str(said.layout)),
            ):
                if a != b:
                    fail(f"{case.name}: {where} output {i} has {what} {a}, but the fake kernel says {b}", _ALLOCATE)
            if real.layout == torch.strided and _strides(real) != _strides(said):
                fail(
                    f"{case.name}: {where} output {i} has strides {tuple(real.stride())}, but the fake kernel says "
                    f"{tuple(said.stride())}",
                    _ALLOCATE,
                )
            for x, f, name in zip(tensors, fakes, case.names, strict=True):
                if real.numel() and (_storage(real) == _storage(x)) != (_storage(said) == _storage(f)):
                    fail(
                        f"{case.name}: {where} output {i} {'shares' if _storage(real) == _storage(x) else 'does not share'} "
                        f"the memory of {name}, and the fake kernel says otherwise",
                        "return a view in the fake kernel exactly where the kernel does",
                    )
    return f"in {', '.join(tried)} layout"


def _symbolic(case: Case, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor], list[Tensor], list[list[Any]]]:
    """The fake kernel on tensors all of whose sizes are symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = []
    for i, x in enumerate(tensors):
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in x.shape],
            constraint_sizes=[None] * x.dim(),
        )
        fakes.append(mode.from_tensor(x, source=ConstantSource(f"t{i}"), symbolic_context=context))
    symbols = [[size.node.expr if isinstance(size, torch.SymInt) else None for size in f.shape] for f in fakes]
    with mode, enable_python_dispatcher(), torch.no_grad():
        return env, fakes, list(case.run(*fakes)), symbols


@row
def fake_dynamic(case: Case) -> str | None:
    """The fake kernel keeps sizes symbolic."""
    tensors = case.fresh()
    if any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided tensor of more than one element")
    env, _, outs, symbols = _symbolic(case, tensors)
    for i, (real, said) in enumerate(zip(case.expected, outs, strict=True)):
        sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in said.shape]
        if sizes != list(real.shape):
            fail(
                f"{case.name}: with dynamic sizes the fake kernel says that output {i} has shape {sizes} instead of "
                f"{list(real.shape)}",
                "compute output shapes from x.shape alone",
            )
    for name, x, each in zip(case.names, tensors, symbols, strict=True):
        for d, symbol in enumerate(each):
            found = env.replacements.get(symbol) if symbol is not None else None
            if found is None or not found.is_number:
                continue
            # An operator that takes no other size may say so.
            try:
                plain(case, resized(case.fresh(), x.shape[d], x.shape[d] + 1))
            except Exception:
                continue
            fail(
                f"{case.name}: the fake kernel fixes dimension {d} of {name} to {found}, and the kernel takes other sizes; "
                "every new size compiles again, and export with a dynamic dimension fails",
                "do not turn sizes into Python numbers in the fake kernel (int(), //, if): use them as they are, and "
                "check them by torch._check",
            )
    return None


@row
def fake_unbacked(case: Case) -> str | None:
    """The fake kernel works with sizes that only the data decide."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensors = case.fresh()
    first = next((x.shape[0] for x in tensors if x.dim() and x.shape[0] > 1), None)
    if first is None or any(x.layout != torch.strided for x in tensors):
        skip("no strided tensor of more than one element")
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode, enable_python_dispatcher(), torch.no_grad():
        size = env.create_unbacked_symint()
        torch._check(size >= 2)
        fakes = [
            torch.empty(
                [size if d == 0 and n == first else n for d, n in enumerate(x.shape)], dtype=x.dtype, device=x.device
            )
            for x in tensors
        ]
        try:
            outs = case.run(*fakes)
        except Exception as error:
            if not refused(error) and "data-dependent" not in str(error) and "GuardOnDataDependent" not in repr(error):
                raise
            warn(
                f"{case.name}: the fake kernel branches on a size that is not known before the program runs "
                f"({last_line(error)[:160]}); a program with such sizes (nonzero, masks) does not compile",
                "replace `if size != …: raise` by torch._check(size == …, lambda: …) in the fake kernel",
            )
    for i, (real, said) in enumerate(zip(case.expected, outs, strict=True)):
        if real.dim() != said.dim() or real.dtype != said.dtype:
            fail(
                f"{case.name}: with an unbacked size the fake kernel says that output {i} is {_dtype(said)} of "
                f"{said.dim()} dimensions instead of {_dtype(real)} of {real.dim()}",
                "compute output shapes from x.shape alone",
            )
    return None


@row
def fake_errors(case: Case) -> str | None:
    """The fake kernel refuses what the kernel refuses, in the same words."""
    notes, agreed = [], 0
    for what, tensors in _wrong_inputs(case):
        real = fake = None
        try:
            plain(case, tensors)
        except Exception as error:
            real = error
        try:
            _fake(case, tensors)
        except Exception as error:
            fake = error
        if fake and not real:
            fail(
                f"{case.name}: given {what} the kernel runs, but the fake kernel raised {last_line(fake)}",
                "refuse in the fake kernel only what the kernel refuses",
            )
        if real and not fake:
            notes.append(f"given {what} the kernel raised {last_line(real)}, and the fake kernel takes it")
        elif real and fake and _sentence(real) != _sentence(fake):
            notes.append(f"given {what} the kernel says {last_line(real)!r}, and the fake kernel {last_line(fake)!r}")
        else:
            agreed += real is not None
    if notes:
        warn(
            f"{case.name}: {notes[0]}" + (f" (and {len(notes) - 1} more such)" if len(notes) > 1 else ""),
            "check the arguments in the fake kernel as the kernel does, with the same sentences (torch._check), so "
            "that a compiled program fails where it is compiled and says what eager says",
        )
    return f"{agreed} refusals agree"


def _sentence(error: BaseException) -> str:
    """The first line, less what a compiler puts around it."""
    return (str(error).strip().splitlines() or [""])[0]


def _wrong_inputs(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    count = len(case.leaves)
    for i, name in enumerate(case.names):
        x = case.leaves[i]
        if x.dim() and x.layout == torch.strided:
            for d in {0, x.dim() - 1}:
                tensors = case.fresh()
                tensors[i] = resized([tensors[i].movedim(d, 0)], -1, 0)[0]
                tensors[i] = torch.cat([tensors[i], tensors[i][:1]]).movedim(0, d)
                if count > 1:
                    yield f"a {name} of shape {list(tensors[i].shape)}", tensors
            tensors = case.fresh()
            tensors[i] = tensors[i].unsqueeze(0).repeat(2, *[1] * x.dim())
            yield f"a {name} of shape {list(tensors[i].shape)}", tensors
            tensors = case.fresh()
            tensors[i] = tensors[i].flatten()[0].clone() if x.numel() else tensors[i]
            yield f"a zero-dimensional {name}", tensors
        for dtype in (torch.int64, torch.float64, torch.bfloat16):
            if dtype != x.dtype and (count > 1 or dtype == torch.int64):
                tensors = case.fresh()
                tensors[i] = tensors[i].to(dtype)
                yield f"a {name} of {str(dtype).removeprefix('torch.')}", tensors
        if count > 1 and case.device.type != "cpu" and x.dim():
            tensors = case.fresh()
            tensors[i] = tensors[i].cpu()
            yield f"a {name} on cpu", tensors


# ---- transforms ----


@row
def functionalization(case: Case) -> str | None:
    """Functionalized, it gives what it gave."""
    remedy = "declare in the schema what is written to and what is a view; functionalization believes it"
    try:
        outs = torch.func.functionalize(case.function())(*case.fresh())
    except Exception as error:
        if not case.mutable or "alias annotations" not in str(error):
            refuse_or_fail(case, error, "torch.func.functionalize", remedy)
        # C++ functionalization knows no custom operator that writes; the compiler's does.
        with _quiet():
            outs = _compiled(case, False)(*case.fresh())
    if wrong := differs(outs, case.expected):
        fail(f"{case.name}: functionalized, {wrong}, which eager gives", remedy)
    return None


@row
def out(case: Case) -> str | None:
    """Its out= overload writes into tensors of any layout, resizes empty ones, and returns them."""
    packet = getattr(getattr(torch.ops, case.op.namespace), case.schema.name.split("::")[1])
    variant = next(
        (o for o in (getattr(packet, n) for n in packet.overloads()) if _outs(o) and _same_inputs(case.op, o)), None
    )
    if variant is None:
        skip("it has no out= overload")
    if _outs(case.op):
        skip("it is an out= overload")
    names = _outs(variant)
    remedy = "resize out (at::native::resize_output), copy the result into it, and return it"

    def run(outs: list[Tensor]) -> Any:
        args, kwargs = case.arguments(case.fresh())
        if case.seeded:
            torch.manual_seed(SEED)
        with torch.no_grad():
            return variant(*args, **kwargs, **dict(zip(names, outs, strict=True)))

    for what, make in (
        ("of the right size", lambda x: torch.full_like(x, 1)),
        ("with other strides", lambda x: torch.full_like(_stepped(x), 1) if x.dim() < 2 else _permuted(x)),
        ("of no elements", lambda x: x.new_empty(0)),
    ):
        outs = [make(x) for x in case.expected]
        strides = [x.stride() for x in outs]
        returned = run(outs)
        returned = [returned] if isinstance(returned, Tensor) else list(returned or outs)
        where = f"{case.name}: {name_of(variant)} with out= {what}"
        if wrong := differs(outs, case.expected):
            fail(f"{where}: {wrong}, which the operator returns", remedy)
        if any(r is not o for r, o in zip(returned, outs, strict=True)):
            fail(f"{where} returns another tensor than out", remedy)
        if what != "of no elements" and strides != [x.stride() for x in outs]:
            fail(f"{where} changed the strides of out, which has the right size", remedy)
    return None


def _outs(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _same_inputs(op: Any, other: Any) -> bool:
    given = [(a.name, str(a.type)) for a in op._schema.arguments]
    return given == [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Three times the arguments, floating values scaled differently."""
    return [[x * s if differentiable(x) else x.clone() for x in tensors] for s in (1.0, 0.875, 1.125)]


def _loops(case: Case, call: Callable[[], Any], remedy: str) -> tuple[Any, bool]:
    """What the call under vmap gives, and whether PyTorch's loop over samples was needed."""
    functorch = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    functorch._set_vmap_fallback_enabled(False)
    try:
        return call(), False
    except Exception as error:
        if "vmap fallback" not in str(error):
            refuse_or_fail(case, error, "torch.vmap", remedy)
    finally:
        functorch._set_vmap_fallback_enabled(True)
    try:
        return call(), True
    except Exception as error:
        refuse_or_fail(case, error, "torch.vmap", remedy)


_SLOW = "register a batching rule: torch.library.register_vmap, or a kernel at FuncTorchBatched"


@row
def vmap(case: Case) -> str | None:
    """Under torch.vmap it gives what a loop gives, and without PyTorch's slow loop."""
    if case.seeded:
        skip("its numbers are random")
    if not case.leaves:
        skip("no tensor argument")
    batch = _batches(case.fresh())
    remedy = "mend the batching rule: it gets the batched dimension of each argument, or None"
    slow = False
    ways = [("every argument batched", [0] * len(case.leaves))]
    if len(case.leaves) > 1:
        ways.append((f"only {case.names[0]} batched", [0] + [None] * (len(case.leaves) - 1)))
    if case.leaves[0].dim():
        ways.append((f"{case.names[0]} batched last", [-1] + [0] * (len(case.leaves) - 1)))
    for what, dims in ways:
        rows = [
            [x if d is not None else batch[0][i] for i, (x, d) in enumerate(zip(r, dims, strict=True))] for r in batch
        ]
        single = [plain(case, r) for r in rows]
        if not single[0]:
            skip("no output")
        expected = [torch.stack(outs) for outs in zip(*single, strict=True)]
        stacked = [
            torch.stack([r[i] for r in rows], d) if d is not None else rows[0][i].clone() for i, d in enumerate(dims)
        ]
        call = torch.vmap(case.run, in_dims=tuple(dims))
        outs, looped = _loops(case, lambda call=call, stacked=stacked: call(*stacked), remedy)
        slow = slow or looped
        if wrong := differs(outs, expected, coarse=4 * tolerance(*case.leaves)):
            fail(f"{case.name}: under torch.vmap with {what}, {wrong}, which a loop gives", remedy)
    if slow:
        warn(f"{case.name}: torch.vmap is right but takes PyTorch's slow loop over the samples", _SLOW)
    return None


@row
def vmap_grad(case: Case) -> str | None:
    """torch.vmap of torch.func.grad gives what a loop over backward gives."""
    if case.seeded:
        skip("its numbers are random")
    if case.derivative.status not in ("pass", "refused"):
        skip("there is no derivative to check: see backward")
    wanted = tuple(i for i, flag in enumerate(case.wanted) if flag)

    def loss(*tensors: Tensor) -> Tensor:
        outs = [out for out in case.run(*tensors) if differentiable(out)]
        return sum((out * c).sum() for out, c in zip(outs, weights, strict=True))

    weights = cotangents([out for out in case.expected if differentiable(out)])
    if not weights or any(w.is_complex() for w in weights) or any(x.is_complex() for x in case.leaves):
        skip("torch.func.grad is for real numbers")
    batch = _batches(case.fresh())
    stacked = [torch.stack(each) for each in zip(*batch, strict=True)]
    remedy = "give the derivative in a form that torch.func knows: register_autograd with setup_context, of operators"
    got, slow = _loops(case, lambda: torch.vmap(torch.func.grad(loss, wanted))(*stacked), remedy)
    if case.derivative.status == "refused":
        _lost(case, "torch.func.grad")
    single = []
    for r in batch:
        leaves = case.leaf(r)
        single.append(torch.autograd.grad(loss(*leaves), case.of(leaves), allow_unused=True, materialize_grads=True))
    expected = [torch.stack(each) for each in zip(*single, strict=True)]
    if wrong := differs(got, expected, "the gradient of differentiable argument", coarse=4 * tolerance(*case.leaves)):
        fail(f"{case.name}: under torch.vmap of torch.func.grad {wrong}, which a loop over backward gives", remedy)
    if slow:
        warn(f"{case.name}: torch.vmap of torch.func.grad is right but takes PyTorch's slow loop", _SLOW)
    return None


@row
def autocast(case: Case) -> str | None:
    """Under autocast it takes the dtypes that a linear before it makes, by a policy of its own."""
    kind = case.device.type
    if not torch.amp.is_autocast_available(kind):
        skip(f"{kind} has no autocast")
    floats = [i for i, x in enumerate(case.leaves) if x.is_floating_point()]
    if not floats:
        skip("no floating tensor argument")
    if any(case.leaves[i].dtype == torch.float64 for i in floats):
        skip("autocast leaves float64 alone")
    if case.schema.name.endswith("_backward"):
        skip("autograd calls a backward operator in the dtypes that its forward saw, with autocast off")
    policy = case.has_kernel(f"Autocast{case.key}")
    # A linear gives the half type; parameters, and what other operators give, stay float32.
    mixes = [{i: torch.bfloat16 if i == floats[0] else torch.float32 for i in floats}]
    if len(floats) > 1:
        mixes.append({i: torch.float32 if i == floats[0] else torch.bfloat16 for i in floats})
    mixed = len(floats) > 1
    dtypes = set()
    for mix in mixes:
        said = ", ".join(f"{case.names[i]} {str(d).removeprefix('torch.')}" for i, d in mix.items())
        tensors = case.fresh()
        tensors = [x.to(mix[i]) if i in mix else x for i, x in enumerate(tensors)]
        try:
            with torch.autocast(kind, dtype=torch.bfloat16):
                outs = plain(case, tensors)
        except Exception as error:
            fail(
                f"{case.name}: under autocast, given what a linear makes ({said}), it raised {last_line(error)}; "
                + ("its autocast kernel does not cast" if policy else f"it has no kernel at Autocast{case.key}"),
                "register an autocast policy: torch.library.register_autocast(op, device_type, dtype), or a kernel at the "
                "Autocast key that casts and calls the operator again",
            )
        wide = plain(case, case.fresh())
        if wrong := differs(outs, wide, dtype=False, coarse=8e-2):
            fail(
                f"{case.name}: under autocast, given {said}, {wrong}, which float32 gives",
                "compute in float32 where bfloat16 is not enough",
            )
        dtypes.add(", ".join(_dtype(x) for x in outs))
        if case.derivative.status == "pass":
            leaves = case.leaf(tensors)
            with torch.autocast(kind, dtype=torch.bfloat16):
                outs = case.run(*leaves)
            attached = [x for x in outs if x.requires_grad]
            try:
                grads = torch.autograd.grad(attached, case.of(leaves), cotangents(attached), allow_unused=True)
            except Exception as error:
                fail(
                    f"{case.name}: the backward of a call under autocast ({said}) raised {last_line(error)}",
                    "give the backward the dtypes that the forward computed in; an autocast kernel that casts before "
                    "autograd does so",
                )
            if wrong := differs(
                grads, case.gradients, "the gradient of differentiable argument", dtype=False, coarse=0.15
            ):
                fail(
                    f"{case.name}: under autocast ({said}) {wrong}, which float32 gives",
                    "compute the backward in float32 where bfloat16 is not enough",
                )
    result = f"mixed inputs give {' or '.join(sorted(dtypes))}"
    if mixed and not policy and not case.composite:
        warn(
            f"{case.name}: it has no autocast policy (no kernel at Autocast{case.key}) and computes with whatever dtypes "
            f"arrive: {result}",
            "decide: register_autocast in the half type for what is quick and safe there, in float32 for sums, "
            "exponentials and norms",
        )
    return result if mixed else f"a bfloat16 input gives {' or '.join(sorted(dtypes))}"


# ---- programs ----


class _Program(torch.nn.Module):
    """A program of the operator alone."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(*tensors)


@row
def export(case: Case) -> str | None:
    """torch.export traces it; the program, its decompositions, and a saved copy run."""
    if case.seeded:
        skip("its numbers are random")
    remedy = "mend the fake kernel: export runs nothing else"
    try:
        program = torch.export.export(_Program(case.function()), tuple(case.fresh()), strict=False)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        forms = {
            "exported": program,
            "decomposed": program.run_decompositions(),
            "saved and loaded": torch.export.load(file),
        }
    except Exception as error:
        fail(f"{case.name}: torch.export raised {last_line(error)}", remedy)
    for what, form in forms.items():
        if wrong := differs(form.module()(*case.fresh()), case.expected):
            fail(f"{case.name}: {what}, {wrong}, which eager gives", remedy)
    return None


@row
def jit_trace(case: Case) -> str | None:
    """torch.jit.trace runs it."""
    if case.seeded:
        skip("its numbers are random")
    if not case.expected or not case.leaves:
        skip("torch.jit.trace wants tensors in and out")
    traced = torch.jit.trace(case.function(), tuple(case.fresh()), check_trace=False)
    outs = traced(*case.fresh())
    if wrong := differs([outs] if isinstance(outs, Tensor) else outs, case.expected):
        fail(
            f"{case.name}: under torch.jit.trace {wrong}, which eager gives",
            "see what the trace fixed: print its graph",
        )
    return None


@row
def jit_script(case: Case) -> str | None:
    """torch.jit.script runs it."""
    if case.seeded:
        skip("its numbers are random")
    if case.constants:
        skip("TorchScript has no literal for an argument of the sample")
    if case.mutable:
        skip("the operator writes to its arguments")
    arguments = ", ".join(f"t{i}: Tensor" for i in range(len(case.leaves)))
    name = case.schema.name.replace("::", ".")
    text = f"def function({arguments}):\n    return {case.call_text.replace('op(', f'torch.ops.{name}(', 1)}\n"
    unit = torch.jit.CompilationUnit(text)
    with torch.no_grad():
        outs = unit.function(*case.fresh())
    outs = [x for x in torch.utils._pytree.tree_leaves(outs) if isinstance(x, Tensor)]
    if wrong := differs(outs, case.expected):
        fail(f"{case.name}: under torch.jit.script {wrong}, which eager gives", "mend the schema's defaults and types")
    return None


@row
def copies(case: Case) -> str | None:
    """A program that uses it survives copy.deepcopy and pickle."""
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"t{i}") for i in range(len(case.leaves))]
    args, kwargs = case.arguments(placeholders)
    result = graph.call_function(case.op, args, kwargs)
    graph.output(result)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    def run(program: Any) -> list[Tensor]:
        if case.seeded:
            torch.manual_seed(SEED)
        with torch.no_grad():
            outs = program(*case.fresh())
        return [x.clone() for x in torch.utils._pytree.tree_leaves(outs) if isinstance(x, Tensor)]

    expected = run(module)
    for what, copied in (
        ("copy.deepcopy", lambda: copy.deepcopy(module)),
        ("pickle", lambda: pickle.loads(pickle.dumps(module))),
    ):
        try:
            program = copied()
        except Exception as error:
            fail(
                f"{case.name}: {what} of a program that calls it raised {last_line(error)}",
                "make every argument of the operator a value that can be pickled",
            )
        if wrong := differs(run(program), expected):
            fail(f"{case.name}: after {what} of a program that calls it, {wrong}", "see what the copy lacks")
    return None


# ---- inputs ----


def _clear(case: Case, error: BaseException, inputs: str) -> str:
    """A refusal of some inputs as a note; fails if the error is an accident of the kernel's."""
    if "INTERNAL ASSERT" in str(error) or isinstance(error, (AssertionError, ZeroDivisionError, SystemError)):
        fail(
            f"{case.name}: given {inputs} it ended in {last_line(error)}",
            "take such inputs, or refuse them by a sentence (TORCH_CHECK, torch._check) that says the rule",
        )
    return f"{inputs}: {last_line(error)}"


@row
def layouts(case: Case) -> str | None:
    """Inputs that are permuted, padded, stepped, expanded or channels-last give what contiguous ones give."""
    remedy = "read elements by the tensor's strides, or start from x.contiguous()"
    refusals = []
    for name, tensors in layouts_of(case):
        try:
            outs = plain(case, tensors)
        except Exception as error:
            refusals.append(_clear(case, error, f"inputs in {name} layout"))
            continue
        straight = [x.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else x for x in tensors]
        if wrong := differs(outs, plain(case, straight)):
            fail(f"{case.name}: for inputs in {name} layout {wrong}, which contiguous inputs give", remedy)
        if case.derivative.status == "pass":
            got = gradients(case.run, case.leaf(tensors), case.wanted)
            expected = gradients(case.run, case.leaf(straight), case.wanted)
            if wrong := differs(got, expected, "the gradient of differentiable argument"):
                fail(f"{case.name}: for inputs in {name} layout {wrong}, which contiguous inputs give", remedy)
    refusals = [text for text in refusals if "channels-last" not in text]
    if refusals:
        refuse("; ".join(refusals))
    return None


def _against(case: Case, tensors: list[Tensor], inputs: str) -> str | None:
    """Run unusual inputs; compare with the reference, else with the fake kernel. Returns a refusal."""
    try:
        outs = plain(case, tensors)
    except Exception as error:
        return _clear(case, error, inputs)
    try:
        expected = by_reference(case, tensors)
    except Exception:
        expected = None
    if expected is not None:
        wrong = differs(outs, expected, dtype=not case.reference, coarse=4 * tolerance(*case.leaves))
    else:
        try:
            wrong = differs([x.to("meta") for x in outs], [x.to("meta") for x in _fake(case, tensors)[1]])
        except Exception:  # fake_layouts and fake_errors say so
            wrong = ""
    if wrong:
        who = "the fake kernel" if expected is None else "the reference"
        fail(
            f"{case.name}: given {inputs}, {wrong}, which {who} gives", "handle such inputs, or refuse them by an error"
        )
    if case.derivative.status == "pass" and not any(x.numel() > 4096 for x in tensors):
        try:
            for x, g in zip(case.of(tensors), gradients(case.run, case.leaf(tensors), case.wanted), strict=True):
                if g is not None and g.shape != x.shape:
                    fail(f"{case.name}: given {inputs}, a gradient has shape {list(g.shape)}", "sum it to the input's")
        except RuntimeError as error:
            return _clear(case, error, f"{inputs}, backward of")
    return None


@row
def empty(case: Case) -> str | None:
    """Tensors of no elements are taken, or refused by a sentence."""
    tensors = case.fresh()
    sizes = sizes_of(tensors)
    if not sizes or any(x.layout != torch.strided for x in tensors):
        skip("no strided tensor of more than one element")
    refusals = [
        _against(case, resized(tensors, size, 0), f"inputs whose dimensions of size {size} are empty")
        for size in sizes[:3]
    ]
    if all(refusals):
        refuse(refusals[0])
    return "; ".join(text for text in refusals if text)


@row
def zero_dim(case: Case) -> str | None:
    """Zero-dimensional tensors are taken, or refused by a sentence."""
    tensors = case.fresh()
    if not tensors or any(x.layout != torch.strided or not x.numel() for x in tensors):
        skip("no strided tensor with elements")
    if refusal := _against(case, [x.reshape(-1)[0].clone() for x in tensors], "zero-dimensional inputs"):
        refuse(refusal)
    return None


_LARGE = 2**19  # elements: enough for every kernel to use its threads and vectors


@row
def large(case: Case) -> str | None:
    """Large inputs give what the reference, or a single thread, gives."""
    tensors = case.fresh()
    if any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided tensor of more than one element")
    note = ""
    for size in sizes_of(tensors)[:2]:
        most = max(tensors, key=lambda x: (x.shape.count(size) if size in x.shape else 0, x.numel()))
        power = max(1, list(most.shape).count(size))
        new = max(size, int(size * (_LARGE / max(most.numel(), 1)) ** (1 / power)))
        with contextlib.suppress(Exception):
            while new > size and sum(x.numel() for x in _fake(case, resized(tensors, size, new))[1]) > 2**22:
                new //= 4
        big = resized(tensors, size, max(new, size))
        inputs = f"inputs whose dimensions of size {size} are {new} long"
        refusal = _against(case, big, inputs)
        if refusal:
            note = note or refusal
            continue
        outs = plain(case, big)
        torch.set_num_threads(1)
        if wrong := differs(outs, plain(case, big), coarse=4 * tolerance(*case.leaves)):
            fail(f"{case.name}: given {inputs}, {wrong}, which one thread gives", "see how threads divide the work")
        return f"{new} instead of {size}"
    refuse(note)


# ---- the machine ----


@row
def stream(case: Case) -> str | None:
    """On another stream it gives what it gives on the default one."""
    if case.device.type in ("cpu", "meta"):
        skip(f"{case.device.type} has no streams")
    side = torch.Stream(device=case.device)
    side.wait_stream(torch.accelerator.current_stream(case.device))
    tensors = case.fresh()
    with side:
        outs = plain(case, tensors)
        grads = gradients(case.run, case.fresh(grad=True), case.wanted) if case.derivative.status == "pass" else []
    side.record_event().synchronize()
    remedy = "launch on the current stream of the tensors' device, not on the default one"
    if wrong := differs(outs, case.expected):
        fail(f"{case.name}: on another stream {wrong}, which the default stream gives", remedy)
    if grads and (wrong := differs(grads, case.gradients, "the gradient of differentiable argument")):
        fail(f"{case.name}: on another stream {wrong}, which the default stream gives", remedy)
    return None


@contextlib.contextmanager
def _garbage(case: Case, pattern: int) -> Iterator[None]:
    """Memory handed out in here is filled with the byte `pattern`, as far as this device and C library let us."""
    kind = case.device.type
    if kind == "openreg":
        from openreg_ops import _C

        before = _C.poison()
        _C.set_poison(pattern == 0xFF)  # it knows one pattern
        try:
            yield
        finally:
            _C.set_poison(before)
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if kind == "cpu" else None
    if mallopt:
        perturb = -6  # M_PERTURB: malloc fills memory with the complement
        mallopt(perturb, pattern ^ 0xFF or 0x100)
        try:
            yield
        finally:
            mallopt(perturb, 0)
        return
    # Elsewhere: leave garbage in freed blocks of the sizes that the call will ask for.
    blocks = []
    for x in (*case.leaves, *case.expected):
        for _ in range(4):
            blocks.append(torch.full((x.numel() * x.element_size(),), pattern, dtype=torch.uint8, device=case.device))
    del blocks
    yield


@row
def poison(case: Case) -> str | None:
    """What it gives does not depend on what was in memory before."""
    remedy = "write every element of what torch.empty gives before it is read; torch.zeros where sums start from it"

    def run(what: str) -> list[Tensor | None]:
        tensors = case.fresh(grad=what == "gradient")
        seen = gradients(case.run, tensors, case.wanted) if what == "gradient" else plain(case, tensors)
        return [x if x is None else x.detach().clone() for x in seen]

    for what in ("output", "gradient"):
        if what == "gradient" and case.derivative.status != "pass":
            continue
        expected = None
        for pattern in (0x5A, 0xFF, 0x00):
            with _garbage(case, pattern):
                got = run(what)
            expected = expected or got
            if wrong := differs(got, expected, what):
                fail(
                    f"{case.name}: it reads memory that was never written: with fresh memory filled by 0x{pattern:02X} "
                    f"bytes instead of 0x5A, {wrong}",
                    remedy,
                )
    return None


@row
def determinism(case: Case) -> str | None:
    """Three calls give the same bits, with any number of threads."""
    remedy = "add in a fixed order: one partial sum a block, combined by index, not by arrival"
    function = gradients if case.derivative.status == "pass" else None

    def everything() -> list[Tensor | None]:
        outs: list[Tensor | None] = list(plain(case, case.fresh()))
        return outs + (function(case.run, case.fresh(grad=True), case.wanted) if function else [])

    first = everything()
    for what, threads in (("the same call again", None), ("one thread", 1), ("three threads", 3)):
        if threads:
            torch.set_num_threads(threads)
        for _ in range(2):
            again = everything()
            if wrong := differs(again, first, "result"):
                fail(f"{case.name}: {what} gives another result: {wrong}", remedy)
            if wrong := differs(again, first, "result", exact=True):
                warn(f"{case.name}: {what} rounds differently: {wrong}", remedy)
    return None


@row
def threads(case: Case) -> str | None:
    """Calls from four threads at once give what one gives, on inputs of their own and on shared ones."""
    if case.seeded:
        skip("its numbers are random, and the generator is shared")
    distinct = [[x * s if differentiable(x) else x for x in case.fresh()] for s in (1.0, 0.75, 1.25, 1.5)]
    shared = case.fresh()
    wrongs: list[str] = []
    start = threading.Barrier(4)

    def work(tensors: list[Tensor], expected: list[Tensor], what: str) -> None:
        try:
            start.wait(60)
            for _ in range(8):
                if wrong := differs(plain(case, tensors), expected):
                    wrongs.append(f"on {what}, {wrong}, which one thread alone gives")
                    return
        except Exception as error:
            wrongs.append(f"on {what}, a call raised {last_line(error)}")

    for what, inputs in (("inputs of their own", distinct), ("shared inputs", [shared] * 4)):
        alone = [plain(case, tensors) for tensors in inputs]
        workers = [
            threading.Thread(target=work, args=(tensors, expected, what), daemon=True)
            for tensors, expected in zip(inputs, alone, strict=True)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        if any(worker.is_alive() for worker in workers):
            fail(f"{case.name}: four threads that call it on {what} do not end", "look for a lock that is taken twice")
        if wrongs:
            fail(
                f"{case.name}: called from four threads {wrongs[0]}",
                "keep nothing between calls (static buffers, module globals), or guard it by a lock",
            )
    return None


@row
def overhead(case: Case) -> str | None:
    """What a call costs beside the work, in nanoseconds."""
    tensors = case.fresh()
    for size in sizes_of(tensors)[:2]:
        with contextlib.suppress(Exception):
            nothing = resized(tensors, size, 0)
            plain(case, nothing)
            tensors = nothing
            break
    inputs = "empty inputs" if any(not x.numel() for x in tensors) else "the sample"
    args, kwargs = case.arguments(tensors)
    with torch.no_grad():
        call = _nanoseconds(lambda: case.op(*args, **kwargs))
        small = torch.ones(1, device=case.device)
        base = _nanoseconds(lambda: torch.ops.aten.neg.default(small))
    text = f"{call:,.0f} ns a call on {inputs}"
    if case.derivative.status == "pass" and not case.mutable:
        args, kwargs = case.arguments(case.leaf(tensors))
        text += f", {_nanoseconds(lambda: case.op(*args, **kwargs)):,.0f} ns where a gradient is wanted"
    return f"{text}; aten::neg takes {base:,.0f} ns"


def _nanoseconds(call: Callable[[], Any]) -> float:
    """The quickest of some batches, of 40 ms altogether."""
    call()
    best, count = float("inf"), 1
    end = time.perf_counter_ns() + 40_000_000
    while (begin := time.perf_counter_ns()) < end:
        for _ in range(count):
            call()
        took = time.perf_counter_ns() - begin
        best = min(best, took / count)
        if took < 1_000_000:
            count *= 2
    return best
