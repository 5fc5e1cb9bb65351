"""Runs the checks of an operator: in forked children, or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from openreg_tools.check.case import FAKE, Case, Operator, Verdict
from openreg_tools.check.checks import ANY_LAYOUT, CHECKS, UNUSUAL
from openreg_tools.check.checks.derivatives import derivative
from openreg_tools.check.report import ENDED, Report, Result
from openreg_tools.check.settings import preserved
from openreg_tools.core import child
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.options import Wrong
from openreg_tools.core.samples import Sample

ENDS = 20  # how often the operator may end its process before the remaining checks are skipped
HANGS = 2  # how often it may hang
ALONE = ("state",)  # the checks that need a process in which the operator has not run

# ---- one check of one sample ----

# PyTorch's errors for what the package of a device does not have yet, and what that is.
_LACKING = {
    r"Could not run '(aten::[\w.]+)' with arguments from the '(?!CPU|Meta|Sparse|Quantized|Nested)\w+' backend": "{}",
    r"module 'torch\.\w+' has no attribute '(\w*rng_state|manual_seed\w*|synchronize|current_\w+|device_count)'": "{}()",
    r"register (PrivateUse1HooksInterface)": "{}",
    r"use AMP with the `\w+` backend, but .*(get_amp_supported_dtype)": "{}()",
}


def lacking(sentence: str) -> str:
    """What the package of a device lacks, according to an error of PyTorch; "" if that is not what it says."""
    found = ((re.search(pattern, sentence), text) for pattern, text in _LACKING.items())
    return next((text.format(match[1]) for match, text in found if match), "")


@dataclasses.dataclass
class Checks:
    """The checks of one operator, to run one by one."""

    report: Report  # without results
    op: Operator
    samples: list[Sample]
    reference: Callable[..., Any] | None
    known: dict[str, str]
    intended_gradient: Callable[..., Any] | None = None
    trying: Callable[[str], None] = lambda inputs: None  # called with the inputs that a check tries
    _case: tuple[int, Case, str] | None = None  # the sample's number, and why the operator refuses it

    def result(self, i: int, name: str) -> Result:
        """Run one check on one sample."""
        start = time.perf_counter()
        case, refusal = (self._new_case(i), "") if name in ALONE else self._of_sample(i)
        if refusal and name != "runs":
            verdict = Verdict("skip", f"{case.name} refuses this sample")
        elif name not in ANY_LAYOUT and any(x.layout != torch.strided for x in case.leaves):
            verdict = Verdict("skip", "it applies to strided tensors only")
        else:
            with preserved(self.report.device):
                verdict = _run_check(CHECKS[name], case)
            if verdict.status == "fail" and name != "runs" and (part := lacking(verdict.sentence)):
                verdict = Verdict("skip", f"the device lacks {part}")
        seconds = round(time.perf_counter() - start, 4)
        return Result(name, i, verdict.status, verdict.sentence, verdict.remedy, seconds)

    def rehearse(self, i: int, name: str) -> None:
        """Run one check on one sample without gradients, in a child that cannot have them."""
        case, refusal = self._of_sample(i)
        if not refusal:
            case.derivative = Verdict("skip", "")
            _run_check(CHECKS[name], case)

    def _of_sample(self, i: int) -> tuple[Case, str]:
        if self._case is None or self._case[0] != i:
            case = self._new_case(i)
            self._case = i, case, _refusal(case)
        return self._case[1:]

    def _new_case(self, i: int) -> Case:
        case = Case(self.op, self.samples[i], self.report.device, self.reference, derivative, self.intended_gradient)
        case.trying = self.trying
        case.others = (*self.samples[:i], *self.samples[i + 1 :])
        return case


# What an operator may raise. SystemExit would otherwise end the tool, which then reports nothing.
_RAISED = (Exception, SystemExit, GeneratorExit)


def _refusal(case: Case) -> str:
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except _RAISED as error:
        return all_lines(error)
    return ""


def _run_check(function: Callable[[Case], str | None], case: Case) -> Verdict:
    try:
        return Verdict("pass", function(case) or "")
    except Verdict as verdict:
        return verdict
    except _RAISED as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "/torch/" not in f.filename), "")
        said = f"{case.name}: the check {function.__name__} ended in {all_lines(error)}" + f" ({where})" * bool(where)
        remedy = "the operator raised where its result was expected; see the section of this check for what it calls"
        return Verdict("fail", said, remedy)


# ---- all checks ----


def in_process(checks: Checks, seconds: float, progress: Callable[[str], None]) -> Report:
    """Run every check here. The kernel first gets unusual inputs in a forked child, where that is possible."""
    report, began = checks.report, time.perf_counter()
    host = report.device == "cpu" and hasattr(os, "fork")
    with child.at_most() if host else contextlib.nullcontext(), preserved(checks.report.device):
        for i, name in sorted(report.planned(), key=lambda planned: planned[1] not in ALONE):
            progress(_where(report, i, name))
            rehearsed = _rehearsed(checks, i, name, seconds) if host and name in UNUSUAL else None
            report.results.append(rehearsed or checks.result(i, name))
    report.finish(checks.known)
    report.seconds = time.perf_counter() - began
    return report


def _rehearsed(checks: Checks, i: int, name: str, seconds: float) -> Result | None:
    """The result of a check that ends or hangs a child, which calls the kernel without autograd."""
    trying = ""

    def work(answer: Callable[[Any], None]) -> None:
        checks.trying = answer
        with child.at_most():
            checks.rehearse(i, name)

    try:
        for inputs in child.answers(work, seconds):
            trying = inputs
    except child.Ended as error:
        return _ended(checks.report, i, name, error, trying)
    return None


def in_children(prepare: Callable[[], Checks], seconds: float, progress: Callable[[str], None]) -> Report:
    """Prepare and run every check in a forked child; when it ends or hangs in one, another goes on with the next.

    Args:
        seconds: how long one check of one sample may take.
    Raises:
        ValueError: the request is wrong.
    """
    began = time.perf_counter()
    report: Report | None = None
    known: dict[str, str] = {}
    planned: list[tuple[int, str]] = []
    stopped: dict[int, str] = {}  # by sample: why its remaining checks are skipped
    ends, hangs = 0, 0

    def work(answer: Callable[[Any], None]) -> None:
        try:
            checks = prepare()
        except Exception as error:
            said = isinstance(error, (ValueError, Wrong))
            if not said:
                traceback.print_exc()
            answer({"wrong": str(error) if said else all_lines(error)})
            return
        answer({"ready": dataclasses.asdict(checks.report), "known": checks.known})
        torch.empty(0, device=checks.report.device)  # a device reserves its memory before there is a limit
        with child.at_most(), preserved(checks.report.device):
            checks.trying = lambda inputs: answer({"trying": inputs})
            for k, (i, name) in enumerate(planned[len(report.results) :] if report else _ordered(checks.report)):
                if k and name in ALONE:
                    return  # another child goes on
                answer({"at": [i, name]})
                result = Result(name, i, "skip", stopped[i]) if i in stopped else checks.result(i, name)
                answer({"result": dataclasses.asdict(result)})

    while report is None or len(report.results) < len(planned):
        if report and planned[len(report.results)][1] in ALONE:
            importlib.import_module("torch._dynamo")  # a call of a custom_op imports it: once here, not in every child
        at, trying, since = None, "", time.perf_counter()
        try:
            for said in child.answers(work, seconds):
                if "wrong" in said:
                    raise ValueError(said["wrong"])
                if "ready" in said and report is None:
                    report, known = Report(**said["ready"]), said["known"]
                    planned = _ordered(report)
                if "at" in said:
                    at, trying, since = tuple(said["at"]), "", time.perf_counter()
                    progress(_where(report, *at))
                trying = said.get("trying", trying)
                if "result" in said:
                    report.results.append(Result(**said["result"]))
                    at = None
        except child.Ended as error:
            if report is None:
                raise ValueError(f"the process that imports the operator and makes its inputs ended: {error}") from None
            if len(report.results) == len(planned):
                break
            hung = isinstance(error, child.Hung)
            ends, hangs = ends + (not hung), hangs + hung
            i, name = at or planned[len(report.results)]
            report.results.append(_ended(report, i, name, error, trying))
            report.results[-1].seconds = round(time.perf_counter() - since, 4)
            if name == "runs":
                stopped[i] = f"{report.operator} does not return for this sample"
            if ends == ENDS or hangs == HANGS:
                why = f"earlier checks {'did not end' if hung else 'ended the process'}, so this one was not run"
                stopped = dict.fromkeys(range(len(report.samples)), why)
    report.finish(known)
    report.seconds = time.perf_counter() - began
    return report


def _ordered(report: Report) -> list[tuple[int, str]]:
    return sorted(report.planned(), key=lambda planned: planned[1] in ALONE)


def _where(report: Report, i: int, name: str) -> str:
    done, total = len(report.results), len(report.samples) * len(report.about)
    return f"[{done + 1}/{total}] sample {i}: {name}"


def _ended(report: Report, i: int, name: str, error: child.Ended, trying: str) -> Result:
    given = f"given {trying}, " if trying else ""
    what = "the check does not end" if isinstance(error, child.Hung) else ENDED
    remedy = "the operator must return or raise an exception; run its calls in a debugger to see where it stops"
    if trying == FAKE:
        remedy = (
            "register a fake kernel (torch.library.register_fake): without one, a kernel at CompositeExplicitAutograd, which "
            "holds for every device, reads the memory of tensors that have none"
        )
    elif trying and not isinstance(error, child.Hung):
        remedy = (
            "the kernel reads or writes outside its arguments for these inputs: check sizes and the values of indices "
            "before it touches memory (TORCH_CHECK, torch._check)"
        )
    return Result(name, i, "fail", f"{report.operator}: {given}{what}: {error}", remedy)
