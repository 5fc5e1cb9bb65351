"""The child process: makes an operator's base calls, and runs one case on the CPU and on the device.

It reads JSON lines from stdin and answers with JSON lines. It announces each step that may end the process, so that the
parent knows on which side a crash happened. What takes seconds to import is imported once: the process that the parent
starts forks the one that works, and forks another when that one dies.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import importlib
import json
import mmap
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import generated, layouts, opinfo, schemas, survey
from openreg_tools.conformance.calls import Call, Move, RequiresGrad, Stays, StorageOf, stays_within
from openreg_tools.forms import Wrong
from openreg_tools.generate import changes, snippet

__all__ = ["Record", "bases", "listed", "run", "serve"]

Record = dict[str, Any]
BASES = 6  # calls that the CPU accepts, per operator: of up to four dimensions. OpInfo adds up to four
REFUSED = 8  # calls that the CPU refuses, if it accepts none

# Operators whose results are compared in shape, dtype and layout, but not in values; `schemas.is_uninitialized` names the
# ones that allocate. Random operators are compared from one seed if the device draws the same numbers as the CPU.
WITHOUT_VALUES: dict[str, str] = {
    **{f"aten::{name}": f"undefined: {why}" for name, why in layouts.WRITTEN_IN_PART.items()},
    "aten::set_": "makes a tensor without memory",
    **{
        f"aten::{name}": "grows a storage that is too small: the new part is uninitialized"
        for name in (
            "set_.source_Storage_storage_offset",
            "set_.source_Tensor_storage_offset",
            "set.source_Storage_storage_offset",
            "set.source_Storage_storage_offset_out",
        )
    },
}

# Operators that PyTorch checks differently on different devices.
CHECKED_BY_DEVICE: dict[str, str] = {
    "aten::quantize_per_channel.out": "PyTorch resizes out= of the CPU and of CUDA without dispatch; elsewhere resize_ refuses "
    "tensors quantized by channel",
    **{
        f"aten::{name}{which}": "PyTorch reads q, and checks that it is between 0 and 1, only on the CPU"
        for name in ("quantile", "nanquantile")
        for which in ("", ".out", ".scalar", ".scalar_out")
    },
}

# Operators whose results depend on the strides of their arguments, or that take a storage.
ABOUT_MEMORY = re.compile(
    r"aten::(as_strided|set|resize|_resize|_reshape_alias|slice_inverse|is_set_to|is_contiguous|stride|to_padded)"
)

# Operators whose CPU kernels ignore the strides of an argument, which PyTorch makes contiguous before it calls them.
IGNORES_STRIDES: dict[str, str] = {
    "aten::native_group_norm_backward": "the derivative of native_group_norm passes contiguous gradients",
}

# Errors about memory, whose types and limits differ between devices.
_MEMORY = re.compile(
    r"allocat|(not enough|out of) memory|can be pinned|overflow|too large|Storage size calculation", re.I
)


_OUT_OF_BOUNDS = re.compile(r"index \S+ is out of bounds")
OVERFLOWS = "an intermediate result overflows on one side"
ELSEWHERE = "an argument is on another device, or has no memory, or none is on a device"


# ---- what there is ----


@functools.cache
def listed(device: str) -> dict[str, str]:
    """What can be called: every operator that reaches the device, and what the device has for it (dispatch.HAS)."""
    target = dispatch.target(device)
    found = operators.operators(device, has=("own", "shared", "composite", "fallback")).entries
    has = {entry.name: entry.has for entry in found}
    for name in dispatch.names():
        if name not in has and torch._C._dispatch_has_kernel_for_dispatch_key(name, target.key):
            has[name] = "own"
        elif name.startswith(f"{backends.of_device(device).namespace}::"):
            has.setdefault(name, dispatch.has(name, target.key).kind)
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
    """The calls that cases change, and whether they are valid: accepted by the CPU, or given by the caller."""
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
    """The call with out= tensors of the shapes that it writes; a change empties them."""
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


class _Plain(Move):
    """Copies in contiguous memory of their own: what a kernel would receive if layouts did not matter."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return super().copy(tensor)
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _called(name: str, call: Call, move: Move, _: opinfo.Mover) -> Any:
    """Results, written arguments, and the memory of all arguments; deferred errors are raised here."""
    with survey.at_most(4 << 30):
        out, written = schemas._call(name, call, move)
        if move.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(move.device)
    return (out, written), move


