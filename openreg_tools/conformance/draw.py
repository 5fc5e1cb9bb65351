"""Draws cases of generated calls: calls that the CPU accepts, with up to four changes.

A case is a JSON object: an operator, the index of one of its base calls, and changes to that call (`core.variations`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import dispatch
from openreg_tools.conformance import schemas
from openreg_tools.core import from_schema, opinfo, variations
from openreg_tools.core.move import Move, is_written
from openreg_tools.core.options import named
from openreg_tools.core.samples import Sample, dtype_name, parse, sample_of
from openreg_tools.core.variations import is_strided

__all__ = ["Case", "SAME_MEANING", "base_calls", "cases", "given_samples", "leaves_of", "sample_of_case"]

Case = dict[str, Any]
BASES = 6  # calls that the CPU accepts, per operator: of up to four dimensions. OpInfo adds up to four
REFUSED = 8  # calls that the CPU refuses, if it accepts none

# Changes after which the call means the same: what the CPU then accepts, the device has to accept.
SAME_MEANING = {"layout", "bit", "host", "dtypes", "alias", "out"}

_COUNTS = (0, 1, 1, 1, 2, 2, 3, 4)  # how many changes a case has
# The order in which changes are applied, because later ones undo earlier ones: layouts come before shared memory.
_ORDER = ("number", "sizes", "shape", "dtypes", "dtype", "values", "out", "layout", "bit", "alias", "host", "garbage")
_NUMBERS: dict[type, tuple[Any, ...]] = {
    int: (1, 0, -1, 2, 3, 99, -2, 2**31, 2**62, 2**63 - 1, -(2**63)),
    float: (1.0, 0.0, -0.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, {"complex": [0, 1]}),
    bool: (False, True),
    str: ("", "garbage", "sum", "mean"),
}
_OF_OUT = ("permuted", "stepped", "expanded", "padded")


def leaves_of(name: str, sample: Sample) -> list[tuple[Any, Any]]:
    """The leaves of a sample's arguments, each with its argument of the schema."""
    return [
        (argument, leaf)
        for argument, value in from_schema.arguments_of(name, sample)
        for leaf in tree_leaves(value)
    ]  # fmt: skip


def _choices(name: str, sample: Sample, aliases: bool) -> list[tuple[str, list[Any], list[Any]]]:
    """The changes that a sample may have: a kind, the positions or dtypes that it starts from, and the ways."""
    leaves = leaves_of(name, sample)
    tensors = {i: (argument, x) for i, (argument, x) in enumerate(leaves) if is_strided(x)}
    outs = [i for i, (argument, _) in tensors.items() if argument.is_out]
    inputs = [i for i in tensors if i not in outs]
    written = [i for i in inputs if is_written(tensors[i][0])] or inputs[:1]
    shaped = [i for i, (_, x) in tensors.items() if x.dim()]
    found = [
        ("layout", shaped, [layout for layout in variations.LAYOUTS if layout != "channels-last"]),
        ("layout", shaped, ["permuted", "padded", "stepped"]),
        ("layout", [i for i in shaped if tensors[i][1].dim() in (4, 5)], ["channels-last"]),
        ("layout", [*tensors], ["offset", "unaligned"]),
        ("sizes", sorted({size for _, x in tensors.values() for size in x.shape}), [0, 1, 2, 5]),
        ("shape", inputs, [*variations.SHAPES]),
        ("values", inputs, [*variations.VALUES]),
        ("dtypes", sorted({dtype_name(x.dtype) for _, x in tensors.values()}), [*variations.DTYPES]),
        ("dtype", inputs, [*variations.DTYPES]),
        ("host", inputs[1:], [None]),
        ("bit", [i for i in inputs if tensors[i][1].is_floating_point() or tensors[i][1].is_complex()], ["neg", "conj"]),
        ("alias", [i for i in inputs if i not in written] if aliases else [], [(at, how) for at in written for how in variations.ALIASES]),
        ("alias", outs if aliases else [], [(at, how) for at in inputs for how in variations.ALIASES]),
        ("out", outs, ["empty"]),
        ("layout", outs, [*_OF_OUT]),
        ("dtype", outs, [*variations.DTYPES]),
        ("shape", outs, ["last longer", "one dimension more", "first of size 1"]),
        *(("number", [i for i, (_, x) in enumerate(leaves) if type(x) is kind], [*ways]) for kind, ways in _NUMBERS.items()),
        ("garbage", [*range(100)], [None]),
    ]  # fmt: skip
    return [choice for choice in found if choice[1] and choice[2]]


