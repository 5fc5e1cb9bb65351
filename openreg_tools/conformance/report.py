"""Reports of a conformance run: tables by dtype and by operator, JSON, an HTML heat map, and regressions."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from openreg_tools.conformance import graphs, outcomes
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import Block, Box, Cell, Lines, Section, Table, Text, counted, cut
from openreg_tools.core.page import facts, legend
from openreg_tools.core.report import Report
from openreg_tools.core.samples import DTYPES, dtype_name

Record = dict[str, Any]  # one line of the results file: operator, dtype, ran, failures, notes, seconds
Case = tuple[str, str]  # operator, dtype


VERDICTS = {"pass": "equal to the CPU", "fail": "differs"}
MARKS = {"pass": ".", "fail": "F"}
_NAMES = {dtype_name(dtype): short for short, dtype in DTYPES.items()}
SHORT = {name: _NAMES[name] for name in opinfo.DTYPES}


def _kind(name: str) -> str:
    if name.startswith("optim."):
        return "optimizers"
    return "modules" if name.startswith("nn.") and not name.startswith("nn.functional.") else "operators"


@dataclasses.dataclass
class ConformanceReport(Report):
    """The records of a run, judged."""

    header: Record
    records: list[Record]
    against: dict[Case, Record] | None = None  # an earlier run

    def __post_init__(self) -> None:
        self.title = f"conformance of {self.header.get('device', '')}"

    def verdict(self, record: Record) -> str:
        """The verdict, one of VERDICTS."""
        return "fail" if record["failures"] else "pass"

    @property
    def regressions(self) -> list[tuple[Record, list[str]]]:
        """The cases that have a failure now that the earlier run did not have."""
        found = []
        for record in self.records:
            before = (self.against or {}).get((record["operator"], record["dtype"]))
            if before is not None:
                differed = {(f["check"], f["kind"]) for f in before["failures"]}
                new = {(f["check"], f["kind"]) for f in record["failures"]} - differed
                if new:
                    found.append((record, sorted(f"{check} [{kind}]" for check, kind in new)))
        return found

    @property
    def repaired(self) -> list[Record]:
        """The cases that failed in the earlier run and pass now."""
        before = self.against or {}
        return [
            r for r in self.records
            if not r["failures"] and before.get((r["operator"], r["dtype"]), {}).get("failures")
        ]  # fmt: skip

    @property
    def passed(self) -> bool:
        """True if nothing is worse than in the earlier run; without one, if nothing fails."""
        if self.against is not None:
            return not self.regressions
        return not any(r["failures"] for r in self.records)

    # ---- text and HTML ----

    def summary(self) -> str:
        judged = collections.Counter(map(self.verdict, self.records))
        operators = {r["operator"] for r in self.records}
        bad = {r["operator"] for r in self.records if r["failures"]}
        failed = f", {len(bad)} failed" if bad else ""
        cases = ", ".join(f"{judged[v]} {v}" for v in VERDICTS if judged[v])
        return f"{len(operators)} operators: {len(operators) - len(bad)} passed{failed}; {len(self.records)} cases: {cases}"

    def blocks(self, page: bool = False, verbose: bool = False) -> Iterator[Block]:
        if page:
            yield from self._regressed()
            yield from self._failures(page)
            judged = collections.Counter(map(self.verdict, self.records))
            yield facts({"operators": len({r["operator"] for r in self.records}), **{v: judged[v] for v in VERDICTS}})
            marks = {v: (MARKS[v], text) for v, text in VERDICTS.items()} | {"regressed": ("R", "regressed")}
            yield Section("Cases by dtype", [self._by_dtype()])
            yield Section("Operators (rows) by dtype (columns)", [legend(marks), self._by_operator(every=True)])
            yield from self._graphs()
            said = [
                f"{name}: {' '.join(value) if isinstance(value, list) else value}"
                for name, value in self.header.items()
            ]
            yield Section("This run", [*map(Text, said)])
            return
        yield self._by_dtype()
        kinds = collections.Counter(kind for r in self.records for kind in {f["kind"] for f in r["failures"]})
        notes = collections.Counter(n for r in self.records for n in r["notes"] if not n.startswith(graphs.NOTE))
        if kinds:
            said = [f"  {count:5} {kind}: {outcomes.KINDS[kind]}" for kind, count in kinds.most_common()]
            yield Section("Cases in which something differed:", [Lines(said)])
        if notes:
            said = ", ".join(f"{count} {note}" for note, count in notes.most_common())
            yield Section("", [Text(f"Differences that are allowed, in cases: {said}")])
        yield from self._graphs()
        grid = self._by_operator(every=verbose)
        if len(grid.rows) > 1:
            yield Section("", [grid, Text(", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()))])
        yield from self._failures()
        yield from self._regressed()

    def _regressed(self) -> Iterator[Block]:
        if self.against is not None:
            regressed = [f"REGRESSED {r['operator']} {r['dtype']}: {', '.join(new)}" for r, new in self.regressions]
            said = f"Against the earlier run: {len(self.regressions)} regressions, {len(self.repaired)} cases fixed"
            yield Section(said, [Text(words, 2) for words in regressed])

    def _by_dtype(self) -> Table:
        rows: list[list[Any]] = [["dtype", "compared", "cases", *VERDICTS]]
        present = [dtype for dtype in opinfo.DTYPES if any(r["dtype"] == dtype for r in self.records)]
        for name in (*present, "all"):
            chosen = [r for r in self.records if name in ("all", r["dtype"])]
            judged = collections.Counter(map(self.verdict, chosen))
            rows.append(
                [name, sum(sum(r["ran"].values()) for r in chosen), len(chosen), *(judged[v] for v in VERDICTS)]
            )
        return Table(rows)

    def _by_operator(self, every: bool) -> Table:
        """A row for each operator and a mark for each dtype; without `every`, only operators that do not pass."""
        by_name: dict[str, dict[str, Record]] = {}
        for record in self.records:
            by_name.setdefault(record["operator"], {})[record["dtype"]] = record
        regressed = {(r["operator"], r["dtype"]) for r, _ in self.regressions}
        present = [d for d in SHORT if any(d in by_dtype for by_dtype in by_name.values())]
        rows: list[list[Any]] = [["operator", *(SHORT[d] for d in present)]]
        for name, by_dtype in sorted(by_name.items()):
            cells: list[Any] = []
            for dtype in present:
                if (record := by_dtype.get(dtype)) is None:
                    cells.append("")
                    continue
                verdict = self.verdict(record)
                said = "\n".join(f"{f['check']} [{f['kind']}] {f['message']}" for f in record["failures"])
                mark = "R" if (name, dtype) in regressed else MARKS[verdict]
                style = "regressed" if mark == "R" else verdict
                cells.append(Cell(mark, style, f"{name} {dtype}: {said or verdict}"))
            if every or {str(cell) for cell in cells} - {".", ""}:
                rows.append([cut(name, 32), *cells])
        return Table(rows, marks=True)

    def _graphs(self) -> Iterator[Block]:
        """How many operators, modules and optimizers graphs capture, and why they cannot capture the others."""
        ran, refused, failed = collections.Counter(), collections.defaultdict(collections.Counter), set()
        for record in self.records:
            name = record["operator"]
            ran[name] += record["ran"].get(graphs.CHECK, 0)
            for note, count in record["notes"].items():
                if note.startswith(graphs.NOTE):
                    refused[name][note.removeprefix(graphs.NOTE)] += count
            if any(failure["check"].startswith(graphs.CHECK) for failure in record["failures"]):
                failed.add(name)
        for kind in ("operators", "modules", "optimizers"):
            names = {name for name in {*+ran, *failed} if _kind(name) == kind} - graphs.DYNAMIC  # +: what ran
            bad = {name: refused[name] for name in sorted(names) if name in failed or refused[name]}
            if not names:
                continue
            share = 100 * (len(names) - len(bad)) / len(names)
            fixed = " whose results' shapes do not depend on values" if kind == "operators" else ""
            others = " The others, with the number of calls that each cause affects:" if bad else ""
            causes = []
            for name, counts in bad.items():
                said = [f"{cause} ({count} of {ran[name]})" for cause, count in counts.most_common()]
                causes.append(Text(f"{name}: {'; '.join([*said, *['differs, see below'] * (name in failed)])}", 2))
            yield Section(
                f"Graphs capture {len(names) - len(bad)} of {len(names)} {kind}{fixed}, and replay what eager mode "
                f"computes: {share:.1f} %.{others}",
                causes,
            )

    def _failures(self, page: bool = False) -> Iterator[Block]:
        groups: dict[tuple[str, str, str], list[tuple[Record, Record]]] = collections.defaultdict(list)
        for record in self.records:
            for failure in record["failures"]:
                groups[record["operator"], failure["check"], failure["kind"]].append((record, failure))
        said: list[Block] = []
        for (name, check, kind), found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
            dtypes = ", ".join(sorted({record["dtype"] for record, _ in found}, key=opinfo.DTYPES.index))
            record, failure = found[0]
            where = f"{dtypes}; {record['dtype']} sample {failure['sample']}: {failure['message']}"
            if page:
                title = f"FAIL {name}: {check} [{kind}], in {counted(len(found), 'case')}"
                said.append(Box(title, [Text(outcomes.KINDS[kind]), Text(where)], "fail", is_open=len(said) < 10))
            else:
                said += [Lines([f"{len(found):5} {name} {check} [{kind}]"]), Text(where, 6)]
        if said:
            yield Section("Failures, most frequent first:", said)

    # ---- JSON ----

    def dict(self) -> dict[str, Any]:
        return {
            **self.header,
            "good": self.passed,
            "summary": self.summary(),
            "regressions": [
                {"operator": r["operator"], "dtype": r["dtype"], "new": new} for r, new in self.regressions
            ],
            "cases": [{**r, "verdict": self.verdict(r)} for r in self.records],
        }
