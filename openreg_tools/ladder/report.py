"""The report of a ladder: the rungs reached, the first check that fails, and what to write next."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from openreg_tools import dispatch
from openreg_tools.core.blocks import Block, Box, Cell, PageOnly, Section, Table, Text, counted, seconds
from openreg_tools.core.device import target_of
from openreg_tools.core.report import Report
from openreg_tools.ladder.rung import RUNGS, TRANSLATION, Check, address
from openreg_tools.operators import operators

MARKS = {"pass": "reached", "fail": "not reached"}
SHARES = ("kernel", "composite", "fallback", "refused")


@dataclasses.dataclass(frozen=True)
class Checked:
    """How a check ended: "pass", "fail" or "skip", with what it said."""

    check: Check
    verdict: str
    said: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that `trace` recorded: its name and the operators that it called."""

    name: str
    operators: tuple[str, ...]

    def by_kind(self, key: str) -> dict[str, list[str]]:
        """The operators by what serves them at a dispatch key, each one of dispatch.HAS.

        A structured operator without a kernel of its own is replaced by the out variant that it runs.
        """
        found: dict[str, list[str]] = {kind: [] for kind in dispatch.HAS}
        for op in self.operators:
            if dispatch.has(op, key).kind == "composite":
                op = dispatch.delegate_of(op) or op
            if op not in (names := found[dispatch.has(op, key).kind]):
                names.append(op)
        return found


