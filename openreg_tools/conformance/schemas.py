"""The operators that a device lists, and calls of them that the CPU accepts or refuses, made from their schemas.

`generated_calls` makes these calls on the device. The tables say which operators need other arguments, which are not
called, and which are not compared.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import layouts, outcomes
from openreg_tools.conformance.guarded import stays_within
from openreg_tools.core import child, from_schema, opinfo
from openreg_tools.core import device as devices
from openreg_tools.core.attempts import Attempt, attempts
from openreg_tools.core.known_arguments import SAMPLES
from openreg_tools.core.move import Move, is_written
from openreg_tools.core.samples import Sample, sample_of

ATTEMPTS = 240
BYTES = 1 << 30  # of memory for one call: a huge size is an error, instead of minutes of work

# Operators that PyTorch's own code calls with arguments that no schema describes, and the OpInfo that calls each.
REACHED_BY: dict[str, str] = {
    "aten::_batch_norm_with_update": "_batch_norm_with_update",
    "aten::_ctc_loss": "nn.functional.ctc_loss",
    "aten::_ctc_loss.Tensor": "nn.functional.ctc_loss",
    "aten::_ctc_loss_backward": "nn.functional.ctc_loss",
    "aten::_ctc_loss_backward.Tensor": "nn.functional.ctc_loss",
    "aten::_embedding_bag": "nn.functional.embedding_bag",
    "aten::_embedding_bag_backward": "nn.functional.embedding_bag",
    "aten::_embedding_bag_per_sample_weights_backward": "nn.functional.embedding_bag",
    "aten::_native_batch_norm_legit": "_native_batch_norm_legit",
    "aten::_trilinear": "nn.functional.bilinear",
    "aten::_upsample_bilinear2d_aa_backward": "_upsample_bilinear2d_aa",
    "aten::_upsample_nearest_exact1d_backward": "nn.functional.interpolate.nearest-exact",
    "aten::_upsample_nearest_exact2d_backward": "nn.functional.interpolate.nearest-exact",
    "aten::_upsample_nearest_exact3d_backward": "nn.functional.interpolate.nearest-exact",
    "aten::col2im": "nn.functional.unfold",
    "aten::convolution": "nn.functional.conv_transpose1d",
    "aten::convolution_backward": "nn.functional.conv_transpose1d",
    "aten::fractional_max_pool2d": "nn.functional.fractional_max_pool2d",
    "aten::fractional_max_pool3d": "nn.functional.fractional_max_pool3d",
    "aten::fractional_max_pool3d_backward": "nn.functional.fractional_max_pool3d",
    "aten::grid_sampler_2d": "nn.functional.grid_sample",
    "aten::grid_sampler_2d_backward": "nn.functional.grid_sample",
    "aten::grid_sampler_3d": "nn.functional.grid_sample",
    "aten::grid_sampler_3d_backward": "nn.functional.grid_sample",
    "aten::linalg_ldl_solve": "linalg.ldl_solve",
    "aten::linalg_lu_solve": "lu_solve",
    "aten::mv": "addmv",
    "aten::native_group_norm_backward": "nn.functional.group_norm",
    "aten::native_layer_norm_backward": "nn.functional.layer_norm",
    "aten::nll_loss2d_backward": "nn.functional.linear_cross_entropy",
    "aten::nll_loss2d_forward": "nn.functional.linear_cross_entropy",
    "aten::nll_loss_backward": "nn.functional.cross_entropy",
    "aten::nll_loss_forward": "nn.functional.cross_entropy",
    "aten::scatter.reduce": "scatter",
    "aten::segment_reduce": "_segment_reduce.lengths",
    "aten::upsample_bicubic2d_backward": "nn.functional.interpolate.bicubic",
    "aten::upsample_bilinear2d_backward": "nn.functional.interpolate.bilinear",
    "aten::upsample_linear1d_backward": "nn.functional.interpolate.linear",
    "aten::upsample_nearest1d_backward": "nn.functional.interpolate.nearest",
    "aten::upsample_nearest2d_backward": "nn.functional.interpolate.nearest",
    "aten::upsample_nearest3d_backward": "nn.functional.interpolate.nearest",
    "aten::upsample_trilinear3d_backward": "nn.functional.interpolate.trilinear",
}

# Operators that are not called, and why.
NOT_CALLED: dict[str, str] = {
    "aten::from_file": "maps a file that the caller provides",
    "aten::from_file.out": "as from_file",
    "aten::_nnpack_spatial_convolution": "PyTorch calls it for CPU tensors that it has checked; it divides by a size of 0",
    "aten::_nnpack_spatial_convolution.out": "as _nnpack_spatial_convolution",
    "aten::_add_batch_dim": "makes a tensor for the inside of torch.vmap",
    "aten::_remove_batch_dim": "takes a tensor from the inside of torch.vmap",
    "aten::record_stream": "takes a stream, and the CPU has none",
}

# Operators with kernels of the device's own: their behavior on garbage is not compared with the CPU's.
DIFFERENT: dict[str, str] = {
    "aten::empty.memory_format": "like CUDA, the device does not pin its own memory, and it allocates before it refuses a layout",
    "aten::empty_strided": "as empty.memory_format",
    "aten::resize_": "the CPU takes a negative size where another is 0",
    "aten::set_.source_Storage_storage_offset": "the device reserves memory and takes it when it is written to",
    "aten::lstm.input": "the CPU's oneDNN ignores weights and states that are too many",
}

# Operators that are called, and whose results are not compared, and why.
UNCOMPARED: dict[str, str] = {
    "aten::_convert_indices_from_csr_to_coo": "indices that do not increase leave part of the result unwritten",
    "aten::_convert_indices_from_csr_to_coo.out": "as _convert_indices_from_csr_to_coo",
    "aten::_pack_padded_sequence": "the sizes of its batches are on the CPU on every device",
    "aten::_pack_padded_sequence.out": "as _pack_padded_sequence",
    "aten::_pad_packed_sequence": "the lengths that it returns are on the CPU on every device",
    "aten::_rowwise_prune": "its index mapping is made on the CPU on every device",
    "aten::_shape_as_tensor": "its result is on the CPU on every device",
    "aten::_test_ambiguous_defaults.a": "as _shape_as_tensor",
    "aten::_test_ambiguous_defaults.b": "as _shape_as_tensor",
    "aten::_to_cpu": "as _shape_as_tensor",
    "aten::_pin_memory": "pinned memory is the CPU's on every device",
    "aten::_pin_memory.out": "as _pin_memory",
    "aten::pin_memory": "as _pin_memory",
    "aten::choose_qparams_optimized": "as _shape_as_tensor",
    "aten::get_device": "it says which device",
    "aten::to_mkldnn": "oneDNN's layout is the CPU's on every device",
    "aten::mkldnn_convolution": "oneDNN takes CPU tensors, and PyTorch calls it only for those",
    "aten::mkldnn_convolution.out": "as mkldnn_convolution",
    "aten::quantized_gru_cell": "its fused cell refuses quantized weights, on this device as on CUDA",
    "aten::quantized_lstm_cell": "as quantized_gru_cell",
    "aten::_wrapped_linear_prepack": "as fbgemm_pack_gemm_matrix_fp16",
    "aten::fbgemm_pack_gemm_matrix_fp16": "FBGEMM packs on the CPU, on every device",
    "aten::fbgemm_pack_quantized_matrix": "as fbgemm_pack_gemm_matrix_fp16",
    "aten::fbgemm_pack_quantized_matrix.KN": "as fbgemm_pack_gemm_matrix_fp16",
}

# Operators whose results depend on more than their arguments, or that have parts without a defined value.
UNDEFINED: dict[str, str] = {f"aten::{name}": why for name, why in layouts.WRITTEN_IN_PART.items()}


def is_uncompared(name: str) -> bool:
    """Returns true if an operator asks for the device type, or belongs to a CPU library: it takes only CPU tensors."""
    of_library = name.startswith(("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::"))
    return name in UNCOMPARED or name.startswith("aten::_autocast_to_") or of_library


# The CPU's error messages for dtypes that CUDA and the device support.
LACKS_DTYPE = re.compile(
    r"not implemented for '|doesn't support tensors of type|Unsupported dtype|does not support complex|half to float conversion|but found Half"
)

# Arguments that the host reads on every device, by operator name without overload.
HOST_ARGUMENTS: dict[str, str] = {
    "aten::_foreach_addcdiv": "scalars",
    "aten::_foreach_addcdiv_": "scalars",
    "aten::_foreach_addcmul": "scalars",
    "aten::_foreach_addcmul_": "scalars",
    "aten::_pack_padded_sequence": "lengths",
    "aten::_pack_padded_sequence_backward": "batch_sizes",
    "aten::_pad_packed_sequence": "batch_sizes",
    "aten::randint_like": "high",
    "aten::tensor_split": "tensor_indices_or_sections",
}

# Operators that return uninitialized memory, in addition to those in outcomes.py.
UNINITIALIZED = {
    "_efficientzerotensor", "_empty_affine_quantized", "_empty_per_channel_affine_quantized",
    "_sparse_compressed_tensor_with_dims", "resize", "resize_", "resize_as", "resize_as_",
}  # fmt: skip

# Arguments that describe the tensor to make; out= forms do not have them.
OPTIONS = {"dtype", "layout", "device", "pin_memory"}

CPU_KEYS = ("CPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU", "MkldnnCPU")


@functools.cache
def names(device: str) -> list[str]:
    """Every ATen operator that the dispatcher lists for the device, and every operator of its package."""
    listed = operators.operators(device, has=("own", "shared", "composite")).entries
    namespace = backends.of_device(device).namespace
    own = [name for name in dispatch.names() if namespace and name.startswith(f"{namespace}::")]
    return [entry.name for entry in listed] + own


def is_of_package(name: str) -> bool:
    """Returns true if an operator belongs to a device's package, which provides its samples."""
    return bool(backends.of_operator(name).namespace)


