"""The checker's results: a table of checks and samples, then the failures, one for each cause."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openreg_tools.check.case import FAKE
from openreg_tools.check.checks import PARTS
from openreg_tools.core import report
from openreg_tools.core.blocks import Block, Box, Cell, Lines, Section, Table, Text
from openreg_tools.core.findings import Finding
from openreg_tools.core.page import facts, legend

ENDED = "the process ends in this check"
# Each status with its mark in the table, and what it means.
MARKS = {
    "pass": (".", "correct"),
    "fail": ("FAIL", "wrong"),
    "warn": ("warn", "works, but is slow or surprising"),
    "known": ("known", "wrong, with a known cause"),
    "refused": ("ref", "unsupported (raises a clear error)"),
    "limit": ("lim", "PyTorch does not support it, whatever the operator does"),
    "skip": ("-", "does not apply"),
}
_PART = {check: part for part, checks in PARTS.items() for check in checks}
_ORDER = list(_PART)
_LINES = 6  # of a failure's sentence, and of its remedy
_SAMPLES = 10  # up to so many have a column each on a terminal


@dataclasses.dataclass
class Result:
    """The result of one check for one sample."""

    check: str
    sample: int
    status: str  # one of MARKS
    sentence: str = ""  # which operator, the rule, what arrived; for a skip, why
    remedy: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Cause:
    """What is wrong with an operator: the failure that says it best, and the other checks that it makes fail."""

    result: Result
    samples: list[int]
    also: list[Result]


@dataclasses.dataclass
class Report(report.Report):
    """Every result of one operator: `passed`, `failures`, and the forms `str(report)`, `json()` and `html()`."""

    operator: str
    schema: str
    device: str
    torch: str
    samples: list[str]
    about: dict[str, str]  # check -> what it verifies, in the order of the table
    results: list[Result] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    definition: dict[str, str] = dataclasses.field(default_factory=dict)  # part of the operator -> file and line

    @property
    def title(self) -> str:
        """The heading of the page."""
        return f"check of {self.operator}"

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Result]:
        """The results that failed."""
        return self.of("fail")

    def of(self, status: str, check: str | None = None) -> list[Result]:
        """The results of a status (pass, fail, warn, refused, skip), of one check if `check` is given."""
        return [r for r in self.results if r.status == status and check in (None, r.check)]

    def row(self, check: str) -> list[Result]:
        """The results of a check, by sample."""
        return sorted((r for r in self.results if r.check == check), key=lambda r: r.sample)

    def planned(self) -> Iterator[tuple[int, str]]:
        """Each sample's number with each check."""
        return itertools.product(range(len(self.samples)), self.about)

    def finish(self, known: Mapping[str, str]) -> None:
        """Mark what is known to fail, and note what does not fail, and what the device lacks."""
        for result in self.results:
            if result.check in known and result.status == "fail":
                result.status, result.remedy = "known", known[result.check]
        for name, cause in known.items():
            if (row := self.row(name)) and not any(result.status == "known" for result in row):
                self.notes.append(f"{name} was known to fail, but does not: {cause}")
        start = "the device lacks "
        lacks = (r.sentence for r in self.results if r.status == "skip" and r.sentence.startswith(start))
        if parts := dict.fromkeys(sentence.removeprefix(start) for sentence in lacks):
            needed = f"The package of the device lacks {', '.join(parts)}"
            self.notes.append(f"{needed}: the checks that need them were skipped.")

    def raise_if_failed(self) -> None:
        """Raises:
        AssertionError: a check failed; its text is the report.
        """
        if not self.passed:
            raise AssertionError(f"{self.operator} fails {len(self.failures)} checks\n\n{self}")

    # ---- the results in groups ----

    def grouped(self, *statuses: str) -> list[tuple[Result, list[int]]]:
        """Results with these statuses, in table order, each with the samples that share its message."""
        groups: dict[tuple[str, str], tuple[Result, list[int]]] = {}
        for status, check in itertools.product(statuses, self.about):
            for r in self.row(check):
                if r.status == status:
                    groups.setdefault((r.check, r.sentence), (r, []))[1].append(r.sample)
        return list(groups.values())

    def causes(self) -> list[Cause]:
        """The failures by cause.

        A wrong kernel also makes the checks of backward and of whole programs fail, and a wrong backward or fake kernel
        those of programs.
        """
        found: dict[str, Cause] = {}
        first = {check: self.of("fail", check)[0] for check in self.about if self.of("fail", check)}
        parts, order_of_parts = {check: _part(result) for check, result in first.items()}, list(PARTS)

        def order(check: str) -> tuple[int, bool, bool, int]:
            part = order_of_parts.index(parts[check]) if parts[check] in PARTS else -1
            place = _ORDER.index(check) if check in _PART else len(_ORDER)
            return part, ENDED not in first[check].sentence, _PART.get(check) != parts[check], place

        for check in sorted(first, key=order):
            part = parts[check]
            if part == "backward" and "kernel" in found:
                part = "kernel"
            if part == "program":
                part = next((other for other in ("kernel", "backward", "fake kernel") if other in found), "program")
            if part in found:
                found[part].also.append(first[check])
            else:
                found[part] = Cause(first[check], [result.sample for result in self.of("fail", check)], [])
        return list(found.values())

    def findings(self) -> list[Finding]:
        """Each cause, and each warning, at the line that defines the part of the operator it is about."""
        causes = [(cause.result, "error") for cause in self.causes()]
        warnings = [(result, "warning") for result, _ in self.grouped("warn")]
        found = []
        for result, level in causes + warnings:
            message = f"{result.sentence}\nRemedy: {result.remedy}" if result.remedy else result.sentence
            where = self.definition.get(_part(result)) or next(iter(self.definition.values()), "")
            found.append(Finding(result.check, level, message, where))
        return found

    # ---- the forms ----

    def summary(self) -> str:
        """One line: the verdict, the counts of each status, and the seconds."""
        counts = Counter(r.status for r in self.results)
        text = ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])
        return f"{self.operator} {'passes' if self.passed else 'FAILS'}: {text or 'nothing ran'}; {self.seconds:.1f} s"

    def blocks(self, page: bool = False, verbose: bool = False) -> Iterator[Block]:
        """The content; verbose adds why checks were skipped and what passed."""
        if page:
            yield from (self._box(cause.result, cause.samples, cause.also) for cause in self.causes())
        yield Lines([self.schema, f"on {self.device}, torch {self.torch}"])
        yield Lines([f"  {i}  {text}" for i, text in enumerate(self.samples)])
        yield from (Text(note, 4) for note in self.notes)
        if page:
            counts = Counter(r.status for r in self.results)
            yield facts({status: counts[status] for status in MARKS if counts[status]})
        shown = [check for check in self.about if verbose or page or any(r.status != "skip" for r in self.row(check))]
        table = self._table(shown, whole=page)
        yield Section("Checks (rows) by sample (columns)", [legend(MARKS), table]) if page else table
        if hidden := [check for check in self.about if check not in shown]:
            yield Text(f"Skipped for every sample (--verbose says why): {', '.join(hidden)}", 4)
        if page:
            yield Section("Other results", list(self._others("warn", "known", "limit", "refused", "pass", "skip")))
            return
        if limits := [result.check for result, _ in self.grouped("limit")]:
            text = f"PyTorch's own limits, whatever the operator does (--verbose): {', '.join(dict.fromkeys(limits))}"
            yield Text(text, 4)
        yield from self._others(*(("skip", "pass", "limit") if verbose else ()), "refused", "warn", "known")
        for cause in self.causes():
            yield self._box(cause.result, cause.samples, cause.also, None if verbose else _LINES)

    def _table(self, checks: Iterable[str], whole: bool) -> Table:
        """A mark for each check and sample, or how many samples have each mark."""
        rows = {check: self.row(check) for check in checks}
        if whole or len(self.samples) <= _SAMPLES:
            head: list[Any] = ["check", *range(len(self.samples))]
            cells = {
                check: {r.sample: Cell(MARKS[r.status][0], r.status, r.sentence) for r in row}
                for check, row in rows.items()
            }
            lines = [[check, *(found.get(i, "") for i in range(len(self.samples)))] for check, found in cells.items()]
            if whole:
                head.append("what it verifies")
                lines = [[*line, Cell(self.about[line[0]], "words")] for line in lines]
        else:
            head = ["check", *(mark for mark, _ in MARKS.values())]
            lines = [
                [check, *(len([r for r in row if r.status == s]) or "" for s in MARKS)] for check, row in rows.items()
            ]
        return Table([head, *lines], marks=True)

    def _others(self, *statuses: str) -> Iterator[Box]:
        return (self._box(result, samples) for result, samples in self.grouped(*statuses) if result.sentence)

    def _box(self, result: Result, samples: list[int], also: Iterable[Result] = (), most: int | None = None) -> Box:
        """What a check says, in at most `most` lines for the sentence and for the remedy each."""
        failed, also = result.status == "fail", list(also)
        where = "" if len(samples) == len(self.samples) else f" (sample {', '.join(map(str, samples))})"
        content: list[Block] = [_cut(Text(result.sentence), most)]
        if result.remedy:
            text, *commands = result.remedy.split("\n")  # commands can be copied as they are
            content.append(_cut(Text(f"{'Cause' if result.status == 'known' else 'Remedy'}: {text}"), most))
            content.append(Lines(commands))
        if also and most:
            content.append(Text(f"Also fails: {', '.join(other.check for other in also)} (--verbose shows them)"))
        content += [Text(f"Also fails {other.check}: {other.sentence}") for other in also if not most]
        if failed:
            content.append(Lines([f"More: openreg-tools check --explain {result.check}"]))
        return Box(f"{'FAIL' if failed else result.status} {result.check}{where}", content, result.status, failed)

    def dict(self) -> dict[str, Any]:
        """What `json()` writes."""
        return {
            "operator": self.operator,
            "schema": self.schema,
            "device": self.device,
            "torch": self.torch,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
            "definition": self.definition,
            "samples": self.samples,
            "checks": self.about,
            "causes": [
                {"check": cause.result.check, "samples": cause.samples, "also": [also.check for also in cause.also]}
                for cause in self.causes()
            ],
            "results": [dataclasses.asdict(r) for r in self.results],
        }


def explanation(check: str) -> str:
    """The section of docs/checker.md about a check.

    Raises:
        KeyError: there is no such check.
    """
    page = Path(__file__).with_name("checker.md").read_text()
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    return sections[check].rstrip()


def _part(result: Result) -> str:
    """The part of the operator that a failure is about."""
    if ENDED in result.sentence:  # whatever the check is about, it did not come to that
        return "fake kernel" if FAKE in result.sentence else "kernel" if "given " in result.sentence else "program"
    return _PART.get(result.check, result.check)


def _cut(text: Text, most: int | None) -> Block:
    lines = Text(text.words, 4).lines()
    return (
        text
        if most is None or len(lines) <= most
        else Lines([line.strip() for line in [*lines[: most - 1], lines[most - 1][:76] + " …"]])
    )
