"""What `compare` finds: the first operator that differs, and all operators by the error that they add."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from openreg_tools.compare.tolerance import Tolerance, Tolerances, matches
from openreg_tools.core.blocks import Block, Cell, Lines, Section, Table, Text, seconds, wrapped
from openreg_tools.core.chart import Bar, bars
from openreg_tools.core.compare import Error
from openreg_tools.core.place import Place
from openreg_tools.core.report import Report

__all__ = ["Difference", "Differences", "Row"]


@dataclasses.dataclass
class Difference:
    """One result of one call that is beyond its tolerance."""

    index: int  # of the call
    operator: str  # "aten::mm"
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
        out = [*wrapped(out, 0), *wrapped([self.sentence(), f"at {self.place}"], 2)]
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
    unlike: int = 0  # of another shape, dtype or number, or the call raised on the device alone
    ulps: float = 0.0  # the largest
    added: float = 0.0  # relative errors of its results, added up
    tolerance: str = ""

    def add(self, error: Error, tolerance: Tolerance) -> None:
        """Count a result with this error."""
        self.inexact += 1
        if error.ulps >= self.ulps:
            self.ulps, self.tolerance = error.ulps, f"{tolerance.ulps:.4g} {tolerance.kind}"
        self.added += error.relative


class Differences(Report):
    """The report of `compare`; complete when its context ends.

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
        self.raised = ""  # what ended the program early
        self.operators = 0
        self._rows: dict[str, Row] = {}

    # ---- filled by the comparison ----

    def count(self) -> int:
        """Count a call; returns its index."""
        self.operators += 1
        return self.operators - 1

    def row(self, operator: str) -> Row:
        """The row of an operator, created on first use."""
        return self._rows.setdefault(operator, Row(operator))

    def add(self, difference: Difference) -> None:
        """Count a difference, and keep it unless 1000 are kept already."""
        row = self.row(difference.operator)
        if difference.error is None:
            row.unlike += 1
        else:
            row.beyond += 1
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
    def passed(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def ranked(self) -> list[Row]:
        """The operators with an error; the ones that add the most come first."""
        rows = sorted(self._rows.values(), key=lambda row: (-row.added, -row.ulps, row.operator))
        return [row for row in rows if row.added or row.beyond or row.unlike]

    def assert_close(self) -> None:
        """Raise AssertionError with the report if an operator differs."""
        if not self.passed:
            raise AssertionError(self.text())

    # ---- the report ----

    @property
    def title(self) -> str:  # type: ignore[override]
        """The heading of the page."""
        return f"compare of {self.name or 'a program'}"

    def opening(self) -> str:
        """Where the first difference is."""
        if self.first is None:
            return self._verdict()
        return (
            f"{self.first.operator} is the first operator that differs, at {self.first.place}: {self.first.sentence()}"
        )

    def blocks(self, page: bool = False, top: int = 15) -> Iterator[Block]:
        """The first difference, and the `top` operators that add the most error."""
        if not page:
            yield Text(self._counts())
        if self.first is None:
            yield from () if page else [Section("", [Text(self._verdict())])]
        else:
            yield Section("The first difference:", [Lines(self.first.lines())])
            others: dict[str, int] = {}
            for later in self.differences[1:]:
                others[later.operator] = others.get(later.operator, 0) + 1
            if others:
                counts = ", ".join(f"{name} ({count})" for name, count in list(others.items())[:top])
                yield Section("", [Text(f"Later ones: {counts}")])
        if page:
            yield from self._operators()
        elif ranked := self.ranked:
            rows = [
                [r.operator, r.calls, r.inexact, r.beyond + r.unlike, f"{r.ulps:.4g}", f"{r.added:.3g}", r.tolerance]
                for r in ranked
            ]
            head = ["operator", "calls", "inexact", "beyond", "ulps", "error added", "allowed"]
            yield Table([head, *rows], fit=True, top=top)
        notes = [f"{operator} was not compared: {why}" for operator, why in self.skipped.items()]
        notes += [note + (f" ({times} times)" if times > 1 else "") for note, times in self.notes.items()]
        if notes:
            yield Section("", [*map(Text, notes)])

    def _operators(self) -> Iterator[Block]:
        """A chart and a table of every operator, the ones that add the most error first."""
        rows = self.ranked + [row for row in self._rows.values() if row not in self.ranked]
        chosen = [row for row in rows if row.ulps][:20]
        yield bars(
            f"Largest error of an operator on {self.device} against {self.reference}",
            "units in the last place (ulps), logarithmic; | is what is allowed",
            [
                Bar(r.operator, r.ulps, float(r.tolerance.partition(" ")[0] or 0), "fail" * (r.beyond > 0))
                for r in chosen
            ],
        )
        head = ["operator", "calls", "compared", "inexact", "beyond tolerance", "other shape or error",
                "largest error (ulps)", "allowed (ulps)", "error added (relative)"]  # fmt: skip
        cells = [
            [r.operator, r.calls, r.compared, r.inexact, Cell(r.beyond, "fail" * (r.beyond > 0)), Cell(r.unlike, "fail" * (r.unlike > 0)),
             f"{r.ulps:.4g}", r.tolerance, f"{r.added:.3g}"]
            for r in rows
        ]  # fmt: skip
        if cells:
            yield Section("Operators, by the error that they add", [Text(self._counts()), Table([head, *cells])])
        else:
            yield Text(self._counts())

    def _verdict(self) -> str:
        if not self.operators:
            text = f"No operator touched a tensor of {self.device}"
        else:
            text = "Nothing differs beyond its tolerance"
        return f"{text} until the program raised {self.raised}" if self.raised else f"{text}."

    def _counts(self) -> str:
        rows = self._rows.values()
        compared, inexact, beyond, unlike = (
            sum(getattr(row, name) for row in rows) for name in ("compared", "inexact", "beyond", "unlike")
        )
        words = [
            f"{self.operators:,} call{'s' * (self.operators != 1)}", f"{compared:,} compared",
            f"{inexact:,} result{'s' * (inexact != 1)} not equal bit for bit", f"{beyond:,} beyond the tolerance",
        ]  # fmt: skip
        if unlike:
            words.append(f"{unlike:,} different in shape, dtype or number, or raised on {self.device} alone")
        return (
            f"{self.name or 'the program'} on {self.device} against {self.reference}, torch {torch.__version__}: "
            f"{', '.join(words)}, {seconds(self.seconds)}"
        )

    def dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "name": self.name, "device": self.device, "against": self.reference, "torch": torch.__version__,
            "seconds": self.seconds, "calls": self.operators,
            "first": self.first.dict() if self.first else None,
            "differences": [difference.dict() for difference in self.differences],
            "ranked": [dataclasses.asdict(row) for row in self.ranked],
            "skipped": self.skipped, "notes": self.notes, "raised": self.raised,
        }  # fmt: skip
