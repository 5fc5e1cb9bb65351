"""Checks of every operator that a device lists, with arguments made from its schema and with garbage.

`check(op, device)` makes three. ``generated`` calls the operator with arguments that the CPU accepts, and
compares the results. ``garbage`` damages such arguments: the call must return or raise, without ending
the process or failing an internal assertion, and the device must accept what the CPU accepts. ``freed`` takes the memory
of one tensor at a time: see `freed`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends, dispatch, operators
from openreg_tools.conformance import freed, layouts, outcomes
from openreg_tools.conformance.attempts import Attempt, attempts
from openreg_tools.conformance.guarded import stays_within
from openreg_tools.conformance.outcomes import Comparison, Tally
from openreg_tools.core import child, from_schema, opinfo
from openreg_tools.core.blocks import first_line
from openreg_tools.core.known_arguments import SAMPLES
from openreg_tools.core.move import Move, is_written
from openreg_tools.core.samples import Sample, sample_of

CHECKS = ("generated", "garbage", freed.CHECK)
ATTEMPTS = 240

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


def run(name: str, call: Sample, device: str) -> tuple[Any, list[Any]]:
    """What a call returns on the device, and the arguments that it writes to."""
    return called(name, call, Move(device))


def outcome_of(name: str, call: Sample, move: Move) -> outcomes.Outcome:
    """What a call returned, and wrote to, or raised."""
    outcome = outcomes.run(lambda _: called(name, call, move), str(move.device))
    outcome.mover = move
    return outcome


def called(name: str, call: Sample, move: Move) -> tuple[Any, list[Any]]:
    on_host, cpu = HOST_ARGUMENTS.get(name.partition(".")[0]), Move("cpu")
    names = [argument.name for argument in dispatch.schema(name).arguments]
    args = [(cpu if each == on_host else move)(value) for each, value in zip(names, call.args, strict=False)]
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
        return (
            _derived(name, most)
            if any(each.is_out for each in dispatch.schema(name).arguments)
            else _samples(name)[:most]
        )
    return _tried(name, most, "returned") or _derived(name, most)


def refused(name: str, most: int) -> list[Sample]:
    """Calls that the CPU refuses, for an operator without any that it accepts."""
    return _tried(name, most, "raised")[:most]


@functools.lru_cache(maxsize=8)
def _survey(name: str, most: int) -> list[tuple[int, Attempt]]:
    def attempt(k: int) -> None:
        call = from_schema.call(name, k)
        run(name, call, "cpu")
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
    return tuple((each.name, str(each.real_type)) for each in dispatch.schema(name).arguments if not each.is_out)


def _writes(name: str) -> bool:
    return any(map(is_written, dispatch.schema(name).arguments))


@functools.cache
def without_out(name: str) -> str | None:
    """The functional form of an out= or in-place operator. It may take `OPTIONS` in addition."""
    base, outs = name.partition(".")[0], any(each.is_out for each in dispatch.schema(name).arguments)
    for each in dispatch.overloads(base if outs else base.removesuffix("_")):
        if each == name:
            continue
        if any(argument.is_out for argument in dispatch.schema(each).arguments) or (_writes(each) and not outs):
            continue
        theirs = _signature(each)
        if _signature(name) in (theirs, tuple(pair for pair in theirs if pair[0] not in OPTIONS)):
            return each
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
        for shaped in (False, True):
            made = _with_outs(name, like, call, shaped)
            if made and not (
                is_on_cpu(name) and outcomes.run(lambda _, made=made: run(name, made, "cpu"), "cpu").error
            ):
                calls.append(made)
                break
    return calls


def _with_outs(name: str, like: str, call: Sample, shaped: bool) -> Sample | None:
    """A call of `like` with out= tensors, either of the shapes that it returns or empty."""
    outs = [each for each in dispatch.schema(name).arguments if each.is_out]
    results = (
        outcomes.run(lambda _: run(like, call, "cpu" if is_on_cpu(like) else "meta")[0], "cpu").value if outs else ()
    )
    if results is None:  # also the meta device does not have it
        results = tuple(torch.empty(0) for _ in outs)
    if any(isinstance(x, torch.Tensor) and x.is_mkldnn for x in tree_leaves(results)):
        return None  # oneDNN's layout cannot be made empty
    results = results[: len(outs)] if isinstance(results, tuple) else (results,)
    made = tree_map(lambda x: _emptied(x, shaped), list(results))
    kwargs = {key: value for key, value in call.kwargs.items() if key in dict(_signature(name))}
    return Sample(*call.args, **kwargs, **{each.name: out for each, out in zip(outs, made, strict=True)})


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


def check(
    name: str,
    device: str,
    samples: int,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda where: None,
) -> Tally:
    """Make generated calls of one operator, `samples` of them, and 16 damaged ones for each where the kernel is its own."""
    tally = Tally()
    if name in NOT_CALLED:
        tally.notes["not called"] += 1
        return tally
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at("making arguments")
        calls = accepted(name, samples)
        if "generated" in checks:
            for i, call in enumerate(calls):
                at(f"generated, sample {i}")
                if not is_on_cpu(name):
                    _runs(tally, name, call, i, device)
                    continue
                if name in UNCOMPARED:
                    with contextlib.suppress(RuntimeError):  # not a crash
                        run(name, call, device)
                    tally.ran["generated"] += 1
                    continue
                _compare(tally, name, call, i, device)
        for i, call in enumerate(calls if freed.CHECK in checks else ()):
            freed.compare(tally, i, f"sample {i}", functools.partial(called, name, call), lambda: Move(device), at)
        if "generated" in checks and not calls:
            _refused(tally, name, samples, device, at)
        if "garbage" in checks and is_own(name, device):
            _garbage(
                tally, name, calls or [from_schema.call(name, k) for k in range(samples)], 16 * samples, device, at
            )
    return tally


def _runs(tally: Tally, name: str, call: Sample, sample: int, device: str) -> None:
    """Check an operator that only the device has: it must run, and an out= form must equal the functional form."""
    comparison = Comparison(tally, "generated", sample, device, True)
    there = outcomes.run(lambda _: run(name, call, device)[0], device)
    outs = {each.name for each in dispatch.schema(name).arguments if each.is_out}
    like = without_out(name) if outs else None
    if there.error is None and like:
        plain = Sample(*call.args, **{key: value for key, value in call.kwargs.items() if key not in outs})
        comparison.outcomes(outcomes.run(lambda _: tree_map(_to_cpu, run(like, plain, device)[0]), device), there)
        return
    tally.ran["generated"] += 1
    if there.error is not None:
        comparison.fail("error", f"{first_line(there.error)} ({call!r})")


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _compare(tally: Tally, name: str, call: Sample, sample: int, device: str) -> None:
    with filled_memory():
        cpu, there = outcome_of(name, call, Move("cpu")), outcome_of(name, call, Move(device))
    comparison = Comparison(tally, "generated", sample, device, values=not is_uninitialized(name))
    before = len(tally.failures)
    comparison.outcomes(cpu, there)
    for failure in tally.failures[before:]:
        failure.message = f"{failure.message} ({call!r})"


def _refused(tally: Tally, name: str, samples: int, device: str, at: Callable[[str], None]) -> None:
    """Check that the device refuses the calls that the CPU refuses, if it uses the CPU's kernel."""
    tally.notes["only refused calls"] += 1
    for i, call in enumerate(refused(name, samples)):
        at(f"generated, refused sample {i}")
        tally.ran["generated"] += 1
        try:
            with child.at_most(4 << 30):
                run(name, call, device)
        except Exception:
            continue
        if not is_own(name, device):
            tally.fail("generated", "no error", i, f"the CPU refuses ({call!r})")


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Fills new memory, because a call that the CPU accepts may leave part of its result unwritten."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _garbage(tally: Tally, name: str, calls: list[Sample], count: int, device: str, at: Callable[[str], None]) -> None:
    made = [from_schema.garbage(name, calls[k % len(calls)], k) for k in range(count)]
    at("making garbage")
    compared = is_on_cpu(name) and name not in {**DIFFERENT, **backends.of_operator(name).differs()}
    on_cpu: dict[int, Attempt] = {}
    if compared:
        on_cpu = dict(attempts(count, lambda k: run(name, made[k], "cpu")))
    for k, call in enumerate(made):
        cpu, alone = on_cpu.get(k), from_schema.is_alone(call)
        if cpu is not None and cpu.kind in ("crashed", "hung") and (alone or not is_of_package(name)):
            tally.notes["the CPU crashes"] += 1
            continue
        at(f"garbage, sample {k}")
        tally.ran["garbage"] += 1

        def fail(kind: str, message: str, k: int = k, call: Sample = call) -> None:
            tally.fail("garbage", kind, k, f"{message} ({call!r})")

        if cpu is not None and cpu.kind in ("crashed", "hung"):
            fail("crash", f"on the CPU: {cpu.message}")
            continue
        try:
            with child.at_most(4 << 30):
                run(name, call, device)
            error = None
        except Exception as raised:
            error = first_line(raised)
        if error and "INTERNAL ASSERT" in error and not (cpu and "INTERNAL ASSERT" in cpu.message):
            fail("internal", error)
        elif cpu is not None and cpu.kind == "raised" and not error and LACKS_DTYPE.search(cpu.message):
            tally.notes["a dtype that the CPU lacks"] += 1
        elif cpu is not None and not alone and bool(error) != (cpu.kind == "raised"):
            fail("error" if error else "no error", error or f"the CPU raised {cpu.message}")
