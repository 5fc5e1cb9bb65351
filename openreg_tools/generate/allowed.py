"""Tables and rules that allow differences between a device and the CPU that are not the device's fault.

A rule is as narrow as its reason. A difference that no rule allows is a finding.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import dispatch
from openreg_tools.conformance import generated, layouts, opinfo, schemas, survey
from openreg_tools.conformance.calls import Call, Move, RequiresGrad, Stays, StorageOf, stays_within, writes_beyond
from openreg_tools.generate import changes

__all__ = [
    "BYTES", "CHECKED_BY_DEVICE", "ELSEWHERE", "MEMORY", "NAN", "OUT_OF_BOUNDS", "OVERFLOWS", "READ_AND_WRITTEN", "RETURNS_ANOTHER", "ROUNDS",
    "LACKS_MEMORY", "UNCHECKED", "WITHOUT_VALUES", "Plain", "called", "damages", "differences", "differs_when_plain", "doubtful", "grows", "has_shared_memory", "has_short_padding", "in_plain_memory",
    "is_elsewhere", "is_finite_equal", "is_infinite_on_both_sides",  "is_read_and_written", "is_uncompared", "is_undefined_for_nan", "is_pytorchs_assert", "is_unreadable", "lacks_tensor", "overflows", "plain_error", "raises_when_plain", "refuses_gradient", "takes_negative_size", "writes_anywhere",
    "returns_another", "rounds", "takes_it_plain", "widened", "writes_an_input",
]  # fmt: skip

BYTES = 1 << 30  # of memory for one call: a huge size is an error, instead of minutes of work

# Operators whose results are compared in shape, dtype and layout, but not in values; `schemas.is_uninitialized` names the
# ones that allocate. Random operators are compared from one seed if the device draws the same numbers as the CPU.
WITHOUT_VALUES: dict[str, str] = {f"aten::{name}": f"undefined: {why}" for name, why in layouts.WRITTEN_IN_PART.items()}

# Operators that PyTorch checks differently on different devices, and the errors that differ.
_BY_CHANNEL = (
    re.compile("resize|quantiz", re.I),
    (
        "PyTorch resizes out= of the CPU and of CUDA without dispatch; elsewhere resize_ refuses tensors quantized by channel"
    ),
)
_Q = re.compile(r"\bq\b"), "PyTorch reads q, and checks that it is between 0 and 1, only on the CPU"
CHECKED_BY_DEVICE: dict[str, tuple[re.Pattern[str], str]] = {
    "aten::_empty_per_channel_affine_quantized.out": _BY_CHANNEL,
    "aten::_make_per_channel_quantized_tensor.out": _BY_CHANNEL,
    "aten::quantize_per_channel.out": _BY_CHANNEL,
    "aten::max_pool1d": (
        re.compile("without overflow"),
        "only the CPU has a kernel for it, which takes larger numbers",
    ),
    **{
        f"aten::addr{which}": (
            re.compile("size mismatch, input|2D tensor expected"),
            "only the CPU has a kernel for it; math_addr, for other devices, resizes the result",
        )
        for which in ("", "_", ".out")
    },
    "aten::_grouped_mm": (re.compile("aligned to 16 bytes"), "PyTorch requires this of every device except the CPU"),
    "aten::scalar_tensor": (re.compile("sparse", re.I), "PyTorch ignores layout= on the CPU only"),
    **{
        f"aten::{name}{which}": _Q
        for name in ("quantile", "nanquantile")
        for which in ("", ".out", ".scalar", ".scalar_out")
    },
}

# Operators that are not called, because PyTorch calls them with arguments that it has checked, and others damage memory.
UNCHECKED = {
    f"aten::{name}": "the public operator checks the arguments; with others, the CPU's kernel reads or writes anywhere"
    for name in ("_cummax_helper", "_cummin_helper", "_cholesky_solve_helper", "_cholesky_solve_helper.out")
} | {
    f"aten::fbgemm_linear_int8_weight{which}": "its packed weights have no size; with another input, the CPU's kernel reads anywhere"
    for which in ("", "_fp32_activation")
}

# Operators whose results depend on the strides of their arguments, or that take a storage.
ABOUT_MEMORY = re.compile(
    r"aten::(as_strided|set|resize|_resize|_reshape_alias|slice_inverse|_nested_view_from|is_set_to|is_contiguous|stride|to_padded)"
)

# Operators whose CPU kernels ignore the strides of an argument, and the file of PyTorch that makes it contiguous before
# it calls them, or operators whose results depend on strides otherwise.
IGNORES_STRIDES: dict[str, str] = {
    "aten::_nested_compute_contiguous_strides_offsets": "nested tensors make their sizes contiguous",
    "aten::_embedding_bag": "aten/src/ATen/native/EmbeddingBag.cpp, make_offset2bag_out: offset2bag stays empty on the fast path, which "
    "depends on the strides",
    "aten::embedding_bag": "as _embedding_bag",
    "aten::_embedding_bag_forward_only": "as _embedding_bag",
    "aten::_linalg_det": "aten/src/ATen/native/LinearAlgebra.cpp: a contiguous A is factored as its transpose",
    "aten::_linalg_slogdet": "as _linalg_det",
    **{
        f"aten::_scaled_dot_product_flash_attention_for_cpu{which}": "aten/src/ATen/native/transformers/sdp_utils_cpp.h, "
        "check_last_dim_stride_equals_1_dense: scaled_dot_product_attention calls it only with contiguous rows"
        for which in ("", "_backward")
    },
    "aten::mkldnn_rnn_layer": "aten/src/ATen/native/mkldnn/RNN.cpp: mkldnn_rnn passes a contiguous input, hx and cx",
    **{
        f"aten::{name}{which}": "with equal indices, the order of the memory decides which element stays"
        for name in ("index_put", "_index_put_impl", "_unsafe_index_put", "index_copy", "put", "scatter")
        for which in ("", "_")
    },
    **{
        f"aten::_fused_{optimizer}{which}": "torch/csrc/autograd/functions/accumulate_grad.h gives a gradient the strides of its dense "
        "parameter, and torch.optim makes states with preserve_format"
        for optimizer in ("adagrad", "adam", "adamw", "sgd")
        for which in ("", "_")
    },
}

# Operators whose gradients should have the input's shape, and whose statistics and weights one element for each channel.
# They do not check this, and otherwise the result depends on the layouts.
BATCH_NORM = re.compile(r"aten::(_batch_norm_(no|with)_update|_?native_batch_norm|batch_norm_backward\b)")
_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
# Operators that factor a contiguous matrix as its transpose: with denormal elements, one of the two may be singular.
DETERMINANTS = re.compile(r"aten::(linalg_)?(log|slog)?det(\.|$)")
# Operators whose results are compared squared: they take the root of a difference, and near zero that enlarges its rounding.
ROOTS = {"aten::_euclidean_dist", "aten::_euclidean_dist.out"}

# Errors about memory, whose types and limits differ between devices.
MEMORY = re.compile(
    r"allocat|bad_alloc|(not enough|out of) memory|can be pinned|overflow|too large|Storage size calculation", re.I
)


# Errors that the device may raise where the CPU computes a result: it has less memory, or cannot pin it.
LACKS_MEMORY = re.compile(r"(not enough|out of) memory|allocat|can be pinned", re.I)
OUT_OF_BOUNDS = re.compile(r"index \S+ is out of bounds|index out of range|out of DATA bounds")
RETURNS_ANOTHER = "the CPU's kernel returns another tensor instead of writing to out="
# Kernels that return an uninitialized value for NaN: their loop ends before it sets one.
UNDEFINED_FOR_NAN = re.compile(r"aten::special_(chebyshev|hermite|laguerre|legendre|shifted_chebyshev)_polynomial")
NAN = "PyTorch's kernel returns an uninitialized value for NaN"
ROUNDS = "terms of a half type that cancel are rounded at the size of the largest element"
OVERFLOWS = "an intermediate result overflows on one side"
READ_AND_WRITTEN = "memory is written to that is also read in other places, which PyTorch does not detect"
ELSEWHERE = "an argument is on another device or has no memory, or the call does not name the device"


# ---- calls ----


class Plain(Move):
    """Copies in separate contiguous memory: what a kernel would receive if layouts did not matter."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return super().copy(tensor)
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def called(name: str, call: Call, move: Move, _: opinfo.Mover) -> Any:
    """Results, written arguments, and the memory of all arguments; deferred errors are raised here."""
    with survey.at_most(BYTES):
        out, written = schemas._call(name, call, move)
        if move.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(move.device)
    return (out, written), move


