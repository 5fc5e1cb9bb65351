"""Generated calls: `conformance --generate N` changes calls that the CPU accepts, and compares the device with the CPU.

Worker processes draw and run the cases of an operator (`generated_calls`). A failure is run again in a new process,
without the changes that it does not need.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import schemas
from openreg_tools.conformance.draw import Case
from openreg_tools.conformance.outcomes import KINDS
from openreg_tools.conformance.worker import Worker, on_workers
from openreg_tools.core import device as devices
from openreg_tools.core.blocks import Block, Lines, Section, Table, Text
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Progress, Report, say

__all__ = ["GeneratedFinding", "GeneratedReport", "Tested", "listed", "replay", "search"]

BATCH = 8  # the fewest cases of an operator that gets any
OWN = 3  # times as many cases for a kernel of the device's own package
REACHES = ("own", "shared", "composite", "fallback")  # of dispatch.HAS

# Operators that are not called, because PyTorch calls them with arguments that it has checked, and others damage memory.
UNCHECKED = {
    f"aten::{name}": "the public operator checks the arguments; with others, the CPU's kernel reads or writes anywhere"
    for name in ("_cummax_helper", "_cummin_helper", "_cholesky_solve_helper", "_cholesky_solve_helper.out")
} | {
    f"aten::{name}": "its packed weights have no size; with another input, the CPU's kernel reads anywhere"
    for name in (
        "fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation",
        "quantized_gru_cell", "quantized_lstm_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell",
    )
}  # fmt: skip


@functools.cache
def listed(device: str) -> list[str]:
    """Every operator that reaches the device."""
    key, namespace = devices.target_of(device).key, backends.of_device(device).namespace
    names = {entry.name for entry in operators.operators(device, has=REACHES).entries}
    for name in dispatch.names():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        if has_kernel or namespace and name.startswith(f"{namespace}::"):
            names.add(name)
        elif dispatch.is_custom(name) and dispatch.has(name, key).kind in REACHES:
            names.add(name)
    return sorted(names)


# ---- the report ----

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
class GeneratedFinding:
    """A difference between the device and the CPU, shrunk."""

    operator: str
    kind: str  # one of KINDS
    message: str
    call: str
    case: dict[str, Any]  # with the samples that it starts from, if not the schema's


@dataclasses.dataclass
class Tested:
    """What happened to one operator."""

    name: str
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    reached: int = 0  # cases in which the device's kernel completed, or failed where the CPU's did not
    never: str = ""  # why the kernel was not reached
    finding: GeneratedFinding | None = None

    def add(self, found: dict[str, Any]) -> None:
        """Count what a worker found; nothing but a failure if it ended."""
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

    def __post_init__(self) -> None:
        self.title = f"generated calls on {self.device}, torch {torch.__version__}"

    @property
    def findings(self) -> list[GeneratedFinding]:
        return [tested.finding for tested in self.operators if tested.finding]

    @property
    def passed(self) -> bool:
        return not self.findings

    def command(self, finding: GeneratedFinding) -> str:
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
        called = sum(bool(tested.ends) for tested in self.operators)
        reached = sum(bool(tested.reached) for tested in self.operators)
        return (
            f"{len(self.operators)} operators: {called} called, the device's kernel reached in {reached}; "
            f"{self.ends().total()} cases of seed {self.seed} in {self.seconds:.0f} s, "
            f"{self.ends()['allowed']} differences allowed; {len(self.findings)} findings"
        )

    def blocks(self, page: bool = False, verbose: bool = False) -> Iterator[Block]:
        if not page:
            yield Text(self.title)
        yield Table([["end", "cases"], *([f"{end}: {ENDS[end]}", n] for end, n in self.ends().most_common())])
        if notes := self.notes():
            yield Section("Allowed:", [Text(f"{n}: {note}", 2) for note, n in notes.most_common()])
        never: list[Block] = []
        for why, names in self.never().items():
            shown = names if verbose or page else names[:6]
            more = f", and {len(names) - len(shown)} more (--verbose)" if len(names) > len(shown) else ""
            never += [Text(f"{len(names)}: {why}", 2), Text(", ".join(shown) + more, 6)]
        if never:
            yield Section("Never reached:", never)
        for finding in self.findings:
            words = Text(f"{finding.message} {finding.call}".strip(), 4)
            title = f"FAIL {finding.operator} [{finding.kind}] {KINDS[finding.kind]}"
            yield Section(title, [words, Lines([f"    {self.command(finding)}"])])

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
            "operators": [{**vars(t), "cases": t.ends.total(), "finding": bool(t.finding)} for t in self.operators],
            "findings": [{**vars(f), "command": self.command(f)} for f in self.findings],
        }


# ---- the search ----


def shares(names: list[str], count: int, seed: int, is_own: Callable[[str], bool]) -> dict[str, int]:
    """How many of `count` cases each operator gets; with few cases, some operators get none."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    weights = {name: OWN if is_own(name) else 1 for name in order}
    total, left = sum(weights.values()), count
    given: dict[str, int] = {}
    for name in order:
        share = min(left, max(BATCH, count * weights[name] // total))
        if share:
            given[name] = share
        left -= share
    given[order[0]] += left  # the remainder after rounding
    return given


def explore(worker: Worker, name: str, count: int, seed: int, given: dict[str, Any]) -> Tested:
    """Run `count` cases of one operator, and shrink the first failure."""
    tested = Tested(name)
    if reason := schemas.NOT_CALLED.get(name) or UNCHECKED.get(name):
        tested.never = reason
        return tested
    found = worker.ask({"generate": name, "count": count, "seed": seed, "given": given}, steps=True)
    tested.add(found)
    failure = found.get("failure") or _ended(found)
    if failure and (shrunk := _shrunk(worker, failure, given)):
        tested.finding = GeneratedFinding(
            name, **shrunk | {"case": shrunk["case"] | ({"given": given} if given else {})}
        )
    elif failure:
        tested.notes["a failure that did not repeat in a new process"] += 1
    if not tested.reached and not tested.finding:
        tested.never = _why_never(name, found)
    return tested


def _ended(found: dict[str, Any]) -> dict[str, Any] | None:
    """The failure of a case in which the worker ended, unless it was at work on the CPU's side."""
    if "ended" not in found or found["at"] not in ("device", "comparison"):
        return None
    return {"kind": found["ended"], "message": found["message"], "call": "", "case": found["case"]}


def _shrunk(worker: Worker, failure: dict[str, Any], given: dict[str, Any]) -> dict[str, Any] | None:
    """The failure in a new process, without the changes that it does not need; None if it does not repeat."""

    def again(case: Case) -> dict[str, Any] | None:
        found = worker.ask({"case": case, "given": given}, steps=True)
        failed = found.get("failure") or _ended(found)
        return failed if failed and failed["kind"] == failure["kind"] else None

    worker.stop()
    smallest = again(failure["case"])
    for i in reversed(range(len(failure["case"]["changes"]) if smallest else 0)):
        case = smallest["case"]
        smallest = again({**case, "changes": [*case["changes"][:i], *case["changes"][i + 1 :]]}) or smallest
    return smallest


def _why_never(name: str, found: dict[str, Any]) -> str:
    if "ended" in found:
        return f"{found['at']}: {found['ended']}, {found['message']}"
    if not schemas.is_on_cpu(name):
        return "an operator of another backend: the CPU has no kernel for it"
    return "no arguments that the CPU accepts were found, or all differences were allowed"


def search(arguments: argparse.Namespace, names: list[str]) -> GeneratedReport:
    """Run `arguments.generate` cases of the operators on `arguments.jobs` worker processes.

    Args:
        arguments: device, generate, seed, jobs, threads, timeout and modules, as in the commands; `given` samples; `quiet`.
    """
    start = time.monotonic()
    counts = shares(names, arguments.generate, arguments.seed, lambda name: schemas.is_own(name, arguments.device))
    given = {key: value for key, value in getattr(arguments, "given", {}).items() if value}
    progress, lock = (
        Progress(arguments.generate, "findings", quiet=getattr(arguments, "quiet", False)),
        threading.Lock(),
    )
    report = GeneratedReport(arguments.device, arguments.seed, list(arguments.modules))

    def one(worker: Worker, name: str) -> None:
        tested = explore(worker, name, counts[name], arguments.seed, given)
        with lock:
            report.operators.append(tested)
            if tested.finding and not progress.quiet:
                say(f"found {name} [{tested.finding.kind}]  {report.command(tested.finding)}")
            progress.step(name, counts[name], bool(tested.finding))

    on_workers(counts, [Worker(arguments) for _ in range(min(arguments.jobs, len(counts)))], one)
    skipped = [name for name in names if name not in counts]
    report.operators += [Tested(name, never="no case was drawn; use a larger --generate") for name in skipped]
    report.operators.sort(key=lambda tested: tested.name)
    report.seconds = time.monotonic() - start
    return report


def replay(arguments: argparse.Namespace) -> GeneratedReport:
    """Run the case that `arguments.case` gives as JSON.

    Raises:
        Wrong: it is not a case, or its operator does not exist.
    """
    wanted = f"--case takes the JSON that a finding prints, but got {arguments.case!r}: "
    try:
        case = json.loads(arguments.case)
        given = case.pop("given", {})
        if not set(case) == {"op", "base", "changes"} or type(case["base"]) is not int:
            raise ValueError("it is not an operator, a base and changes")
    except (ValueError, AttributeError, TypeError) as error:
        raise Wrong(f"{wanted}{error}") from None
    name = case["op"]
    if name not in listed(arguments.device):
        raise Wrong(f"{arguments.device} lists no operator {name}")
    worker, start = Worker(arguments), time.monotonic()
    try:
        found = worker.ask({"case": case, "given": given}, steps=True)
        if "wrong" in found or found.get("at") in ("start", "making arguments"):
            raise Wrong(f"{wanted}{found.get('wrong') or found['message']}")
        tested = Tested(name)
        tested.add(found)
        if failure := found.get("failure") or _ended(found):
            tested.finding = GeneratedFinding(name, **failure | {"case": json.loads(arguments.case)})
    finally:
        worker.stop()
    return GeneratedReport(arguments.device, 0, list(arguments.modules), [tested], time.monotonic() - start)
