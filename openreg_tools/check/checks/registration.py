"""Checks of what is registered with an operator: its numbers, its effects, its defaults, its sizes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from openreg_tools.check.case import Case, Verdict, pull, skip
from openreg_tools.check.checks.common import is_symbolic, needs_order, others_than, scaled
from openreg_tools.check.checks.derivatives import derivative, gradcheck
from openreg_tools.check.checks.fakes import fake_mode, faking, run_fake, unlike_fake
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.variations import of_sizes, reversed_in, sizes_of


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


# ---- outputs that are not tensors ----


def _other_inputs(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    """The sample, other values, and other sizes."""
    yield "the sample", case.fresh()
    for what, factor in (("negated", -1.0), ("smaller", 0.125), ("larger", 8.0)):
        yield f"{what} values", [scaled(x, factor) for x in case.fresh()]
    for i, name in enumerate(case.names):
        tensors = case.fresh()
        tensors[i] = ~tensors[i] if tensors[i].dtype == torch.bool else reversed_in(tensors[i])
        yield f"other values of {name}", tensors
    for size in sizes_of(case.leaves):
        yield f"sizes of {size + 1} instead of {size}", of_sizes(case.fresh(), {size: size + 1})


def _numbers(case: Case, tensors: list[Tensor]) -> list[Any]:
    """The outputs that are not tensors, of a call on these tensors."""
    args, kwargs = case.arguments(tensors)
    with torch.no_grad():
        out = case.op(*args, **kwargs)
    outs = (out,) if len(case.schema.returns) == 1 else out or ()
    kinds = [str(returned.type) for returned in case.schema.returns]
    return tree_leaves([value for value, kind in zip(outs, kinds, strict=True) if "Tensor" not in kind])


def fake_numbers(case: Case) -> str | None:
    """The fake kernel gives the kernel's numbers (int, float, bool), or new symbols, for other inputs too."""
    if all("Tensor" in str(returned.type) for returned in case.schema.returns):
        skip("it returns no number")
    needs_order(case)
    tried = 0
    for what, tensors in _other_inputs(case):
        with faking(fake_mode(case, static_shapes=True)) as mode:
            fakes = [mode.from_tensor(x) for x in tensors]
        try:
            numbers = _numbers(case, tensors)
        except Exception:  # not every operator accepts the others
            continue
        try:
            with faking(mode):
                said = _numbers(case, fakes)
        except Exception as error:
            skip(f"the fake kernel gives no number: {all_lines(error)}")
        tried += 1
        for i, (real, fake) in enumerate(zip(numbers, said, strict=True)):
            known = not isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)) or fake.node.has_hint()
            if known and not _same(real, getattr(getattr(fake, "node", None), "hint", fake)):
                case.fail(
                    f"given {what} number {i} of its outputs is {real}, but the fake kernel says {fake}, which a compiled "
                    "program takes for the result of every call",
                    "in the fake kernel, return torch.library.get_ctx().new_dynamic_size() for an int that depends on "
                    "values, and compute one that depends on sizes from x.shape as the kernel does; return any other "
                    "number as a tensor of no dimension",
                )
    return f"{tried} inputs"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) or a != a and b != b
    return a == b


# ---- effects ----


def effects(case: Case) -> str | None:
    """Compilers keep its calls: it returns or writes something, or is registered as effectful."""
    from torch._library.utils import is_impure

    if case.schema.returns or case.mutable:
        skip("it returns or writes something")
    if case.composite:
        skip("compilers keep the operators that it is made of")
    if not is_impure(case.op):
        case.fail(
            "it returns nothing, and its schema says that it writes nothing, so compilers remove its calls",
            "declare what it writes (Tensor(a!) x in the schema, mutates_args in custom_op); for an effect outside of its "
            f'arguments: torch.library._register_effectful_op("{case.name}", torch._library.effects.EffectType.ORDERED)',
        )
    return "registered as effectful"


# ---- arguments with a default ----

