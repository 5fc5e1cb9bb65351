"""Calls and errors that may differ between a device and the CPU without a fault of the device.

A rule is as narrow as its reason. A difference that no rule allows is a finding. Rules about operators by name are in
`tables`, about shared memory in `aliasing`, about layouts in `contiguous`, and about values in `numerics`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import dispatch
from openreg_tools.conformance import opinfo
from openreg_tools.conformance.calls import Call, RequiresGrad, Stays, StorageOf
from openreg_tools.generate import changes, contiguous, tables

__all__ = [
    "ELSEWHERE",
    "LACKS_MEMORY",
    "MEMORY",
    "OUT_OF_BOUNDS",
    "has_short_list",
    "indexes_anywhere",
    "is_elsewhere",
    "is_pytorchs_assert",
    "is_unreadable",
    "lacks_tensor",
    "raises_when_plain",
    "refuses_batch_sizes",
    "refuses_gradient",
    "refuses_state",
    "refuses_unchecked",
    "takes_negative_size",
]

# Errors about memory, whose types and limits differ between devices.
MEMORY = re.compile(
    r"allocat|bad_alloc|(not enough|out of) memory|can be pinned|overflow|too large|Storage size calculation", re.I
)

# Errors that the device may raise where the CPU computes a result: it has less memory, or cannot pin it.
LACKS_MEMORY = re.compile(r"(not enough|out of) memory|allocat|can be pinned", re.I)
OUT_OF_BOUNDS = re.compile(r"index \S+ is out of bounds|index out of range|out of DATA bounds")
_Bound = Callable[[dict[str, Any]], int]  # of the numbers of an argument, given all arguments
ELSEWHERE = "an argument is on another device or has no memory, or the call does not name the device"


def is_elsewhere(name: str, call: Call) -> bool:
    """Whether an argument is on the host, on meta, or without memory, or no argument says where the call runs."""
    leaves = tree_leaves((call.args, call.kwargs))
    if not any(isinstance(each, (torch.Tensor, torch.device, StorageOf, RequiresGrad)) for each in leaves):
        return True
    if any(
        value is None and "Device" in argument.real_type.annotation_str
        for argument, value in changes.given_to(name, call)
    ):
        return True  # some operators then use the CPU, others the device of an argument
    inputs = [(argument, value) for argument, value in changes.given_to(name, call) if not argument.is_out]
    if any(
        isinstance(value, list) and not value and "List[Tensor]" in argument.real_type.annotation_str
        for argument, value in inputs
    ):
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves([value for _, value in inputs])):
            return True  # only out= names a device
    stays = any(isinstance(each, Stays) or isinstance(each, torch.device) and each.type != "cpu" for each in leaves)
    return call.alone or stays


# Kernels that read the numbers of these lists without a check of how many there are.
_UNCHECKED_LISTS = re.compile(r"aten::(reflection_pad[12]d|_slow_conv2d)_backward")
_LISTS = ("padding", "kernel_size", "stride")


def has_short_list(name: str, call: Call) -> bool:
    """Whether a kernel reads more numbers than a list has, which PyTorch does not check: of the gradient of a padding, of
    a convolution, or of the sizes of a tensor with another number of batch dimensions than it can have.
    """
    given = {argument.name: (argument, value) for argument, value in changes.given_to(name, call)}
    if name.startswith("aten::_new_zeros_with_same_feature_meta"):
        x, count = given["self"][1], given.get("self_num_batch_dims", (None, 0))[1]
        return isinstance(x, torch.Tensor) and not 0 <= count <= x.dim()
    lists = [given[each] for each in _LISTS if each in given and _UNCHECKED_LISTS.match(name)]
    return any(isinstance(value, list) and len(value) < argument.N for argument, value in lists)


def _pooled(dims: int) -> dict[str, _Bound]:
    return {"indices": lambda given: math.prod(given["self"].shape[-dims:])}


_OFFSETS: dict[str, _Bound] = {"offsets": lambda given: given["indices"].numel() + 1}
_BAGS: dict[str, _Bound] = {
    "indices": lambda given: given["num_weights"],
    "offset2bag": lambda given: given["grad"].shape[0],
}
_TARGETS: dict[str, _Bound] = {"targets": lambda given: given["log_probs"].shape[-1]}
_SEGMENTS: dict[str, _Bound] = {
    "lengths": lambda given: given["data"].shape[given["lengths"].dim() - 1] + 1,
    "offsets": lambda given: given["data"].shape[given["offsets"].dim() - 1] + 1,
}
_TRANSFORM: dict[str, _Bound] = {"dim": lambda given: given["self"].dim()}  # torch.fft passes dimensions from 0 on

# What kernels of the CPU use as an index without a check, and its bound. The device checks it in csrc/aten/traits/missing_checks.cpp.
_UNCHECKED: dict[str, dict[str, _Bound]] = {
    "aten::_convert_indices_from_coo_to_csr": {"self": lambda given: given["size"]},
    "aten::_convert_indices_from_csr_to_coo": {"crow_indices": lambda given: given["col_indices"].shape[-1] + 1},
    "aten::_ctc_loss": _TARGETS,
    "aten::_ctc_loss_backward": _TARGETS
    | {
        "blank": _TARGETS["targets"],
        "input_lengths": lambda given: given["log_probs"].shape[0] + 1,
        "target_lengths": lambda given: (given["log_alpha"].shape[2] + 1) // 2,
    },
    "aten::_embedding_bag": _OFFSETS,
    "aten::_embedding_bag_backward": _BAGS | _OFFSETS,
    "aten::_embedding_bag_dense_backward": _BAGS,
    "aten::_embedding_bag_forward_only": _OFFSETS,
    "aten::_embedding_bag_per_sample_weights_backward": _BAGS
    | _OFFSETS
    | {"indices": lambda given: given["weight"].shape[0]},
    "aten::_fft_c2c": _TRANSFORM,
    "aten::_fft_c2r": _TRANSFORM,
    "aten::_fft_r2c": _TRANSFORM,
    "aten::_segment_reduce_backward": _SEGMENTS,
    "aten::_sparse_mm_reduce_impl_backward": {"arg_out": lambda given: given["self"]._nnz() + 1},
    "aten::adaptive_max_pool2d_backward": _pooled(2),
    "aten::adaptive_max_pool3d_backward": _pooled(3),
    "aten::ctc_loss": _TARGETS,
    "aten::embedding_bag": _OFFSETS,
    "aten::embedding_dense_backward": {"indices": lambda given: given["num_weights"]},
    "aten::max_pool2d_with_indices_backward": _pooled(2),
    "aten::max_pool3d_with_indices_backward": _pooled(3),
    "aten::segment_reduce": _SEGMENTS,
}

# Other kernels of the CPU that do not check an index, or whether two shapes fit. The device checks them there too.
_ALSO_UNCHECKED = {
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_adaptive_avg_pool3d_backward",
    "aten::_batch_norm_no_update",
    "aten::_batch_norm_with_update",
    "aten::_cdist_backward",
    "aten::_log_softmax_backward_data",
    "aten::_masked_softmax_backward",
    "aten::_native_batch_norm_legit",
    "aten::_pdist_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_slow_conv2d_backward",
    "aten::_weight_norm_interface",
    "aten::_weight_norm_interface_backward",
    "aten::avg_pool2d_backward",
    "aten::avg_pool3d_backward",
    "aten::batch_norm_backward",
    "aten::batch_norm_update_stats",
    "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d_backward",
    "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward",
    "aten::lu_unpack",
    "aten::multi_margin_loss_backward",
    "aten::multilabel_margin_loss_backward",
    "aten::native_batch_norm",
    "aten::native_batch_norm_backward",
    "aten::native_layer_norm_backward",
    "aten::nll_loss2d_backward",
    "aten::nll_loss_backward",
    "aten::reflection_pad1d_backward",
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
    "quantized::embedding_bag_2bit_rowwise_offsets",
    "quantized::embedding_bag_4bit_rowwise_offsets",
    "quantized::embedding_bag_byte_rowwise_offsets",
}


def indexes_anywhere(name: str, call: Call) -> bool:
    """Whether an index, a length or a dimension is out of range for a kernel that reads or writes there without a check."""
    given = {argument.name: value for argument, value in changes.given_to(name, call)}
    for which, bound in _UNCHECKED.get(name.partition(".")[0], {}).items():
        # A wrong argument may have no shape, for example.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, RuntimeError):
            end = bound(given)
            if any(not 0 <= number < end for number in _numbers(given.get(which))):
                return True
    return False


def _numbers(value: Any) -> list[int | float]:
    """The real numbers in an argument: a number, a list, or a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.real if value.is_complex() else value).flatten().tolist() if changes._is_plain(value) else []
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]


