"""Hypothesis strategies that draw a case of an operator from the profiles of its base calls. Simple choices come first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from openreg_tools.forms import Wrong

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise Wrong(f"generated inputs need hypothesis: pip install 'openreg_tools[generate]' ({error})") from None

from openreg_tools.generate.changes import ALIASES, DTYPES, LAYOUTS, SHAPES, VALUES

__all__ = ["cases", "first", "without_constants"]

_COUNTS = (0, 1, 1, 1, 2, 2, 3, 4)  # how many changes a case has
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "int": (1, 0, -1, 2, 3, 99, -2, 2**31, 2**62, 2**63 - 1, -(2**63)),
    "float": (1.0, 0.0, -0.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, {"complex": [0, 1]}),
    "bool": (False, True),
    "str": ("", "garbage", "sum", "mean"),
}
# The order in which changes are applied, because later ones undo earlier ones: layouts come before shared memory.
_ORDER = (
    "number", "sizes", "shape", "dtypes", "dtype", "values", "out", "layout", "offset", "bit", "alias", "host", "garbage"
)  # fmt: skip
_FLOATS = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")


@contextlib.contextmanager
def without_constants() -> Iterator[None]:
    """Keeps hypothesis from drawing constants of the loaded modules, for which it reads all of their source.

    Cases then depend on the seed alone, and nothing is written to a folder `.hypothesis`.
    """
    from hypothesis.internal.conjecture import providers

    before = getattr(providers, "_get_local_constants", None)  # of hypothesis 6.131 and later
    if before is None:
        yield
        return
    nothing = providers.Constants()
    providers._get_local_constants = lambda: nothing
    try:
        yield
    finally:
        providers._get_local_constants = before


def cases(name: str, bases: list[list[dict[str, Any]]], aliases: bool = True) -> Any:
    """Cases of an operator: one of the base calls, and up to four changes."""
    changes = [_changes(profile, aliases) for profile in bases]

    @st.composite
    def case(draw: Any) -> dict[str, Any]:
        base = draw(st.integers(0, len(bases) - 1))
        count = draw(st.sampled_from(_COUNTS))
        drawn = [list(draw(changes[base])) for _ in range(count)]
        return {"op": name, "base": base, "changes": sorted(drawn, key=lambda change: _ORDER.index(change[0]))}

    return case()


def first(name: str, bases: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The cases that every search begins with: the widest base call with each tensor's strides reversed, out= first.

    Kernels that step through a tensor as if it were contiguous fail with these, some of them only in four dimensions.
    """

    def width(leaf: dict[str, Any]) -> int:
        return len([size for size in leaf["shape"] if size > 1]) if leaf["kind"] == "tensor" else 0

    widths = [max(map(width, profile), default=0) for profile in bases]
    base = widths.index(max(widths))
    wide = sorted((leaf for leaf in bases[base] if width(leaf) > 1), key=lambda leaf: not leaf["out"])
    return [{"op": name, "base": base, "changes": [["layout", leaf["at"], "reversed"]]} for leaf in wide]


def _changes(profile: list[dict[str, Any]], aliases: bool) -> Any:
    tensors = [leaf for leaf in profile if leaf["kind"] == "tensor"]
    of = st.sampled_from
    options = []

    def each(kind: str, leaves: list[dict[str, Any]], *how: Any, often: int = 1) -> None:
        if leaves:
            options.extend([st.tuples(st.just(kind), of([leaf["at"] for leaf in leaves]), *how)] * often)

    def is_wide(leaf: dict[str, Any]) -> bool:
        return len([size for size in leaf["shape"] if size > 1]) > 1

    inputs = [leaf for leaf in tensors if not leaf["out"]]
    outs = [leaf for leaf in tensors if leaf["out"]]
    floats = [leaf for leaf in inputs if leaf["dtype"] in _FLOATS]
    each("layout", [leaf for leaf in tensors if is_wide(leaf)], of(list(LAYOUTS)), often=2)
    each("layout", [leaf for leaf in tensors if leaf["shape"]], of(["sliced", "expanded"]))
    each("offset", tensors, of([1, 3]))
    if sizes := sorted({size for leaf in tensors for size in leaf["shape"]}):
        options.append(st.tuples(st.just("sizes"), of(sizes), of([0, 1, 2, 5])))
    each("shape", inputs, of(list(SHAPES)))
    each("values", inputs, of(VALUES))
    if dtypes := sorted({leaf["dtype"] for leaf in tensors}):
        options.append(st.tuples(st.just("dtypes"), of(dtypes), of(DTYPES)))
    each("dtype", inputs, of(DTYPES))
    each("host", inputs[1:])
    each("bit", floats, of(["neg", "conj"]))
    if aliases and len(inputs) > 1:
        firsts = [leaf for leaf in inputs if leaf["written"]] or inputs[:1]
        each(
            "alias",
            [leaf for leaf in inputs if leaf not in firsts],
            of([leaf["at"] for leaf in firsts]),
            of(ALIASES),
            often=2,
        )
    if aliases and inputs:
        each("alias", outs, of([leaf["at"] for leaf in inputs]), of(ALIASES), often=2)
    each("out", outs, st.just("empty"))
    each("layout", outs, of(["reversed", "sliced", "expanded", "padded"]), often=2)
    each("dtype", outs, of(DTYPES))
    each("shape", outs, of(["last longer", "one dimension more", "first of size 1"]))
    for kind, values in _NUMBERS.items():
        each("number", [leaf for leaf in profile if leaf["kind"] == kind], of(values))
    options.append(st.tuples(st.just("garbage"), st.integers(0, 99)))
    return st.one_of(options)