@dataclasses.dataclass
class Ladder(Report):
    """The outcomes of every rung's checks, and the operators of `programs`."""

    device: str
    outcomes: dict[int, list[Checked]]
    require: int = len(RUNGS)
    programs: tuple[Program, ...] = ()

    def __post_init__(self) -> None:
        self.title = f"ladder of {self.device}"
        self.rungs = [rung for rung in RUNGS if rung.number in self.outcomes]

    def is_reached(self, number: int) -> bool:
        """True if no check of this rung fails."""
        return all(outcome.verdict != "fail" for outcome in self.outcomes[number])

    @property
    def reached(self) -> int:
        """The last rung of the unbroken row of rungs that are reached."""
        return next((rung.number - 1 for rung in self.rungs if not self.is_reached(rung.number)), len(self.rungs))

    @property
    def first(self) -> Checked | None:
        """The first check that fails."""
        return next((o for outcomes in self.outcomes.values() for o in outcomes if o.verdict == "fail"), None)

    @property
    def passed(self) -> bool:
        return self.reached >= self.require

    def summary(self) -> str:
        more = f"; {self.require} required" if not self.passed else ""
        return f"{self.device} reaches rung {self.reached} of {len(RUNGS)}{more}"

    def blocks(self, page: bool = False) -> Iterator[Block]:
        if page:
            yield PageOnly(self._drawing())
        rows: list[list[Any]] = [["", "rung", "checks", "time", ""]]
        for rung in self.rungs:
            found, is_reached = self.outcomes[rung.number], self.is_reached(rung.number)
            good = sum(outcome.verdict != "fail" for outcome in found)
            mark = Cell(MARKS["pass" if is_reached else "fail"], "pass" if is_reached else "fail")
            time = seconds(sum(outcome.seconds for outcome in found))
            rows.append([rung.number, rung.title, f"{good} of {len(found)}", time, mark])
        yield Table(rows, left=2)
        if self.first:
            yield Section("The first check that fails", list(self._failure(self.first)))
        used = self._used()
        rows = [*self._shares(), *([f"used by {name}", *shares] for name, shares, _ in used)]
        missing = [
            Text(
                f"{name} uses {counted(len(names), 'operator')} without a kernel{': ' if names else ''}{', '.join(names)}."
            )
            for name, _, names in used
        ]
        yield Section(f"Operators of torch {torch.__version__}", [Table(rows, left=1, fit=True), *missing])
        if page:
            for rung in self.rungs:
                failed = not self.is_reached(rung.number)
                blocks = [Table([["check", "", "says", "file"], *(
                    [o.check.name, Cell(o.verdict, o.verdict), o.said, self._file(o.check)] for o in self.outcomes[rung.number]
                )], left=1), PageOnly(_links(rung.sections))]  # fmt: skip
                yield Box(f"{rung.number} {rung.title}", blocks, "fail" if failed else "pass", failed)

    def _failure(self, outcome: Checked) -> Iterator[Block]:
        check = outcome.check
        yield Text(f"rung {self._rung(outcome)}: {check.name}", 2)
        yield Text(outcome.said, 4)
        facts = {"dispatch key": check.key or "none: Python or the device guard", "file": f"{self._file(check)}, of those that `openreg-tools new-backend` writes",
                 "document": f"{check.section}, {address(check.section)}", "next": check.todo}  # fmt: skip
        for name, value in facts.items():
            yield Text(f"{name}: {value}", 2)

    def _shares(self) -> list[list[Any]]:
        """How many operators have a kernel, by class."""
        totals = operators(self.device).totals()
        rows = [["operators", *SHARES]]
        rows += [[kind, *_shares(totals[kind])] for kind in ("required", "structured", "explicit", "implicit")]
        return rows

    def _used(self) -> list[tuple[str, list[str], list[str]]]:
        """Each program's name, how many of its operators have a kernel, and those that fall back or raise."""
        used = []
        for program in self.programs:
            found = program.by_kind(target_of(self.device).key)
            missing = [f"{op} ({kind})" for kind in ("fallback", "refused") for op in found[kind]]
            used.append((program.name, _shares({kind: len(names) for kind, names in found.items()}), missing))
        return used

    def dict(self) -> dict[str, Any]:
        head, *rows = self._shares()
        return {
            "device": self.device,
            "torch": torch.__version__,
            "reached": self.reached,
            "first": self.first and self._fields(self.first),
            "rungs": [
                {
                    "number": rung.number,
                    "title": rung.title,
                    "reached": self.is_reached(rung.number),
                    "checks": [self._fields(outcome) for outcome in self.outcomes[rung.number]],
                }
                for rung in self.rungs
            ],
            "operators": {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows},
            "programs": [
                {"name": name, **dict(zip(SHARES, shares, strict=True)), "missing": missing}
                for name, shares, missing in self._used()
            ],
        }

    def _fields(self, outcome: Checked) -> dict[str, Any]:
        check = outcome.check
        return {
            "rung": self._rung(outcome), "name": check.name, "verdict": outcome.verdict, "said": outcome.said,
            "key": check.key, "file": self._file(check), "section": check.section, "url": address(check.section),
            "next": check.todo, "seconds": round(outcome.seconds, 3),
        }  # fmt: skip

    def _rung(self, outcome: Checked) -> int:
        return next(number for number, found in self.outcomes.items() if outcome in found)

    def _file(self, check: Check) -> str:
        """The file of a check, in a package that `new-backend` has written for the device."""
        return check.file.replace("acme", torch.device(self.device).type)

    def _drawing(self) -> str:
        """The ladder, the first rung at the bottom."""
        height, lines = 26, []
        for rung in reversed(self.rungs):
            y = (len(self.rungs) - rung.number) * height + 8
            style = "pass" if self.is_reached(rung.number) else "fail"
            lines.append(
                f'<g class="{style}"><line x1="14" y1="{y + 8}" x2="86" y2="{y + 8}" stroke="currentColor" stroke-width="5"/>'
                f'<text x="104" y="{y + 13}" fill="currentColor">{rung.number} {html.escape(rung.title)}</text></g>'
            )
        end = len(self.rungs) * height + 8
        sides = "".join(
            f'<line x1="{x}" y1="0" x2="{x}" y2="{end}" stroke="currentColor" stroke-width="4" opacity=".45"/>'
            for x in (14, 86)
        )
        words = html.escape(self.summary())
        return (
            f'<svg viewBox="0 0 420 {end}" width="420" role="img" aria-label="{words}" font-size="14">'
            f"{sides}{''.join(lines)}</svg>"
        )


def _links(sections: tuple[str, ...]) -> str:
    links = (f'<a href="{html.escape(address(section))}">{html.escape(section)}</a>' for section in sections)
    if any(section.startswith("Extending dispatcher") for section in sections):
        links = (*links, f'<a href="{TRANSLATION}">中文</a>')
    return f"<p>Documents: {', '.join(links)}</p>"


def _shares(counts: Mapping[str, int]) -> list[str]:
    """Numbers by one of dispatch.HAS, as numbers and shares of SHARES."""
    total = sum(counts.values())
    numbers = [counts["own"] + counts["shared"], *(counts[kind] for kind in SHARES[1:])]
    return [f"{number} ({number / max(1, total):.0%})" for number in numbers]