# ---- arguments ----


def is_uncompared(name: str) -> bool:
    """Whether an operator asks for the device type, or belongs to a CPU library, which takes only CPU tensors."""
    return (
        name in schemas.UNCOMPARED
        or name.startswith("aten::_autocast_to_")
        or name.startswith(("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::"))
    )


def is_elsewhere(name: str, call: Call) -> bool:
    """Whether an argument is on the host, on meta, or without memory, or no argument says where the call runs."""
    leaves = tree_leaves((call.args, call.kwargs))
    if not any(isinstance(each, (torch.Tensor, torch.device, StorageOf, RequiresGrad)) for each in leaves):
        return True
    if any(
        value is None and "Device" in argument.real_type.annotation_str for argument, value in _given_to(name, call)
    ):
        return True  # some operators then use the CPU, others the device of an argument
    inputs = [(argument, value) for argument, value in _given_to(name, call) if not argument.is_out]
    if any(
        isinstance(value, list) and not value and "List[Tensor]" in argument.real_type.annotation_str
        for argument, value in inputs
    ):
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves([value for _, value in inputs])):
            return True  # only out= names a device
    stays = any(isinstance(each, Stays) or isinstance(each, torch.device) and each.type != "cpu" for each in leaves)
    return call.alone or stays


def has_short_padding(name: str, call: Call) -> bool:
    """Whether the gradient of a padding got fewer numbers than its kernel reads, which PyTorch does not check."""
    if not re.match(r"aten::(reflection|replication)_pad[123]d_backward", name):
        return False
    given = [(argument, value) for argument, value in _given_to(name, call) if argument.name == "padding"]
    return any(isinstance(value, list) and len(value) < argument.N for argument, value in given)


