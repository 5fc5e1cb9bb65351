"""Generated calls: `conformance --generate N` changes calls that the CPU accepts, and compares the device with the CPU.

A case is a JSON object: an operator, the index of one of its base calls, and changes to that call (`core.variations`).
A worker process draws the cases of an operator and runs them until one fails (`run`). `search` runs a failure again in a new process,
without the changes that it does not need.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import json
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import close_enough, schemas
from openreg_tools.conformance.attempts import Attempt, attempts
from openreg_tools.conformance.generated_report import Finding, GeneratedReport, Tested
from openreg_tools.conformance.guarded import Guarded, fenced, stays_within
from openreg_tools.conformance.outcomes import Comparison, Outcome, Report, first_line, run
from openreg_tools.conformance.reproducer import program
from openreg_tools.conformance.worker import Worker, on_workers
from openreg_tools.core import child, from_schema, opinfo, variations
from openreg_tools.core import device as devices
from openreg_tools.core.move import Move, Stays, StorageOf, is_written
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Progress, say
from openreg_tools.core.samples import Sample, dtype_name, parse, sample_of
from openreg_tools.core.variations import is_strided, tensors_of

__all__ = ["Calls", "listed", "replay", "search"]

Case = dict[str, Any]
BASES = 6  # calls that the CPU accepts, per operator: of up to four dimensions. OpInfo adds up to four
REFUSED = 8  # calls that the CPU refuses, if it accepts none
BATCH = 8  # the fewest cases of an operator that gets any
OWN = 3  # times as many cases for a kernel of the device's own package
BYTES = 1 << 30  # of memory for one call: a huge size is an error, instead of minutes of work
REACHES = ("own", "shared", "composite", "fallback")  # of dispatch.HAS

# Changes after which the call means the same: what the CPU then accepts, the device has to accept.
SAME_MEANING = {"layout", "bit", "host", "dtypes", "alias", "out"}

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


# ---- drawing cases ----

_COUNTS = (0, 1, 1, 1, 2, 2, 3, 4)  # how many changes a case has
# The order in which changes are applied, because later ones undo earlier ones: layouts come before shared memory.
_ORDER = ("number", "sizes", "shape", "dtypes", "dtype", "values", "out", "layout", "bit", "alias", "host", "garbage")
_NUMBERS: dict[type, tuple[Any, ...]] = {
    int: (1, 0, -1, 2, 3, 99, -2, 2**31, 2**62, 2**63 - 1, -(2**63)),
    float: (1.0, 0.0, -0.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, {"complex": [0, 1]}),
    bool: (False, True),
    str: ("", "garbage", "sum", "mean"),
}
_OF_OUT = ("permuted", "stepped", "expanded", "padded")


def leaves_of(name: str, sample: Sample) -> list[tuple[Any, Any]]:
    """The leaves of a sample's arguments, each with its argument of the schema."""
    return [
        (argument, leaf)
        for argument, value in from_schema.arguments_of(name, sample)
        for leaf in tree_leaves(value)
    ]  # fmt: skip


def _choices(name: str, sample: Sample, aliases: bool) -> list[tuple[str, list[Any], list[Any]]]:
    """The changes that a sample may have: a kind, the positions or dtypes that it starts from, and the ways."""
    leaves = leaves_of(name, sample)
    tensors = {i: (argument, x) for i, (argument, x) in enumerate(leaves) if is_strided(x)}
    outs = [i for i, (argument, _) in tensors.items() if argument.is_out]
    inputs = [i for i in tensors if i not in outs]
    written = [i for i in inputs if is_written(tensors[i][0])] or inputs[:1]
    shaped = [i for i, (_, x) in tensors.items() if x.dim()]
    found = [
        ("layout", shaped, [layout for layout in variations.LAYOUTS if layout != "channels-last"]),
        ("layout", shaped, ["permuted", "padded", "stepped"]),
        ("layout", [i for i in shaped if tensors[i][1].dim() in (4, 5)], ["channels-last"]),
        ("layout", [*tensors], ["offset", "unaligned"]),
        ("sizes", sorted({size for _, x in tensors.values() for size in x.shape}), [0, 1, 2, 5]),
        ("shape", inputs, [*variations.SHAPES]),
        ("values", inputs, [*variations.VALUES]),
        ("dtypes", sorted({dtype_name(x.dtype) for _, x in tensors.values()}), [*variations.DTYPES]),
        ("dtype", inputs, [*variations.DTYPES]),
        ("host", inputs[1:], [None]),
        ("bit", [i for i in inputs if tensors[i][1].is_floating_point() or tensors[i][1].is_complex()], ["neg", "conj"]),
        ("alias", [i for i in inputs if i not in written] if aliases else [], [(at, how) for at in written for how in variations.ALIASES]),
        ("alias", outs if aliases else [], [(at, how) for at in inputs for how in variations.ALIASES]),
        ("out", outs, ["empty"]),
        ("layout", outs, [*_OF_OUT]),
        ("dtype", outs, [*variations.DTYPES]),
        ("shape", outs, ["last longer", "one dimension more", "first of size 1"]),
        *(("number", [i for i, (_, x) in enumerate(leaves) if type(x) is kind], [*ways]) for kind, ways in _NUMBERS.items()),
        ("garbage", [*range(100)], [None]),
    ]  # fmt: skip
    return [choice for choice in found if choice[1] and choice[2]]