def is_overridden(name: str) -> bool:
    """Returns true if the CPU's kernel of an operator that PyTorch offers to new devices refuses every call."""
    return name.partition(".")[0].endswith(("_overrideable", "_overrideable_backward"))


def is_own(name: str, device: str) -> bool:
    """Returns true if the operator's kernel on the device is neither the CPU's nor made of other operators."""
    return is_of_package(name) or backends.of_device(device).is_own(name)


def is_uninitialized(name: str) -> bool:
    """Returns true if the operator returns uninitialized memory."""
    base = name.partition("::")[2].partition(".")[0]
    return base in outcomes.UNINITIALIZED or base in UNINITIALIZED or base.startswith(("empty", "new_empty"))


def outcome_of(name: str, call: Sample, move: Move) -> outcomes.Outcome:
    """What a call returned, and wrote to, or raised. Deferred errors are raised here, and huge sizes are errors."""

    def made(_: Move) -> Any:
        with child.at_most(BYTES):
            found = called(name, call, move)
            if move.device.type not in ("cpu", "meta"):
                devices.synchronize(move.device)
        return found

    return outcomes.run(made, move)


def called(name: str, call: Sample, move: Move) -> tuple[Any, list[Any]]:
    """What a call returns, and the arguments that it writes to."""
    on_host, cpu = HOST_ARGUMENTS.get(name.partition(".")[0]), Move("cpu")
    names = [argument.name for argument in dispatch.schema(name).arguments]
    args = [(cpu if key == on_host else move)(value) for key, value in zip(names, call.args, strict=False)]
    kwargs = {key: (cpu if key == on_host else move)(value) for key, value in call.kwargs.items()}
    out = from_schema.overload(name)(*args, **kwargs)
    written = [
        value
        for argument, value in zip(dispatch.schema(name).arguments, [*args, *kwargs.values()], strict=False)
        if is_written(argument)
    ]
    return out, written


