"""The search: draws cases of each operator with hypothesis, runs them in child processes, and shrinks those that fail.

The process that draws does not touch the device. Equal seeds give equal cases, on one version of torch and hypothesis.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from openreg_tools import dispatch
from openreg_tools.conformance import schemas
from openreg_tools.conformance.worker import Progress, Worker, on_workers
from openreg_tools.forms import Wrong
from openreg_tools.generate import changes, child, tables
from openreg_tools.generate.report import Finding, GeneratedReport, Operator

__all__ = ["Child", "replay", "search"]

BATCH = 8  # the fewest cases of an operator that gets any
OWN = 3  # times as many cases for a kernel of the device's own package
SHRINKING = 400  # the most runs to shrink one failure
CRASHES = 40  # how many cases of an operator may end the child
WAITS = 3  # how many may hang
_SUSPECTS = 400  # how many earlier calls of other operators may have caused a crash


class Child(Worker):
    """A child process that runs cases. A new one is forked when it dies."""

    pid = 0  # of the worker process, forked by the process that was started

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.earlier: list[dict[str, Any]] = []  # the cases that this worker process has run
        self.previous: dict[str, Any] | None = None  # the last case, whichever process ran it

    def read(self, deadline: float) -> dict[str, Any] | None:
        answer = super().read(deadline)
        if answer and "pid" in answer:
            self.pid = answer["pid"]
            self.earlier = []
        return answer

    def send(self, line: str) -> None:
        """Send a line to one process: another that reads it drops it, and gets its own copy when it is ready."""
        super().send(f"{self.pid} {line}")

    def stop(self) -> None:
        if self.process and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = 0
        super().stop()

    def given(self) -> dict[str, Any]:
        return getattr(self.arguments, "given", {})

    def whole(self, case: dict[str, Any]) -> dict[str, Any]:
        """The case with the samples that it starts from, if the caller gave some."""
        given = {name: value for name, value in self.given().items() if value}
        return case | ({"given": given} if given else {})

    def words(self) -> list[str]:
        a, given = self.arguments, json.dumps(self.given())
        command = ["conformance", "--worker", "--device", a.device]
        return [*command, "--generate", "1", "--given", given, "--threads", str(a.threads)]

    def case(self, case: dict[str, Any]) -> dict[str, Any]:
        """How a case ends. A crash on the device's side is a failure; a crash on the CPU's side is not."""
        earlier = self.earlier
        answer, kind, message, where = self.exchange(json.dumps(case), "end")
        late, self.late = self.late, ""
        previous, self.previous = self.previous, case
        if late and previous is not None:
            if not (self.doubt(previous) or self.damage(previous, earlier)):
                said = f"a process ended after it had answered {json.dumps(previous)}: {late}"
                return {"end": "failed", "kind": "crash", "message": said, "call": ""}
            earlier = []
        if answer is not None:
            self.earlier.append(case)
            return answer
        failed = {"end": "failed", "kind": kind, "message": message, "call": ""}
        if kind == "crash" and where == "start":  # a process that does not start
            return failed
        custom = dispatch.is_custom(case["op"])  # its kernel is tested on the CPU too
        if where in ("device", "comparison") or where == "cpu" and (custom or schemas._of_package(case["op"])):
            if kind == "crash" and where != "cpu" and (note := self.doubt(case) or self.damage(case, earlier)):
                return {"end": "allowed", "note": note}
            return failed
        side = "the CPU's kernel" if where in ("cpu", "cpu alone") else f"the tool's step {where!r}"
        return {"end": "allowed", "note": f"{side} ends the process" if kind == "crash" else f"{side} hangs"}

    def doubt(self, case: dict[str, Any]) -> str:
        """Why the CPU's kernel may have caused a crash on the device's side, by writing beyond its arguments."""
        if dispatch.is_custom(case["op"]):
            return ""
        answer, *_ = self.exchange(json.dumps({"doubtful": case}), "note")
        return answer["note"] if answer else "the CPU's kernel ends the process"

    def damage(self, case: dict[str, Any], earlier: list[dict[str, Any]]) -> str:
        """Why a crash does not repeat in a new process: an earlier call, of this operator or another, wrote beyond its
        arguments."""
        answer, *_ = self.exchange(json.dumps(case), "end")
        if answer is None:
            return ""
        others = [each for each in earlier if each["op"] != case["op"]][-_SUSPECTS:]
        for each in reversed([*others, *(each for each in earlier if each["op"] == case["op"])]):
            answer, *_ = self.exchange(json.dumps({"damages": each}), "damages")
            if answer is None or answer["damages"]:
                return "an earlier call of the CPU's kernel wrote beyond its arguments"
        return ""

    def bases(self, name: str) -> tuple[list[Any], bool, str]:
        """The profiles of the base calls, whether the calls are valid, and the reason if there are none."""
        answer, kind, message, _ = self.exchange(json.dumps({"bases": name}), "bases")
        return (answer["bases"], answer["valid"], "") if answer else ([], False, f"making arguments: {kind}, {message}")

    def source(self, case: dict[str, Any]) -> str:
        """A program that makes the call of a case."""
        request = {"source": case, "modules": self.arguments.modules}
        answer, _, message, _ = self.exchange(json.dumps(request), "source")
        return answer["source"] if answer else f"# making the arguments ends the process: {message}"


class Found(Exception):  # noqa: N818 -- hypothesis shrinks inputs that raise
    """A case that fails."""


class EnoughError(BaseException):
    """Ends the search of one operator. It is not an Exception, so hypothesis passes it on."""


def _kind(kind: str) -> type[Found]:
    """One exception type for each kind of failure, so that hypothesis does not shrink one to another."""
    return _KINDS.setdefault(kind, type(f"Found{kind.title().replace(' ', '')}", (Found,), {}))


_KINDS: dict[str, type[Found]] = {}


def shares(names: list[str], count: int, seed: int, is_own: dict[str, bool]) -> dict[str, int]:
    """How many of `count` cases each operator gets; with few cases, some operators get none."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda name: not is_own[name]) if count >= BATCH * len(order) else None
    weights = {name: OWN if is_own[name] else 1 for name in order}
    total = sum(weights.values())
    given: dict[str, int] = {}
    left = count
    for name in order:
        share = min(left, max(BATCH, count * weights[name] // total))
        if share:
            given[name] = share
        left -= share
    while left:  # the remainder after rounding
        for name in order[:left]:
            given[name] += 1
        left -= min(left, len(order))
    return given


# ---- one operator ----


def explore(name: str, count: int, seed: int, worker: Child, has: str, aliases: bool) -> Operator:
    """Draw `count` cases of one operator, run them, and shrink the first failure of each kind."""
    import hypothesis
    from hypothesis import errors

    from openreg_tools.generate import draw

    of = Operator(name, has, wanted=count)
    if reason := schemas.NOT_CALLED.get(name) or tables.UNCHECKED.get(name):
        of.never = reason
        return of
    profiles, valid, reason = worker.bases(name)
    if not profiles:
        of.never = reason
        return of
    ends: dict[str, dict[str, Any]] = {}
    best: dict[str, tuple[tuple[int, int, str], dict[str, Any], dict[str, Any]]] = {}
    hung = crashed = 0
    digest = hashlib.sha256()

    def attempt(case: dict[str, Any]) -> None:
        nonlocal hung, crashed
        text = json.dumps(case)
        end = ends.get(text)
        if end is None:
            if hung >= WAITS or crashed >= CRASHES or len(ends) >= (count + SHRINKING if best else count):
                raise EnoughError
            ends[text] = end = worker.case(case)
            of.shrinking += bool(best)
            crashed += end.get("kind") == "crash" or "ends the process" in end.get("note", "")
            hung += "hang" in end.get("note", "") or end.get("kind") == "timeout"
            if not best:
                digest.update(text.encode())
                of.count(end)
        if end["end"] == "failed":
            size = (len(case["changes"]), len(text), text)
            if end["kind"] not in best or size < best[end["kind"]][0]:
                best[end["kind"]] = (size, case, end)
            raise _kind(end["kind"])(name)

    settings = hypothesis.settings(
        max_examples=4 * count, database=None, deadline=None, derandomize=False, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        verbosity=hypothesis.Verbosity.quiet, print_blob=False,
    )  # fmt: skip
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
    test = hypothesis.seed(number)(settings(hypothesis.given(draw.cases(name, profiles, aliases))(attempt)))
    try:
        for case in draw.first(name, profiles)[: count // 4]:
            attempt(case)
        test()
    except (Found, errors.Flaky, EnoughError):
        pass  # `best` has the failure, even if it does not repeat
    of.digest = digest.hexdigest()
    for kind, (_, case, end) in sorted(best.items()):
        case, end = _smaller(case, end, worker)
        again, whole = worker.case(case)["end"] == "failed", worker.whole(case)
        of.findings.append(Finding(name, kind, end["message"], end["call"], whole, worker.source(case), again))
    if not of.reached:
        of.never = "only errors or allowed differences" if valid else _without_arguments(name)
    return of


def _without_arguments(name: str) -> str:
    """Why no arguments were found that the CPU accepts."""
    if name.startswith("c10d::"):
        return "a collective, which takes a process group"
    if any(argument.real_type.kind() == "ClassType" for argument in dispatch.schema(name).arguments):
        return "takes packed weights or another object, which only another operator makes"
    if not schemas._on_cpu(name):
        return "an operator of another backend: the CPU has no kernel for it"
    return "no arguments that the CPU accepts were found"


def _smaller(case: dict[str, Any], end: dict[str, Any], worker: Child) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case without changes that the failure does not need, if hypothesis left any of them."""
    for i in reversed(range(len(case["changes"]))):
        shorter = {**case, "changes": [*case["changes"][:i], *case["changes"][i + 1 :]]}
        got = worker.case(shorter)
        if got["end"] == "failed" and got["kind"] == end["kind"]:
            case, end = shorter, got
    return case, end


# ---- all operators ----


def search(arguments: argparse.Namespace, names: list[str], has: dict[str, str]) -> GeneratedReport:
    """Run `arguments.generate` cases of the operators on `arguments.jobs` child processes.

    Args:
        arguments: device, generate, seed, jobs, threads, timeout, modules and given, as in the commands.
        has: what the device has for each listed operator, one of dispatch.HAS.
    Raises:
        Wrong: hypothesis is not installed.
    """
    from openreg_tools.generate import draw

    with draw.without_constants():
        return _search(arguments, names, has)


def _search(arguments: argparse.Namespace, names: list[str], has: dict[str, str]) -> GeneratedReport:
    start = time.monotonic()
    is_own = {name: schemas.is_own(name, arguments.device) for name in names}
    given = shares(names, arguments.generate, arguments.seed, is_own)
    done: list[Operator] = []
    progress, lock = Progress(arguments.generate, "findings", sys.stderr), threading.Lock()
    aliases = arguments.device.partition(":")[0] != "cpu"

    def one(worker: Child, name: str) -> None:
        of = explore(name, given[name], arguments.seed, worker, has[name], aliases)
        with lock:
            done.append(of)
            if not getattr(arguments, "quiet", False):
                for finding in of.findings:
                    line = finding.command(arguments.device, arguments.modules)
                    print(f"found {finding.operator} [{finding.kind}]  {line}", file=sys.stderr, flush=True)
                progress.step(of.wanted, len(of.findings), of.name)

    workers = [Child(arguments) for _ in range(arguments.jobs)]
    try:
        on_workers(given, workers, one)
    except KeyboardInterrupt:  # report what was found so far
        for worker in workers:
            worker.stop()
    with lock:
        names_done = {of.name for of in done}
        skipped = [
            Operator(
                name,
                has[name],
                never="the run stopped first" if name in given else "no case was drawn; use a larger --generate",
            )
            for name in names
            if name not in names_done
        ]
    return GeneratedReport(
        arguments.device, arguments.seed, sorted([*done, *skipped], key=lambda of: of.name), list(arguments.modules),
        time.monotonic() - start,
    )  # fmt: skip


def replay(arguments: argparse.Namespace) -> GeneratedReport:
    """Run the case that `arguments.case` gives as JSON.

    Raises:
        Wrong: it is not a case, or its operator does not exist.
    """
    wanted = f"--case takes the JSON that a finding prints, but got {arguments.case!r}: "
    try:
        text = json.loads(arguments.case)
    except ValueError as error:
        raise Wrong(f"{wanted}{error}") from None
    kinds = {"op": str, "base": int, "changes": list, "given": dict}
    text = {"given": {}, **text} if isinstance(text, dict) else {}
    for key, kind in kinds.items():
        if key not in text:
            raise Wrong(f"{wanted}it has no {key!r}")
        if type(text[key]) is not kind:
            raise Wrong(f"{wanted}{key!r} is {text[key]!r}, and not of type {kind.__name__}")
    name, case = text["op"], {key: text[key] for key in ("op", "base", "changes")}
    arguments.given = text["given"]
    for why in map(changes.wrong, case["changes"]):
        if why:
            raise Wrong(f"{wanted}{why}")
    samples, inputs = arguments.given.get("samples"), arguments.given.get("inputs", [])
    if (
        not {*arguments.given} <= {"samples", "inputs"}
        or not isinstance(samples, str | None)
        or not isinstance(inputs, list)
        or not all(isinstance(each, str) for each in inputs)
    ):
        raise Wrong(f'{wanted}\'given\' is {{"samples": "MODULE:NAME", "inputs": ["f32[3]"]}}, not {arguments.given}')
    has = child.listed(arguments.device)
    if name not in has:
        raise Wrong(f"{arguments.device} lists no operator {name}")
    worker = None
    try:
        worker = Child(arguments)
        count = len(worker.bases(name)[0])
        if count and not 0 <= case["base"] < count:
            raise Wrong(f"{wanted}{name} has {count} calls to start from, from 0 on")
        of = Operator(name, has[name], wanted=1)
        end = worker.case(case)
        if end["end"] == "unfit":
            raise Wrong(f"{wanted}a change does not fit its argument: {end['note']}")
        of.count(end)
        if end["end"] == "failed":
            of.findings = [
                Finding(name, end["kind"], end["message"], end["call"], worker.whole(case), worker.source(case), True)
            ]
    except RuntimeError as error:  # the process ended while it made the samples that are given
        raise Wrong(f"{wanted}{error}") from None
    finally:
        if worker is not None:
            worker.stop()
    return GeneratedReport(arguments.device, 0, [of], list(arguments.modules), 0.0)
