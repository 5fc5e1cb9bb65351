"""Checks of what is registered with an operator: its numbers, its effects, its defaults, its sizes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.check.case import Case, Outcome, attached, last_line
from openreg_tools.check.checks.common import dtype_name, fail, is_symbolic, resized, scaled, sizes_of, skip, warn
from openreg_tools.check.checks.derivatives import derivative, gradcheck
from openreg_tools.check.checks.fakes import fake_mode, run_fake
from openreg_tools.samples import Sample

# ---- outputs that are not tensors ----


def _other_inputs(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    """The sample, other values, and other sizes."""
    yield "the sample", case.fresh()
    for what, factor in (("negated", -1.0), ("smaller", 0.125), ("larger", 8.0)):
        yield f"{what} values", [scaled(x, factor) for x in case.fresh()]
    for i, name in enumerate(case.names):
        tensors = case.fresh()
        if tensors[i].layout == torch.strided and tensors[i].numel() > 1:
            flat = tensors[i].flatten()
            tensors[i] = (~flat if flat.dtype == torch.bool else flat.roll(1)).view(tensors[i].shape)
            yield f"other values of {name}", tensors
    for size in sizes_of(case.leaves) if all(x.layout == torch.strided for x in case.leaves) else ():
        yield f"sizes of {size + 1} instead of {size}", resized(case.fresh(), size, size + 1)


def fake_numbers(case: Case) -> str | None:
    """The fake kernel gives the kernel's numbers (int, float, bool), or new symbols, for other inputs too."""
    if all("Tensor" in str(each.type) for each in case.schema.returns):
        skip("it returns no number")
    if case.seeded:
        skip("its numbers are random")
    tried = 0
    for what, tensors in _other_inputs(case):
        mode = fake_mode(case, static_shapes=True)
        with mode, enable_python_dispatcher():
            fakes = [mode.from_tensor(x) for x in tensors]
        try:
            numbers = case.numbers(tensors)
        except Exception:  # not every operator accepts the others
            continue
        try:
            with mode, enable_python_dispatcher():
                said = case.numbers(fakes)
        except Exception as error:
            skip(f"the fake kernel gives no number: {last_line(error)}")
        tried += 1
        for i, (real, fake) in enumerate(zip(numbers, said, strict=True)):
            known = not isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)) or fake.node.has_hint()
            if known and not _same(real, getattr(getattr(fake, "node", None), "hint", fake)):
                fail(
                    f"{case.name}: given {what} number {i} of its outputs is {real}, but the fake kernel says {fake}, which "
                    "a compiled program takes for the result of every call",
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
    if case.schema.returns or case.mutable:
        skip("it returns or writes something")
    if case.composite:
        skip("compilers keep the operators that it is made of")
    if not _impure(case):
        fail(
            f"{case.name}: it returns nothing, and its schema says that it writes nothing, so compilers remove its calls",
            "declare what it writes (Tensor(a!) x in the schema, mutates_args in custom_op); for an effect outside of its "
            f'arguments: torch.library._register_effectful_op("{case.name}", torch._library.effects.EffectType.ORDERED)',
        )
    return "registered as effectful"


def _impure(case: Case) -> bool:
    from torch._library.utils import is_impure

    return is_impure(case.op)


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
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]" if "Optional" in str(argument.type) else "")
    kind, default = kind.replace("SymInt", "int"), argument.default_value
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)) and kind in ("int", "float", "number"):
        return default + 1
    if isinstance(default, str):
        return default + "x"
    if kind == "Tensor":
        return case.fresh()[0] if case.leaves else None
    if kind.startswith("List["):
        value = _VALUES.get(kind[5:-1])
        plain = all(isinstance(each, (int, float)) for each in default or ())
        return [each + 1 for each in default] if default and plain else None if value is None else [value]
    return _VALUES.get(kind)


def defaults(case: Case) -> str | None:
    """Kernel, fake kernel, derivative, batching rule and autocast take each argument with a default, passed or omitted."""
    optional = [each for each in case.schema.arguments if each.has_default_value()]
    if not optional:
        skip("no argument has a default")
    calls: list[tuple[str, dict[str, Any], bool]] = [("which omits its arguments with a default", {}, True)]
    for argument in optional:
        value = _another(argument, case)
        if value is not None:
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            calls.append((f"with {argument.name}={shown}", {argument.name: value}, isinstance(value, bool)))
    names = {each.name for each in optional}
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
                with fake_mode(case, static_shapes=True) as mode, enable_python_dispatcher():
                    given = {k: mode.from_tensor(x) if isinstance(x, Tensor) else x for k, x in changes.items()}
                    call = functools.partial(_call, case, names, given)
                    said = run(call, [mode.from_tensor(x) for x in tensors])
            except Exception as error:
                _unless_accepted(case, what, place, error)
                continue
            wrong = _unlike(real, said) if place == "the fake kernel" and real is not None else ""
            if wrong and not _unlike(case.expected, run_fake(case, case.fresh())[1]):  # fake_layouts has the sample
                fail(
                    f"{case.name}: in a call {what}, {wrong}",
                    "compute the outputs' shapes and dtypes in the fake kernel from every argument",
                )
    for argument in optional:
        if isinstance(argument.default_value, float):
            _gradient_with(case, argument.name, _another(argument, case))
    return f"{len(calls)} calls"