def writes_anywhere(name: str, call: Call) -> bool:
    """Whether an index is out of range for a kernel that writes to its result without a check."""
    if name.partition(".")[0] != "aten::embedding_dense_backward":
        return False
    given = {argument.name: value for argument, value in _given_to(name, call)}
    indices, count = given["indices"], given["num_weights"]
    if not isinstance(indices, torch.Tensor) or not changes._is_plain(indices) or not isinstance(count, int):
        return False
    return bool(((indices < 0) | (indices >= count)).any())


def lacks_tensor(name: str, call: Call) -> bool:
    """Whether a Tensor argument is None, which the dispatcher passes on as an undefined tensor."""
    return any(value is None and argument.real_type.kind() == "TensorType" for argument, value in _given_to(name, call))


def _given_to(name: str, call: Call) -> list[tuple[Any, Any]]:
    """Arguments of the schema, and their values."""
    arguments = {argument.name: argument for argument in dispatch.schema(name).arguments}
    return [*zip(arguments.values(), call.args, strict=False), *((arguments[k], v) for k, v in call.kwargs.items())]


def takes_it_plain(name: str, call: Call) -> opinfo.Outcome | None:
    """The CPU's outcome if each argument is contiguous and has its own memory, unless it refuses that too."""
    plain = _run_plain(name, call)
    return plain if plain.error is None else None


