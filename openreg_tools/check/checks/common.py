"""Shared by the checks: how they end, how they compare, and the layouts that they try."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Operator, Outcome, differentiable, last_line, small


def fail(sentence: str, remedy: str) -> NoReturn:
    raise Outcome("fail", sentence, remedy)


def warn(sentence: str, remedy: str = "") -> NoReturn:
    raise Outcome("warn", sentence, remedy)


def refuse(sentence: str) -> NoReturn:
    raise Outcome("refused", sentence)


def limit(sentence: str) -> NoReturn:
    """End the check at a limit of PyTorch, about which the operator's author can do nothing."""
    raise Outcome("limit", sentence)


def skip(reason: str) -> NoReturn:
    raise Outcome("skip", reason)


@contextlib.contextmanager
def only_outcomes() -> Iterator[None]:
    """For inputs that the author did not give: not every operator supports them."""
    try:
        yield
    except Outcome:
        raise
    except Exception:
        pass


# ---- what an error means ----

# Errors in which an operator, or PyTorch, says that something is not supported; any other error is an accident.
_REFUSAL = re.compile(
    r"not (yet |currently )?(been )?(implemented|supported)|(n't|not) (yet )?(have )?support|unsupported|not differentiable"
    r"|no autograd formula|(no|not? have an?) (second |double |higher[- ]order )?(derivative|gradient|backward|forward)"
    r"|once_differentiable|cannot use C\+\+|must override the setup_context|generate_vmap_rule|vmap",
    re.IGNORECASE,
)
# The error for a derivative that another operator lacks, from PyTorch's or the device's fallback.
LACKING = re.compile(
    r"(?<!the )derivative for (\w+::\w+)[.\w]* is not implemented"
    r"|backward through (\w+\.\w+)[.\w]* but no autograd formula"
)
WARNED = "autograd kernel was not registered"
# Python's own errors that may sound like a refusal: "unsupported operand type(s)". For TypeErrors, only these messages.
_ACCIDENTS = (LookupError, AttributeError, NameError, ArithmeticError, AssertionError)
_TYPE_ACCIDENT = re.compile(
    r"^unsupported (operand|format)|between instances of|^'[\w.]+' object |\w\(\) (takes|got|missing)"
)


def refused(error: BaseException) -> bool:
    if isinstance(error, NotImplementedError):
        return True
    accident = isinstance(error, _ACCIDENTS) or (isinstance(error, TypeError) and _TYPE_ACCIDENT.search(str(error)))
    return not accident and bool(_REFUSAL.search(str(error)))


def refuse_or_fail(case: Case, error: BaseException, what: str, remedy: str) -> NoReturn:
    """End the check as refused if the error says so, else as failed."""
    if refused(error):
        refuse(last_line(error))
    fail(f"{case.name}: {what} raised {last_line(error)}", remedy)


def unless_generated(case: Case, error: BaseException, where: str) -> None:
    """End the check at pytorch#168393: the Function that register_autograd generates has no setup_context."""
    if "must override the setup_context" not in str(error):
        return
    with torch.enable_grad():
        outs = case.run(*case.fresh(grad=True))
    if any(out.grad_fn is not None and out.grad_fn.name().startswith("GeneratedBackwardFor") for out in outs):
        limit(f"{where} does not support torch.library.register_autograd (pytorch#168393)")


def needs_tensors(case: Case) -> None:
    if not case.expected:
        skip("it returns no tensor, and a compiler does not know its result")


def needs_literals(case: Case) -> None:
    if case.objects:
        limit(f"PyTorch's compilers and tracers do not take every object of {', '.join(case.objects)} as an argument")


def needs_derivative(case: Case) -> None:
    if case.derivative.status != "pass":
        skip("there is no derivative to check: see backward")


def is_symbolic(op: Operator, name: str) -> bool:
    """Whether an argument's type in the schema is SymInt, which its Python type does not say."""
    return bool(re.search(rf"\bSymInt\S* {name}\b", str(op._schema)))


# ---- comparing ----