def lacks_tensor(name: str, call: Call) -> bool:
    """Whether a Tensor argument is None, which the dispatcher passes on as an undefined tensor."""
    return any(
        value is None and argument.real_type.kind() == "TensorType" for argument, value in changes.given_to(name, call)
    )


_WITHOUT_QUANTIZER = ("aten::_lazy_clone", "aten::view.dtype")


def is_unreadable(name: str, result: Any) -> bool:
    """Whether PyTorch returned a nested tensor with uninitialized offsets, a quantized one without a quantizer, or a negative
    view of a quantized one: on the CPU, an operator that gets such a view calls itself without end.
    """
    if not isinstance(result, torch.Tensor):
        return False
    if result.is_quantized:
        return name in _WITHOUT_QUANTIZER or result.is_neg()
    return name == "aten::select.int" and result.is_nested and result.layout == torch.strided


def refuses_gradient(name: str, call: Call, message: str) -> bool:
    """Whether the device refused the gradient of a convolution that has another shape than the output.

    The CPU does not refuse each of these, and some only where a kernel indexes it.
    """
    if not name.startswith("aten::convolution_backward") or "expected a gradient of shape" not in message:
        return False
    given = {argument.name: value for argument, value in changes.given_to(name, call)}
    x, weight = (given[each].to("meta") for each in ("input", "weight"))
    numbers = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    with contextlib.suppress(RuntimeError, TypeError):  # no such output, or a size that overflows
        return torch.ops.aten.convolution(x, weight, None, *map(given.get, numbers)).shape != given["grad_output"].shape
    return True


