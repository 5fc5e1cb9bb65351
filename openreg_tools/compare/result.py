"""The result of a comparison: the first operator that differs, all operators by the error that they add, and a plot."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from openreg_tools import forms, pages
from openreg_tools.compare.tolerance import Error, Tolerance, Tolerances, matches
from openreg_tools.core.place import Place

__all__ = ["Difference", "Result", "Row"]

BARS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass
class Difference:
    """One result of one call that is beyond its tolerance."""

    index: int  # of the call
    operator: str  # "aten::mm", or "graph 0 of forward"
    what: str  # "result", "result 1", the argument that it wrote, "the call"
    place: Place
    inputs: list[str]  # dtypes, shapes and strides
    error: Error | None
    tolerance: Tolerance | None
    found: str  # instead of an error: a different shape, an exception
    device: str
    reference: str
    result: str = ""
    stack: list[str] = dataclasses.field(default_factory=list)
    call: tuple[Any, list[Any], dict[str, Any]] | None = None  # operator and inputs on the reference, of the first

    def sentence(self) -> str:
        """What differs, and by how much."""
        if self.error is None:
            return f"{self.what} {self.found}"
        e = self.error
        at = f" at {list(e.at)}" if e.at else ""
        ulps = "infinitely many" if math.isinf(e.ulps) else f"{e.ulps:.4g}"
        return (
            f"{self.what} is off by {ulps} ulps{at}: {e.got!r} on {self.device}, {e.expected!r} on {self.reference}; "
            f"{e.count:,} element{'s' * (e.count != 1)} beyond {self.tolerance}"
        )

    def lines(self) -> list[str]:
        """The call, the difference, and the stack of the program, for a terminal of 80 columns."""
        out = [
            f"call {self.index}: {self.operator}({', '.join(self.inputs)})" + (f" -> {self.result}" * bool(self.result))
        ]
        out = [*forms.wrapped(out, 0), *forms.wrapped([self.sentence(), f"at {self.place}"], 2)]
        return [*out, *(f"    {frame}" for frame in self.stack[-8:])]

    def dict(self) -> dict[str, Any]:
        """The difference as values for JSON."""
        return {
            "call": self.index, "operator": self.operator, "what": self.what, "says": self.sentence(),
            "line": self.place.line(), "module": self.place.module, "phase": self.place.phase, "node": self.place.node,
            "inputs": self.inputs, "stack": self.stack,
            "ulps": self.error and self.error.ulps, "tolerance": self.tolerance and self.tolerance.ulps,
        }  # fmt: skip


@dataclasses.dataclass
class Row:
    """All calls of one operator."""

    operator: str
    calls: int = 0
    compared: int = 0
    inexact: int = 0  # results that are not bit-for-bit equal
    beyond: int = 0  # beyond the tolerance
    ulps: float = 0.0  # the largest
    added: float = 0.0  # relative errors of its results, added up
    tolerance: str = ""

    def add(self, error: Error, tolerance: Tolerance) -> None:
        """Count a result with this error."""
        self.inexact += 1
        if error.ulps >= self.ulps:
            self.ulps, self.tolerance = error.ulps, f"{tolerance.ulps:.4g} {tolerance.kind}"
        self.added += error.relative


class Result:
    """The result of `compare`; complete when its context ends.

    Args:
        device, reference: the two devices.
        name: the program's name in the report.
    """

    def __init__(self, device: str, reference: str, name: str = "") -> None:
        self.device, self.reference, self.name = device, reference, name
        self.differences: list[Difference] = []  # at most 1000
        self.notes: dict[str, int] = {}
        self.skipped: dict[str, str] = {}  # operators that were not compared, and why
        self.seconds = 0.0
        self.transient = False  # whether the first difference was gone when `write_test` ran the operator again
        self.raised = ""  # what ended the program early
        self.command: list[str] = []  # the program's sys.argv
        self._rows: dict[str, Row] = {}
        self._points: list[tuple[int, float, float, str]] = []
        self._counter = itertools.count()
        self.operators = 0
        self.writer: Callable[[Result, Path, bool], str]  # which `compare` sets

    # ---- filled by the comparison ----

    def count(self) -> int:
        """Count a call; returns its index."""
        self.operators += 1
        return next(self._counter)

    def row(self, operator: str) -> Row:
        """The row of an operator, created on first use."""
        row = self._rows.get(operator)
        if row is None:
            row = self._rows[operator] = Row(operator)
        return row

    def unequal(self) -> int:
        """How many results are not bit-for-bit equal, or differ in another way."""
        return sum(row.inexact + row.beyond for row in self._rows.values())

    def point(self, index: int, ulps: float, allowed: float, operator: str) -> None:
        """Add a point to the plot of errors over the calls."""
        if len(self._points) < 200_000:
            self._points.append((index, ulps, allowed, operator))

    def add(self, difference: Difference) -> None:
        """Keep a difference, unless 1000 are kept already."""
        if len(self.differences) < 1000:
            self.differences.append(difference)

    def note(self, text: str) -> None:
        """Add a note to the report; equal notes are counted."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def used(self, tolerances: Tolerances) -> None:
        """Add a note for each tolerance that no operator of the program had."""
        for pattern in tolerances.given:
            if not any(matches(name, pattern) for name in self._rows):
                self.note(f"The program called no operator that the tolerance of {pattern} is for.")

    # ---- queries ----

    @property
    def first(self) -> Difference | None:
        """The first difference, or None."""
        return self.differences[0] if self.differences else None

    @property
    def ranked(self) -> list[Row]:
        """The operators with an error; the ones that add the most come first."""
        rows = sorted(self._rows.values(), key=lambda row: (-row.added, -row.ulps, row.operator))
        return [row for row in rows if row.added or row.beyond]

    def assert_close(self) -> None:
        """Raise AssertionError with the report if an operator differs."""
        if self.first is not None:
            raise AssertionError(self.report())

    def write_test(self, path: str | Path, shrink: bool = True) -> str:
        """Write a pytest test of the first difference that fails as long as the operator differs; returns its text.

        Inputs are shrunk while the operator still differs with them.

        Raises:
            ValueError: nothing differs, or what differs is not an operator with inputs (a compiled graph).
        """
        return self.writer(self, Path(path), shrink)

    def report(self, top: int = 15) -> str:
        """The same as `text`."""
        return self.text(top)

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = 15) -> str:
        """The report as text, with the `top` operators that add the most error."""
        lines = [*self._summary(), ""]
        if self.first is None:
            lines += forms.wrapped([self._verdict()], 0)
        else:
            lines += ["The first difference:", *self.first.lines()]
            others: dict[str, int] = {}
            for each in self.differences[1:]:
                others[each.operator] = others.get(each.operator, 0) + 1
            if others:
                counts = ", ".join(f"{name} ({count})" for name, count in list(others.items())[:top])
                lines += ["", *forms.wrapped([f"Later ones: {counts}"], 0)]
        if ranked := self.ranked:
            rows = [["operator", "calls", "inexact", "beyond", "ulps", "error added", "allowed"]]
            rows += [
                [r.operator, r.calls, r.inexact, r.beyond, f"{r.ulps:.4g}", f"{r.added:.3g}", r.tolerance]
                for r in ranked[:top]
            ]
            lines += ["", *forms.table(rows, left=1, fit=True)]
            if len(ranked) > top:
                lines.append(f"and {len(ranked) - top} more (--top {len(ranked)})")
            lines += ["", *self._sparkline()]
        for operator, why in self.skipped.items():
            lines += forms.wrapped([f"{operator} was not compared: {why}"], 0)
        for note, times in self.notes.items():
            lines += forms.wrapped([note + (f" ({times} times)" if times > 1 else "")], 0)
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.operators:
            text = f"No operator touched a tensor of {self.device}"
        else:
            text = "Nothing differs beyond its tolerance"
        return f"{text} until the program raised {self.raised}" if self.raised else f"{text}."

    def _summary(self) -> list[str]:
        compared = sum(row.compared for row in self._rows.values())
        inexact = sum(row.inexact for row in self._rows.values())
        text = (
            f"{self.name or 'the program'} on {self.device} against {self.reference}, torch {torch.__version__}: "
            f"{self.operators:,} calls, {compared:,} compared, {inexact:,} results not equal bit for bit, "
            f"{sum(row.beyond for row in self._rows.values()):,} beyond their tolerance, {forms.seconds(self.seconds)}"
        )
        return forms.wrapped([text], 0)

    def _sparkline(self, width: int = 60) -> list[str]:
        """The largest error over time, on a logarithmic scale."""
        if not self._points:
            return []
        columns = [0.0] * width
        last = max(1, self.operators)
        for index, ulps, _, _ in self._points:
            column = min(width - 1, index * width // last)
            columns[column] = max(columns[column], ulps)
        top = max((u for u in columns if math.isfinite(u)), default=1.0) or 1.0
        levels = [
            0 if not u else 8 if math.isinf(u) else max(1, min(8, round(8 * math.log2(1 + u) / math.log2(1 + top))))
            for u in columns
        ]
        return [f"ulps over the calls, up to {top:.3g}:", f"|{''.join(BARS[level] for level in levels)}|"]

    def dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "name": self.name, "device": self.device, "against": self.reference, "torch": torch.__version__,
            "seconds": self.seconds, "calls": self.operators,
            "first": self.first.dict() if self.first else None,
            "differences": [each.dict() for each in self.differences],
            "ranked": [dataclasses.asdict(row) for row in self.ranked],
            "skipped": self.skipped, "notes": self.notes, "raised": self.raised,
        }  # fmt: skip

    def html(self) -> str:
        """One self-contained page."""
        rows: list[list[Any]] = [["operator", "calls", "inexact", "beyond", "ulps", "error added", "allowed"]]
        rows += [
            [r.operator, r.calls, r.inexact, r.beyond, f"{r.ulps:.4g}", f"{r.added:.3g}", r.tolerance]
            for r in self.ranked
        ]
        facts = {
            "calls": f"{self.operators:,}",
            "compared": f"{sum(row.compared for row in self._rows.values()):,}",
            "not equal bit for bit": f"{sum(row.inexact for row in self._rows.values()):,}",
            "beyond their tolerance": f"{sum(row.beyond for row in self._rows.values()):,}",
        }
        first = self.first
        found = (
            pages.text(self._verdict())
            if first is None
            else f'<pre class="wrapped">{html.escape(chr(10).join(first.lines()))}</pre>'
        )
        notes = [f"{operator} was not compared: {why}" for operator, why in self.skipped.items()]
        notes += [note + (f" ({times} times)" if times > 1 else "") for note, times in self.notes.items()]
        body = [
            pages.text(
                f"{self.device} against {self.reference}, torch {torch.__version__}, {forms.seconds(self.seconds)}"
            ),
            pages.facts(facts),
            pages.section("The first difference", found),
            pages.section("Errors over the calls", plot(self._points, self.operators)),
            pages.section("Operators by the error that they add", pages.table(rows)) if rows[1:] else "",
            pages.section("Notes", "".join(map(pages.text, notes))) if notes else "",
        ]
        return pages.page(f"compare of {self.name or 'a program'}", self.name or "compare", "".join(body))


