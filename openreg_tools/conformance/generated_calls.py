"""Makes calls of an operator on the CPU and on the device, and says how each ends.

`check` is for the suite `schemas`: calls from the schema must agree, and damaged ones, which may raise, must not end the
process. `Calls` is the worker's side of ``--generate``: it draws calls up to one that fails.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import backends, dispatch
from openreg_tools.conformance import close_enough, draw, freed, schemas
from openreg_tools.conformance.close_enough import Plain
from openreg_tools.conformance.draw import Case, leaves_of
from openreg_tools.conformance.guarded import Guarded, fenced, stays_within
from openreg_tools.conformance.outcomes import Comparison, Outcome, Tally
from openreg_tools.core import child, from_schema
from openreg_tools.core.attempts import Attempt, attempts
from openreg_tools.core.blocks import first_line
from openreg_tools.core.move import Move, Stays, StorageOf, is_written
from openreg_tools.core.samples import Sample
from openreg_tools.core.variations import is_strided, tensors_of

__all__ = ["CHECKS", "Calls", "check"]

CHECKS = ("generated", "garbage", freed.CHECK)
_ELSEWHERE = "an argument is on another device or has no memory, or the call does not name the device"
_INTERNAL = "INTERNAL ASSERT"
_SHARED = "memory is written to that another argument shares"
# An error that states a rule. An accident in a kernel says something else.
_RULE = re.compile(r"\b(must|should|expect(s|ed)?|requires?|only|supports?|not (yet )?(implemented|supported))\b", re.I)


class _WritesBeyondError(Exception):
    """The CPU's kernel does not check shapes, and writes beyond its arguments."""


@dataclasses.dataclass
class End:
    """How a call ended."""

    kind: str  # one of generate.ENDS
    note: str = ""  # why a difference is allowed, or what differs
    failure: str = ""  # one of outcomes.KINDS


def check(
    name: str,
    device: str,
    samples: int,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda where: None,
) -> Tally:
    """Make `samples` calls of one operator, and 16 damaged ones for each where the kernel is the device's own."""
    tally = Tally()
    if name in schemas.NOT_CALLED:
        tally.notes["not called"] += 1
        return tally

    def add(check: str, calls: list[Sample], changes: set[str]) -> None:
        def where(i: int, place: str) -> None:
            at(f"{check}, sample {i}, {place}")

        for i, end in ends(name, calls, [changes] * len(calls), device, where, strict=True):
            tally.ran[check] += 1
            if end.failure or end.kind == "refused alone" and check == "generated" and accepted:
                tally.fail(check, end.failure or "error", i, f"{end.note} ({calls[i]!r})")
            elif end.note and end.kind != "refused alone":
                tally.notes[end.note] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at("making arguments")
        accepted = schemas.accepted(name, samples)
        if "generated" in checks and not accepted:
            tally.notes["only refused calls"] += 1
        if "generated" in checks:
            add("generated", accepted or schemas.refused(name, samples), set())
        for i, call in enumerate(accepted if freed.CHECK in checks else ()):
            function = functools.partial(schemas.called, name, call)
            freed.compare(tally, i, f"sample {i}", function, lambda: Move(device), at)
        if "garbage" in checks and schemas.is_own(name, device):
            good = accepted or [from_schema.call(name, k) for k in range(samples)]
            damaged = [from_schema.garbage(name, good[k % len(good)], k) for k in range(16 * samples)]
            add("garbage", damaged, {"garbage"})
    return tally


def ends(
    name: str,
    calls: list[Sample],
    changes: list[set[str]],
    device: str,
    at: Callable[[int, str], None],
    strict: bool = False,
) -> Iterator[tuple[int, End]]:
    """How calls end. All are tried on the CPU first, in another process.

    Args:
        changes: the kinds of changes that made each call.
        at: is told which call is where, because it may end the process.
        strict: also of a wrong call of PyTorch's operators, both sides must raise, or none.
    """
    if not calls:
        return
    with schemas.filled_memory():
        at(0, "the CPU alone")
        on_cpu = schemas.is_on_cpu(name)
        tried = dict(attempts(len(calls), functools.partial(_try_on_cpu, name, calls))) if on_cpu else {}
        for i, (call, of_call) in enumerate(zip(calls, changes, strict=True)):
            yield i, GeneratedCall(name, call, device, of_call, functools.partial(at, i), strict).end(tried.get(i))