@functools.lru_cache(maxsize=8)
def accepted(name: str, most: int) -> list[Sample]:
    """Calls that the CPU accepts, or the meta device if the CPU lacks the operator."""
    if name in REACHED_BY:
        return opinfo.calls_of(from_schema.overload(name), REACHED_BY[name])[:most]
    if name in SAMPLES:
        torch.manual_seed(opinfo.SEED)
        return [SAMPLES[name]() for _ in range(most)]
    if is_of_package(name):
        is_out = any(argument.is_out for argument in dispatch.schema(name).arguments)
        return _derived(name, most) if is_out else _samples(name)[:most]
    return _tried(name, most, "returned") or _derived(name, most)


def refused(name: str, most: int) -> list[Sample]:
    """Calls that the CPU refuses, for an operator without any that it accepts."""
    return _tried(name, most, "raised")[:most]


@functools.lru_cache(maxsize=8)
def _survey(name: str, most: int) -> list[tuple[int, Attempt]]:
    def attempt(k: int) -> None:
        call = from_schema.call(name, k)
        called(name, call, Move("cpu"))
        with filled_memory():
            if not is_uninitialized(name) and not stays_within(functools.partial(called, name, call)):
                raise _ReadsBeyondError

    return list(attempts(ATTEMPTS, attempt, enough=most))