def plot(points: list[tuple[int, float, float, str]], calls: int, most: int = 4000) -> str:
    """Errors over the calls as SVG: calls on the x axis, ulps by powers of two on the y axis."""
    if not points:
        return "<p>Every result equals the reference's bit for bit.</p>"
    shown = sorted(sorted(points, key=lambda p: -p[1])[:most])
    width, height, left = 900, 220, 60
    finite = [p[1] for p in shown if math.isfinite(p[1])]
    low = math.floor(math.log2(max(2.0**-10, min(finite, default=1.0))))
    high = max(low + 1, math.ceil(math.log2(max(2.0**-10, *finite, 1.0))))
    step = max(1, (high - low) // 8)

    def y(ulps: float) -> float:
        if math.isinf(ulps):
            return 5
        return height - (max(low, math.log2(max(ulps, 2.0**-10))) - low) / (high - low) * (height - 10)

    lines = "".join(
        f'<line class="grid" x1="{left}" x2="{width}" y1="{y(2.0**e):.1f}" y2="{y(2.0**e):.1f}"/>'
        f'<text x="0" y="{y(2.0**e) + 4:.1f}">{2.0**e:.3g}</text>'
        for e in range(low, high + 1, step)
    )
    dots = "".join(
        f'<circle class="{"bad" if u > allowed else "good"}" cx="{left + i / max(1, calls) * (width - left):.1f}" '
        f'cy="{y(u):.1f}" r="{4 if u > allowed else 2}"><title>{html.escape(f"call {i}: {name}, {u:.4g} ulps")}</title></circle>'
        for i, u, allowed, name in shown
    )
    return (
        f'<div class="scroll whole"><svg class="plot" viewBox="0 0 {width} {height + 20}" role="img" '
        f'aria-label="errors over the calls">{lines}{dots}'
        f'<text x="{left}" y="{height + 15}">call 0</text><text x="{width - 80}" y="{height + 15}">call {calls:,}</text></svg></div>'
        f"<p>Errors in ulps of each call; large dots are beyond their tolerance.</p>"
    )