def run(case: Record, device: str, at: Callable[[str], None]) -> Record:
    """Run a case on both sides.

    Returns:
        how it ended: "equal", "both raised", "allowed" (a difference that the tool allows, with a note), "failed".
    """
    name = case["op"]
    torch.empty(1, device=device)  # takes the device's memory before a limit on this process's
    at("arguments")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = call_of(case)
    except Exception as error:  # a change that does not fit, such as a dtype that the values do not have
        return {"end": "unfit", "note": opinfo.first_line(error)}
    with warnings.catch_warnings(), schemas._filled_memory():
        warnings.simplefilter("ignore")
        return _compared(name, call, device, at)


def _compared(name: str, call: Call, device: str, at: Callable[[str], None]) -> Record:
    if not schemas._on_cpu(name):
        at("device")
        there = opinfo.run(functools.partial(_called, name, call, Move(device)), device)
        if there.error is not None and "INTERNAL ASSERT" in str(there.error):
            return _failed("internal", opinfo.first_line(there.error), call)
        return {"end": "alone" if there.error is None else "refused alone"}
    alone = torch.device(device).type == "cpu"
    at("cpu")
    reference = _Plain("cpu") if alone else Move("cpu")
    cpu = opinfo.run(functools.partial(_called, name, call, reference), "cpu")
    at("device")
    there = opinfo.run(functools.partial(_called, name, call, Move(device)), device)
    raised = _raised(name, call, cpu, there, alone)
    if raised is not None:
        return raised
    at("comparison")
    for outcome in (cpu, there):
        outcome.value, outcome.mover = outcome.value
    uncompared = _is_uncompared(name)
    values = not (schemas.is_uninitialized(name) or name in WITHOUT_VALUES or uncompared)
    report = opinfo.Report()
    if not uncompared:
        comparison = opinfo.Comparison(report, "generated", -1, device, values)
        comparison.outcomes(cpu, there)
        if values and not report.failures and not alone and not report.notes["strides"]:
            _memory(comparison, call, cpu, there)
    plain = None
    if values and not alone:
        at("contiguous memory")
        plain = _in_plain_memory(name, call, cpu)
    if plain is not None:
        report.failures = [each for each in report.failures if each.kind not in ("value", "shape", "guard")]
        report.failures += _differences(plain, there, device)
    if not report.failures:
        return {"end": "equal", "notes": dict(report.notes)}
    failure = report.failures[0]
    if failure.kind in ("device", "alias", "rng") and _is_elsewhere(call):
        return {"end": "allowed", "note": ELSEWHERE, "reached": True}
    if failure.kind == "value" and schemas.is_own(name, device) and _overflows(call, comparison.unequal):
        return {"end": "allowed", "note": OVERFLOWS, "reached": True}
    if failure.kind in ("value", "shape", "guard", "rng", "structure"):
        at("confirmation")
        if note := _doubtful(name, call, is_plain=plain is not None):
            return {"end": "allowed", "note": note, "reached": True}
    return _failed(failure.kind, failure.message, call)


def _failed(kind: str, message: str, call: Call) -> Record:
    return {"end": "failed", "kind": kind, "message": message, "call": str(call)}


def _raised(name: str, call: Call, cpu: opinfo.Outcome, there: opinfo.Outcome, alone: bool) -> Record | None:
    """The outcome of a case in which a side raised; None if neither did."""
    theirs = opinfo.first_line(cpu.error) if cpu.error else ""
    ours = opinfo.first_line(there.error) if there.error else ""
    if not theirs and not ours:
        return None
    if "INTERNAL ASSERT" in str(there.error) and "INTERNAL ASSERT" not in str(cpu.error):
        return _failed("internal", ours, call)
    differs = {**CHECKED_BY_DEVICE, **schemas.DIFFERENT, **backends.of_operator(name).differs()}
    note = ""
    if alone:
        note = "refuses a layout"
    elif _is_elsewhere(call):
        note = ELSEWHERE
    elif _is_uncompared(name):
        note = "results and errors of this operator are not compared"
    elif _OUT_OF_BOUNDS.search(theirs) and isinstance(there.error, IndexError):
        note = "an index out of bounds, for which PyTorch's operators raise IndexError or RuntimeError"
    elif name in differs:
        note = "this operator's errors differ between devices"
    elif _MEMORY.search(theirs) or _MEMORY.search(ours):
        note = "memory"
    elif theirs and schemas.LACKS_DTYPE.search(theirs):
        note = "a dtype that the CPU lacks"
    elif "INTERNAL ASSERT" in theirs:
        note = "the CPU fails an internal assertion"
    elif layouts._OVERLAP.search(ours):
        note = "the device refuses to write to memory that overlaps"
    elif theirs and not ours and _takes_it_plain(name, call):
        note = "the device takes a layout or alias that the CPU refuses"
    elif not theirs and _lacks_tensor(name, call):
        note = "None for a tensor that is not optional"
    if theirs and ours and (type(cpu.error) is type(there.error) or note):
        return {"end": "both raised"}
    if note:
        return {"end": "allowed", "note": note, "reached": not ours}
    if not theirs:
        return _failed("error", ours, call)
    if not ours:
        return _failed("no error", f"the CPU raised {theirs}", call)
    return _failed("error type", f"the CPU raised {theirs}; the device {ours}", call)