def plain_error(name: str, call: Call) -> BaseException | None:
    """The CPU's error if each argument is contiguous and has its own memory, as the device may pass them to a kernel."""
    return _run_plain(name, call).error


def _run_plain(name: str, call: Call) -> opinfo.Outcome:
    return opinfo.run(functools.partial(called, name, call, Plain("cpu")), "cpu")


def differs_when_plain(name: str, call: Call, plain: opinfo.Outcome, there: opinfo.Outcome, device: str) -> str:
    """How the device's results differ from the CPU's in contiguous memory, where the memory of the arguments is separate."""
    if not _is_memory_separate(name, call) or any(map(_overlaps_itself, _tensors(call))):
        return ""
    there = dataclasses.replace(there, value=there.value[0], mover=there.value[1])
    found = differences(name, call, plain, there, device)
    return found[0].message if found else ""


def grows(outcome: opinfo.Outcome, call: Call) -> bool:
    """Whether a result has more memory than any argument: a call of `set_` makes a storage grow, which leaves the new part
    uninitialized.
    """
    leaves = tree_leaves((call.args, call.kwargs))
    given = [
        (x.tensor if isinstance(x, StorageOf) else x).untyped_storage().nbytes() for x in leaves if _has_storage(x)
    ]
    results = [x for x in tree_leaves(outcome.value) if _has_storage(x)]
    return any(x.untyped_storage().nbytes() > max(given, default=0) for x in results)


def returns_another(cpu: opinfo.Outcome) -> bool:
    """Whether the CPU returned a tensor other than the out= tensors that it was given."""
    (out, written), _ = cpu.value
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    return bool(written) and any(all(x is not each for each in tree_leaves(written)) for x in results)


def has_shared_memory(name: str, call: Call) -> bool:
    """Whether an argument that is written shares memory with another argument, or has elements that share memory."""
    leaves = tree_leaves((call.args, call.kwargs))
    written = [leaves[each["at"]] for each in changes.profile(name, call) if each.get("written")]
    return not _is_memory_separate(name, call) or any(map(_overlaps_itself, written))


def _has_storage(x: Any) -> bool:
    return isinstance(x, StorageOf) or isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested


def _tensors(call: Call) -> list[torch.Tensor]:
    return [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]


# ---- values ----


