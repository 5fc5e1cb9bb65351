"""Shared by the checks: what an error means, what a check needs, and other values and layouts for the sample."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Operator, Verdict, limit, refuse, skip
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import has_numbers, is_small
from openreg_tools.core.variations import LAYOUTS, permuted, sizes_of, slices

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
    """Returns true if an error says that something is not supported."""
    if isinstance(error, NotImplementedError):
        return True
    accident = isinstance(error, _ACCIDENTS) or (isinstance(error, TypeError) and _TYPE_ACCIDENT.search(str(error)))
    return not accident and bool(_REFUSAL.search(str(error)))


def refuse_or_fail(case: Case, error: BaseException, what: str, remedy: str) -> NoReturn:
    """End the check as refused if the error says so, else as failed."""
    if refused(error):
        refuse(all_lines(error))
    case.fail(f"{what} raised {all_lines(error)}", remedy)


def unless_generated(case: Case, error: BaseException) -> None:
    """End the check at pytorch#168393: the Function that register_autograd generates has no setup_context."""
    if "must override the setup_context" not in str(error):
        return
    with torch.enable_grad():
        outs = case.run(*case.fresh(grad=True))
    if any(out.grad_fn is not None and out.grad_fn.name().startswith("GeneratedBackwardFor") for out in outs):
        limit("torch.func does not support torch.library.register_autograd (pytorch#168393)")


@contextlib.contextmanager
def only_verdicts() -> Iterator[None]:
    """In the body, only verdicts are raised: an operator need not support inputs that its author did not give."""
    try:
        yield
    except Verdict:
        raise
    except Exception:
        pass


# ---- what a check needs ----


def needs_tensors(case: Case) -> None:
    if not case.expected:
        skip("it returns no tensor, and a compiler does not know its result")


def needs_literals(case: Case) -> None:
    if case.objects:
        limit(f"PyTorch's compilers and tracers do not take every object of {', '.join(case.objects)} as an argument")


def needs_derivative(case: Case) -> None:
    if not case.has_derivative:
        skip("there is no derivative to check: see backward")


def needs_order(case: Case) -> None:
    """Skip an operator that draws random numbers: where it draws them decides which it gets."""
    if case.seeded:
        skip("its numbers are random")


def needs_sizes(case: Case) -> None:
    if not sizes_of(case.leaves):
        skip("no strided tensor of more than one element")


def is_symbolic(op: Operator, name: str) -> bool:
    """Returns true if an argument's type in the schema is SymInt, which its Python type does not say."""
    return bool(re.search(rf"\bSymInt\S* {name}\b", str(op._schema)))


def picks(case: Case) -> bool:
    """Returns true if it also returns integers, like sort: it may pick any of several equal elements."""
    return any(not x.is_floating_point() and not x.is_complex() for x in case.expected)


# ---- other values and layouts ----


def others_than(value: Any) -> list[Any]:
    """Other values of an argument: of a flag, a number or a word."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1]
        case float():
            return [value * 0.75 if abs(value) > 0.01 else value + 0.5]  # for an epsilon, a larger one
        case str():
            return [value + "x"]
    return []


def scaled(x: Tensor, factor: float, plus: float = 0) -> Tensor:
    """A copy with a floating tensor's values multiplied, and moved; through float32 where x has no arithmetic."""
    if is_small(x) and str(x.dtype).startswith("torch.float8"):
        return (x.to(torch.float32) * factor + plus).to(x.dtype)
    if not has_numbers(x):
        return x.clone()
    return x * factor + plus if plus else x * factor  # a sparse tensor plus a number is an error


# The layouts that are contiguous but start inside their storage. A kernel has no reason to treat them in another way.
CONTIGUOUS = {
    "offset": "that start 16 bytes into their storage",
    "unaligned": "that start one element into their storage, which is not aligned to 16 bytes",
    "slices": "that are slices of one buffer, not aligned to 16 bytes",
}


def layouts_of(case: Case, **options: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """The unchanged sample, in every layout, as slices of one buffer, and with only its first tensor permuted."""
    yield "the sample's", case.fresh(**options)
    for name, layout in LAYOUTS.items():
        yield name, [layout(x) for x in case.fresh(**options)]
    tensors = case.fresh(**options)
    sliced = slices(tensors)
    if any(x is not y for x, y in zip(sliced, tensors, strict=True)):
        yield "slices", sliced
    if len(tensors) > 1 and tensors[0].dim() > 1:
        yield "one permuted and otherwise contiguous", [permuted(tensors[0]), *tensors[1:]]


def zipped(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of several calls, each stacked."""
    return [torch.stack(outs) for outs in zip(*tensors, strict=True)]