def _is_uncompared(name: str) -> bool:
    """Whether an operator asks for the device type, or belongs to a CPU library, which takes only CPU tensors."""
    return (
        name in schemas.UNCOMPARED
        or name.startswith("aten::_autocast_to_")
        or name.startswith(("mkldnn::", "mkldnn_prepacked::", "onednn::"))
    )


def _is_elsewhere(call: Call) -> bool:
    """Whether an argument is on the host, on the meta device, or without memory, or none is on a device."""
    leaves = tree_leaves((call.args, call.kwargs))
    if not any(isinstance(each, (torch.Tensor, torch.device, StorageOf, RequiresGrad)) for each in leaves):
        return True  # a factory that was not told where
    stays = any(isinstance(each, Stays) or isinstance(each, torch.device) and each.type != "cpu" for each in leaves)
    return call.alone or stays


def _lacks_tensor(name: str, call: Call) -> bool:
    """Whether a Tensor argument is None, which the dispatcher passes on as an undefined tensor."""
    arguments = {argument.name: argument for argument in dispatch.schema(name).arguments}
    given = [*zip(arguments.values(), call.args, strict=False), *((arguments[k], v) for k, v in call.kwargs.items())]
    return any(value is None and argument.real_type.kind() == "TensorType" for argument, value in given)


def _takes_it_plain(name: str, call: Call) -> bool:
    """Whether the CPU accepts the same arguments if each is contiguous and has its own memory."""
    return opinfo.run(functools.partial(_called, name, call, _Plain("cpu")), "cpu").error is None


def _overflows(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is not finite, and a sum or product of arguments may have overflowed.

    Another order of operations, or a fused multiplication and addition, then gives inf or nan where the other is finite.
    """

    def is_large(x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or not changes._is_plain(x) or not (x.is_floating_point() or x.is_complex()):
            return False
        x = _widened(x.resolve_conj().resolve_neg()).abs()
        return bool((x.isfinite() & (x > torch.finfo(x.dtype).max ** 0.5)).any())

    if not unequal or not any(map(is_large, tree_leaves((call.args, call.kwargs)))):
        return False
    return all(
        not (expected.isfinite() & actual.isfinite() & ~torch.isclose(expected, actual)).any()
        for expected, actual in ((_widened(e), _widened(a)) for e, a in unequal)
    )


def _memory(comparison: opinfo.Comparison, call: Call, cpu: opinfo.Outcome, there: opinfo.Outcome) -> None:
    """Compare the memory of the arguments, even where no result views it.

    The caller leaves out calls that gave an out= tensor other strides on one side. Where only the CPU has written, it ignores the strides of what it writes to, which some of its kernels do.
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
        a, e, was = _widened(a.cpu()), _widened(e), _widened(was)
        differ = ~torch.isclose(a, e, equal_nan=True)
        if not torch.equal(a[differ].nan_to_num(), was[differ].nan_to_num()):
            comparison.fail(
                "guard", f"memory of an argument: expected {e[differ][:8].tolist()}, got {a[differ][:8].tolist()}"
            )


def _widened(t: torch.Tensor) -> torch.Tensor:
    """In a dtype that has every operator."""
    if t.dtype == torch.complex32:
        return t.to(torch.complex64)
    return t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t


def _doubtful(name: str, call: Call, is_plain: bool) -> str:
    """Why the CPU may cause a difference: its kernel reads beyond its arguments, or its results vary from call to call.

    Args:
        is_plain: whether the expected results are those in contiguous memory.
    """
    within = functools.partial(schemas._call, name, call)
    if not is_plain and _differs_plain(name, call):
        return "the CPU's kernel gives other results in contiguous memory"
    (_, outcome), *_ = survey.survey(1, lambda _: _checked(within)) or [(0, survey.Outcome("crashed"))]
    if outcome.kind == "returned":
        return ""
    return "the CPU's kernel reads or writes beyond its arguments, or changes from call to call"


def _is_memory_separate(name: str, call: Call) -> bool:
    """Whether every tensor argument is a plain one, and what is written shares its storage with no other argument."""
    written = {each["at"] for each in changes.profile(name, call) if each.get("written")}
    tensors = {
        id(leaf): (leaf, i in written)
        for i, leaf in enumerate(tree_leaves((call.args, call.kwargs)))
        if isinstance(leaf, torch.Tensor)
    }
    if not all(changes._is_plain(leaf) for leaf, _ in tensors.values()):
        return False
    storages = collections.Counter(leaf.untyped_storage()._cdata for leaf, _ in tensors.values())
    return all(storages[leaf.untyped_storage()._cdata] == 1 for leaf, is_written in tensors.values() if is_written)


def _differs_plain(name: str, call: Call) -> bool:
    """Whether the CPU's results change if the same values are in contiguous memory of their own."""
    if not _is_memory_separate(name, call):
        return False
    as_is, plain = (
        opinfo.run(functools.partial(_called, name, call, move), "cpu") for move in (Move("cpu"), _Plain("cpu"))
    )
    if as_is.error or plain.error:
        return False
    as_is.value, as_is.mover = as_is.value
    return bool(_differences(plain, as_is, "cpu"))


def _differences(plain: opinfo.Outcome, other: opinfo.Outcome, device: str) -> list[opinfo.Failure]:
    """How the values and shapes of `other` differ from those of a call in contiguous memory."""
    report = opinfo.Report()
    opinfo.Comparison(report, "generated", -1, device, True).results(
        opinfo.Outcome(plain.value[0], mover=plain.value[1]), other
    )
    found = [failure for failure in report.failures if failure.kind in ("value", "shape", "rng")]
    for failure in found:
        failure.message = f"as the CPU computes in contiguous memory, {failure.message}"
    return found


def _in_plain_memory(name: str, call: Call, cpu: opinfo.Outcome) -> opinfo.Outcome | None:
    """The CPU's results in contiguous memory, if they should be those of the call, and are not.

    Some of the CPU's kernels ignore strides; a device that shares such a kernel gives the same wrong results.
    """
    tensors = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]
    if all(not changes._is_plain(each) or each.is_contiguous() for each in tensors) or ABOUT_MEMORY.match(name):
        return None
    if name.partition(".")[0] in IGNORES_STRIDES:
        return None
    if cpu.drew or torch.Tag.nondeterministic_seeded in generated.overload(name).tags:
        return None  # random numbers are drawn in the order of the memory
    if not _is_memory_separate(name, call) or not all(map(_is_ordinary, tensors)):
        return None
    plain = opinfo.run(functools.partial(_called, name, call, _Plain("cpu")), "cpu")
    return plain if plain.error is None and _differences(plain, cpu, "cpu") else None