def overflows(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is not finite, and a sum or product of arguments may have overflowed.

    A different order of operations, or a fused multiply-add, then gives inf or nan on one side and a finite number on
    the other.
    """

    def is_large(x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or not changes._is_plain(x) or not (x.is_floating_point() or x.is_complex()):
            return False
        x = widened(x.resolve_conj().resolve_neg()).abs()
        return bool((x.isfinite() & (x > torch.finfo(x.dtype).max ** 0.5)).any())

    return is_finite_equal(unequal) and any(map(is_large, tree_leaves((call.args, call.kwargs))))


def is_infinite_on_both_sides(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is NaN and the other is too or is infinite, and an argument is not finite:
    inf - inf depends on the formula.
    """
    given = [x for x in tree_leaves((call.args, call.kwargs)) if changes._is_plain(x)]
    return (
        bool(unequal)
        and any(not x.isfinite().all() for x in given)
        and all(
            not ((e.isfinite() | a.isfinite() | ~(e.isnan() | a.isnan())) & ~torch.isclose(e, a, equal_nan=True)).any()
            for e, a in ((widened(e), widened(a)) for e, a in unequal)
        )
    )


def is_undefined_for_nan(name: str, call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results of an operator in `UNDEFINED_FOR_NAN` differ only where an argument is NaN, or becomes NaN on the
    way.
    """
    if not UNDEFINED_FOR_NAN.match(name):
        return False
    leaves = [*call.args, *(value for key, value in call.kwargs.items() if key != "out")]
    leaves = [x.tensor if isinstance(x, Stays) else x for x in leaves]
    undefined = [~torch.as_tensor(x).isfinite() for x in leaves if isinstance(x, (torch.Tensor, int, float))]
    try:
        where = functools.reduce(torch.logical_or, undefined, torch.tensor(False))
        return all(not (~torch.isclose(e, a, equal_nan=True) & ~where.broadcast_to(e.shape)).any() for e, a in unequal)
    except RuntimeError:  # they do not broadcast
        return False


def is_finite_equal(unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is not finite."""
    return bool(unequal) and all(
        not (expected.isfinite() & actual.isfinite() & ~torch.isclose(expected, actual)).any()
        for expected, actual in ((widened(e), widened(a)) for e, a in unequal)
    )


def rounds(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results of half types differ by at most one rounding of the largest element.

    Terms that cancel may have had that size. The largest element is taken from the result and the arguments, because a
    result in which every term cancels has no element of that size. If an argument is larger than 1e4, nothing is
    allowed, because any small result would be.
    """

    def largest(x: torch.Tensor) -> float:
        x = x.detach().resolve_conj().resolve_neg().float().nan_to_num(0.0, 0.0, 0.0)
        return float(x.abs().max()) if x.numel() else 0.0

    halves = (torch.float16, torch.bfloat16)
    leaves = tree_leaves((call.args, call.kwargs))
    given = max((largest(x) for x in leaves if changes._is_plain(x) and x.dtype in halves), default=0.0)
    return bool(unequal) and all(
        given < 1e4
        and expected.dtype in halves
        and (expected.float() - actual.float()).abs().max()
        <= torch.finfo(expected.dtype).eps * max(given, largest(expected))
        for expected, actual in unequal
    )


def widened(t: torch.Tensor) -> torch.Tensor:
    """The arguments in a dtype that every operator supports."""
    if t.dtype == torch.complex32:
        return t.to(torch.complex64)
    return t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t


def doubtful(name: str, call: Call, is_plain: bool, emptied: bool = True) -> str:
    """Why the CPU may cause a difference: its kernel reads beyond its arguments, or its results vary from call to call.

    Args:
        is_plain: whether the expected results are those in contiguous memory.
        emptied: whether to call it with empty out= tensors too, because guarded memory cannot be resized.
    """
    outs = [each["at"] for each in changes.profile(name, call) if each.get("out")]
    calls = [call]
    if outs and emptied:
        calls.append(changes.changed(name, call, [["out", i, "empty"] for i in outs]))
    if is_plain:
        calls += [_plain(each) for each in calls]
    elif _differs_plain(name, call):
        return "the CPU's kernel gives different results in contiguous memory"
    (_, outcome), *_ = survey.survey(
        1, lambda _: [_checked(functools.partial(schemas._call, name, each)) for each in calls]
    ) or [(0, survey.Outcome("crashed"))]
    if outcome.kind == "returned":
        return ""
    return "the CPU's kernel reads or writes beyond its arguments, or changes from call to call"


def damages(name: str, call: Call) -> bool:
    """Whether the CPU's kernel writes beyond its arguments, or ends the process."""

    def check(_: int) -> None:
        if writes_beyond(functools.partial(schemas._call, name, call)):
            raise ValueError

    (_, outcome), *_ = survey.survey(1, check) or [(0, survey.Outcome("crashed"))]
    return outcome.kind != "returned"


def _plain(call: Call) -> Call:
    """The call with each tensor in contiguous memory of its own."""
    move = Plain("cpu")

    def moved(x: Any) -> Any:
        return move.tensor(x) if isinstance(x, torch.Tensor) else x

    return Call(tree_map(moved, call.args), tree_map(moved, call.kwargs), call.alone)


def _is_memory_separate(name: str, call: Call) -> bool:
    """Whether every tensor argument is plain, and no written argument shares its storage with another argument."""
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


def writes_an_input(name: str, call: Call) -> bool:
    """Whether one tensor is both an input and an out= tensor."""
    leaves = tree_leaves((call.args, call.kwargs))
    outs = [each["at"] for each in changes.profile(name, call) if each.get("out")]
    return any(leaves[i] is other for i in outs for j, other in enumerate(leaves) if i != j)


def is_read_and_written(name: str, call: Call) -> bool:
    """Whether an argument that is written shares memory with another that is a different view of it, or that has elements
    that share memory.

    PyTorch refuses such calls, but only if both arguments are dense. The results depend on the order of the elements.
    """
    leaves = [leaf for leaf in tree_leaves((call.args, call.kwargs))]
    written = {each["at"] for each in changes.profile(name, call) if each.get("written")}

    def view(t: torch.Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.storage_offset(), t.dtype

    return any(
        changes._is_plain(other)
        and other.untyped_storage()._cdata == leaves[i].untyped_storage()._cdata
        and (view(other) != view(leaves[i]) or i != j and _overlaps_itself(other))
        for i in written
        for j, other in enumerate(leaves)
    )


def _differs_plain(name: str, call: Call) -> bool:
    """Whether the CPU's results change if the same values are in separate contiguous memory."""
    if not _is_memory_separate(name, call):
        return False
    as_is = opinfo.run(functools.partial(called, name, call, Move("cpu")), "cpu")
    plain = _run_plain(name, call)
    if as_is.error or plain.error:
        return False
    as_is.value, as_is.mover = as_is.value
    return bool(differences(name, call, plain, as_is, "cpu"))


def differences(
    name: str, call: Call, plain: opinfo.Outcome, other: opinfo.Outcome, device: str
) -> list[opinfo.Failure]:
    """How the values and shapes of `other` differ from the results of a call in contiguous memory."""
    report = opinfo.Report()
    expected = opinfo.Outcome(plain.value[0], mover=plain.value[1])
    if name in ROOTS:
        expected, other = (
            dataclasses.replace(each, value=tree_map(_squared, each.value)) for each in (expected, other)
        )
    comparison = opinfo.Comparison(report, "generated", -1, device, True)
    comparison.computed_in = _computed_in(name, call)
    comparison.results(expected, other)
    if rounds(call, comparison.unequal):  # a half type, in another order
        report.failures = [failure for failure in report.failures if failure.kind != "value"]
    found = [failure for failure in report.failures if failure.kind in ("value", "shape", "rng")]
    for failure in found:
        failure.message = f"as the CPU computes in contiguous memory, {failure.message}"
    return found


def _squared(x: Any) -> Any:
    return x * x.abs() if isinstance(x, torch.Tensor) else x  # with its sign


def _computed_in(name: str, call: Call) -> torch.dtype | None:
    """The floating-point dtype that the inputs promote to, in which an operator computes before it converts to out=."""
    given = _given_to(name, call)
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
    tensors = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, torch.Tensor)]
    if all(not changes._is_plain(each) or each.is_contiguous() for each in tensors) or ABOUT_MEMORY.match(name):
        return None
    if name.partition(".")[0] in IGNORES_STRIDES:
        return None
    if BATCH_NORM.match(name) and not _fits_channels(name, call):
        return None
    if DETERMINANTS.match(name) and any(map(_has_denormals, tensors)):
        return None
    if cpu.drew or torch.Tag.nondeterministic_seeded in generated.overload(name).tags:
        return None  # random numbers are drawn in the order of the memory
    numbers = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, float)]
    if (
        not _is_memory_separate(name, call)
        or not all(map(_is_ordinary, tensors))
        or not all(map(math.isfinite, numbers))
    ):
        return None
    twice = [each for each, count in collections.Counter(map(id, tensors)).items() if count > 1]
    if any(cpu.mover.tensors[id(each)].shape != each.shape for each in tensors if id(each) in twice):
        return None  # it is an argument and the out= tensor that is resized
    plain = _run_plain(name, call)
    return plain if plain.error is None and differences(name, call, plain, cpu, "cpu") else None