_TOLERANCE = {  # rtol and atol; atol is for numbers near 1, and grows with the largest
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-9,
    torch.complex64: 2e-5,
}


def scaled(x: Tensor, factor: float, plus: float = 0) -> Tensor:
    """A copy with a floating tensor's values multiplied, and moved; through float32 where x has no arithmetic."""
    if small(x) and x.dtype in _FLOAT8:
        return (x.to(torch.float32) * factor + plus).to(x.dtype)
    return x * factor + plus if differentiable(x) else x.clone()


# float8 rounds to a neighbor in another order of additions; float4 cannot be converted, and is compared as bytes.
_FLOAT8 = {
    dtype: torch.finfo(dtype).eps
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.float8")
}


def reversed_in(x: Tensor) -> Tensor:
    """A copy with the elements in the opposite order along each dimension."""
    raw = x.view(torch.uint8) if small(x) else x  # PyTorch cannot flip float8
    return raw.flip(tuple(range(x.dim()))).view(x.dtype)


def tolerance(*tensors: Tensor) -> float:
    """The tolerance for the coarsest of the dtypes; 0 for integers."""
    return max((_TOLERANCE.get(x.dtype, 0.1) for x in tensors if differentiable(x)), default=0.0)


def differs(
    actual: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    what: str = "output",
    exact: bool = False,
    dtype: bool = True,
    coarse: float = 0,
) -> str:
    """The first difference between two lists of tensors, as "output 0 is …"; "" if there is none."""
    if len(actual) != len(expected):
        return f"there are {len(actual)} {what}s instead of {len(expected)}"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a is None or e is None:
            if not (is_zero(a) and is_zero(e)):
                return f"{what} {i} is {'missing' if a is None else 'there'}, but should not be"
            continue
        if a.shape != e.shape:
            return f"{what} {i} has shape {list(a.shape)} instead of {list(e.shape)}"
        if dtype and a.dtype != e.dtype:
            return f"{what} {i} is {dtype_name(a)} instead of {dtype_name(e)}"
        if a.is_meta or e.is_meta or not a.numel():
            continue
        a, e = (x.detach().to_dense() if x.layout != torch.strided else x.detach() for x in (a, e))
        near = 0.0 if exact else max(tolerance(a, e), coarse)
        if small(a) or small(e):
            eps = _FLOAT8.get(a.dtype, _FLOAT8.get(e.dtype))
            a, e = (x.cpu().to(torch.float32) if eps else x.cpu().view(torch.uint8) for x in (a, e))
            if eps and not exact and torch.allclose(a, e, rtol=eps, atol=eps * 2**-6, equal_nan=True):
                continue
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


def is_zero(x: Tensor | None) -> bool:
    return x is None or not x.count_nonzero()


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def picks(case: Case) -> bool:
    """Whether it also returns integers, like sort: it may pick any of several equal elements."""
    return any(not x.is_floating_point() and not x.is_complex() for x in case.expected)


def plain(case: Case, tensors: Sequence[Tensor], function: Any = None) -> list[Tensor]:
    """The outputs without autograd, copied so that nothing overwrites them."""
    with torch.no_grad():
        return _detached((function or case.run)(*tensors))