def _is_ordinary(t: torch.Tensor) -> bool:
    """Whether no two elements share memory, and sums of elements are finite in any order."""
    if not t.numel():
        return True
    where = torch.arange(t.untyped_storage().nbytes() // t.element_size()).as_strided(
        t.shape, t.stride(), t.storage_offset()
    )
    if where.unique().numel() < t.numel():
        return False
    x = _widened(t.detach().resolve_conj().resolve_neg())
    return not (x.is_floating_point() or x.is_complex()) or bool((x.abs() < 1e4).all())


def _checked(within: Callable[[Move], Any]) -> None:
    if not stays_within(within, resizes=True):
        raise ValueError


# ---- the protocol ----


def serve(device: str, threads: int, given: Record) -> None:
    """Serve requests from stdin until it closes, in forked processes. What operators print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    torch.set_num_threads(1)  # a pool of threads does not survive the fork
    _Given.samples = _given(given)
    has_infos = mmap.mmap(-1, 1)  # shared with the forked processes

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

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
                _infos()  # once here, instead of once in each that follows


def _work(device: str, threads: int, answer: Callable[..., None], has_infos: mmap.mmap) -> None:
    """The forked process. It does not return."""
    try:
        torch.set_num_threads(threads)
        _serve(device, answer, has_infos)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(device: str, answer: Callable[..., None], has_infos: mmap.mmap) -> None:
    def at(where: str) -> None:
        answer(at=where)

    for line in sys.stdin:
        request = json.loads(line)
        if "bases" in request:
            at("making arguments")
            calls, valid = bases(request["bases"])
            has_infos[0] = bool(_infos.cache_info().currsize)
            profiles = [changes.profile(request["bases"], call) for call in calls]
            answer(done=True, valid=valid, bases=profiles)
        elif "source" in request:
            case = request["source"]
            answer(done=True, source=snippet.source(case["op"], call_of(case), device, request["modules"]))
        else:
            answer(done=True, **run(request, device, at))


def _given(given: Record) -> list[Call]:
    """Samples as `check` takes them: of a function, or as text."""
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