def _fits_channels(name: str, call: Call) -> bool:
    """Whether the arguments of a batch norm have the shapes that it expects but does not check."""
    given = {argument.name: value for argument, value in _given_to(name, call)}
    shape, gradient = given["input"].shape, given.get("grad_out")
    unused = () if given.get("train", given.get("training", True)) else ("save_mean", "save_invstd", "save_var")
    shapes = {each: given[each].shape for each in _OF_CHANNELS if given.get(each) is not None}
    return (gradient is None or gradient.shape == shape) and all(
        each == shape[1:2] or which in unused and each.numel() == 0 for which, each in shapes.items()
    )


def _has_denormals(x: torch.Tensor) -> bool:
    x = widened(x.detach().resolve_conj().resolve_neg()).abs()
    return bool(((x > 0) & (x < torch.finfo(torch.float32).tiny)).any())


def is_unreadable(name: str, result: Any) -> bool:
    """Whether PyTorch returned a nested tensor with uninitialized offsets, or a quantized one without a quantizer."""
    if not isinstance(result, torch.Tensor):
        return False
    is_nested = result.is_nested and result.layout == torch.strided
    return name == "aten::select.int" and is_nested or name == "aten::_lazy_clone" and result.is_quantized


def refuses_gradient(name: str, call: Call, message: str) -> bool:
    """Whether the device refused the gradient of a convolution that has another shape than the output.

    The CPU does not refuse each of these.
    """
    if not name.startswith("aten::convolution_backward") or "expected a gradient of shape" not in message:
        return False
    given = {argument.name: value for argument, value in _given_to(name, call)}
    x, weight = (given[each].to("meta") for each in ("input", "weight"))
    numbers = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    with contextlib.suppress(RuntimeError):
        return torch.ops.aten.convolution(x, weight, None, *map(given.get, numbers)).shape != given["grad_output"].shape
    return True