def cases(name: str, bases: list[Sample], count: int, seed: int, aliases: bool) -> Iterator[Case]:
    """Different cases of an operator: first, the widest base call with each tensor permuted, out= first."""
    numbers = random.Random(f"{seed} {name}")
    seen = set()
    for case in [*_first(name, bases)[: count // 4], *(None for _ in range(4 * count))]:
        if case is None:
            base = numbers.randrange(len(bases))
            choices = _choices(name, bases[base], aliases)
            made = []
            for _ in range(numbers.choice(_COUNTS)):
                kind, starts, ways = numbers.choice(choices)
                start, way = numbers.choice(starts), numbers.choice(ways)
                made.append([kind, start, *(way if isinstance(way, tuple) else () if way is None else (way,))])
            case = {"op": name, "base": base, "changes": sorted(made, key=lambda change: _ORDER.index(change[0]))}
        if (text := json.dumps(case)) not in seen and len(seen) < count:
            seen.add(text)
            yield case


def _first(name: str, bases: list[Sample]) -> list[Case]:
    """Kernels that step through a tensor as if it were contiguous fail with these, some of them only in four dimensions."""

    def width(leaf: Any) -> int:
        return len([size for size in leaf.shape if size > 1]) if is_strided(leaf) else 0

    base = max(range(len(bases)), key=lambda i: max((width(x) for _, x in leaves_of(name, bases[i])), default=0))
    wide = [(not argument.is_out, i) for i, (argument, x) in enumerate(leaves_of(name, bases[base])) if width(x) > 1]
    return [{"op": name, "base": base, "changes": [["layout", i, "permuted"]]} for _, i in sorted(wide)]


# ---- base calls ----


@functools.cache
def _infos() -> dict[str, list[str]]:
    """OpInfos by the base name of their ATen operator."""
    found: dict[str, list[str]] = {}
    for full, op in opinfo.database().items():
        for name in {op.name.rpartition(".")[2], op.name.replace(".", "_"), op.aten_name or ""}:
            found.setdefault(name, []).append(full)
    return found


def given_samples(given: dict[str, Any]) -> list[Sample]:
    """Samples as `check` accepts them: from a function, or as text."""
    samples = [parse(text) for text in given.get("inputs", ())]
    if given.get("samples"):
        module, _, path = given["samples"].partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        samples = [sample_of(each) for each in function("cpu", torch.float32)]
    to_cpu = Move("cpu", source=None)
    return [Sample(*to_cpu(sample.args), **to_cpu(sample.kwargs)) for sample in samples]


def _with_whole_outs(name: str, sample: Sample) -> Sample:
    """The sample with out= tensors of the shapes that it writes. A change can make them empty."""
    outs = [argument.name for argument in dispatch.schema(name).arguments if argument.is_out]
    if not outs or not schemas.is_on_cpu(name):
        return sample
    outcome = schemas.outcome_of(name, sample, move := Move("cpu"))
    if outcome.error:
        return sample

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(whole, value)]
        got = move.tensors.get(id(value))
        return torch.zeros(got.shape, dtype=got.dtype) if got is not None and is_strided(got) else value

    return Sample(*sample.args, **{key: whole(v) if key in outs else v for key, v in sample.kwargs.items()})


# ---- the worker: draws and runs the cases of one operator ----

_ELSEWHERE = "an argument is on another device or has no memory, or the call does not name the device"
_SHARED = "memory is written to that another argument shares"


class _WritesBeyondError(Exception):
    """The CPU's kernel does not check shapes, and writes beyond its arguments."""


class Calls:
    """Runs generated calls on a device, in a worker process.

    Args:
        given: the samples to start from, as `check` accepts them; the operator's own if there are none.
        answer: sends the step that may end the process to the parent.
    """

    def __init__(self, device: str, given: dict[str, Any], answer: Callable[[Any], None]) -> None:
        self.device, self.answer = device, answer
        self.alone = torch.device(device).type == "cpu"  # then the reference is contiguous memory
        self.given = given_samples(given)
        module = torch.get_device_module(device)
        if limit := getattr(module, "set_per_process_memory_fraction", None):
            limit(min(1.0, BYTES / module.mem_get_info(device)[1]), torch.device(device).index)

    def bases(self, name: str) -> tuple[list[Sample], bool]:
        """The calls that cases start from, and whether they are valid: accepted by the CPU, or given by the caller."""
        if self.given:
            return self.given, True
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            found = list(schemas.accepted(name, BASES))
            base = name.partition("::")[2].partition(".")[0].removesuffix("_")
            for source in _infos().get(base, ())[:2] if name.startswith("aten::") else ():
                calls = opinfo.calls_of(from_schema.overload(name), source)[:2]
                found += [call for call in calls if not schemas.outcome_of(name, call, Move("cpu")).error]
            if found:
                return [_with_whole_outs(name, sample) for sample in found], True
            return [from_schema.call(name, k) for k in range(REFUSED)], False

    def sample(self, bases: list[Sample], case: Case) -> Sample:
        """The arguments of a case.

        Raises:
            Exception: a change does not fit, such as a dtype that the values do not have.
        """
        name, sample = case["op"], bases[case["base"]]
        names = [argument.name for argument, _ in leaves_of(name, sample)]
        changes = [change for change in case["changes"] if change[0] != "garbage"]
        sample = variations.changed(sample, names, changes)
        for _, k in (change for change in case["changes"] if change[0] == "garbage"):
            sample = from_schema.garbage(name, sample, k)
        return sample

    def run(self, name: str, count: int, seed: int) -> dict[str, Any]:
        """Draw cases of an operator and run them up to the first that fails."""
        self.answer({"at": "making arguments"})
        bases, valid = self.bases(name)
        drawn = list(cases(name, bases, count, seed, aliases=not self.alone))
        return self.run_cases(name, bases, drawn) | {"valid": valid}

    def run_case(self, case: Case) -> dict[str, Any]:
        """Run one case again.

        Raises:
            Wrong: a change does not fit its argument.
        """
        self.answer({"at": "making arguments"})
        bases, _ = self.bases(case["op"])
        if not 0 <= case["base"] < len(bases):
            return {"wrong": f"{case['op']} has {len(bases)} calls to start from, from 0 on"}
        found = self.run_cases(case["op"], bases, [case])
        if "unfit" in found["ends"]:
            (note,) = found["notes"]
            return {"wrong": f"a change does not fit its argument: {note}"}
        return found

    def program(self, case: Case, modules: list[str]) -> str:
        """A program that makes the call of a case."""
        bases, _ = self.bases(case["op"])
        return program(case["op"], self.sample(bases, case), self.device, modules)

    def run_cases(self, name: str, bases: list[Sample], drawn: list[Case]) -> dict[str, Any]:
        made: list[tuple[Case, Sample]] = []
        ends, notes = collections.Counter(), collections.Counter()
        found = {"ends": ends, "notes": notes, "reached": 0}
        with warnings.catch_warnings(), schemas.filled_memory():
            warnings.simplefilter("ignore")
            for case in drawn:
                try:
                    made.append((case, self.sample(bases, case)))
                except Exception as error:
                    ends["unfit"] += 1
                    notes.update([first_line(error)] if len(drawn) == 1 else [])
            self.answer({"at": "the CPU alone"})
            on_cpu = schemas.is_on_cpu(name)
            tried = dict(attempts(len(made), functools.partial(_try_on_cpu, name, made))) if on_cpu else {}
            for i, (case, sample) in enumerate(made):
                at = functools.partial(self._at, case)
                end, note, failure = self.end(name, sample, case, tried.get(i), at)
                ends[end] += 1
                notes.update([note] if note and end != "failed" else [])
                found["reached"] += end in ("equal", "alone", "failed") or end == "allowed" and note != _ELSEWHERE
                if failure:
                    said = {"kind": failure, "message": note, "call": f"({sample!r})", "case": case}
                    return {**found, "failure": said}
        return found

    def _at(self, case: Case, where: str) -> None:
        self.answer({"at": where, "case": case})

    # ---- one case ----

    def end(
        self, name: str, sample: Sample, case: Case, tried: Attempt | None, at: Callable[[str], None]
    ) -> tuple[str, str, str]:
        """How a case ends, with a note, and the kind of its failure.

        "equal", "both raised", "allowed", "failed"; "alone" and "refused alone" where the CPU has no kernel.
        """
        custom = dispatch.is_custom(name)
        is_tested = custom or schemas.is_of_package(name) and not from_schema.is_alone(sample)
        if tried and tried.kind in ("crashed", "hung"):
            if is_tested:
                return "failed", f"on the CPU: {tried.message}", "crash" if tried.kind == "crashed" else "timeout"
            return "allowed", f"the CPU's kernel {'ends the process' if tried.kind == 'crashed' else 'hangs'}", ""
        if tried and _WritesBeyondError.__name__ in tried.message:
            return "allowed", "the CPU's kernel writes beyond its arguments", ""
        if tried is None and schemas.is_on_cpu(name):
            return "allowed", "the CPU's kernel hangs", ""  # in so many cases that the others were not tried
        at("cpu")
        cpu = _outcome(name, sample, Move("cpu")) if tried else None
        at("device")
        there = _outcome(name, sample, Move(self.device))
        internal = "INTERNAL ASSERT"
        if internal in str(there.error) and not (cpu and internal in str(cpu.error)) and not _is_boxing(sample, there):
            return "failed", first_line(there.error), "internal"
        if cpu is None:
            return ("alone" if there.error is None else "refused alone"), "", ""
        at("comparison")
        if cpu.error is not None or there.error is not None:
            return self._raised(name, sample, case, cpu, there)
        if schemas.is_uncompared(name) or any(change[0] == "garbage" for change in case["changes"]):
            return "equal", "", ""
        return self._compared(name, sample, cpu, there, at)

    def _raised(self, name: str, sample: Sample, case: Case, cpu: Outcome, there: Outcome) -> tuple[str, str, str]:
        """The end of a case in which one side or both raised."""
        if cpu.error is not None and there.error is not None:
            return "both raised", "", ""
        theirs, ours = cpu.error and first_line(cpu.error), there.error and first_line(there.error)
        custom, said = dispatch.is_custom(name), theirs or ours
        if self.alone:
            return "allowed", "refuses a layout", ""
        if _is_elsewhere(name, sample):
            return "allowed", _ELSEWHERE, ""
        if schemas.is_uncompared(name) or name in {**schemas.DIFFERENT, **backends.of_operator(name).differs()}:
            return "allowed", "errors of this operator are not compared", ""
        if close_enough.MEMORY.search(said):
            return "allowed", "memory", ""
        if theirs and schemas.LACKS_DTYPE.search(theirs):
            return "allowed", "a dtype that the CPU lacks", ""
        if not custom and not {change[0] for change in case["changes"]} <= SAME_MEANING:
            return "allowed", "one side refuses a call that is wrong", ""
        plain = _outcome(name, sample, close_enough.Plain("cpu"))
        if theirs and plain.error is None:
            wrong = self._off(plain, there, name, sample) if _is_separate(name, sample) else ""
            return (
                ("failed", wrong, "value")
                if wrong
                else ("allowed", "the device takes a layout that the CPU refuses", "")
            )
        if ours and close_enough.OVERLAP.search(ours) and not _is_separate(name, sample):
            return "allowed", "the device refuses to write to memory that overlaps", ""
        if theirs and not custom and not schemas.is_own(name, self.device):
            return "allowed", "the device takes what the CPU refuses", ""
        if ours and plain.error is not None and first_line(plain.error) == ours:
            return "allowed", "the CPU raises this only if the arguments are contiguous", ""
        if note := self._doubt(name, sample):
            return "allowed", note, ""
        if theirs:
            return "failed", f"the CPU raised {theirs}", "no error"
        return "failed", ours, "error"

    def _compared(
        self, name: str, sample: Sample, cpu: Outcome, there: Outcome, at: Callable[[str], None]
    ) -> tuple[str, str, str]:
        """The end of a case in which both sides returned."""
        custom, report = dispatch.is_custom(name), Report()
        separate = _is_separate(name, sample)
        values = not schemas.is_uninitialized(name) and name not in schemas.UNDEFINED
        if self.alone and cpu.drew:
            return "allowed", "random numbers are drawn in the order of memory", ""
        comparison = Comparison(report, "generated", -1, self.device, values)
        comparison.outcomes(cpu, there)
        failures = [(each.kind, each.message) for each in report.failures]
        if not failures and values and not self.alone and not report.notes["strides"]:
            failures += close_enough.beside(sample, cpu, there)
        of_values = [kind for kind, _ in failures if kind in ("value", "shape", "guard")]
        if values and separate and not cpu.drew and (custom or of_values):
            at("contiguous memory")
            plain = _outcome(name, sample, close_enough.Plain("cpu"))
            wrong = self._off(plain, there, name, sample) if plain.error is None else ""
            if plain.error is None and (custom or not wrong):
                failures = [(kind, message) for kind, message in failures if kind not in ("value", "shape", "guard")]
                failures += [(wrong.partition(": ")[0], wrong.partition(": ")[2])] if wrong else []
        if not failures:
            return "equal", "", ""
        kind, message = failures[0]
        excuse = self._excuse(name, sample, kind, message, cpu, comparison, separate, at)
        return ("allowed", excuse, "") if excuse else ("failed", message, kind)

    def _excuse(
        self, name: str, sample: Sample, kind: str, message: str, cpu: Outcome, comparison: Comparison, separate: bool,
        at: Callable[[str], None],
    ) -> str:  # fmt: skip
        """Why a difference says nothing about the device; "" if it does."""
        if kind in ("device", "alias", "rng") and _is_elsewhere(name, sample):
            return _ELSEWHERE
        if kind == "rng" and schemas.is_of_package(name) and comparison.exact:
            return "a package's operator may draw other numbers"
        if kind not in ("value", "shape", "guard", "rng", "structure"):
            return ""
        custom = dispatch.is_custom(name)
        if not separate and (not custom or not _is_twice(name, sample)):
            return _SHARED
        if not custom and kind == "value":
            if close_enough.overflows(sample, comparison.unequal):
                return "infinite or huge arguments give inf or NaN in one order of operations"
            if close_enough.as_exact(functools.partial(schemas.outcome_of, name), sample, cpu, comparison.unequal):
                return "as far from float64 as the CPU"
        at("confirmation")
        return self._doubt(name, sample)

    def _off(self, plain: Outcome, there: Outcome, name: str, sample: Sample) -> str:
        """How the device's results differ from those in contiguous memory, as "kind: message"."""
        report = Report()
        comparison = Comparison(report, "generated", -1, self.device, True)
        comparison.results(Outcome(plain.value[0], mover=plain.mover), Outcome(there.value[0], mover=there.mover))
        found = [each for each in report.failures if each.kind in ("value", "shape")]
        if not found or close_enough.rounds(sample, comparison.unequal):
            return ""
        return f"{found[0].kind}: as the CPU computes in contiguous memory, {found[0].message}"

    def _doubt(self, name: str, sample: Sample) -> str:
        """Why the CPU may cause a difference: its kernel reads beyond its arguments, or its results vary."""
        if dispatch.is_custom(name):  # its CPU kernel is tested too
            one, other = (_outcome(name, sample, close_enough.Plain("cpu")) for _ in range(2))
            varies = one.error is None and other.error is None and self._off(one, other, name, sample)
            return "the results vary from call to call" if varies else ""
        call = functools.partial(schemas.called, name, sample)

        def check(_: int) -> None:
            if not stays_within(call, resizes=True):
                raise _WritesBeyondError
            fenced(call)

        (_, tried), *_ = attempts(1, check) or [(0, Attempt("crashed"))]
        return "" if tried.kind == "returned" else "the CPU's kernel reads or writes beyond its arguments, or varies"


def _try_on_cpu(name: str, made: list[tuple[Case, Sample]], i: int) -> None:
    """In a forked process: make a call on the CPU, and again between guards."""
    sample = made[i][1]
    try:
        with child.at_most(BYTES):
            schemas.run(name, sample, "cpu")
    finally:
        if not dispatch.is_custom(name):
            guarded = Guarded(0x5A)
            with contextlib.suppress(Exception):
                schemas.called(name, sample, guarded)
            if not guarded.is_whole():
                raise _WritesBeyondError


def _outcome(name: str, sample: Sample, move: Move) -> Outcome:
    """The results and the written arguments of a call; deferred errors are raised here."""

    def call(_: Move) -> Any:
        with child.at_most(BYTES):
            found = schemas.called(name, sample, move)
            if move.device.type not in ("cpu", "meta"):
                devices.synchronize(move.device)
        return found

    outcome = run(call, str(move.device))
    outcome.mover = move
    return outcome


def _is_elsewhere(name: str, sample: Sample) -> bool:
    """Whether an argument is on the host, on meta, or without memory, or no argument says where the call runs."""
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
    """Whether no written argument shares its memory with another one, or has elements that share memory."""
    leaves = leaves_of(name, sample)
    counts = collections.Counter(x.untyped_storage()._cdata for x in tensors_of(sample) if is_strided(x))
    written = [x for argument, x in leaves if is_written(argument) and is_strided(x)]
    return all(counts[x.untyped_storage()._cdata] == 1 and not _overlaps_itself(x) for x in written)


def _is_twice(name: str, sample: Sample) -> bool:
    """Whether a written argument is also another argument, and shares its memory with nothing else."""
    leaves = [(argument, x) for argument, x in leaves_of(name, sample) if is_strided(x)]
    written = [x for argument, x in leaves if is_written(argument)]
    return all(
        x is other or x.untyped_storage()._cdata != other.untyped_storage()._cdata
        for x in written
        for _, other in leaves
    ) and not any(map(_overlaps_itself, written))


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements share memory."""
    if not x.numel() or x.is_meta:
        return False
    where = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return where.as_strided(x.shape, x.stride(), x.storage_offset()).unique().numel() < x.numel()


def _is_boxing(sample: Sample, there: Outcome) -> bool:
    """Whether an internal assertion is of PyTorch's code before it calls a kernel: MathBitsFallback, or the boxing of
    sizes that SymInt keeps on the heap."""
    is_large = any(isinstance(x, int) and x < -(2**62) for x in tree_leaves((sample.args, sample.kwargs)))
    said = str(there.error)
    return "MathBitsFallback" in said or "isIntList()" in said and is_large


# ---- the parent: all operators ----


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
        text = worker.ask({"program": shrunk["case"], "given": given, "modules": worker.arguments.modules}, steps=True)
        case = shrunk["case"] | ({"given": given} if given else {})
        source = text.get("program", f"# making the arguments ends the process: {text.get('message')}")
        tested.finding = Finding(name, shrunk["kind"], shrunk["message"], shrunk["call"], case, source)
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
    if found["valid"]:
        return "only errors or allowed differences"
    if name.startswith("c10d::"):
        return "a collective, which takes a process group"
    if any(argument.real_type.kind() == "ClassType" for argument in dispatch.schema(name).arguments):
        return "takes packed weights or another object, which only another operator makes"
    if not schemas.is_on_cpu(name):
        return "an operator of another backend: the CPU has no kernel for it"
    return "no arguments that the CPU accepts were found"


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
        if "wrong" in found or found.get("at") == "making arguments":
            raise Wrong(f"{wanted}{found.get('wrong') or found['message']}")
        tested = Tested(name)
        tested.add(found)
        if failure := found.get("failure") or _ended(found):
            text = worker.ask({"program": case, "given": given, "modules": arguments.modules}, steps=True)
            whole = case | ({"given": given} if given else {})
            source = text.get("program", "")
            tested.finding = Finding(name, failure["kind"], failure["message"], failure["call"], whole, source)
    finally:
        worker.stop()
    return GeneratedReport(arguments.device, 0, list(arguments.modules), [tested], time.monotonic() - start)
