"""Checks of programs that use the operator: exported, traced, scripted, copied."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Operator, last_line, small
from openreg_tools.check.checks.common import differs, dtype_name, fail, limit, needs_literals, needs_tensors, skip
from openreg_tools.check.checks.fakes import program, unlike_eager


class _Program(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(*tensors)


@functools.lru_cache(maxsize=1)
def _decompositions(op: Operator, count: int) -> dict[Operator, Callable[..., Any]]:
    """The default decompositions while there are `count` operators; PyTorch reads the registrations of all for them."""
    return torch.export.default_decompositions().materialize()


def export(case: Case) -> str | None:
    """torch.export traces it; the program, its decompositions, and a saved copy run."""
    needs_tensors(case)
    needs_literals(case)
    if case.seeded:
        skip("its numbers are random")
    remedy = "fix the fake kernel: export runs nothing else"
    table = _decompositions(case.op, len(torch._C._dispatch_get_all_op_names()))
    unsupported = _not_saved(case)
    try:
        exported = torch.export.export(_Program(program(case)), tuple(case.fresh()), strict=False)
        forms = {"exported": exported, "decomposed": exported.run_decompositions(table)}
        try:
            forms["saved and loaded"] = _saved(exported)
        except Exception:
            if not unsupported:
                raise
    except Exception as error:
        fail(f"{case.name}: torch.export raised {last_line(error)}", remedy)
    for what, form in forms.items():
        with torch.no_grad():
            outs = form.module()(*case.fresh())
        if wrong := unlike_eager(case, outs):
            fail(f"{case.name}: {what}, {wrong}, which eager gives", remedy)
    if "saved and loaded" not in forms:
        limit(f"torch.export.save does not support {unsupported}")
    return None


def _saved(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program from the file that it was saved to."""
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


def _not_saved(case: Case) -> str:
    """What of the operator's types torch.export.save has no form for."""
    returned = [str(each.type) for each in case.schema.returns]
    kinds = [f"outputs of type {kind}" for kind in dict.fromkeys(returned) if kind not in ("Tensor", "List[Tensor]")]
    kinds += dict.fromkeys(f"arguments of type {type(value).__name__}" for value in case.constants.values())
    kinds += dict.fromkeys(f"{dtype_name(x)}" for x in (*case.leaves, *case.expected) if small(x))
    return ", ".join(kinds)


def jit_trace(case: Case) -> str | None:
    """torch.jit.trace runs it."""
    if case.seeded:
        skip("its numbers are random")
    if not case.expected or not case.leaves:
        skip("torch.jit.trace needs tensors as inputs and outputs")
    needs_literals(case)
    try:
        traced = torch.jit.trace(case.function(), tuple(case.fresh()), check_trace=False)
        outs = traced(*case.fresh())
    except RuntimeError as error:
        _unless_type(error)
        raise
    if wrong := differs([outs] if isinstance(outs, Tensor) else outs, case.expected):
        if any(argument.is_write and "List" in str(argument.type) for argument in case.schema.arguments):
            limit("torch.jit.trace loses writes to the tensors of a list")
        fail(
            f"{case.name}: under torch.jit.trace {wrong}, which eager gives",
            "print the graph of the trace to see what became a constant",
        )
    return None


def _unless_type(error: Exception) -> None:
    """End the check at a type that TorchScript does not support."""
    if found := re.search(
        r"(unsupported|Unsupported|Unknown|unknown) ((output|input|value)? ?type:? .{1,60})", str(error)
    ):
        limit(f"TorchScript does not support it: {found[0].splitlines()[0].split(', from')[0]}")


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
    try:
        unit = torch.jit.CompilationUnit(text)
    except RuntimeError as error:
        _unless_type(error)
        raise
    with torch.no_grad():
        outs = unit.function(*case.fresh())
    outs = [x for x in torch.utils._pytree.tree_leaves(outs) if isinstance(x, Tensor)]
    if wrong := differs(outs, case.expected):
        fail(f"{case.name}: under torch.jit.script {wrong}, which eager gives", "fix the schema's defaults and types")
    return None


def copies(case: Case) -> str | None:
    """A program that uses it survives copy.deepcopy and pickle."""
    if any(isinstance(value, (torch.Generator, torch.ScriptObject)) for value in case.constants.values()):
        skip("the code of a program has no literal for an argument of the sample")
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"t{i}") for i in range(len(case.leaves))]
    args, kwargs = case.arguments(placeholders)
    result = graph.call_function(case.op, args, kwargs)
    graph.output(result)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    def run(program: Any) -> list[Tensor]:
        if case.seeded:
            case.seed()
        with torch.no_grad():
            outs = program(*case.fresh())
        return [x.clone() for x in torch.utils._pytree.tree_leaves(outs) if isinstance(x, Tensor)]

    expected = run(module)
    for what, copied in (
        ("copy.deepcopy", copy.deepcopy(module)),
        ("pickle", pickle.loads(pickle.dumps(module))),
    ):
        if wrong := differs(run(copied), expected):
            fail(f"{case.name}: after {what} of a program that calls it, {wrong}", "find out what the copy lacks")
    return None