def _gradient_with(case: Case, name: str, value: float) -> None:
    """Fail if the gradient is right for the sample, and wrong for another value of an argument."""
    if case.derivative.status != "pass" or case.intended or case.mutable:
        return
    args, kwargs = case.sample.args, case.sample.kwargs
    given = dict(zip((each.name for each in case.schema.arguments), args, strict=False)) | kwargs | {name: value}
    every = [(each, given.get(each.name, each.default_value)) for each in case.schema.arguments]
    positional = [x for each, x in every if not each.kwarg_only]
    sample = Sample(*positional, **{each.name: x for each, x in every if each.kwarg_only})
    other = Case(case.op, sample, str(case.device), None, derivative)
    try:
        gradcheck(case)
    except Outcome:
        return
    try:
        gradcheck(other)
    except Outcome as outcome:
        if outcome.status == "fail":
            fail(
                f"{case.name}: with {name}={value!r}, {outcome.sentence.partition(': ')[2]}",
                f"compute the backward from every argument; setup_context gets {name} among its inputs, or among "
                "keyword_only_inputs",
            )
    except Exception:  # the kernel does not accept the value
        return


def _call(case: Case, optional: set[str], changes: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Call the operator with the sample's arguments, except that these changes replace those with a default."""
    args, kwargs = case.arguments(tensors)
    given = dict(zip((each.name for each in case.schema.arguments), args, strict=False)) | kwargs
    if not changes:
        given = {name: value for name, value in given.items() if name not in optional}
    return case.op(**(given | changes))


def _places(case: Case) -> dict[str, Any]:
    """What may take the arguments of a call, and how to run it on fake tensors."""

    def gradient(call: Any, tensors: list[Tensor]) -> None:
        leaves = case.leaf(tensors)
        outs = attached(x for x in tree_leaves(call(leaves)) if isinstance(x, Tensor))
        torch.autograd.grad(outs, case.of(leaves), [torch.ones_like(x) for x in outs], allow_unused=True)

    def batched(call: Any, tensors: list[Tensor]) -> None:
        torch.vmap(lambda *rows: call(list(rows)))(*(torch.stack([x, x]) for x in tensors))

    def cast(call: Any, tensors: list[Tensor]) -> None:
        with torch.no_grad(), torch.autocast(case.device.type, torch.bfloat16):
            call(tensors)

    def fake(call: Any, tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            return call(tensors)

    places = {"the fake kernel": fake}
    if case.derivative.status == "pass":
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
        fail(
            f"{case.name}: in a call {what}, {place} raised {last_line(error)}",
            f"give {place} every argument of the schema, with the schema's default: the dispatcher passes an argument only "
            f"if it differs from its default. The schema is {case.schema}",
        )


def _unlike(real: Any, said: Any) -> str:
    """The first difference between outputs and fake ones, in shape and dtype."""
    pairs = zip(*([x for x in tree_leaves(outs) if isinstance(x, Tensor)] for outs in (real, said)), strict=False)
    for i, (a, b) in enumerate(pairs):
        known = [n if isinstance(m, int) else m for n, m in zip(a.shape, b.shape, strict=False)]
        if a.dim() != b.dim() or known != list(b.shape):
            return f"output {i} has shape {list(a.shape)}, but the fake kernel says {list(b.shape)}"
        if a.dtype != b.dtype:
            return f"output {i} is {dtype_name(a)}, but the fake kernel says {dtype_name(b)}"
    return ""


# ---- sizes ----


def int_sizes(case: Case) -> str | None:
    """An argument that is a size of an output is SymInt in the schema, so that a new size does not compile again."""
    ints = [each for each in case.schema.arguments if "int" in str(each.type) and not is_symbolic(case.op, each.name)]
    if not ints:
        skip("no argument is an int")
    args, kwargs = case.arguments(case.fresh())
    given = dict(zip((each.name for each in case.schema.arguments), args, strict=False)) | kwargs
    sizes = set(sizes_of(case.leaves))
    for argument in ints:
        value = given.get(argument.name, argument.default_value)
        for i, n in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                continue
            if isinstance(value, (list, tuple)):
                other = [*value[:i], n + 1, *value[i + 1 :]]
            else:
                other = n + 1
            dim = _size_of_output(case, given, argument.name, n, other)
            if dim is None:
                continue
            sentence = (
                f"{case.name}: {argument.name} is the size of {dim}, and the schema says int; a program that passes a "
                "dynamic size, such as x.shape[0], compiles again for each value"
            )
            remedy = f"write SymInt {argument.name} in the schema, and c10::SymInt in a C++ kernel; the kernel may stay as it is"
            fixed = isinstance(argument.default_value, int) and n not in sizes
            (warn if fixed else fail)(sentence, remedy)
    return None


def _size_of_output(case: Case, given: dict[str, Any], name: str, n: int, other: Any) -> str | None:
    """Which dimension of an output the fake kernel makes as long as the argument, and no other depends on it."""
    shapes = []
    for changes in ({}, {name: other}):
        mode = fake_mode(case, static_shapes=True)
        try:
            with mode, enable_python_dispatcher(), torch.no_grad():
                fakes = tree_map(
                    lambda x, mode=mode: mode.from_tensor(x) if isinstance(x, Tensor) else x, given | changes
                )
                outs = case.op(**fakes)
        except Exception:
            return None
        shapes.append([list(x.shape) for x in tree_leaves(outs) if isinstance(x, Tensor)])
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
