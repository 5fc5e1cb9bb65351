"""The same call with each argument in contiguous memory of its own: what a kernel would receive if layouts did not matter."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from openreg_tools import dispatch
from openreg_tools.conformance import generated, opinfo, schemas, survey
from openreg_tools.conformance.calls import Call, Move, fenced, stays_within
from openreg_tools.core import child
from openreg_tools.generate import aliasing, changes, numerics, tables

__all__ = [
    "BYTES",
    "Plain",
    "called",
    "differences",
    "differs_when_plain",
    "doubtful",
    "gives_separate",
    "in_plain_memory",
    "is_as_dense",
    "is_as_exact",
    "plain_error",
    "takes_it_plain",
]

BYTES = 1 << 30  # of memory for one call: a huge size is an error, instead of minutes of work
_LARGEST = 1e18  # float argument whose square is finite in float32, in which a kernel may compute with it
_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


class Plain(Move):
    """Copies in separate contiguous memory: what a kernel would receive if layouts did not matter."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return super().copy(tensor)
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class Dense(Plain):
    """The same, and copies of sparse tensors are dense."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        sparse = tensor.layout != torch.strided and not tensor.is_nested
        return super().copy(tensor.to_dense() if sparse else tensor)


class PlainBits(Plain):
    """The same with conjugate and negative views of such memory where the arguments are conjugate and negative views."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj():
            return self.copy(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self.copy(torch._neg_view(tensor)))
        return super().copy(tensor)


def called(name: str, call: Call, move: Move, _: opinfo.Mover) -> Any:
    """Results, written arguments, and the memory of all arguments; deferred errors are raised here."""
    with child.at_most(BYTES):
        out, written = schemas._call(name, call, move)
        if move.device.type not in ("cpu", "meta"):
            dispatch.synchronize(move.device)
    return (out, written), move


def takes_it_plain(name: str, call: Call) -> opinfo.Outcome | None:
    """The CPU's outcome if each argument is contiguous and has its own memory, unless it refuses that too."""
    plain = _run_plain(name, call)
    return plain if plain.error is None else None


def is_as_dense(name: str, call: Call, there: opinfo.Outcome) -> bool:
    """Whether the device's results are what the CPU computes for dense tensors in place of the sparse ones."""
    if all(each.layout == torch.strided for each in _tensors(call)):
        return False
    plain = _run_plain(name, call, Dense)
    if plain.error is not None:
        return False
    both = [[x for x in tree_leaves(each.value[0]) if isinstance(x, torch.Tensor)] for each in (plain, there)]
    try:
        dense = [x.cpu().to_dense() if x.layout != torch.strided else x.cpu() for x in both[1]]
        torch.testing.assert_close(dense, both[0], equal_nan=True)
        return True
    except (AssertionError, RuntimeError, NotImplementedError):
        return False


def plain_error(name: str, call: Call) -> BaseException | None:
    """The CPU's error if each argument is contiguous and has its own memory, as the device may pass them to a kernel."""
    return _run_plain(name, call).error


def _run_plain(name: str, call: Call, kind: type[Plain] = Plain) -> opinfo.Outcome:
    return opinfo.run(functools.partial(called, name, call, kind("cpu")), "cpu")


def differs_when_plain(name: str, call: Call, plain: opinfo.Outcome, there: opinfo.Outcome, device: str) -> str:
    """How the device's results differ from the CPU's in contiguous memory, where the memory of the arguments is separate."""
    if not aliasing.is_memory_separate(name, call) or any(map(aliasing.overlaps_itself, _tensors(call))):
        return ""
    there = dataclasses.replace(there, value=there.value[0], mover=there.value[1])
    found, _ = differences(name, call, plain, there, device)
    return found[0].message if found else ""


def doubtful(name: str, call: Call, is_plain: bool, emptied: bool = True) -> str:
    """Why the CPU may cause a difference: its kernel reads beyond its arguments, or its results vary from call to call.

    Args:
        is_plain: whether the expected results are those in contiguous memory.
        emptied: whether to call it with empty out= tensors too, because guarded memory cannot be resized.
    """
    if dispatch.is_custom(name):  # its CPU kernel is tested too
        return "the results vary from call to call" if _varies(name, call) else ""
    outs = [each["at"] for each in changes.profile(name, call) if each.get("out")]
    calls = [call]
    if outs and emptied:
        calls.append(changes.changed(name, call, [["out", i, "empty"] for i in outs]))
    resolved = any(each.is_conj() or each.is_neg() for each in _tensors(call))  # in copies, which no fence surrounds
    if is_plain or resolved:
        calls += [_plain(each) for each in calls]
    if not is_plain and _differs_plain(name, call):
        return "the CPU's kernel gives different results in contiguous memory"

    def check(_: int) -> None:
        if not all(stays_within(functools.partial(schemas._call, name, each), resizes=True) for each in calls):
            raise ValueError
        for each in calls:
            fenced(functools.partial(schemas._call, name, each))
        ran = opinfo.run(functools.partial(called, name, call, Move("cpu")), "cpu")
        if ran.error is None and _resizes_an_input(call, ran.value[1]):
            raise ValueError

    (_, outcome), *_ = survey.survey(1, check) or [(0, survey.Outcome("crashed"))]
    if outcome.kind == "returned":
        return ""
    return "the CPU's kernel reads or writes beyond its arguments, changes from call to call, or resizes an input"


