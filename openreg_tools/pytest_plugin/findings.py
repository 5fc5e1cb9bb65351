"""A run's findings: misuse by kind, line and test, as text of 80 columns and as JSON. Does not import torch."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

# What is looked for, in the order of the report.
KINDS = {
    "host": "the host reads or writes device memory",
    "race": "used before the work that writes it is done",
    "mixed": "tensors of different devices in one operator",
    "cuda": '"cuda" where any device could stand',
    "pinned": "pinned memory that is missing, or written while a copy uses it",
    "leak": "device memory that outlives the test that made it",
    "seed": "random numbers from the CPU's global generator",
    "sync": "the host waits for the device",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of misuse at one line, in one test."""

    kind: str  # one of KINDS
    what: str
    where: str  # "file.py:12"
    test: str
    own: bool = False  # in the tests' own code


class Findings:
    """Findings and how often each occurred."""

    def __init__(self) -> None:
        self.counts: Counter[Finding] = Counter()

    def add(self, finding: Finding, count: int = 1) -> None:
        self.counts[finding] += count

    def pack(self) -> list[list[Any]]:
        """As plain values, for another process; the packed findings are removed here."""
        packed = [[*dataclasses.astuple(finding), count] for finding, count in self.counts.items()]
        self.counts.clear()
        return packed

    def unpack(self, packed: list[list[Any]]) -> None:
        for *fields, count in packed:
            self.add(Finding(*fields), count)

    def kinds(self) -> set[str]:
        """The kinds that were found, not counting waits in the tests' own code."""
        return {finding.kind for finding in self.counts if not _let_off(finding)}

    def lines(self, kind: str) -> list[tuple[int, str, str]]:
        """Count, what and where for one kind; the most frequent first."""
        counts: Counter[tuple[str, str]] = Counter()
        for finding, count in self.counts.items():
            if finding.kind == kind and not _let_off(finding):
                counts[finding.what, finding.where] += count
        ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0][1]))
        return [(count, *line) for line, count in ordered]

    def text(self, top: int = 10) -> list[str]:
        """The report's lines: the most frequent of each kind."""
        out = []
        for kind, title in KINDS.items():
            lines = self.lines(kind)
            own = sum(count for finding, count in self.counts.items() if finding.kind == kind and _let_off(finding))
            if lines:
                out.append(f"{kind}: {title}")
                out += [line for each in lines[:top] for line in _line(*each)]
                if len(lines) > top:
                    out.append(f"         and {len(lines) - top} more (--device-report FILE has all)")
            if own:
                out.append(f"{'' if lines else kind + ': '}{own:>7,} more in the tests' own code, which may wait")
        return out

    def write(self, path: str, **about: Any) -> None:
        """The report as JSON: every line, with the tests that reached it."""
        rows: dict[tuple[str, str, str, bool], dict[str, int]] = {}
        for f, count in self.counts.items():
            rows.setdefault((f.kind, f.what, f.where, f.own), {})[f.test] = count
        found = [
            {"kind": kind, "what": what, "where": where, "in_tests": own, "count": sum(tests.values()), "tests": tests}
            for (kind, what, where, own), tests in sorted(rows.items())
        ]
        Path(path).write_text(json.dumps({**about, "findings": found}, indent=1) + "\n")


def _let_off(finding: Finding) -> bool:
    return finding.own and finding.kind == "sync"


def _line(count: int, what: str, where: str) -> list[str]:
    """One line of at most 80 columns, or two."""
    start = f"{count:>7,}  {where}"
    text = f"{start}  {what}"
    if len(text) <= 80:
        return [text]
    room = 80 - 11
    return [start if len(start) <= 80 else f"{count:>7,}  ...{where[-(80 - 12) :]}",
            f"{'':11}{what if len(what) <= room else what[: room - 3] + '...'}"]  # fmt: skip