def refuses_unchecked(message: str) -> bool:
    """Whether the device refused what an operator of the CPU, or one that it calls, uses without a check: an index, a shape,
    or lengths beside it.
    """
    found = re.match(r"\w+: (\w+): expected .*, but got ", message)
    return found is not None and found[1] in {name.partition("::")[2] for name in (*_UNCHECKED, *_ALSO_UNCHECKED)}


def refuses_batch_sizes(name: str, call: Call, message: str) -> bool:
    """Whether the device refused batch sizes that are not one row of integers. The CPU reads the first ones in memory."""
    given = {argument.name: value for argument, value in changes.given_to(name, call)}
    sizes = given.get("batch_sizes")
    if "expected batch_sizes to be" not in message or not isinstance(sizes, torch.Tensor):
        return False
    return sizes.dim() != 1 or not sizes.is_contiguous() or sizes.dtype != torch.int64 or not sizes.numel()


def refuses_state(name: str, call: Call, message: str) -> bool:
    """Whether the device refused a state that is not a matrix, as PyTorch 2.15 does. Before, the CPU broadcasts it."""
    if name not in ("aten::lstm_cell", "aten::gru_cell") or "of two dimensions, but got shape" not in message:
        return False
    states = next(value for argument, value in changes.given_to(name, call) if argument.name == "hx")
    return any(isinstance(x, torch.Tensor) and x.dim() != 2 for x in tree_leaves(states))


def takes_negative_size(name: str, call: Call, message: str) -> bool:
    """Whether the device refused a negative size beside a size of 0, which the CPU's out= operators accept. The size of 0
    may be that of an argument.
    """
    has_out = any(argument.is_out for argument in dispatch.schema(name).arguments)
    sizes = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, int)]
    if not has_out or "negative dimension" not in message or not any(x < 0 for x in sizes):
        return False
    return 0 in sizes or any(isinstance(x, torch.Tensor) and 0 in x.shape for x in tree_leaves(call.args))


def raises_when_plain(name: str, call: Call, message: str) -> bool:
    """Whether the CPU raises this error too if each argument is contiguous and has its own memory."""
    error = None if tables.ABOUT_MEMORY.match(name) else contiguous.plain_error(name, call)
    return error is not None and opinfo.first_line(error) == message


def is_pytorchs_assert(call: Call, message: str) -> bool:
    """Whether an internal assertion is of PyTorch's code before it calls a kernel: MathBitsFallback, or the boxing of sizes
    that SymInt keeps on the heap.
    """
    is_large = any(isinstance(x, int) and x < -(2**62) for x in tree_leaves((call.args, call.kwargs)))
    return "MathBitsFallback" in message or "isIntList()" in message and is_large