def _plain(call: Call) -> Call:
    """The call with each tensor in contiguous memory of its own."""
    move = Plain("cpu")

    def moved(x: Any) -> Any:
        return move.tensor(x) if isinstance(x, torch.Tensor) else x

    return Call(tree_map(moved, call.args), tree_map(moved, call.kwargs), call.alone)


def _resizes_an_input(call: Call, move: Move) -> bool:
    """Whether the call has resized an argument that is an input too: its kernel then read what the new memory held."""
    tensors = _tensors(call)
    twice = [each for each, count in collections.Counter(map(id, tensors)).items() if count > 1]
    return any(move.tensors[id(each)].shape != each.shape for each in tensors if id(each) in twice)


def _differs_plain(name: str, call: Call) -> bool:
    """Whether the CPU's results change if the same values are in separate contiguous memory."""
    if not aliasing.is_memory_separate(name, call):
        return False
    as_is = opinfo.run(functools.partial(called, name, call, Move("cpu")), "cpu")
    plain = _run_plain(name, call)
    if as_is.error or plain.error:
        return False
    as_is.value, as_is.mover = as_is.value
    found, _ = differences(name, call, plain, as_is, "cpu")
    return bool(found)


def _varies(name: str, call: Call) -> bool:
    """Whether two calls in contiguous memory give different results."""
    one, other = _run_plain(name, call), _run_plain(name, call)
    if one.error or other.error:
        return False
    other.value, other.mover = other.value
    found, _ = differences(name, call, one, other, "cpu")
    return bool(found)


def differences(
    name: str, call: Call, plain: opinfo.Outcome, other: opinfo.Outcome, device: str
) -> tuple[list[opinfo.Failure], list[tuple[torch.Tensor, torch.Tensor]]]:
    """How the values and shapes of `other` differ from the results of a call in contiguous memory, and which results do."""
    report = opinfo.Report()
    expected = opinfo.Outcome(plain.value[0], mover=plain.value[1])
    if name in tables.ROOTS:
        expected, other = (
            dataclasses.replace(each, value=tree_map(_squared, each.value)) for each in (expected, other)
        )
    comparison = opinfo.Comparison(report, "generated", -1, device, True)
    comparison.computed_in = _computed_in(name, call)
    comparison.results(expected, other)
    if numerics.rounds(call, comparison.unequal):  # a half type, in another order
        report.failures = [failure for failure in report.failures if failure.kind != "value"]
    found = [failure for failure in report.failures if failure.kind in ("value", "shape", "rng")]
    for failure in found:
        failure.message = f"as the CPU computes in contiguous memory, {failure.message}"
    return found, comparison.unequal


def gives_separate(name: str, call: Call, there: opinfo.Outcome, device: str) -> bool:
    """Whether the device's results are the CPU's for written arguments in contiguous memory apart from the inputs.

    PyTorch does not say what a kernel gives that writes to its own input, and the CPU's results depend on the layout.
    """
    leaves, spec = tree_flatten((call.args, call.kwargs))
    for each in changes.profile(name, call):
        if each.get("written"):
            leaves[each["at"]] = leaves[each["at"]].clone()
    apart = Call(*tree_unflatten(leaves, spec))
    plain = _run_plain(name, apart)
    return plain.error is None and not differences(name, apart, plain, there, device)[0]