_SIGNATURE = re.compile(r"\(\) (takes|missing|got an unexpected keyword)")
_UNPACKED = re.compile("(too many|not enough) values to unpack|tuple index out of range")  # in_dims, or inputs
_VALUES = {
    "bool": True,
    "int": 1,
    "float": 0.5,
    "number": 0.5,
    "str": "x",
    "ScalarType": torch.float64,
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
}


def _another(argument: Any, case: Case) -> Any:
    """A value unlike an argument's default; None if there is none. Only fake kernels get it, unless it is a bool."""
    kind = re.sub(r"^Optional\[(.*)\]$", r"\1", str(argument.type)).replace("SymInt", "int")
    default = argument.default_value
    if others := others_than(default) if kind in ("bool", "int", "float", "number", "str") else []:
        return others[0]
    if kind == "Tensor":
        return case.fresh()[0] if case.leaves else None
    if kind.startswith("List["):
        if default and all(isinstance(number, (int, float)) for number in default):
            return [number + 1 for number in default]
        return [_VALUES[kind[5:-1]]] if kind[5:-1] in _VALUES else None
    return _VALUES.get(kind)


def defaults(case: Case) -> str | None:
    """Kernel, fake kernel, derivative, batching rule and autocast take each argument with a default, passed or omitted."""
    optional = [argument for argument in case.schema.arguments if argument.has_default_value()]
    if not optional:
        skip("no argument has a default")
    calls: list[tuple[str, dict[str, Any], bool]] = [("which omits its arguments with a default", {}, True)]
    for argument in optional:
        if (value := _another(argument, case)) is not None:
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            calls.append((f"with {argument.name}={shown}", {argument.name: value}, isinstance(value, bool)))
    names = {argument.name for argument in optional}
    for what, changes, may_run in calls:
        real = None
        if may_run and case.leaves:
            try:
                with torch.no_grad():
                    real = _call(case, names, changes, case.fresh())
            except Exception as error:
                _unless_accepted(case, what, "the kernel", error)
        for place, run in _places(case).items():
            tensors = case.fresh()
            try:
                with faking(fake_mode(case, static_shapes=True)) as mode:
                    given = {k: mode.from_tensor(x) if isinstance(x, Tensor) else x for k, x in changes.items()}
                    call = functools.partial(_call, case, names, given)
                    said = run(call, [mode.from_tensor(x) for x in tensors])
            except Exception as error:
                _unless_accepted(case, what, place, error)
                continue
            compared = place == "the fake kernel" and real is not None
            wrong = unlike_fake(_tensors(real), _tensors(said)) if compared else ""
            if wrong and not unlike_fake(case.expected, run_fake(case, case.fresh())[1]):  # fake_layouts has the sample
                case.fail(
                    f"in a call {what}, {wrong}",
                    "compute the outputs' shapes and dtypes in the fake kernel from every argument",
                )
    for argument in optional:
        if isinstance(argument.default_value, float):
            _gradient_with(case, argument.name, _another(argument, case))
    return f"{len(calls)} calls"


def _gradient_with(case: Case, name: str, value: float) -> None:
    """Fail if the gradient is right for the sample, and wrong for another value of an argument."""
    if not case.has_derivative or case.intended or case.mutable:
        return
    other = Case(case.op, case.sample_with(name, value), case.device, differentiate=derivative)
    try:
        gradcheck(case)
    except Verdict:
        return
    try:
        gradcheck(other)
    except Verdict as verdict:
        if verdict.status == "fail":
            case.fail(
                f"with {name}={value!r}, {verdict.sentence.partition(': ')[2]}",
                f"compute the backward from every argument; setup_context gets {name} among its inputs, or among "
                "keyword_only_inputs",
            )
    except Exception:  # the kernel does not accept the value
        return


