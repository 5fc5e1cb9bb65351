"""Checks of data-dependent sizes, as from nonzero() and item(): "unbacked" sizes, whose value no compiler knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from openreg_tools.check.case import Case, skip
from openreg_tools.check.checks.common import needs_literals, needs_order, needs_tensors
from openreg_tools.check.checks.fakes import compiled, compiled_results, fake_mode, faking, quiet, unlike_fake
from openreg_tools.core.blocks import all_lines

_REMEDY = (
    "check sizes with torch._check(size == …, lambda: …), combine conditions with | and & instead of `or` and `and`, take "
    "torch.sym_max for max(), and where a branch is needed, ask guard_or_false of torch.fx.experimental.symbolic_shapes"
)


def _dims(case: Case) -> list[tuple[int, int]]:
    """Which dimensions of which tensors to try: all with more than one element."""
    dims = [(i, d) for i, x in enumerate(case.leaves) for d, size in enumerate(x.shape) if size > 1]
    if not dims:
        skip("no tensor has more than one element")
    return dims


def _depends(case: Case, where: str, error: Exception) -> NoReturn:
    """End the check for an error in a program with such sizes."""
    if any(text in f"{error!r} {error}" for text in ("data-dependent", "DataDependent", "unbacked")):
        said = next((line for line in str(error).splitlines() if "guard on" in line), all_lines(error))
        case.warn(
            f"{where} it asks for a size that is not known before the program runs ({said.strip()[:160]}); a program with "
            "such sizes (nonzero, item, masks) does not compile",
            _REMEDY,
        )
    case.fail(f"{where} it raised {all_lines(error)}", _REMEDY)


def _variants(case: Case) -> Iterator[tuple[str, dict[tuple[int, int], int]]]:
    """Which dimensions get which symbol: each dimension alone, dimensions of equal size together, and all with different
    symbols."""
    dims = _dims(case)
    for i, d in dims:
        yield f"with an unbacked dimension {d} of {case.names[i]}", {(i, d): 0}
    for size in dict.fromkeys(case.leaves[i].shape[d] for i, d in dims):
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
        with faking(fake_mode(case)) as mode, torch.no_grad():
            sizes = [mode.shape_env.create_unbacked_symint() for _ in range(max(symbols.values()) + 1)]
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
        if wrong := unlike_fake(case.expected, outs):
            case.fail(f"{where}, {wrong}", "compute output shapes from x.shape alone")
    return f"{len(variants)} ways"


def compile_unbacked(case: Case) -> str | None:
    """Compiled with every dimension unbacked (equal sizes share a symbol), outputs and gradients are the eager ones."""
    needs_tensors(case)
    needs_literals(case)
    needs_order(case)
    dims = _dims(case)

    def marked(tensors: list[Tensor]) -> list[Tensor]:
        for i, d in dims:
            torch._dynamo.decorators.mark_unbacked(tensors[i], d, shape_id=f"n{tensors[i].shape[d]}")
        return tensors

    where = "under torch.compile with every dimension unbacked"
    with quiet(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        try:
            got = compiled_results(case, compiled(case, dynamic=None), marked)
        except Exception as error:
            _depends(case, f"{where},", error)
    case.expect(got, case.eager, where, "eager gives", _REMEDY)
    return "with its backward" if case.has_derivative else "without a backward"
