"""Reports of a conformance run: tables by dtype and by operator, JSON, an HTML heat map, and regressions."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from openreg_tools import forms, pages
from openreg_tools.conformance import graphs, opinfo, sweep

Record = dict[str, Any]  # one line of the results file: operator, dtype, ran, failures, notes, seconds
Case = tuple[str, str]  # operator, dtype


@dataclasses.dataclass(frozen=True)
class Known:
    """Why an operator differs, and in which checks and dtypes."""

    cause: str
    checks: tuple[str, ...] = sweep.CHECKS
    dtypes: tuple[str, ...] = opinfo.DTYPES


VERDICTS = {
    "pass": "equal to the CPU",
    "known": "differs, for a cause in known_failures.py",
    "fail": "differs",
    "fixed": "listed as a known failure, but passes",
}
MARKS = {"pass": ".", "known": "k", "fail": "F", "fixed": "x"}
SHORT = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "complex64": "c64", "int64": "i64",
    "int32": "i32", "uint8": "u8", "bool": "b8",
}  # fmt: skip


def _kind(name: str) -> str:
    if name.startswith("optim."):
        return "optimizers"
    return "modules" if name.startswith("nn.") and not name.startswith("nn.functional.") else "operators"


@dataclasses.dataclass
class Results:
    """The records of a run, judged."""

    header: Record
    records: list[Record]
    dtypes: dict[str, list[str]]  # of all operators
    known: dict[str, Known] = dataclasses.field(default_factory=dict)
    thorough: bool = True  # with fewer samples or checks, a known failure might not appear
    against: dict[Case, Record] | None = None  # an earlier run

    def __post_init__(self) -> None:
        passed = {(r["operator"], r["dtype"]) for r in self.records if not r["failures"] and r["ran"]}
        # The listed operators that pass in every dtype they are listed for, all of those having run.
        self.fixed = {
            name
            for name, known in self.known.items()
            if self.thorough
            and all((name, dtype) in passed for dtype in self.dtypes.get(name, ()) if dtype in known.dtypes)
        }

    def verdict(self, record: Record) -> str:
        """The verdict, one of VERDICTS."""
        known = self.known.get(record["operator"])
        listed = known is not None and record["dtype"] in known.dtypes
        if record["failures"]:
            return "known" if listed and {f["check"] for f in record["failures"]} <= set(known.checks) else "fail"
        return "fixed" if listed and record["operator"] in self.fixed else "pass"

    @property
    def regressions(self) -> list[tuple[Record, list[str]]]:
        """The cases that have a failure now that the earlier run did not have."""
        found = []
        for record in self.records:
            before = (self.against or {}).get((record["operator"], record["dtype"]))
            if before is not None and self.verdict(record) == "fail":
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
    def good(self) -> bool:
        """With an earlier run: no regression. Otherwise: no failure, and no known failure that passes."""
        if self.against is not None:
            return not self.regressions
        return not any(self.verdict(r) in ("fail", "fixed") for r in self.records)

    # ---- text ----

    def text(self, verbose: bool = False) -> str:
        lines = forms.table(self._by_dtype(), left=1)
        kinds = collections.Counter(kind for r in self.records for kind in {f["kind"] for f in r["failures"]})
        notes = collections.Counter(n for r in self.records for n in r["notes"] if not n.startswith(graphs.NOTE))
        if kinds:
            lines += ["", "Cases in which something differed:"]
            lines += [f"  {count:5} {kind}: {opinfo.KINDS[kind]}" for kind, count in kinds.most_common()]
        if notes:
            said = ", ".join(f"{count} {note}" for note, count in notes.most_common())
            lines += ["", *forms.wrapped([f"Differences that are allowed, in cases: {said}"], 0)]
        lines += self._graphs() + self._grid(verbose) + self._failures()
        for record in self.records:
            if self.verdict(record) == "fixed":
                lines.append(
                    f"{record['operator']} {record['dtype']} is a known failure but passes: take it off the list"
                )
        if self.against is not None:
            lines += self._compared()
        return "\n".join([*lines, "", *forms.wrapped([self.summary()], 0)])

    def summary(self) -> str:
        judged = collections.Counter(map(self.verdict, self.records))
        operators = {r["operator"] for r in self.records}
        bad = {r["operator"] for r in self.records if self.verdict(r) in ("fail", "fixed")}
        return (
            f"{len(operators)} operators, {len(operators) - len(bad)} good, {len(bad)} bad; "
            f"{len(self.records)} cases: " + ", ".join(f"{judged[v]} {v}" for v in VERDICTS)
        )

    def _by_dtype(self) -> list[list[Any]]:
        rows: list[list[Any]] = [["dtype", "compared", "cases", *VERDICTS]]
        present = [dtype for dtype in opinfo.DTYPES if any(r["dtype"] == dtype for r in self.records)]
        for name in (*present, "all"):
            chosen = [r for r in self.records if name in ("all", r["dtype"])]
            judged = collections.Counter(map(self.verdict, chosen))
            rows.append(
                [name, sum(sum(r["ran"].values()) for r in chosen), len(chosen), *(judged[v] for v in VERDICTS)]
            )
        return rows

    def _matrix(self) -> dict[str, dict[str, Record]]:
        matrix: dict[str, dict[str, Record]] = {}
        for record in self.records:
            matrix.setdefault(record["operator"], {})[record["dtype"]] = record
        return dict(sorted(matrix.items()))

    def _grid(self, verbose: bool) -> list[str]:
        """A row for each operator and a mark for each dtype; without `verbose`, only operators that do not pass."""
        rows = [["", *SHORT.values()]]
        for name, by_dtype in self._matrix().items():
            marks = [MARKS[self.verdict(by_dtype[d])] if d in by_dtype else "" for d in SHORT]
            if verbose or set(marks) - {".", ""}:
                rows.append([forms.cut(name, 32), *marks])
        if len(rows) == 1:
            return []
        legend = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
        return ["", *forms.table(rows, left=1), legend]

    def _graphs(self) -> list[str]:
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
        lines: list[str] = []
        for kind in ("operators", "modules", "optimizers"):
            names = {name for name in {*+ran, *failed} if _kind(name) == kind} - graphs.DYNAMIC  # +: what ran
            bad = {name: refused[name] for name in sorted(names) if name in failed or refused[name]}
            if not names:
                continue
            share = 100 * (len(names) - len(bad)) / len(names)
            fixed = " whose results' shapes do not depend on values" if kind == "operators" else ""
            lines += ["", *forms.wrapped([
                f"Graphs capture {len(names) - len(bad)} of {len(names)} {kind}{fixed}, and replay what eager mode "
                f"computes: {share:.1f} %.{' The others, with the number of calls that each cause affects:' if bad else ''}"
            ], 0)]  # fmt: skip
            for name, causes in bad.items():
                said = [f"{cause} ({count} of {ran[name]})" for cause, count in causes.most_common()]
                lines += forms.wrapped([f"{name}: {'; '.join([*said, *['differs, see below'] * (name in failed)])}"], 2)
        return lines

    def _failures(self) -> list[str]:
        groups: dict[tuple[str, str, str], list[tuple[Record, Record]]] = collections.defaultdict(list)
        for record in self.records:
            if self.verdict(record) == "fail":
                for failure in record["failures"]:
                    groups[record["operator"], failure["check"], failure["kind"]].append((record, failure))
        lines = ["", "Failures, most frequent first:"] if groups else []
        for (name, check, kind), found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
            dtypes = ", ".join(sorted({record["dtype"] for record, _ in found}, key=opinfo.DTYPES.index))
            record, failure = found[0]
            lines.append(f"{len(found):5} {name} {check} [{kind}]")
            where = f"{dtypes}; {record['dtype']} sample {failure['sample']}: {failure['message']}"
            lines += forms.wrapped([where], 6)
        return lines

    def _compared(self) -> list[str]:
        lines = ["", f"Against the earlier run: {len(self.regressions)} regressions, {len(self.repaired)} cases fixed"]
        for record, new in self.regressions:
            lines += forms.wrapped([f"REGRESSED {record['operator']} {record['dtype']}: {', '.join(new)}"], 2)
        return lines

    # ---- JSON and HTML ----

    def dict(self) -> dict[str, Any]:
        return {
            **self.header,
            "good": self.good,
            "summary": self.summary(),
            "regressions": [
                {"operator": r["operator"], "dtype": r["dtype"], "new": new} for r, new in self.regressions
            ],
            "cases": [{**r, "verdict": self.verdict(r)} for r in self.records],
        }

    def html(self) -> str:
        """A heat map: a row for each operator, a column for each dtype."""
        present = [d for d in SHORT if any(r["dtype"] == d for r in self.records)]
        rows: list[list[Any]] = [["operator", *(SHORT[d] for d in present)]]
        regressed = {(r["operator"], r["dtype"]) for r, _ in self.regressions}
        for name, by_dtype in self._matrix().items():
            cells: list[Any] = []
            for dtype in present:
                if dtype not in by_dtype:
                    cells.append("")
                    continue
                record = by_dtype[dtype]
                verdict = self.verdict(record)
                said = "\n".join(f"{f['check']} [{f['kind']}] {f['message']}" for f in record["failures"])
                mark = "R" if (name, dtype) in regressed else MARKS[verdict]
                cells.append((mark, {"class": verdict, "title": f"{name} {dtype}: {said or verdict}"}))
            rows.append([name, *cells])
        judged = collections.Counter(map(self.verdict, self.records))
        marks = {v: (MARKS[v], text) for v, text in VERDICTS.items()} | {"regressed": ("R", "regressed")}
        body = [
            pages.text(self.summary()),
            pages.text(", ".join(f"{name} {value}" for name, value in self.header.items())),
            pages.facts({"operators": len(rows) - 1, **{v: judged[v] for v in VERDICTS}}),
            pages.section("By dtype", pages.table(self._by_dtype())),
            pages.section("By operator", pages.legend(marks) + f'<div class="map">{pages.table(rows)}</div>'),
        ]
        title = f"conformance of {self.header.get('device', '')}"
        return pages.page(title, title, "".join(body))
