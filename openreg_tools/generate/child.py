"""The child process: makes an operator's base calls, and runs one case on the CPU and on the device.

It reads lines from stdin, each the number of the process that is to serve it and a request in JSON, and answers with JSON
lines. It announces each step that may end the process, so that the parent knows on which side a crash happened. The
process that the parent starts imports everything once and forks a worker. When the worker dies, it forks a new one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import mmap
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import generated, layouts, opinfo, schemas
from openreg_tools.conformance.calls import Call, Move
from openreg_tools.conformance.worker import serving
from openreg_tools.forms import Wrong
from openreg_tools.generate import aliasing, allowed, changes, contiguous, numerics, snippet, tables

__all__ = ["Record", "bases", "listed", "run", "serve"]

Record = dict[str, Any]
BASES = 6  # calls that the CPU accepts, per operator: of up to four dimensions. OpInfo adds up to four
REACHES = ("own", "shared", "composite", "fallback")  # of dispatch.HAS
REFUSED = 8  # calls that the CPU refuses, if it accepts none

# ---- the operators and their base calls ----


@functools.cache
def listed(device: str) -> dict[str, str]:
    """Every operator that reaches the device, with what the device has for it (dispatch.HAS)."""
    target = dispatch.target(device)
    found = operators.operators(device, has=REACHES).entries
    has = {entry.name: entry.has for entry in found}
    for name in dispatch.names():
        if name not in has and torch._C._dispatch_has_kernel_for_dispatch_key(name, target.key):
            has[name] = "own"
        elif name.startswith(f"{backends.of_device(device).namespace}::"):
            has.setdefault(name, dispatch.has(name, target.key).kind)
        elif dispatch.is_custom(name) and (kind := dispatch.has(name, target.key).kind) in REACHES:
            has.setdefault(name, kind)
    return dict(sorted(has.items()))


@functools.cache
def _infos() -> dict[str, list[str]]:
    """OpInfos by the base name of their ATen operator."""
    found: dict[str, list[str]] = {}
    for full, op in opinfo.database().items():
        for name in {op.name.rpartition(".")[2], op.name.replace(".", "_"), op.aten_name or ""}:
            found.setdefault(name, []).append(full)
    return found


class _Given:
    """Samples passed to `check`."""

    samples: list[Call] = []


@functools.lru_cache(maxsize=4)
def bases(name: str) -> tuple[list[Call], bool]:
    """The calls that cases start from, and whether they are valid: accepted by the CPU, or given by the caller."""
    if _Given.samples:
        return _Given.samples, True
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        found = list(schemas.accepted(name, BASES))
        base = name.partition("::")[2].partition(".")[0].removesuffix("_")
        if name.startswith("aten::"):
            for source in _infos().get(base, ())[:2]:
                found += [call for call in generated.recorded(name, source)[:2] if _returns(name, call)]
    if not found:
        return [generated.call(name, k) for k in range(REFUSED)], False
    return [_with_whole_outs(name, call) for call in found], True


def _returns(name: str, call: Call) -> bool:
    return opinfo.run(lambda _: schemas.run(name, call, "cpu"), "cpu").error is None


def _with_whole_outs(name: str, call: Call) -> Call:
    """The call with out= tensors of the shapes that it writes. A change can make them empty."""
    outs = [each.name for each in dispatch.schema(name).arguments if each.is_out]
    if not outs or not schemas._on_cpu(name):
        return call
    move = Move("cpu")
    if opinfo.run(lambda _: schemas._call(name, call, move), "cpu").error:
        return call

    def whole(value: Any) -> Any:
        got = move.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None
        if got is None or not changes._is_plain(got):
            return value
        return torch.zeros(got.shape, dtype=got.dtype)

    return Call(
        call.args, {key: tree_map(whole, v) if key in outs else v for key, v in call.kwargs.items()}, call.alone
    )


def call_of(case: Record) -> Call:
    """The arguments of a case."""
    calls, _ = bases(case["op"])
    return changes.changed(case["op"], calls[case["base"] % len(calls)], case["changes"])


# ---- one case ----


def run(case: Record, device: str, at: Callable[[str], None]) -> Record:
    """Run a case on both sides.

    Returns:
        How it ended: "equal", "both raised", "allowed" (a difference that the tool allows, with a note), "failed".
    """
    name = case["op"]
    torch.empty(1, device=device)  # reserves the device's memory before this process's memory is limited
    at("arguments")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = call_of(case)
    except Exception as error:  # a change that does not fit, such as a dtype that the values do not have
        return {"end": "unfit", "note": opinfo.first_line(error)}
    if allowed.indexes_anywhere(name, call):
        return {
            "end": "allowed",
            "note": "the CPU's kernel does not check its indices, lengths or dimensions, and reads or writes anywhere",
        }
    if allowed.has_short_list(name, call):
        return {"end": "allowed", "note": "the kernel reads beyond a list that is too short"}
    with warnings.catch_warnings(), schemas._filled_memory():
        warnings.simplefilter("ignore")
        end = _compared(name, call, device, at)
        if end.get("kind") == "error type" and len(case["changes"]) > 1 and _may_raise(case, end["raised"], at):
            return {"end": "both raised"}
        return end


def _may_raise(case: Record, error: str, at: Callable[[str], None]) -> bool:
    """Whether the call without some of the changes raises this error on the CPU: of several wrong arguments, any may be
    reported.
    """
    at("confirmation")
    made = case["changes"]
    fewer = (each for count in range(1, len(made)) for each in itertools.combinations(made, count))
    for changes_ in fewer:
        call = call_of({**case, "changes": list(changes_)})
        outcome = opinfo.run(functools.partial(contiguous.called, case["op"], call, Move("cpu")), "cpu")
        if type(outcome.error).__name__ == error:
            return True
    return False


def _compared(name: str, call: Call, device: str, at: Callable[[str], None]) -> Record:
    if not schemas._on_cpu(name):
        at("device")
        there = opinfo.run(functools.partial(contiguous.called, name, call, Move(device)), device)
        if "INTERNAL ASSERT" in str(there.error) and not allowed.is_pytorchs_assert(call, str(there.error)):
            return _failed("internal", opinfo.first_line(there.error), call)
        return {"end": "alone" if there.error is None else "refused alone"}
    alone = torch.device(device).type == "cpu"
    at("cpu alone" if call.alone else "cpu")
    reference = contiguous.Plain("cpu") if alone else Move("cpu")
    cpu = opinfo.run(functools.partial(contiguous.called, name, call, reference), "cpu")
    at("device")
    there = opinfo.run(functools.partial(contiguous.called, name, call, Move(device)), device)
    raised = _raised(name, call, cpu, there, device)
    if raised is not None:
        if raised.get("kind") == "no error":
            at("confirmation")
            if note := contiguous.doubtful(name, call, is_plain=False, emptied=False):
                return {"end": "allowed", "note": note, "reached": True}
        return raised
    at("comparison")
    for outcome in (cpu, there):
        outcome.value, outcome.mover = outcome.value
    uncompared = tables.is_uncompared(name)
    values = not (schemas.is_uninitialized(name) or name in tables.WITHOUT_VALUES or uncompared)
    if (
        name.startswith(("aten::set_.", "aten::set."))
        and aliasing.grows(cpu, call)
        or allowed.is_unreadable(name, cpu.value[0])
    ):
        values = False
    report = opinfo.Report()
    if not uncompared:
        comparison = opinfo.Comparison(report, "generated", -1, device, values)
        comparison.bits = not alone  # there are none in contiguous memory
        comparison.outcomes(cpu, there)
        unequal = comparison.unequal
        if values and not report.failures and not alone and not report.notes["strides"]:
            _memory(comparison, call, cpu, there)
    plain = None
    if values and not alone:
        at("contiguous memory")
        plain = contiguous.in_plain_memory(name, call, cpu)
        if not report.failures and aliasing.writes_an_input(name, call):
            plain = None  # what a matrix product into its own input gives depends on the layout
    if plain is not None:
        report.failures = [each for each in report.failures if each.kind not in ("value", "shape", "guard")]
        found, unequal = contiguous.differences(name, call, plain, there, device)
        report.failures += found
    if not report.failures:
        return {"end": "equal", "notes": dict(report.notes)}
    failure = report.failures[0]
    is_of_device = failure.kind in ("device", "alias", "rng") or "attribute 'device'" in failure.message
    if is_of_device and allowed.is_elsewhere(name, call):
        return {"end": "allowed", "note": allowed.ELSEWHERE, "reached": True}
    if failure.kind == "value" and numerics.is_undefined_for_nan(name, call, unequal):
        return {"end": "allowed", "note": numerics.NAN, "reached": True}
    if failure.kind == "value" and numerics.transforms(name, unequal):
        return {"end": "allowed", "note": numerics.TRANSFORMS, "reached": True}
    of_tensor = all(each.kind in ("dtype", "alias") for each in report.failures)
    if of_tensor and aliasing.returns_another(name, cpu.value) and not aliasing.returns_another(name, there.value):
        return {"end": "allowed", "note": aliasing.RETURNS_ANOTHER, "reached": True}
    if failure.kind == "rng" and schemas._of_package(name) and comparison.exact:
        return {"end": "allowed", "note": "a package's operator may draw other numbers", "reached": True}
    if failure.kind == "rng" and alone:
        return {"end": "allowed", "note": "random numbers are drawn in the order of memory", "reached": True}
    if failure.kind == "value" and schemas.is_own(name, device):
        differs = name in backends.of_operator(name).differs() and numerics.is_finite_equal(unequal)
        for is_allowed, note in (
            (numerics.is_infinite_on_both_sides(call, unequal), "an infinite argument gives inf or NaN"),
            (differs, "this operator's infinities and NaN differ between devices"),
            (numerics.rounds(call, unequal), numerics.ROUNDS),
            (numerics.overflows(call, unequal), numerics.OVERFLOWS),
            (
                plain is None and contiguous.is_as_exact(name, call, cpu, unequal),
                "terms cancel, on the CPU too",
            ),
        ):
            if is_allowed:
                return {"end": "allowed", "note": note, "reached": True}
    if failure.kind == "value" and aliasing.is_read_and_written(name, call):
        return {"end": "allowed", "note": aliasing.READ_AND_WRITTEN, "reached": True}
    if failure.kind == "value" and aliasing.writes_an_input(name, call):
        if contiguous.gives_separate(name, call, there, device):
            return {"end": "allowed", "note": "the results are those of a call with memory apart", "reached": True}
    if failure.kind in ("value", "shape", "guard", "rng", "structure"):
        at("confirmation")
        if note := contiguous.doubtful(name, call, is_plain=plain is not None):
            return {"end": "allowed", "note": note, "reached": True}
    return _failed(failure.kind, failure.message, call)


def _failed(kind: str, message: str, call: Call) -> Record:
    return {"end": "failed", "kind": kind, "message": message, "call": str(call)}


def _raised(name: str, call: Call, cpu: opinfo.Outcome, there: opinfo.Outcome, device: str) -> Record | None:
    """The outcome of a case in which one side or both raised; None if neither did."""
    theirs = opinfo.first_line(cpu.error) if cpu.error else ""
    ours = opinfo.first_line(there.error) if there.error else ""
    if not theirs and not ours:
        return None
    asserts = "INTERNAL ASSERT"
    is_pytorchs = allowed.is_pytorchs_assert(call, str(there.error))
    if (
        asserts in str(there.error)
        and not is_pytorchs
        and asserts not in f"{cpu.error} {contiguous.plain_error(name, call)}"
    ):
        return _failed("internal", ours, call)
    differs = {**schemas.DIFFERENT, **backends.of_operator(name).differs()}
    checked, _ = tables.CHECKED_BY_DEVICE.get(name, (None, ""))
    note = ""
    if torch.device(device).type == "cpu":
        note = "refuses a layout"
    elif allowed.is_elsewhere(name, call):
        note = allowed.ELSEWHERE
    elif tables.is_uncompared(name):
        note = "results and errors of this operator are not compared"
    elif allowed.OUT_OF_BOUNDS.search(theirs) and (
        isinstance(there.error, IndexError) or allowed.OUT_OF_BOUNDS.search(ours)
    ):
        note = "an index out of bounds, for which PyTorch's operators raise IndexError or RuntimeError"
    elif (
        not theirs
        and isinstance(there.error, NotImplementedError)
        # The CPU copies a negative view to other memory and the result back.
        and any(x and aliasing.returns_another(name, x.value[0]) for x in (cpu, contiguous.takes_it_plain(name, call)))
    ):
        note = aliasing.RETURNS_ANOTHER
    elif name in differs or checked and (checked.search(theirs) or checked.search(ours)):
        note = "this operator's errors differ between devices"
    elif allowed.MEMORY.search(theirs) or (allowed.MEMORY if theirs else allowed.LACKS_MEMORY).search(ours):
        note = "memory"
    elif not theirs and allowed.raises_when_plain(name, call, ours):
        note = "the CPU raises this only if the arguments are contiguous"
    elif not theirs and allowed.takes_negative_size(name, call, ours):
        note = "the CPU accepts a negative size"
    elif not theirs and allowed.refuses_state(name, call, ours):
        note = "before PyTorch 2.15, the CPU broadcasts a state that is not a matrix"
    elif isinstance(cpu.error, IndexError | RuntimeError | None) and allowed.refuses_gradient(name, call, ours):
        note = "a gradient of another shape, which the CPU accepts or refuses elsewhere"
    elif not theirs and allowed.refuses_batch_sizes(name, call, ours):
        note = "batch sizes of another shape, which the CPU reads from memory as they are"
    elif allowed.refuses_unchecked(ours):
        note = "an index or a shape that the CPU does not check, or checks later"
    elif theirs and schemas.LACKS_DTYPE.search(theirs):
        note = "a dtype that the CPU lacks"
    elif "INTERNAL ASSERT" in theirs:
        note = "the CPU fails an internal assertion"
    elif layouts._OVERLAP.search(ours) and aliasing.has_shared_memory(name, call):
        note = "the device refuses to write to memory that overlaps"
    elif theirs and not ours and (plain := contiguous.takes_it_plain(name, call)):
        note = "the device takes a layout or alias that the CPU refuses"
        if message := contiguous.differs_when_plain(name, call, plain, there, device):
            if not (note := contiguous.doubtful(name, call, is_plain=True)):
                return _failed("value", message, call)
    elif "unsupported tensor layout" in theirs and not ours and contiguous.is_as_dense(name, call, there):
        note = "the device takes a sparse tensor that the CPU refuses"
    elif (not theirs or ours) and allowed.lacks_tensor(name, call):
        note = "None for a tensor that is not optional"
    if theirs and ours and (isinstance(there.error, type(cpu.error)) or note):
        return {"end": "both raised"}
    if note:
        return {"end": "allowed", "note": note, "reached": not ours}
    if not theirs:
        return _failed("error", ours, call)
    if not ours:
        return _failed("no error", f"the CPU raised {theirs}", call)
    ends = _failed("error type", f"the CPU raised {theirs}; the device {ours}", call)
    return {**ends, "raised": type(there.error).__name__}


def _memory(comparison: opinfo.Comparison, call: Call, cpu: opinfo.Outcome, there: opinfo.Outcome) -> None:
    """Compare the memory of the arguments, even where no result views it.

    Do not call this if an out= tensor has different strides on the two sides. Memory that only the CPU has written to is
    not a difference: some CPU kernels ignore the strides of the tensors that they write to.
    """
    before = {}
    for leaf in tree_leaves((call.args, call.kwargs)):
        if changes._is_plain(leaf):
            storage = leaf.untyped_storage()
            flat = torch.empty(0, dtype=leaf.dtype)
            before[storage._cdata, leaf.dtype] = flat.set_(storage, 0, (storage.nbytes() // leaf.element_size(),), (1,))
    for key, e in cpu.mover.storages.items():
        a, was = there.mover.storages.get(key), before.get(key)
        if a is None or was is None or not e.untyped_storage().nbytes() or not a.untyped_storage().nbytes():
            continue
        dtype, (a, e, was) = e.dtype, map(numerics.widened, (a.cpu(), e, was))
        differ = ~(torch.isclose(a, e, equal_nan=True) | torch.isclose(a, was, rtol=0, atol=0, equal_nan=True))
        try:  # as close as results have to be
            torch.testing.assert_close(a[differ].to(dtype), e[differ].to(dtype), equal_nan=True)
        except AssertionError:
            comparison.fail(
                "guard", f"memory of an argument: expected {e[differ][:8].tolist()}, got {a[differ][:8].tolist()}"
            )


# ---- the protocol ----


def serve(device: str, threads: int, given: Record) -> None:
    """Serve requests from stdin until it closes, in forked processes."""
    answer = serving()
    torch.set_num_threads(1)  # a pool of threads does not survive the fork
    _Given.samples = _given(given)
    has_infos = mmap.mmap(-1, 1)  # shared with the forked processes
    code = -1
    while code:
        pid = os.fork()
        if not pid:
            _work(device, threads, answer, has_infos)
        answer(ready=True, pid=pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            answer(died=code)
            if has_infos[0]:
                _infos()  # loaded once here instead of in each forked process


def _work(device: str, threads: int, answer: Callable[..., None], has_infos: mmap.mmap) -> None:
    """Runs in the forked process; does not return."""
    try:
        torch.set_num_threads(threads)
        _limit_memory(device)
        _serve(device, answer, has_infos)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _limit_memory(device: str) -> None:
    """Limit tensors on the device to `contiguous.BYTES`, if its module can."""
    module = torch.get_device_module(device)
    if limit := getattr(module, "set_per_process_memory_fraction", None):
        limit(min(1.0, contiguous.BYTES / module.mem_get_info(device)[1]), torch.device(device).index)


def _serve(device: str, answer: Callable[..., None], has_infos: mmap.mmap) -> None:
    def at(where: str) -> None:
        answer(at=where)

    for line in sys.stdin:
        pid, _, text = line.partition(" ")
        if pid != str(os.getpid()):  # to a process that ended, or the rest of a line that it began to read
            continue
        at("request")
        request = json.loads(text)
        if "bases" in request:
            at("making arguments")
            calls, valid = bases(request["bases"])
            has_infos[0] = bool(_infos.cache_info().currsize)
            profiles = [changes.profile(request["bases"], call) for call in calls]
            answer(valid=valid, bases=profiles)
        elif "doubtful" in request:
            case = request["doubtful"]
            answer(note=contiguous.doubtful(case["op"], call_of(case), is_plain=True))
        elif "damages" in request:
            case = request["damages"]
            answer(damages=aliasing.damages(case["op"], call_of(case)))
        elif "source" in request:
            case = request["source"]
            answer(source=snippet.source(case["op"], call_of(case), device, request["modules"]))
        else:
            answer(**run(request, device, at))


def _given(given: Record) -> list[Call]:
    """Samples as `check` accepts them: from a function, or as text."""
    from openreg_tools.samples import parse, sample_of

    samples = [parse(text) for text in given.get("inputs", ())]
    if given.get("samples"):
        module, _, path = given["samples"].partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        samples = [sample_of(each) for each in function("cpu", torch.float32)]
    if not samples:
        return []
    try:
        to_cpu = functools.partial(tree_map, lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
        return [Call(to_cpu(list(sample.args)), to_cpu(dict(sample.kwargs))) for sample in samples]
    except AttributeError as error:
        raise Wrong(f"the samples are not arguments: {error}") from None