def _call(case: Case, optional: set[str], changes: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Call the operator with the sample's arguments, except that these changes replace those with a default."""
    given = case.given(tensors)
    if not changes:
        given = {name: value for name, value in given.items() if name not in optional}
    return case.op(**(given | changes))


def _places(case: Case) -> dict[str, Any]:
    """What may take the arguments of a call, and how to run it on fake tensors."""

    def gradient(call: Any, tensors: list[Tensor]) -> None:
        leaves = case.leaf(tensors)
        pull(_tensors(call(leaves)), leaves, lambda outs: list(map(torch.ones_like, outs)))

    def batched(call: Any, tensors: list[Tensor]) -> None:
        torch.vmap(lambda *rows: call(list(rows)))(*(torch.stack([x, x]) for x in tensors))

    def cast(call: Any, tensors: list[Tensor]) -> None:
        with torch.no_grad(), torch.autocast(case.device.type, torch.bfloat16):
            call(tensors)

    def fake(call: Any, tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            return call(tensors)

    places = {"the fake kernel": fake}
    if case.has_derivative:
        places["the derivative"] = gradient
    if case.leaves and case.has_kernel("FuncTorchBatched"):
        places["the batching rule"] = batched
    if case.has_kernel(f"Autocast{case.key}"):
        places["the autocast kernel"] = cast
    return places


def _unless_accepted(case: Case, what: str, place: str, error: Exception) -> None:
    """Fail for an error that says that a function lacks an argument, or a default."""
    lacks = isinstance(error, TypeError) and _SIGNATURE.search(str(error))
    if not lacks and place in ("the derivative", "the batching rule") and "a tensor" not in what:
        lacks = isinstance(error, (ValueError, IndexError)) and _UNPACKED.search(str(error))
    if lacks:
        case.fail(
            f"in a call {what}, {place} raised {all_lines(error)}",
            f"give {place} every argument of the schema, with the schema's default: the dispatcher passes an argument only "
            f"if it differs from its default. The schema is {case.schema}",
        )


# ---- sizes ----


def int_sizes(case: Case) -> str | None:
    """An argument that is a size of an output is SymInt in the schema, so that a new size does not compile again."""
    ints = [a for a in case.schema.arguments if "int" in str(a.type) and not is_symbolic(case.op, a.name)]
    if not ints:
        skip("no argument is an int; SymInt is right for a size")
    sizes = set(sizes_of(case.leaves))
    for argument in ints:
        value = case.value(argument.name)
        is_list = isinstance(value, (list, tuple))
        for i, n in enumerate(value if is_list else [value]):
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                continue
            other = [*value[:i], n + 1, *value[i + 1 :]] if is_list else n + 1
            dim = _size_of_output(case, argument.name, n, other)
            if dim is None:
                continue
            fixed = isinstance(argument.default_value, int) and n not in sizes
            (case.warn if fixed else case.fail)(
                f"{argument.name} is the size of {dim}, and the schema says int; a program that passes a dynamic size, such "
                "as x.shape[0], compiles again for each value",
                f"write SymInt {argument.name} in the schema, and c10::SymInt in a C++ kernel; the kernel may stay as it is",
            )
    return None


def _size_of_output(case: Case, name: str, n: int, other: Any) -> str | None:
    """Which dimension of an output the fake kernel makes as long as the argument, and no other depends on it."""
    shapes = []
    for changes in ({}, {name: other}):
        tensors = case.fresh()
        try:
            with faking(fake_mode(case, static_shapes=True)) as mode, torch.no_grad():
                outs = case.op(**(case.given(mode.from_tensor(x) for x in tensors) | changes))
        except Exception:
            return None
        shapes.append([list(x.shape) for x in _tensors(outs)])
    before, after = shapes
    if [len(shape) for shape in before] != [len(shape) for shape in after]:
        return None
    changed = [
        (i, d, a, b)
        for i, pair in enumerate(zip(before, after, strict=True))
        for d, (a, b) in enumerate(zip(*pair, strict=True))
        if not (isinstance(a, int) and isinstance(b, int)) or a != b
    ]
    if changed and all((a, b) == (n, n + 1) for _, _, a, b in changed):
        return f"dimension {changed[0][1]} of output {changed[0][0]}"
    return None