def cases(name: str, bases: list[Sample], count: int, seed: int, aliases: bool) -> Iterator[Case]:
    """Different cases of an operator: first, the widest base call with each tensor permuted, out= first."""
    numbers = random.Random(f"{seed} {name}")
    seen = set()
    for case in [*_first(name, bases)[: count // 4], *(None for _ in range(4 * count))]:
        if case is None:
            base = numbers.randrange(len(bases))
            choices = _choices(name, bases[base], aliases)
            made = []
            for _ in range(numbers.choice(_COUNTS)):
                kind, starts, ways = numbers.choice(choices)
                start, way = numbers.choice(starts), numbers.choice(ways)
                made.append([kind, start, *(way if isinstance(way, tuple) else () if way is None else (way,))])
            case = {"op": name, "base": base, "changes": sorted(made, key=lambda change: _ORDER.index(change[0]))}
        if (text := json.dumps(case)) not in seen and len(seen) < count:
            seen.add(text)
            yield case


def _first(name: str, bases: list[Sample]) -> list[Case]:
    """Kernels that step through a tensor as if it were contiguous fail with these, some of them only in four dimensions."""

    def width(leaf: Any) -> int:
        return len([size for size in leaf.shape if size > 1]) if is_strided(leaf) else 0

    base = max(range(len(bases)), key=lambda i: max((width(x) for _, x in leaves_of(name, bases[i])), default=0))
    wide = [(not argument.is_out, i) for i, (argument, x) in enumerate(leaves_of(name, bases[base])) if width(x) > 1]
    return [{"op": name, "base": base, "changes": [["layout", i, "permuted"]]} for _, i in sorted(wide)]


# ---- base calls ----


@functools.cache
def _infos() -> dict[str, list[str]]:
    """OpInfos by the base name of their ATen operator."""
    found: dict[str, list[str]] = {}
    for full, op in opinfo.database().items():
        for name in {op.name.rpartition(".")[2], op.name.replace(".", "_"), op.aten_name or ""}:
            found.setdefault(name, []).append(full)
    return found


def base_calls(name: str) -> list[Sample]:
    """Calls that the CPU accepts, made from the schema or recorded from OpInfo's samples; others if there are none."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        found = list(schemas.accepted(name, BASES))
        base = name.partition("::")[2].partition(".")[0].removesuffix("_")
        for source in _infos().get(base, ())[:2] if name.startswith("aten::") else ():
            calls = opinfo.calls_of(from_schema.overload(name), source)[:2]
            found += [call for call in calls if not schemas.outcome_of(name, call, Move("cpu")).error]
        return [_with_whole_outs(name, sample) for sample in found] or [
            from_schema.call(name, k) for k in range(REFUSED)
        ]


def given_samples(given: dict[str, Any]) -> list[Sample]:
    """Samples as `check` accepts them: from a function, or as text."""
    samples = [parse(text) for text in given.get("inputs", ())]
    if given.get("samples"):
        samples = [sample_of(sample) for sample in named(given["samples"])("cpu", torch.float32)]
    to_cpu = Move("cpu", source=None)
    return [Sample(*to_cpu(sample.args), **to_cpu(sample.kwargs)) for sample in samples]


def _with_whole_outs(name: str, sample: Sample) -> Sample:
    """The sample with out= tensors of the shapes that it writes. A change can make them empty."""
    outs = [argument.name for argument in dispatch.schema(name).arguments if argument.is_out]
    if not outs or not schemas.is_on_cpu(name):
        return sample
    outcome = schemas.outcome_of(name, sample, move := Move("cpu"))
    if outcome.error:
        return sample

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(whole, value)]
        got = move.tensors.get(id(value))
        return torch.zeros(got.shape, dtype=got.dtype) if got is not None and is_strided(got) else value

    return Sample(*sample.args, **{key: whole(v) if key in outs else v for key, v in sample.kwargs.items()})


def sample_of_case(bases: list[Sample], case: Case) -> Sample:
    """The arguments of a case.

    Raises:
        Exception: a change does not fit, such as a dtype that the values do not have.
    """
    name, sample = case["op"], bases[case["base"]]
    names = [argument.name for argument, _ in leaves_of(name, sample)]
    sample = variations.changed(sample, names, [change for change in case["changes"] if change[0] != "garbage"])
    for _, k in (change for change in case["changes"] if change[0] == "garbage"):
        sample = from_schema.garbage(name, sample, k)
    return sample
