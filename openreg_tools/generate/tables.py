"""What PyTorch does differently on different devices, or without a defined result, by the name of the operator."""

from __future__ import annotations

import re

from openreg_tools.conformance import layouts, schemas

__all__ = [
    "ABOUT_MEMORY",
    "BATCH_NORM",
    "CHECKED_BY_DEVICE",
    "DETERMINANTS",
    "IGNORES_STRIDES",
    "ROOTS",
    "THRESHOLDS",
    "UNCHECKED",
    "UNDEFINED_FOR_NAN",
    "WITHOUT_VALUES",
    "WRONG_FOR_WIDTH_1",
    "is_uncompared",
]

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
    f"aten::{name}": "its packed weights have no size; with another input, the CPU's kernel reads anywhere"
    for name in (
        "fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation",
        "quantized_gru_cell", "quantized_lstm_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell",
    )
}  # fmt: skip

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

# Pools whose indices PyTorch gets wrong for uint8 in channels last.
WRONG_FOR_UINT8 = re.compile(r"aten::max_pool3d_with_indices(\.|$)")

# Losses whose forward refuses a negative threshold, the last argument. The backward does not. A number can then be above the
# threshold and below its negative at once, and which of the two the CPU tests first depends on the strides.
THRESHOLDS = re.compile(r"aten::smooth_l1_loss_backward(\.|$)")

# Antialiased resizing, which PyTorch gets wrong for a result of width 1 in channels last, on the CPU.
WRONG_FOR_WIDTH_1 = re.compile(r"aten::_upsample_(bilinear|bicubic|lanczos)2d_aa(\.|$)")

# Operators that write the same number to each element.
FILLS = re.compile(r"aten::(fill_|zero_|fill\.|zero\.)")

# Operators whose gradients should have the input's shape, and whose statistics and weights one element for each channel.
# They do not check this, and otherwise the result depends on the layouts.
BATCH_NORM = re.compile(r"aten::(_batch_norm_(no|with)_update|_?native_batch_norm|batch_norm_backward\b)")

# Operators that factor a contiguous matrix as its transpose: rounding, or denormal elements, may make one of the two singular.
DETERMINANTS = re.compile(r"aten::(linalg_)?(log|slog)?det(\.|$)")

# Operators whose results are compared squared: they take the root of a difference, and near zero that enlarges its rounding.
ROOTS = {"aten::_euclidean_dist", "aten::_euclidean_dist.out"}

# Kernels that return an uninitialized value for NaN: their loop ends before it sets one.
UNDEFINED_FOR_NAN = re.compile(r"aten::special_(chebyshev|hermite|laguerre|legendre|shifted_chebyshev)_polynomial")


def is_uncompared(name: str) -> bool:
    """Whether an operator asks for the device type, or belongs to a CPU library, which takes only CPU tensors."""
    return (
        name in schemas.UNCOMPARED
        or name.startswith("aten::_autocast_to_")
        or name.startswith(("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::"))
    )