def is_as_exact(name: str, call: Call, cpu: opinfo.Outcome, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether float32 results are about as far from those of float64 as the CPU's, which are further than rounding:
    terms cancel.
    """

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    if not unequal or any(expected.dtype != torch.float32 for expected, _ in unequal):
        return False
    plain = _plain(call)
    again = _run_plain(name, Call(tree_map(wide, plain.args), tree_map(wide, plain.kwargs), call.alone))
    if again.error is not None:
        return False
    rtol = opinfo._RTOL[torch.float32]
    pairs = list(zip(tree_leaves(cpu.value), tree_leaves(again.value[0]), strict=True))
    for expected, actual in unequal:
        exact = next((y for x, y in pairs if isinstance(x, torch.Tensor) and torch.equal(x, expected)), None)
        if exact is None or exact.dtype != torch.float64:
            return False
        differs = ~torch.isclose(actual, expected, rtol=rtol, atol=1e-5, equal_nan=True)
        error = (expected - exact).abs()
        cancels = expected.isfinite() & exact.isfinite() & (error > rtol * exact.abs())
        if (differs & ~(cancels & ((actual - exact).abs() <= 16 * error))).any():
            return False
    return True


def _squared(x: Any) -> Any:
    return x * x.abs() if isinstance(x, torch.Tensor) else x  # with its sign


def _computed_in(name: str, call: Call) -> torch.dtype | None:
    """The floating-point dtype that the inputs promote to, in which an operator computes before it converts to out=."""
    given = changes.given_to(name, call)
    inputs = tree_leaves([value for argument, value in given if not argument.is_out])
    dtypes = [x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return (
        functools.reduce(torch.promote_types, dtypes)
        if dtypes and len(inputs) < len(tree_leaves([v for _, v in given]))
        else None
    )


def in_plain_memory(name: str, call: Call, cpu: opinfo.Outcome) -> opinfo.Outcome | None:
    """The CPU's results in contiguous memory, if the call should have given them and did not.

    Some of the CPU's kernels ignore strides. A device that shares such a kernel gives the same wrong results.
    """
    tensors = _tensors(call)
    if all(not changes._is_plain(each) or each.is_contiguous() for each in tensors) or tables.ABOUT_MEMORY.match(name):
        return None
    if name.partition(".")[0] in tables.IGNORES_STRIDES:
        return None
    if tables.BATCH_NORM.match(name) and not _fits_channels(name, call) or not _fits_kernel(name, call):
        return None
    if cpu.drew or torch.Tag.nondeterministic_seeded in generated.overload(name).tags:
        return None  # random numbers are drawn in the order of the memory
    numbers = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, float)]
    if (
        not aliasing.is_memory_separate(name, call)
        or not all(map(_is_ordinary, tensors))
        or not all(abs(each) <= _LARGEST for each in numbers)
    ):
        return None
    if tables.DETERMINANTS.match(name) and any(_has_denormals(each) or _is_singular(each) for each in tensors):
        return None
    if _resizes_an_input(call, cpu.mover):
        return None
    if tables.THRESHOLDS.match(name) and any(number < 0 for number in numbers):
        return None
    if tables.WRONG_FOR_UINT8.match(name) and any(each.dtype == torch.uint8 for each in tensors):
        return None
    plain = _run_plain(name, call)
    if plain.error is not None or not differences(name, call, plain, cpu, "cpu")[0]:
        return None
    if tables.WRONG_FOR_WIDTH_1.match(name) and tree_leaves(cpu.value)[0].shape[-1:] == (1,):
        return None
    if any(each.is_conj() or each.is_neg() for each in tensors):
        as_views = _run_plain(name, call, PlainBits)
        if as_views.error is None and not differences(name, call, as_views, cpu, "cpu")[0]:
            return None  # the layout changes nothing: the kernel ignores the views
    return plain


def _tensors(call: Call) -> list[torch.Tensor]:
    return [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]


def _fits_channels(name: str, call: Call) -> bool:
    """Whether the arguments of a batch norm have the shapes that it expects but does not check."""
    given = {argument.name: value for argument, value in changes.given_to(name, call)}
    shape, gradient = given["input"].shape, given.get("grad_out")
    unused = () if given.get("train", given.get("training", True)) else ("save_mean", "save_invstd", "save_var")
    shapes = {each: given[each].shape for each in _OF_CHANNELS if given.get(each) is not None}
    return (gradient is None or gradient.shape == shape) and all(
        each == shape[1:2] or which in unused and each.numel() == 0 for which, each in shapes.items()
    )


def _fits_kernel(name: str, call: Call) -> bool:
    """Whether the weight of a convolution has the kernel_size given beside it. PyTorch's operators with both arguments do
    not check this, and read the weight differently in each layout.
    """
    given = {argument.name: value for argument, value in changes.given_to(name, call)}
    weight, size = given.get("weight"), given.get("kernel_size")
    if not isinstance(weight, torch.Tensor) or not isinstance(size, list) or weight.dim() == 2:
        return True  # of two dimensions, it is a matrix of any kernel
    sizes = list(weight.shape[2:])
    return sizes == (size * len(sizes) if len(size) == 1 else size)


def _is_singular(x: torch.Tensor) -> bool:
    """Whether rounding decides if a matrix is singular."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return False
    x = numerics.widened(x.detach())
    found = torch.linalg.svdvals(x.to(torch.promote_types(x.dtype, torch.float64)))
    return bool((found[..., -1] <= x.shape[-1] * torch.finfo(x.dtype).eps * found[..., 0]).any())


def _has_denormals(x: torch.Tensor) -> bool:
    x = numerics.widened(x.detach().resolve_conj().resolve_neg()).abs()
    return bool(((x > 0) & (x < torch.finfo(torch.float32).tiny)).any())


def _is_ordinary(t: torch.Tensor) -> bool:
    """Whether no two elements share memory, and sums of elements are finite in any order."""
    if not t.numel():
        return True
    if aliasing.overlaps_itself(t):
        return False
    x = numerics.widened(t.detach().resolve_conj().resolve_neg())
    return not (x.is_floating_point() or x.is_complex()) or bool((x.abs() < 1e4).all())