def _tried(name: str, most: int, kind: str) -> list[Sample]:
    return [
        from_schema.call(name, k)
        for k, outcome in _survey(name, most)
        if outcome.kind == kind and _ReadsBeyondError.__name__ not in outcome.message
    ]


class _ReadsBeyondError(Exception):
    """The CPU's kernel does not check shapes, and reads or writes beyond its arguments."""


def _signature(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((a.name, str(a.real_type)) for a in dispatch.schema(name).arguments if not a.is_out)


def _writes(name: str) -> bool:
    return any(map(is_written, dispatch.schema(name).arguments))


@functools.cache
def without_out(name: str) -> str | None:
    """The functional form of an out= or in-place operator. It may take `OPTIONS` in addition."""
    base, outs = name.partition(".")[0], any(argument.is_out for argument in dispatch.schema(name).arguments)
    for other in dispatch.overloads(base if outs else base.removesuffix("_")):
        if any(argument.is_out for argument in dispatch.schema(other).arguments) or (_writes(other) and not outs):
            continue
        theirs = _signature(other)
        if other != name and _signature(name) in (theirs, tuple(pair for pair in theirs if pair[0] not in OPTIONS)):
            return other
    return None


def is_on_cpu(name: str) -> bool:
    """Returns true if the CPU has a kernel for some layout, or for the form that an out= operator of PyTorch calls."""
    like = without_out(name) if _writes(name) else None
    if is_overridden(name) or (like and not is_on_cpu(like)):
        return False
    return any(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key) for key in CPU_KEYS)


def _derived(name: str, most: int) -> list[Sample]:
    """Calls of an out= or in-place operator, made from calls of its functional form."""
    like = without_out(name) if _writes(name) else None
    if not like:
        return []
    calls = []
    for call in accepted(like, most):
        made = filter(None, (_with_outs(name, like, call, shaped) for shaped in (False, True)))
        calls += [x for x in made if not is_on_cpu(name) or not outcome_of(name, x, Move("cpu")).error][:1]
    return calls


def _with_outs(name: str, like: str, call: Sample, shaped: bool) -> Sample | None:
    """A call of `like` with out= tensors, either of the shapes that it returns or empty."""
    outs = [argument.name for argument in dispatch.schema(name).arguments if argument.is_out]
    value = outcome_of(like, call, Move("cpu" if is_on_cpu(like) else "meta")).value if outs else None
    results = value[0] if value else tuple(torch.empty(0) for _ in outs)  # where the meta device does not have it
    if any(isinstance(x, torch.Tensor) and x.is_mkldnn for x in tree_leaves(results)):
        return None  # oneDNN's layout cannot be made empty
    results = results[: len(outs)] if isinstance(results, tuple) else (results,)
    made = tree_map(lambda x: _emptied(x, shaped), list(results))
    kwargs = {key: value for key, value in call.kwargs.items() if key in dict(_signature(name))}
    return Sample(*call.args, **kwargs, **dict(zip(outs, made, strict=True)))


def _emptied(result: Any, shaped: bool) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    if result.layout != torch.strided or result.is_nested or result.is_quantized:
        return torch.empty_like(result)
    return torch.zeros(result.shape if shaped else 0, dtype=result.dtype)


def _samples(name: str) -> list[Sample]:
    """Calls of an operator of a device's package, from the samples that the package provides."""
    outcomes.seed("cpu")
    samples = backends.of_operator(name).samples(name.partition(".")[0])
    calls = []
    for dtype in (torch.float32, torch.bfloat16):
        for sample in map(sample_of, samples("cpu", dtype) if samples else ()):
            args, kwargs = [], {}
            for i, argument in enumerate(dispatch.schema(name).arguments):
                given = sample.args[i] if i < len(sample.args) else None
                value = given if i < len(sample.args) else sample.kwargs.get(argument.name, argument.default_value)
                if isinstance(value, float) and argument.real_type.kind() == "TensorType":  # an overload
                    value = torch.tensor(value)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            calls.append(Sample(*args, **kwargs))
    return calls


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Fills new memory, because a call that the CPU accepts may leave part of its result unwritten."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