def in_place(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call on these tensors themselves, then what it wrote: `plain` without its copies of the inputs."""
    outs = plain(case, tensors, case.function(raw=True))
    return [*outs, *_detached([tensors[i] for i in case.written])]


def by_reference(case: Case, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The outputs of the reference, or of the operator's CPU kernel; None if there is neither."""
    function = reference_of(case)
    return plain(case, [x.detach().cpu() for x in tensors], function) if function else None


def reference_of(case: Case) -> Callable[..., tuple[Tensor, ...]] | None:
    if case.reference:
        return case.function(op=case.reference)
    host = not any(isinstance(c, torch.device) for c in case.constants.values())
    # Each device's generator gives different random numbers.
    if case.device.type != "cpu" and host and not case.seeded and case.has_computed_kernel("CPU"):
        return case.function()
    return None


def storage_of(x: Tensor) -> int | None:
    return x.untyped_storage()._cdata if x.layout == torch.strided and x.numel() else None


# ---- layouts: the same values with other strides ----


def permuted(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x.clone()


def padded(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return torch.stack([x, x, x])[1]
    other = reversed_in(x)  # so that reading the wrong elements shows
    return torch.cat([other, x, other], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def stepped(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 1]


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x) if x.dim() and x.shape[0] else x


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    x = x if x.dim() >= 4 else x.expand(*(2, 3)[: 4 - x.dim()], *x.shape)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _inside(x: Tensor, before: int) -> Tensor:
    """Contiguous, `before` elements into its storage. What surrounds it is NaN, or an integer that it has itself."""
    if not x.numel():
        return x
    flat = x.reshape(-1)
    around = flat.new_full((before,), torch.nan) if differentiable(x) else flat[:1].repeat(before)
    return torch.cat([around, flat, around])[before:-before].view(x.shape)


def offset(x: Tensor) -> Tensor:
    return _inside(x, max(1, 16 // x.element_size()))


def unaligned(x: Tensor) -> Tensor:
    return _inside(x, 1)


def _slices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous slices of one buffer, as q, k and v of one projection are; the first starts it, the others are unaligned."""
    out = list(tensors)
    for dtype in {x.dtype for x in tensors}:
        mine = [i for i, x in enumerate(tensors) if x.dtype == dtype and x.layout == torch.strided and x.numel()]
        if len(mine) > 1:
            flat = [tensors[i].reshape(-1) for i in mine]
            parts = torch.cat([piece for x in flat for piece in (x, x[:1])]).split(
                [n for x in flat for n in (len(x), 1)]
            )
            for i, part in zip(mine, parts[::2], strict=True):
                out[i] = part.view(tensors[i].shape)
    return out


# The layouts that are contiguous but start inside their storage. A kernel has no reason to treat them in another way.
CONTIGUOUS = {
    "offset": "that start 16 bytes into their storage",
    "unaligned": "that start one element into their storage, which is not aligned to 16 bytes",
    "slices": "that are slices of one buffer, not aligned to 16 bytes",
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": offset,
    "unaligned": unaligned,
    "permuted": permuted,
    "padded": padded,
    "stepped": stepped,
    "expanded": _expanded,
    "channels-last": _channels_last,
}


def layouts_of(case: Case, **options: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """The unchanged sample, in every layout, as slices of one buffer, and with only its first tensor permuted."""
    yield "the sample's", case.fresh(**options)
    for name, layout in LAYOUTS.items():
        yield name, [layout(x) if x.layout == torch.strided else x for x in case.fresh(**options)]
    tensors = case.fresh(**options)
    slices = _slices(tensors)
    if any(x is not y for x, y in zip(slices, tensors, strict=True)):
        yield "slices", slices
    if len(tensors) > 1 and tensors[0].dim() > 1:
        yield "one permuted and otherwise contiguous", [permuted(tensors[0]), *tensors[1:]]


def resized(tensors: Sequence[Tensor], old: int, new: int) -> list[Tensor]:
    """Every dimension of size `old` becomes `new` long, by repeating or dropping elements."""
    return of_sizes(tensors, {old: new})


def of_sizes(tensors: Sequence[Tensor], sizes: Mapping[int, int]) -> list[Tensor]:
    """Every dimension whose size is a key becomes as long as its value, by repeating or dropping elements.

    Integers stay in order, with the first and the last one, because they may be the offsets of rows.
    """
    out = []
    for x in tensors:
        for d, old in enumerate(x.shape):
            if old in sizes:
                new = torch.arange(sizes[old], device=x.device)
                last = max(sizes[old] - 1, 1)
                x = x.index_select(d, new % max(old, 1) if differentiable(x) else new * (old - 1) // last)
        out.append(x)
    return out


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """The distinct sizes above one, starting with the largest tensor's."""
    ordered = sorted(tensors, key=lambda x: -x.dim())
    return list(dict.fromkeys(size for x in ordered for size in x.shape if size > 1))
