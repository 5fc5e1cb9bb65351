"""Reports on generated inputs: findings with a command that reproduces them, outcomes, and operators that never ran."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import html
import json
import shlex
from typing import Any

import torch

from openreg_tools import forms, pages
from openreg_tools.conformance import opinfo
from openreg_tools.dispatch import HAS

__all__ = ["Finding", "GeneratedReport", "Operator"]

ENDS = {
    "equal": "device and CPU agree",
    "both raised": "both raise the same type of error",
    "allowed": "a difference that says nothing about the device",
    "alone": "the CPU has no kernel: it returned",
    "refused alone": "the CPU has no kernel: it raised",
    "unfit": "a change did not fit the arguments",
    "failed": "a difference, or a crash",
}
REACHED = {"equal", "alone", "failed"}


@dataclasses.dataclass
class Finding:
    """A difference between the device and the CPU, shrunk."""

    operator: str
    kind: str  # one of opinfo.KINDS
    message: str
    call: str
    case: dict[str, Any]  # with the samples that it starts from, if not the schema's
    source: str  # a program that makes the call on both devices
    repeats: bool  # whether it failed again, in a separate child process or in the same one

    def command(self, device: str, modules: list[str]) -> str:
        """The command that reproduces the case."""
        imports = "".join(f" --import {module}" for module in modules)
        case = shlex.quote(json.dumps(self.case))
        return f"python -m openreg_tools conformance --device {device}{imports} --case {case}"


@dataclasses.dataclass
class Operator:
    """What happened to one operator."""

    name: str
    has: str  # one of dispatch.HAS
    wanted: int = 0
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reached: int = 0  # cases in which the device's kernel completed, or failed where the CPU's did not
    shrinking: int = 0  # runs spent on shrinking failures
    never: str = ""  # why the kernel was not reached
    findings: list[Finding] = dataclasses.field(default_factory=list)
    digest: str = ""

    def count(self, end: dict[str, Any]) -> None:
        self.ends[end["end"]] += 1
        self.reached += end["end"] in REACHED or bool(end.get("reached"))
        if note := end.get("note"):
            self.notes[note if end["end"] == "allowed" else end["end"]] += 1


@dataclasses.dataclass
class GeneratedReport:
    """Every requested operator."""

    device: str
    seed: int
    operators: list[Operator]
    modules: list[str]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        return [finding for of in self.operators for finding in of.findings]

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def digest(self) -> str:
        """A hash of all cases up to the first failure of each operator; equal seeds give equal hashes."""
        return hashlib.sha256("".join(of.digest for of in self.operators).encode()).hexdigest()[:16]

    def _totals(self) -> list[list[Any]]:
        rows = [["operators", *HAS[:-1], "all"]]
        for title, is_in in (
            ("listed for the device", lambda of: True),
            ("called", lambda of: bool(of.ends)),
            ("the device's kernel reached", lambda of: of.reached),
            ("never reached", lambda of: not of.reached),
        ):
            chosen = [of for of in self.operators if is_in(of)]
            rows.append([title, *(sum(of.has == has for of in chosen) for has in HAS[:-1]), len(chosen)])
        return rows

    def _ends(self) -> collections.Counter[str]:
        return sum((of.ends for of in self.operators), collections.Counter())

    def _notes(self) -> collections.Counter[str]:
        return sum((of.notes for of in self.operators), collections.Counter())

    def _never(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = collections.defaultdict(list)
        for of in self.operators:
            if not of.reached:
                found[of.never].append(of.name)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def summary(self) -> str:
        cases, reached = self._ends().total(), sum(of.reached for of in self.operators)
        shrinking = sum(of.shrinking for of in self.operators)
        return (
            f"{cases} cases of seed {self.seed} in {self.seconds:.0f} s, {shrinking} more to shrink; the device's kernel "
            f"reached in {reached}; {self._ends()['allowed']} differences allowed; {len(self.findings)} findings"
        )

    def text(self, verbose: bool = False) -> str:
        lines = [f"generated inputs on {self.device}, torch {torch.__version__}", ""]
        lines += [*forms.table(self._totals(), left=1), ""]
        lines += [f"{count:6} {end}: {ENDS[end]}" for end, count in self._ends().most_common()]
        if notes := self._notes():
            lines += ["", "Allowed:", *(f"{count:6} {note}" for note, count in notes.most_common())]
        if never := self._never():
            lines += ["", "Never reached:"]
            for why, names in never.items():
                lines.append(f"{len(names):6} {why}")
                shown = names if verbose else names[:6]
                more = f", and {len(names) - len(shown)} more (--verbose)" if len(names) > len(shown) else ""
                lines += forms.wrapped([", ".join(shown) + more], 7)
        for finding in self.findings:
            lines += ["", f"FAIL {finding.operator} [{finding.kind}] {opinfo.KINDS[finding.kind]}"]
            lines += forms.wrapped([f"{finding.message} {finding.call}".strip()])
            if not finding.repeats:
                lines.append("    It did not fail again in the child process that ran it last.")
            lines += [f"    {finding.command(self.device, self.modules)}", ""]
            lines += [f"    {line}" for line in finding.source.splitlines()]
        return "\n".join([*lines, "", *forms.wrapped([self.summary()], 0)])

    def dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": torch.__version__,
            "seed": self.seed,
            "passed": self.passed,
            "summary": self.summary(),
            "digest": self.digest,
            "ends": self._ends(),
            "notes": self._notes(),
            "never": self._never(),
            "operators": [
                {
                    "name": of.name,
                    "has": of.has,
                    "cases": of.ends.total(),
                    "reached": of.reached,
                    "never": of.never,
                    "ends": of.ends,
                    "notes": of.notes,
                    "digest": of.digest,
                }
                for of in self.operators
            ],
            "findings": [
                {**dataclasses.asdict(f), "command": f.command(self.device, self.modules)} for f in self.findings
            ],
        }

    def html(self) -> str:
        """A self-contained page."""
        e = html.escape
        found = "".join(
            pages.details(
                f"{f.operator} {f.kind}",
                f"<p>{e(f.message)} {e(f.call)}</p><pre>{e(f.command(self.device, self.modules))}</pre><pre>{e(f.source)}</pre>",
                "fail",
                is_open=True,
            )
            for f in self.findings
        )
        ends = [["cases", "", ""], *([count, end, ENDS[end]] for end, count in self._ends().most_common())]
        never = [["operators", "", "why"]]
        never += [
            [len(names), (", ".join(names), {"class": "words"}), (why, {"class": "words"})]
            for why, names in self._never().items()
        ]
        body = [
            pages.text(self.summary()),
            pages.facts({"cases": self._ends().total(), "findings": len(self.findings), "seed": self.seed}),
            pages.section("Findings", found or pages.text("None.")),
            pages.section("Operators", pages.table(self._totals())),
            pages.section("How the cases ended", pages.table(ends, left=0)),
            pages.section("Never reached", pages.table(never, left=0)) if never[1:] else "",
        ]
        title = f"generated inputs on {self.device}"
        return pages.page(title, title, "".join(body))