@dataclasses.dataclass
class GeneratedCall:
    """One call on a device and on the CPU."""

    name: str
    sample: Sample
    device: str
    changes: set[str] = dataclasses.field(default_factory=set)
    at: Callable[[str], None] = lambda where: None
    strict: bool = False

    def __post_init__(self) -> None:
        self.custom = dispatch.is_custom(self.name)  # its CPU kernel is tested too
        self.alone = torch.device(self.device).type == "cpu"  # then the reference is contiguous memory

    def on(self, move: Move) -> Outcome:
        return schemas.outcome_of(self.name, self.sample, move)

    @functools.cached_property
    def plain(self) -> Outcome:
        """What the CPU gives in contiguous memory."""
        return self.on(Plain("cpu"))

    @functools.cached_property
    def separate(self) -> bool:
        return _is_separate(self.name, self.sample)

    def end(self, tried: Attempt | None) -> End:
        """How the call ends, if `tried` is how it ended on the CPU alone; None if that was not tried."""
        package = self.custom or schemas.is_of_package(self.name)
        if tried and tried.kind in ("crashed", "hung"):
            crashed = tried.kind == "crashed"
            if package and not from_schema.is_alone(self.sample):
                return End("failed", f"on the CPU: {tried.message}", "crash" if crashed else "timeout")
            return End("allowed", f"the CPU's kernel {'ends the process' if crashed else 'hangs'}")
        if tried and _WritesBeyondError.__name__ in tried.message:
            return End("allowed", "the CPU's kernel writes beyond its arguments")
        if tried is None and schemas.is_on_cpu(self.name):
            return End("allowed", "the CPU's kernel hangs")  # in so many cases that the others were not tried
        self.at("cpu")
        cpu = self.on(Move("cpu")) if tried else None
        self.at("device")
        there = self.on(Move(self.device))
        asserts = [_INTERNAL in str(outcome.error) for outcome in (there, cpu) if outcome]
        if asserts[0] and not any(asserts[1:]) and not _is_boxing(self.sample, there):
            return End("failed", first_line(there.error), "internal")
        if cpu is None:
            return End("alone") if there.error is None else End("refused alone", first_line(there.error))
        self.at("comparison")
        if cpu.error is not None or there.error is not None:
            return self.raised(cpu, there)
        if schemas.is_uncompared(self.name) or "garbage" in self.changes:
            return End("equal")
        return self.compared(cpu, there)

    def raised(self, cpu: Outcome, there: Outcome) -> End:
        """The end of a call that one side or both raised in."""
        if cpu.error is not None and there.error is not None:
            return End("both raised")
        theirs, ours = (outcome.error and first_line(outcome.error) for outcome in (cpu, there))
        lenient, differs = not self.custom and not self.strict, backends.of_operator(self.name).differs()
        if self.alone:
            return End("allowed", "refuses a layout")
        if from_schema.is_alone(self.sample) or not self.strict and _is_elsewhere(self.name, self.sample):
            return End("allowed", _ELSEWHERE)
        if schemas.is_uncompared(self.name) or self.name in {**schemas.DIFFERENT, **differs}:
            return End("allowed", "errors of this operator are not compared")
        if close_enough.MEMORY.search(theirs or ours):
            return End("allowed", "memory")
        if theirs and schemas.LACKS_DTYPE.search(theirs):
            return End("allowed", "a dtype that the CPU lacks")
        if lenient and not self.changes <= draw.SAME_MEANING:
            return End("allowed", "one side refuses a call that is wrong")
        if theirs and self.plain.error is None:
            _, wrong = self.off(self.plain, there) if self.separate else ("", "")
            if wrong and not self.doubt():
                return End("failed", wrong, "value")
            return End("allowed", "the device takes a layout that the CPU refuses")
        if ours and close_enough.OVERLAP.search(ours) and not self.separate:
            return End("allowed", "the device refuses to write to memory that overlaps")
        if theirs and lenient and not schemas.is_own(self.name, self.device):
            return End("allowed", "the device takes what the CPU refuses")
        if ours and self.plain.error is not None and first_line(self.plain.error) == ours:
            return End("allowed", "the CPU raises this only if the arguments are contiguous")
        if note := self.doubt():
            return End("allowed", note)
        if ours and lenient and _RULE.search(ours):
            return End("allowed", "the device states a rule, and the CPU does not")
        return End("failed", f"the CPU raised {theirs}", "no error") if theirs else End("failed", ours, "error")

    def compared(self, cpu: Outcome, there: Outcome) -> End:
        """The end of a call that both sides returned from."""
        values = not schemas.is_uninitialized(self.name) and self.name not in schemas.UNDEFINED
        if self.alone and cpu.drew:
            return End("allowed", "random numbers are drawn in the order of memory")
        tally = Tally()
        comparison = Comparison(tally, "generated", -1, self.device, values)
        comparison.outcomes(cpu, there)
        failures = [(failure.kind, failure.message) for failure in tally.failures]
        if not failures and values and not self.alone and not tally.notes["strides"]:
            failures += close_enough.beside(self.sample, cpu, there)
        others = [(kind, message) for kind, message in failures if kind not in ("value", "shape")]
        if values and self.separate and not cpu.drew and (self.custom or len(others) < len(failures)):
            self.at("contiguous memory")
            kind, wrong = self.off(self.plain, there) if self.plain.error is None else ("", "")
            if self.plain.error is None and (self.custom or not wrong):
                failures = others + ([(kind, wrong)] if wrong else [])
        if not failures:
            return End("equal", "rounding" if tally.notes["rounding"] else "")
        kind, message = failures[0]
        excuse = self.excuse(kind, cpu, comparison)
        return End("allowed", excuse) if excuse else End("failed", message, kind)

    def excuse(self, kind: str, cpu: Outcome, comparison: Comparison) -> str:
        """Why a difference says nothing about the device; "" if it does."""
        if kind in ("device", "alias", "rng") and _is_elsewhere(self.name, self.sample):
            return _ELSEWHERE
        if kind == "rng" and schemas.is_of_package(self.name) and comparison.exact:
            return "a package's operator may draw other numbers"
        if kind not in ("value", "shape", "guard", "rng", "structure"):
            return ""
        if not self.separate and (not self.custom or not _is_twice(self.name, self.sample)):
            return _SHARED
        if not self.custom and kind == "value":
            if close_enough.overflows(self.sample, comparison.unequal):
                return "infinite or huge arguments give inf or NaN in one order of operations"
            outcome_of = functools.partial(schemas.outcome_of, self.name)
            if close_enough.as_exact(outcome_of, self.sample, cpu, comparison.unequal):
                return "as far from float64 as the CPU"
        self.at("confirmation")
        return self.doubt()

    def off(self, plain: Outcome, there: Outcome) -> tuple[str, str]:
        """How results differ from those in contiguous memory: the kind, and a message; "" if they do not."""
        tally = Tally()
        comparison = Comparison(tally, "generated", -1, str(there.mover.device), True)
        comparison.near["scale"] = close_enough.size_of(self.sample)
        comparison.results(Outcome(plain.value[0], mover=plain.mover), Outcome(there.value[0], mover=there.mover))
        for failure in tally.failures:
            if failure.kind in ("value", "shape"):
                return failure.kind, f"as the CPU computes in contiguous memory, {failure.message}"
        return "", ""

    def doubt(self) -> str:
        """Why the CPU may cause a difference: its kernel reads beyond its arguments, or its results vary."""
        if self.custom:
            again = self.on(Plain("cpu"))
            varies = self.plain.error is None and again.error is None and self.off(self.plain, again)[0]
            return "the results vary from call to call" if varies else ""
        call = functools.partial(schemas.called, self.name, self.sample)

        def check(_: int) -> None:
            if not stays_within(call, resizes=True):
                raise _WritesBeyondError
            fenced(call)

        (_, tried), *_ = attempts(1, check) or [(0, Attempt("crashed"))]
        return "" if tried.kind == "returned" else "the CPU's kernel reads or writes beyond its arguments, or varies"


