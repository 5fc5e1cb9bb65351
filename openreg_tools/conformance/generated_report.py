"""The report on generated calls: findings with a command that reproduces them, and operators that were never reached."""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
from collections.abc import Iterator
from typing import Any

import torch

from openreg_tools.conformance.outcomes import KINDS
from openreg_tools.core.blocks import Block, Lines, Section, Table, Text
from openreg_tools.core.report import Report

__all__ = ["Finding", "GeneratedReport", "Tested"]

ENDS = {
    "equal": "device and CPU agree",
    "both raised": "both raise an error",
    "allowed": "a difference that says nothing about the device",
    "alone": "the CPU has no kernel: it returned",
    "refused alone": "the CPU has no kernel: it raised",
    "unfit": "a change did not fit the arguments",
    "failed": "a difference, or a crash",
}


@dataclasses.dataclass
class Finding:
    """A difference between the device and the CPU, shrunk."""

    operator: str
    kind: str  # one of KINDS
    message: str
    call: str
    case: dict[str, Any]  # with the samples that it starts from, if not the schema's
    source: str  # a program that makes the call on both devices


@dataclasses.dataclass
class Tested:
    """What happened to one operator."""

    name: str
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reached: int = 0  # cases in which the device's kernel completed, or failed where the CPU's did not
    never: str = ""  # why the kernel was not reached
    finding: Finding | None = None

    def add(self, found: dict[str, Any]) -> None:
        """Count what a worker found; nothing if it ended."""
        self.ends.update(found.get("ends", {"failed": 1}))
        self.notes.update(found.get("notes", {}))
        self.reached += found.get("reached", 0)


@dataclasses.dataclass
class GeneratedReport(Report):
    """Every requested operator."""

    device: str
    seed: int
    modules: list[str]
    operators: list[Tested] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return f"generated calls on {self.device}, torch {torch.__version__}"

    @property
    def findings(self) -> list[Finding]:
        return [tested.finding for tested in self.operators if tested.finding]

    @property
    def passed(self) -> bool:
        return not self.findings

    def command(self, finding: Finding) -> str:
        """The command that runs the case of a finding again."""
        imports = "".join(f" --import {module}" for module in self.modules)
        case = shlex.quote(json.dumps(finding.case))
        return f"python -m openreg_tools conformance --device {self.device}{imports} --case {case}"

    def ends(self) -> collections.Counter[str]:
        """How many cases ended in each way."""
        return sum((tested.ends for tested in self.operators), collections.Counter())

    def notes(self) -> collections.Counter[str]:
        """How many differences were allowed, by the reason."""
        return sum((tested.notes for tested in self.operators), collections.Counter())

    def never(self) -> dict[str, list[str]]:
        """The operators whose kernel was not reached, by the reason."""
        found: dict[str, list[str]] = collections.defaultdict(list)
        for tested in self.operators:
            if tested.never:
                found[tested.never].append(tested.name)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def summary(self) -> str:
        called, reached = (
            sum(map(bool, counts)) for counts in zip(*((t.ends, t.reached) for t in self.operators), strict=True)
        )
        return (
            f"{len(self.operators)} operators, {called} called, the device's kernel reached in {reached}; "
            f"{self.ends().total()} cases of seed {self.seed} in {self.seconds:.0f} s, "
            f"{self.ends()['allowed']} differences allowed; {len(self.findings)} findings"
        )

    def blocks(self, page: bool = False, verbose: bool = False) -> Iterator[Block]:
        if not page:
            yield Text(self.title)
        yield Table([["cases", "", ""], *([n, end, ENDS[end]] for end, n in self.ends().most_common())], left=0)
        if notes := self.notes():
            yield Section(
                "Allowed:", [Table([["cases", "why"], *([n, note] for note, n in notes.most_common())], left=0)]
            )
        never = []
        for why, names in self.never().items():
            shown = names if verbose or page else names[:6]
            more = f", and {len(names) - len(shown)} more (--verbose)" if len(names) > len(shown) else ""
            never += [Text(f"{len(names)}: {why}"), Text(", ".join(shown) + more, 4)]
        if never:
            yield Section("Never reached:", never)
        for finding in self.findings:
            yield Section(
                f"FAIL {finding.operator} [{finding.kind}] {KINDS[finding.kind]}",
                [
                    Text(f"{finding.message} {finding.call}".strip(), 4),
                    Lines(
                        [f"    {self.command(finding)}", "", *(f"    {line}" for line in finding.source.splitlines())]
                    ),
                ],
            )

    def dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": torch.__version__,
            "seed": self.seed,
            "passed": self.passed,
            "summary": self.summary(),
            "ends": self.ends(),
            "notes": self.notes(),
            "never": self.never(),
            "operators": [
                {
                    **{k: v for k, v in dataclasses.asdict(tested).items() if k != "finding"},
                    "cases": tested.ends.total(),
                }
                for tested in self.operators
            ],
            "findings": [{**dataclasses.asdict(f), "command": self.command(f)} for f in self.findings],
        }