def takes_negative_size(name: str, call: Call, message: str) -> bool:
    """Whether the device refused a negative size beside a size of 0, which the CPU's out= operators accept."""
    has_out = any(argument.is_out for argument in dispatch.schema(name).arguments)
    sizes = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, int)]
    return has_out and "negative dimension" in message and 0 in sizes and min(sizes) < 0


def raises_when_plain(name: str, call: Call, message: str) -> bool:
    """Whether the CPU raises this error too if each argument is contiguous and has its own memory."""
    error = None if ABOUT_MEMORY.match(name) else plain_error(name, call)
    return error is not None and opinfo.first_line(error) == message


def is_pytorchs_assert(call: Call, message: str) -> bool:
    """Whether an internal assertion is of PyTorch's code before it calls a kernel: MathBitsFallback, or the boxing of sizes
    that SymInt keeps on the heap.
    """
    is_large = any(isinstance(x, int) and x < -(2**62) for x in tree_leaves((call.args, call.kwargs)))
    return "MathBitsFallback" in message or "isIntList()" in message and is_large


def _is_ordinary(t: torch.Tensor) -> bool:
    """Whether no two elements share memory, and sums of elements are finite in any order."""
    if not t.numel():
        return True
    if _overlaps_itself(t):
        return False
    x = widened(t.detach().resolve_conj().resolve_neg())
    return not (x.is_floating_point() or x.is_complex()) or bool((x.abs() < 1e4).all())


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements share memory."""
    if not changes._is_plain(t) or not t.numel():
        return False
    where = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return where.as_strided(t.shape, t.stride(), t.storage_offset()).unique().numel() < t.numel()


def _checked(within: Callable[[Move], Any]) -> None:
    if not stays_within(within, resizes=True):
        raise ValueError