class Calls:
    """Runs generated calls on a device, in a worker process.

    Args:
        given: the samples to start from, as `check` accepts them; the operator's own if there are none.
        answer: sends the step that may end the process to the parent.
    """

    def __init__(self, device: str, given: dict[str, Any], answer: Callable[[Any], None]) -> None:
        self.device, self.alone = device, torch.device(device).type == "cpu"
        self.answer, self.given = answer, draw.given_samples(given)
        module = torch.get_device_module(device)
        if limit := getattr(module, "set_per_process_memory_fraction", None):
            limit(min(1.0, schemas.BYTES / module.mem_get_info(device)[1]), torch.device(device).index)

    def bases(self, name: str) -> list[Sample]:
        """The calls that cases start from."""
        return self.given or draw.base_calls(name)

    def answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what the parent asks for: generated calls of an operator, or one case again.

        If a change of that case does not fit its argument, the answer says what is wrong with it.
        """
        self.answer({"at": "making arguments"})
        case = request.get("case")
        name = case["op"] if case else request["generate"]
        bases = self.bases(name)
        if not case:
            drawn = draw.cases(name, bases, request["count"], request["seed"], aliases=not self.alone)
            return self.run_cases(name, bases, list(drawn))
        if not 0 <= case["base"] < len(bases):
            return {"wrong": f"{name} has {len(bases)} calls to start from, from 0 on"}
        found = self.run_cases(name, bases, [case])
        return {"wrong": f"a change does not fit: {[*found['notes']][0]}"} if "unfit" in found["ends"] else found

    def run_cases(self, name: str, bases: list[Sample], drawn: list[Case]) -> dict[str, Any]:
        """Run cases up to the first that fails."""
        cases: list[Case] = []
        calls: list[Sample] = []
        counts, notes = collections.Counter(), collections.Counter()
        found = {"ends": counts, "notes": notes, "reached": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in drawn:
                try:
                    calls.append(draw.sample_of_case(bases, case))
                    cases.append(case)
                except Exception as error:
                    counts["unfit"] += 1
                    notes.update([first_line(error)] * (len(drawn) == 1))
            changes = [{change[0] for change in case["changes"]} for case in cases]
            for i, end in ends(
                name, calls, changes, self.device, lambda i, at: self.answer({"at": at, "case": cases[i]})
            ):
                counts[end.kind] += 1
                found["reached"] += end.kind in ("equal", "alone", "failed") or (
                    end.kind == "allowed" and end.note != _ELSEWHERE
                )
                if end.failure:
                    failed = {"kind": end.failure, "message": end.note, "call": f"({calls[i]!r})", "case": cases[i]}
                    return {**found, "failure": failed}
                notes.update([end.note] if end.kind == "allowed" else [])
        return found


def _try_on_cpu(name: str, calls: list[Sample], i: int) -> None:
    """In a forked process: make a call on the CPU, and again between guards."""
    sample = calls[i]
    try:
        with child.at_most(schemas.BYTES):
            schemas.called(name, sample, Move("cpu"))
    finally:
        if not dispatch.is_custom(name):
            guarded = Guarded(0x5A)
            with contextlib.suppress(Exception):
                schemas.called(name, sample, guarded)
            if not guarded.is_whole():
                raise _WritesBeyondError


def _is_elsewhere(name: str, sample: Sample) -> bool:
    """Returns true if an argument is on the host, on meta or without memory, or none says where the call runs."""
    given = from_schema.arguments_of(name, sample)
    inputs = tree_leaves([value for argument, value in given if not argument.is_out])
    if not any(isinstance(x, (torch.Tensor, torch.device, StorageOf)) for x in inputs):
        return True
    if any(value is None and "Device" in argument.real_type.annotation_str for argument, value in given):
        return True  # some operators then use the CPU, others the device of an argument
    if any(value is None and argument.real_type.kind() == "TensorType" for argument, value in given):
        return True  # the dispatcher passes it on as an undefined tensor
    leaves = tree_leaves((sample.args, sample.kwargs))
    stays = any(isinstance(x, Stays) or isinstance(x, torch.device) and x.type != "cpu" for x in leaves)
    return stays or from_schema.is_alone(sample)


def _is_separate(name: str, sample: Sample) -> bool:
    """Returns true if no written argument shares its memory with another one, or has elements that share memory."""
    leaves = leaves_of(name, sample)
    counts = collections.Counter(x.untyped_storage()._cdata for x in tensors_of(sample) if is_strided(x))
    written = [x for argument, x in leaves if is_written(argument) and is_strided(x)]
    return all(counts[x.untyped_storage()._cdata] == 1 and not _overlaps_itself(x) for x in written)


def _is_twice(name: str, sample: Sample) -> bool:
    """Returns true if a written argument is also another argument, and shares its memory with nothing else."""
    leaves = [(argument, x) for argument, x in leaves_of(name, sample) if is_strided(x)]
    written = [x for argument, x in leaves if is_written(argument)]
    return all(
        x is other or x.untyped_storage()._cdata != other.untyped_storage()._cdata
        for x in written
        for _, other in leaves
    ) and not any(map(_overlaps_itself, written))


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Returns true if two elements share memory."""
    if not x.numel() or x.is_meta:
        return False
    where = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return where.as_strided(x.shape, x.stride(), x.storage_offset()).unique().numel() < x.numel()


def _is_boxing(sample: Sample, there: Outcome) -> bool:
    """Returns true if an internal assertion is of PyTorch's code before the kernel: MathBitsFallback, or the boxing of
    sizes that SymInt keeps on the heap."""
    is_large = any(isinstance(x, int) and x < -(2**62) for x in tree_leaves((sample.args, sample.kwargs)))
    said = str(there.error)
    return "MathBitsFallback" in said or "isIntList()" in said and is_large
