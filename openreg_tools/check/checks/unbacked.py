"""Checks of data-dependent sizes, as from nonzero() and item(): "unbacked" sizes, whose value no compiler knows."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from openreg_tools.check.case import Case, gradients, last_line
from openreg_tools.check.checks.common import differs, dtype_name, fail, needs_literals, needs_tensors, skip, warn
from openreg_tools.check.checks.fakes import fake_mode

_REMEDY = (
    "check sizes with torch._check(size == …, lambda: …), combine conditions with | and & instead of `or` and `and`, take "
    "torch.sym_max for max(), and where a branch is needed, ask guard_or_false of torch.fx.experimental.symbolic_shapes"
)


def _dims(case: Case) -> list[tuple[int, int]]:
    """Which dimensions of which tensors to try: all with more than one element."""
    if any(x.layout != torch.strided for x in case.leaves):
        skip("a tensor is not strided")
    dims = [(i, d) for i, x in enumerate(case.leaves) for d, size in enumerate(x.shape) if size > 1]
    if not dims:
        skip("no tensor has more than one element")
    return dims


def _ask(error: Exception) -> bool:
    """Whether an error says that a size is not known."""
    said = f"{error!r} {error}"
    return any(text in said for text in ("data-dependent", "DataDependent", "unbacked"))


def _depends(case: Case, where: str, error: Exception) -> NoReturn:
    """End the check for an error in a program with such sizes."""
    if _ask(error):
        said = next((line for line in str(error).splitlines() if "guard on" in line), last_line(error))
        warn(
            f"{case.name}: {where} it asks for a size that is not known before the program runs ({said.strip()[:160]}); a "
            "program with such sizes (nonzero, item, masks) does not compile",
            _REMEDY,
        )
    fail(f"{case.name}: {where} it raised {last_line(error)}", _REMEDY)


def _variants(case: Case) -> Iterator[tuple[str, dict[tuple[int, int], int]]]:
    """Which dimensions get which symbol: each dimension alone, dimensions of equal size together, and all with different
    symbols."""
    dims = _dims(case)
    for i, d in dims:
        yield f"with an unbacked dimension {d} of {case.names[i]}", {(i, d): 0}
    sizes = list(dict.fromkeys(case.leaves[i].shape[d] for i, d in dims))
    for size in sizes:
        alike = [(i, d) for i, d in dims if case.leaves[i].shape[d] == size]
        if len(alike) > 1:
            yield f"with an unbacked size instead of {size}", dict.fromkeys(alike, 0)
    if len(dims) > 1:
        yield "with every dimension unbacked", {dim: n for n, dim in enumerate(dims)}


def fake_unbacked(case: Case) -> str | None:
    """The fake kernel works with data-dependent sizes, in each dimension and in all at once."""
    needs_tensors(case)
    variants = list(_variants(case))
    for where, symbols in variants:
        mode = fake_mode(case)
        env = mode.shape_env
        with mode, enable_python_dispatcher(), torch.no_grad():
            sizes = [env.create_unbacked_symint() for _ in range(max(symbols.values()) + 1)]
            for size in sizes:
                torch._check(size >= 0)
            fakes = [
                torch.empty(
                    [sizes[symbols[i, d]] if (i, d) in symbols else n for d, n in enumerate(x.shape)],
                    dtype=x.dtype,
                    device=case.device,
                )
                for i, x in enumerate(case.leaves)
            ]
            try:
                outs = case.run(*fakes)
            except Exception as error:
                _depends(case, f"{where}, in the fake kernel", error)
        for i, (real, said) in enumerate(zip(case.expected, outs, strict=True)):
            known = all(n == m for n, m in zip(said.shape, real.shape, strict=False) if isinstance(n, int))
            if real.dim() != said.dim() or real.dtype != said.dtype or not known:
                fail(
                    f"{case.name}: {where} the fake kernel says that output {i} is {dtype_name(said)} of shape "
                    f"{list(said.shape)} instead of {dtype_name(real)} of {list(real.shape)}",
                    "compute output shapes from x.shape alone",
                )
    return f"{len(variants)} ways"


def _captured() -> Any:
    import torch._dynamo as dynamo

    return dynamo.config.patch(
        suppress_errors=False, verbose=False, capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )


def compile_unbacked(case: Case) -> str | None:
    """Compiled with every dimension unbacked (equal sizes share a symbol), outputs and gradients are the eager ones."""
    needs_tensors(case)
    needs_literals(case)
    dims = _dims(case)
    if case.seeded:
        skip("its numbers are random")
    grad = case.derivative.status == "pass"

    def marked(tensors: list[Tensor]) -> list[Tensor]:
        for i, d in dims:
            torch._dynamo.decorators.mark_unbacked(tensors[i], d, shape_id=f"n{tensors[i].shape[d]}")
        return tensors

    compiled = torch.compile(case.function(), backend="aot_eager", fullgraph=True)
    with _captured():
        try:
            outs = compiled(*marked(case.fresh(grad=grad)))
            got = gradients(compiled, marked(case.fresh(grad=True)), case.wanted) if grad else []
        except Exception as error:
            _depends(case, "under torch.compile with every dimension unbacked,", error)
    if wrong := differs(list(outs), case.expected):
        fail(f"{case.name}: under torch.compile with every dimension unbacked {wrong}, which eager gives", _REMEDY)
    if wrong := grad and differs(got, case.gradients, "the gradient of differentiable argument"):
        fail(f"{case.name}: under torch.compile with every dimension unbacked {wrong}, which eager gives", _REMEDY)
    return "with its backward" if grad else "without a backward"


def export_unbacked(case: Case) -> str | None:
    """Exported after nonzero(), which determines its sizes, strictly or not, it gives the eager outputs."""
    needs_tensors(case)
    needs_literals(case)
    dims = _dims(case)
    if case.seeded:
        skip("its numbers are random")
    sizes = list(dict.fromkeys(case.leaves[i].shape[d] for i, d in dims))

    class Program(torch.nn.Module):
        def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
            super().__init__()
            self.function = function

        def forward(self, masks: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
            kept = [mask.nonzero().squeeze(1) for mask in masks]
            tensors = list(tensors)
            for i, d in dims:
                tensors[i] = tensors[i].index_select(d, kept[sizes.index(case.leaves[i].shape[d])])
            return self.function(*tensors)

    masks = [torch.ones(size, dtype=torch.bool, device=case.device) for size in sizes]
    # Without a __name__, through which Dynamo would look up this code's globals in a module.
    function = case.function()
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    program = Program(types.FunctionType(function.__code__, scope))
    for strict in (False, True):
        with _captured(), torch.no_grad():
            where = f"under torch.export ({'strict' if strict else 'not strict'}) behind nonzero()"
            try:
                exported = torch.export.export(program, (masks, case.fresh()), strict=strict)
                outs = exported.module()(masks, case.fresh())
            except Exception as error:
                _depends(case, where, error)
        if wrong := differs(list(outs), case.expected):
            fail(f"{case.name}: {where} {wrong}, which eager gives", _REMEDY)
    return None
