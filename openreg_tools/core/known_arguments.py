"""Arguments for ATen operators for which random choices find none, or which the CPU lacks and so cannot validate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from openreg_tools.core.move import Packed, RequiresGrad, Stays, StorageOf
from openreg_tools.core.samples import Sample

__all__ = ["SAMPLES"]


def _with(make: Callable[[], Any], after: list[Any]) -> Sample:
    return Sample(make(), *after)


def _recurrent(weights: int, lstm: bool, packed: bool) -> Sample:
    """A bidirectional layer with biases, [4, 2, 3] to 5 features."""
    hidden = torch.rand(2, 2, 5)
    params = [torch.rand(weights * 5, size) for size in (3, 5)] + [torch.rand(weights * 5) for _ in range(2)]
    first = [torch.rand(7, 3), Stays(torch.tensor([2, 2, 2, 1]))] if packed else [torch.rand(4, 2, 3)]
    rest = [True, 1, 0.0, True, True] if packed else [True, 1, 0.0, True, True, False]
    return Sample(*first, [hidden, hidden.clone()] if lstm else hidden, params * 2, *rest)


def _cell(weights: int, lstm: bool) -> Sample:
    hidden = torch.rand(2, 5)
    params = [torch.rand(weights * 5, 3), torch.rand(weights * 5, 5), torch.rand(weights * 5), torch.rand(weights * 5)]
    return Sample(torch.rand(2, 3), [hidden, hidden.clone()] if lstm else hidden, *params)


def _fused_cell(weights: int) -> Sample:
    return Sample(torch.rand(2, weights * 5), torch.rand(2, weights * 5), torch.rand(2, 5),
                 torch.rand(weights * 5), torch.rand(weights * 5))  # fmt: skip


def _of_channels(*first: Any) -> list[Any]:
    """The arguments of batch normalization, [2, 3, 4], that follow its tensors."""
    return [*first, torch.rand(3), torch.rand(3), torch.rand(3), torch.rand(3)]


# ---- tensors of other layouts ----

_INDEX_NAMES = {
    torch.sparse_csr: "crow col",
    torch.sparse_csc: "ccol row",
    torch.sparse_bsr: "crow col",
    torch.sparse_bsc: "ccol row",
}


def _dense() -> torch.Tensor:
    """[4, 4], with two blocks of [2, 2] that are zero."""
    return (torch.rand(4, 4) + 0.1) * torch.eye(2).repeat_interleave(2, 0).repeat_interleave(2, 1)


def _sparse(layout: torch.layout = torch.sparse_coo) -> torch.Tensor:
    return _dense().to_sparse(
        layout=layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    )


def _uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.rand(3), (4,))


def _parts(layout: torch.layout) -> list[torch.Tensor]:
    """The compressed indices, plain indices and values of a sparse tensor."""
    x = _sparse(layout)
    return [*(getattr(x, f"{which}_indices")() for which in _INDEX_NAMES[layout].split()), x.values()]


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)])


def _quantized(*shape: int, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(*shape), 0.05, 0, dtype)


def _channels() -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of two channels."""
    return torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([1, 2])


def _per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(torch.rand(2, 3), *_channels(), 0, torch.qint8)


def _options(dtype: torch.dtype = torch.float32, layout: torch.layout = torch.strided) -> dict[str, Any]:
    return {"dtype": dtype, "layout": layout, "device": torch.device("cpu"), "pin_memory": False}


# Operators of one tensor: a function that makes it, and the arguments that follow.
_OF_ONE: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    **{
        f"{name}{copy}": (functools.partial(_sparse, layout), [])
        for copy in ("", "_copy")
        for layout, names in {
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
            torch.sparse_csc: ("ccol_indices", "row_indices"),
        }.items()
        for name in names
    },
    "indices": (_sparse, []),
    "_coalesce": (_uncoalesced, []),
    "coalesce": (_uncoalesced, []),
    "is_coalesced": (_uncoalesced, []),
    "_coalesced": (_sparse, [False]),
    "_sparse_log_softmax": (_sparse, [1, False]),
    "_sparse_log_softmax.int": (_sparse, [1, None]),
    "_sparse_softmax": (_sparse, [1, False]),
    "_sparse_softmax.int": (_sparse, [1, None]),
    "_sparse_sum": (_sparse, []),
    "_sparse_sum.dim": (_sparse, [[0]]),
    "sparse_resize": (_uncoalesced, [[6], 1, 0]),
    "sparse_resize_and_clear": (_sparse, [[3, 4], 2, 0]),
    "_to_dense": (_sparse, [None, None]),
    "_to_sparse.sparse_dim": (_dense, [2]),
    "_to_sparse_csr": (_dense, [None]),
    "_to_sparse_csc": (_dense, [None]),
    "_to_sparse_bsr": (_dense, [[2, 2], None]),
    "_to_sparse_bsc": (_dense, [[2, 2], None]),
    "nested_to_padded_tensor": (_nested, [0.5, None]),
    "int_repr": (_per_channel, []),
    "q_per_channel_scales": (_per_channel, []),
    "q_per_channel_zero_points": (_per_channel, []),
    "quantize_per_tensor": (_dense, [0.1, 3, torch.quint8]),
    "quantize_per_tensor_dynamic": (_dense, [torch.qint8, False]),
    "quantized_max_pool1d": (lambda: _quantized(1, 2, 6), [[2], [2], [0], [1], False]),
    "quantized_max_pool2d": (lambda: _quantized(1, 2, 6, 6), [[2] * 2, [2] * 2, [0] * 2, [1] * 2, False]),
    "quantized_max_pool3d": (lambda: _quantized(1, 2, 6, 6, 6), [[2] * 3, [2] * 3, [0] * 3, [1] * 3, False]),
    "_test_check_tensor": (lambda: torch.ones(2, 3, dtype=torch.bool), []),
    "_pin_memory": (_dense, [None]),
    "pin_memory": (_dense, [None]),
    "linalg_cond.p_str": (lambda: torch.rand(3, 3) + torch.eye(3), ["fro"]),
    "stft": (lambda: torch.rand(16), [4, 2, 4, None, False, True, True, None]),
    "stft.center": (lambda: torch.rand(16), [4, 2, 4, None, True, "reflect", False, True, True, None]),
    "_sobol_engine_initialize_state_": (lambda: torch.zeros(2, 30, dtype=torch.int64), [2]),
    "affine_grid_generator": (lambda: torch.rand(1, 2, 3), [[1, 2, 4, 5], False]),
    "affine_grid_generator_backward": (lambda: torch.rand(1, 4, 5, 2), [[1, 2, 4, 5], False]),
    "_upsample_bilinear2d_aa.vec": (lambda: torch.rand(1, 2, 4, 4), [[6, 6], False, None]),
    "_upsample_lanczos2d_aa.vec": (lambda: torch.rand(1, 2, 4, 4), [[6, 6], False, None]),
    "upsample_bicubic2d.vec": (lambda: torch.rand(1, 2, 4, 4), [[6, 6], False, None]),
    "_upsample_nearest_exact1d.vec": (lambda: torch.rand(1, 2, 4), [[6], None]),
    "_upsample_nearest_exact3d.vec": (lambda: torch.rand(1, 2, 4, 4, 4), [[6] * 3, None]),
    "upsample_nearest3d.vec": (lambda: torch.rand(1, 2, 4, 4, 4), [[6] * 3, None]),
    "upsample_trilinear3d.vec": (lambda: torch.rand(1, 2, 4, 4, 4), [[6] * 3, False, None]),
    "retain_grad": (lambda: RequiresGrad(torch.rand(2)), []),
    "native_norm": (_sparse, [2]),
    "native_norm.ScalarOpt_dim_dtype": (_sparse, [2, [0, 1], False, None]),
}


# ---- families ----


def _convolved(rank: int, *after: Any) -> Sample:
    """A convolution of [1, 2, 5, ...] with [3, 2, 2, ...], and the arguments after its weight."""
    return Sample(torch.rand(1, 2, *[5] * rank), torch.rand(3, 2, *[2] * rank), *after)


def _slow(rank: int, *after: Any) -> Sample:
    """A convolution whose kernel's size is an argument, with a bias and a stride of 1."""
    return _convolved(rank, [2] * rank, torch.rand(3), [1] * rank, *after)


def _grid(*first: torch.Tensor) -> Sample:
    return Sample(*first, torch.rand(1, 2, 5, 5), torch.rand(1, 4, 4, 2) * 2 - 1, 0, 0, False)


def _projections() -> list[torch.Tensor]:
    """For attention with 8 features: weights and biases of the queries, keys and values, and of the result."""
    return [torch.rand(24, 8), torch.rand(24), torch.rand(8, 8), torch.rand(8)]


def _attended(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values, and similar tensors: four positions, and two heads of 8 features."""
    return [torch.rand(1, 4, 2, 8).to(dtype) for _ in range(count)]


_NO_WINDOW = {"scale": None, "window_size_left": None, "window_size_right": None}


def _flash(*out: torch.Tensor) -> Sample:
    more = dict.fromkeys(("seqused_k", "alibi_slopes", "block_table", "num_splits"))
    return Sample(*out, *_attended(3, torch.bfloat16), None, None, 4, 4, 0.0, False, False, **_NO_WINDOW, **more)


def _ctc(lengths: Callable[[list[int]], Any]) -> Sample:
    return Sample(
        torch.rand(6, 2, 4).log_softmax(2), torch.randint(1, 4, (2, 3)), lengths([6, 6]), lengths([3, 2]), 0, 1, False
    )


def _embedded(*after: Any) -> Sample:
    """Five rows in two bags."""
    return Sample(torch.rand(7, 3), torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2]), *after)


def _factors() -> Sample:
    return Sample(torch.rand(3, 2), *torch.linalg.lu_factor(torch.rand(3, 3) + torch.eye(3)))


def _scaled() -> list[torch.Tensor]:
    a, b = (torch.rand(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    return [a, b.t()]


def _fbgemm(gates: int, size: int) -> tuple[torch.Tensor, Stays, torch.Tensor, float, int]:
    """A weight of 5 features for each gate: quantized, packed, and the sums of its columns, its scale and zero point."""
    weight, sums, scale, zero_point = torch.fbgemm_linear_quantize_weight(torch.rand(gates * 5, size))
    return weight, Packed(torch.fbgemm_pack_quantized_matrix(weight)), sums, scale, zero_point


def _quantized_cell(gates: int, lstm: bool) -> Sample:
    hidden = torch.rand(2, 5)
    (w, *inputs), (w2, *hiddens) = _fbgemm(gates, 3), _fbgemm(gates, 5)
    rest = [value for pair in zip(inputs, hiddens, strict=True) for value in pair]
    return Sample(torch.rand(2, 3), [hidden, hidden.clone()] if lstm else hidden, w, w2, torch.rand(gates * 5),
               torch.rand(gates * 5), *rest)  # fmt: skip


def _linear_int8() -> Sample:
    weight, packed, sums, scale, zero_point = _fbgemm(1, 3)
    return Sample(torch.rand(2, 3), weight, packed, sums, scale, zero_point, torch.rand(5))


def _linear_fp16(*out: torch.Tensor) -> Sample:
    return Sample(torch.rand(2, 3), Packed(torch.fbgemm_pack_gemm_matrix_fp16(torch.rand(5, 3))), torch.rand(5), *out)


def _observed() -> Sample:
    """A moving-average observer and what it quantizes."""
    on = torch.ones(1, dtype=torch.int64)
    return Sample(torch.rand(2, 3), on, on.clone(), torch.zeros(1), torch.ones(1), torch.ones(1),
               torch.zeros(1, dtype=torch.int32), 0.01, 0, 255, 0, False, False)  # fmt: skip


def _dynamic_layers(gates: int) -> list[Any]:
    """The quantized weights of one layer of a recurrent network."""

    def packed(size: int) -> Any:
        weight = torch.quantize_per_tensor(torch.rand(gates * 5, size), 0.1, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(weight, torch.rand(gates * 5))

    return [torch.ops.quantized.make_quantized_cell_params_dynamic(
        packed(3), packed(5), torch.rand(gates * 5), torch.rand(gates * 5), False)]  # fmt: skip


def _int4() -> Sample:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 15, (32, 64), dtype=torch.int32), 2)
    return Sample(torch.rand(4, 64), packed, 32, torch.rand(2, 32, 2))


def _dynamic_int4() -> Sample:
    weight, scales = torch.randint(0, 255, (32, 32), dtype=torch.uint8), torch.rand(32, 2)
    return Sample(
        torch.rand(4, 64), torch.ops.aten._dyn_quant_pack_4bit_weight(weight, scales, None, 32, 64, 32), 32, 64, 32
    )


def _sobol() -> Sample:
    state = torch.ops.aten._sobol_engine_initialize_state_(torch.zeros(2, 30, dtype=torch.int64), 2)
    return Sample(state, torch.randint(0, 2, (2, 30, 30)).tril(), 2)


def _softmax_backward() -> Sample:
    gradient, output = _sparse(), _sparse()
    return Sample(gradient, output, 1, output)


def _amp() -> Sample:
    return Sample(torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 2)


def _dynamic_linear() -> Sample:
    return Sample(torch.rand(2, 3), torch.ops.quantized.linear_prepack(_quantized(5, 3), torch.rand(5)))


def _dynamic_half_linear() -> Sample:
    return Sample(torch.rand(2, 3), torch.ops.quantized.linear_prepack_fp16(torch.rand(5, 3), torch.rand(5)))


def _dynamic_convolution(dims: int) -> Sample:
    prepack = getattr(torch.ops.quantized, f"conv{dims}d_prepack")
    one, none = [1] * dims, [0] * dims
    return Sample(
        torch.rand(1, 2, *[4] * dims), prepack(_quantized(3, 2, *[2] * dims), torch.rand(3), one, none, one, 1)
    )


def _embedding(bits: int) -> torch.ScriptObject:
    weight = torch.quantize_per_channel(
        torch.rand(6, 8), torch.rand(6) + 0.1, torch.zeros(6), 0, torch.quint4x2 if bits == 4 else torch.quint8
    )
    return torch.ops.quantized.embedding_bag_prepack(weight)


SAMPLES: dict[str, Callable[[], Sample]] = {
    "aten::lstm.input": lambda: _recurrent(4, True, False),
    "aten::lstm.data": lambda: _recurrent(4, True, True),
    "aten::gru.input": lambda: _recurrent(3, False, False),
    "aten::gru.data": lambda: _recurrent(3, False, True),
    "aten::rnn_tanh.input": lambda: _recurrent(1, False, False),
    "aten::rnn_tanh.data": lambda: _recurrent(1, False, True),
    "aten::rnn_relu.input": lambda: _recurrent(1, False, False),
    "aten::rnn_relu.data": lambda: _recurrent(1, False, True),
    "aten::lstm_cell": lambda: _cell(4, True),
    "aten::gru_cell": lambda: _cell(3, False),
    "aten::_thnn_fused_lstm_cell": lambda: _fused_cell(4),
    "aten::_thnn_fused_gru_cell": lambda: _fused_cell(3),
    "aten::_thnn_fused_gru_cell_backward": lambda: Sample(torch.rand(2, 5), torch.rand(2, 25), True),
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: Sample(torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 20), True),
    "aten::batch_norm_stats": lambda: Sample(torch.rand(2, 3, 4), 1e-5),
    "aten::batch_norm_gather_stats": lambda: Sample(torch.rand(2, 3, 4), torch.rand(2, 3), torch.rand(2, 3), torch.rand(3), torch.rand(3), 0.1, 1e-5, 8),
    "aten::batch_norm_gather_stats_with_counts": lambda: Sample(torch.rand(2, 3, 4), torch.rand(2, 3), torch.rand(2, 3), torch.rand(3), torch.rand(3), 0.1, 1e-5,
         torch.tensor([8.0, 8.0])),
    "aten::batch_norm_elemt": lambda: Sample(*_of_channels(torch.rand(2, 3, 4)), 1e-5),
    "aten::batch_norm_elemt.out": lambda: Sample(*_of_channels(torch.rand(2, 3, 4)), 1e-5, **{"out": torch.empty(2, 3, 4)}),
    "aten::batch_norm_backward_reduce": lambda: Sample(*_of_channels(torch.rand(2, 3, 4), torch.rand(2, 3, 4))[:5], True, True, True),
    "aten::batch_norm_backward_elemt": lambda: Sample(*_of_channels(torch.rand(2, 3, 4), torch.rand(2, 3, 4)), torch.rand(3), torch.tensor([8], dtype=torch.int32)),
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda: Sample(torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 8), None, 0.0, False, False, **{"scale": None}),
    "aten::_copy_from": lambda: Sample(torch.rand(2, 3), torch.empty(2, 3), False),
    "aten::_copy_from_and_resize": lambda: Sample(torch.rand(2, 3), torch.empty(0)),
    "aten::_reshape_alias": lambda: Sample(torch.rand(2, 3), [3, 2], [2, 1]),
    "aten::convolution_overrideable": lambda: Sample(torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), torch.rand(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "aten::convolution_backward_overrideable": lambda: Sample(torch.rand(1, 3, 4, 4), torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
         [True, True, True]),
    "aten::set_.source_Storage_storage_offset": lambda: Sample(torch.empty(0), StorageOf(torch.rand(16)), 1, [2, 3], [3, 1]),
    "aten::set_.source_Tensor": lambda: Sample(torch.empty(0), torch.rand(2, 3)),
    **{f"aten::{name}": functools.partial(_with, *made) for name, made in _OF_ONE.items()},
    # ---- sparse ----
    **{
        f"aten::sparse_{name}_tensor.{'_'.join(_INDEX_NAMES[layout].split())}_value": functools.partial(
            lambda layout: Sample(*_parts(layout), **_options(layout=layout)), layout
        )
        for name, layout in {"bsr": torch.sparse_bsr, "bsc": torch.sparse_bsc}.items()
    },
    "aten::sparse_compressed_tensor.comp_plain_value": lambda: Sample(*_parts(torch.sparse_csr), **_options(layout=torch.sparse_csr)),
    **{
        f"aten::{name}": lambda: Sample(*_parts(torch.sparse_csc), [4, 4], **_options(layout=torch.sparse_csc))
        for name in ("sparse_compressed_tensor.comp_plain_value_size", "_sparse_compressed_tensor_unsafe")
    },
    "aten::_sparse_compressed_tensor_with_dims": lambda: Sample(3, 0, [4, 4], [], torch.int64, **_options(layout=torch.sparse_csr)),
    "aten::_sparse_coo_tensor_with_dims": lambda: Sample(2, 0, [3, 4], **_options(layout=torch.sparse_coo)),
    "aten::_sparse_coo_tensor_with_dims_and_tensors": lambda: Sample(1, 0, [4], torch.tensor([[0, 2]]), torch.rand(2), **_options(layout=torch.sparse_coo) | {"is_coalesced": None}),
    "aten::sparse_coo_tensor.size": lambda: Sample([3, 4], **_options(layout=torch.sparse_coo)),
    **{
        f"aten::_validate_sparse_{name}_tensor_args": functools.partial(
            lambda layout: Sample(*_parts(layout), [4, 4], None), layout
        )
        for name, layout in zip(("csr", "csc", "bsr", "bsc"), _INDEX_NAMES, strict=True)
    },
    "aten::_validate_sparse_compressed_tensor_args": lambda: Sample(
        *_parts(torch.sparse_bsr), [4, 4], torch.sparse_bsr, None
    ),
    "aten::_validate_compressed_sparse_indices": lambda: Sample(True, *_parts(torch.sparse_csr)[:2], 4, 4, 8),
    "aten::_sparse_csr_prod.dim_dtype": lambda: Sample(_sparse(torch.sparse_csr), [0], True, dtype=None),
    "aten::_sparse_csr_sum.dim_dtype": lambda: Sample(_sparse(torch.sparse_csr), [0], True, dtype=None),
    "aten::_sparse_sum.dtype": lambda: Sample(_sparse(), dtype=torch.float64),
    "aten::_sparse_sum.dim_dtype": lambda: Sample(_sparse(), [0], dtype=torch.float64),
    "aten::_sparse_sum_backward": lambda: Sample(torch.rand(4).to_sparse(), _sparse(), [0]),
    "aten::_sparse_log_softmax_backward_data": _softmax_backward,
    "aten::_sparse_softmax_backward_data": _softmax_backward,
    "aten::_sparse_mask_projection": lambda: Sample(_sparse(), _sparse(), False),
    "aten::sparse_mask": lambda: Sample(_dense(), _sparse()),
    "aten::_sparse_mm.reduce": lambda: Sample(_sparse(torch.sparse_csr), torch.rand(4, 3), "amax"),
    "aten::_sparse_sparse_matmul": lambda: Sample(_sparse(), _sparse()),
    "aten::smm": lambda: Sample(_sparse(), torch.rand(4, 3)),
    "aten::sspaddmm": lambda: Sample(_sparse(), _sparse(), torch.rand(4, 4), beta=1, alpha=2),
    "aten::copy_sparse_to_sparse": lambda: Sample(_sparse(), _sparse(), False),
    "aten::resize_as_sparse": lambda: Sample(_sparse(), _sparse()),
    "aten::_spdiags": lambda: Sample(torch.rand(2, 4), torch.tensor([0, 1]), [4, 4], None),
    "aten::_to_sparse": lambda: Sample(_dense(), layout=torch.sparse_csr, blocksize=None, dense_dim=None),
    # ---- nested ----
    "aten::_nested_from_padded": lambda: Sample(torch.rand(2, 2, 3), Stays(torch.tensor([[2, 3], [1, 3]])), False),
    "aten::_nested_tensor_from_mask": lambda: Sample(torch.rand(2, 2, 3), torch.tensor([[True, True], [True, False]]), True),
    "aten::_nested_tensor_from_tensor_list": lambda: Sample(
        [torch.rand(2, 3), torch.rand(1, 3)], torch.float32, torch.strided, torch.device("cpu"), False
    ),
    **{
        f"aten::_nested_view_from_buffer{copy}": lambda: Sample(
            torch.rand(9), *(Stays(torch.tensor(rows)) for rows in ([[2, 3], [1, 3]], [[3, 1], [3, 1]], [0, 6]))
        )
        for copy in ("", "_copy")
    },
    "aten::_jagged_to_padded_dense_forward": lambda: Sample(torch.rand(5, 3), [torch.tensor([0, 2, 5])], [3], 0.5),
    # ---- quantized ----
    "aten::quantize_per_tensor.tensor_qparams": lambda: Sample(
        _dense(), torch.tensor(0.1), torch.tensor(3), torch.quint8
    ),
    "aten::quantize_per_tensor.tensors": lambda: Sample(
        [_dense(), _dense()], torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), torch.qint8
    ),
    "aten::quantize_per_channel": lambda: Sample(torch.rand(2, 3), *_channels(), 0, torch.qint8),
    "aten::dequantize.tensors": lambda: Sample([_quantized(2, 3), _per_channel()]),
    "aten::_make_per_tensor_quantized_tensor": lambda: Sample(torch.randint(0, 9, (2, 3), dtype=torch.uint8), 0.1, 3),
    "aten::_make_per_channel_quantized_tensor": lambda: Sample(
        torch.randint(0, 9, (2, 3), dtype=torch.uint8), *_channels(), 0
    ),
    "aten::_empty_affine_quantized": lambda: Sample([2, 3], **_options(torch.qint8) | {"scale": 0.5, "zero_point": 1, "memory_format": torch.contiguous_format}),
    "aten::_empty_per_channel_affine_quantized": lambda: Sample([2, 3], **dict(zip(("scales", "zero_points"), _channels(), strict=True))
        | {"axis": 0} | _options(torch.qint8) | {"memory_format": torch.contiguous_format}),
    "aten::empty_quantized": lambda: Sample([2, 3], _quantized(2), **_options(torch.quint8) | {"memory_format": None}),
    "aten::quantized_batch_norm": lambda: Sample(
        _quantized(1, 2, 3, 3), torch.rand(2), torch.rand(2), torch.rand(2), torch.rand(2), 1e-5, 0.1, 2
    ),
    "aten::_fused_moving_avg_obs_fq_helper": _observed,
    "aten::_fused_moving_avg_obs_fq_helper_functional": _observed,
    "aten::fake_quantize_per_channel_affine_cachemask": lambda: Sample(
        torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2], dtype=torch.int32), 0, 0, 255
    ),
    "aten::fake_quantize_per_tensor_affine_cachemask": lambda: Sample(torch.rand(2, 3), 0.1, 1, 0, 255),
    "aten::quantized_lstm_cell": lambda: _quantized_cell(4, True),
    "aten::quantized_gru_cell": lambda: _quantized_cell(3, False),
    "aten::quantized_rnn_relu_cell": lambda: _quantized_cell(1, False),
    "aten::quantized_rnn_tanh_cell": lambda: _quantized_cell(1, False),
    "aten::quantized_lstm.input": lambda: Sample(
        torch.rand(4, 2, 3), [torch.rand(1, 2, 5), torch.rand(1, 2, 5)], _dynamic_layers(4), True, 1, 0.0, False, False,
        False, dtype=torch.qint8, use_dynamic=True,
    ),
    "aten::quantized_lstm.data": lambda: Sample(
        torch.rand(7, 3), Stays(torch.tensor([2, 2, 2, 1])), [torch.rand(1, 2, 5), torch.rand(1, 2, 5)],
        _dynamic_layers(4), True, 1, 0.0, False, False, dtype=torch.qint8, use_dynamic=True,
    ),
    "aten::quantized_gru.input": lambda: Sample(
        torch.rand(4, 2, 3), torch.rand(1, 2, 5), _dynamic_layers(3), True, 1, 0.0, False, False, False
    ),
    "aten::quantized_gru.data": lambda: Sample(
        torch.rand(7, 3), Stays(torch.tensor([2, 2, 2, 1])), torch.rand(1, 2, 5), _dynamic_layers(3), True, 1, 0.0, False,
        False,
    ),
    "aten::fbgemm_linear_int8_weight": _linear_int8,
    "aten::fbgemm_linear_int8_weight_fp32_activation": _linear_int8,
    **{
        f"aten::fbgemm_linear_fp16_weight{which}{out}": lambda out=out: _linear_fp16(*[torch.empty(0)] * bool(out))
        for which in ("", "_fp32_activation")
        for out in ("", ".out")
    },
    "aten::_wrapped_linear_prepack": lambda: Sample(
        torch.rand(5, 3), torch.tensor(0.1), torch.tensor(0), torch.rand(5)
    ),
    "aten::_wrapped_quantized_linear_prepacked": lambda: Sample(
        torch.rand(2, 3), torch.tensor(0.1), torch.tensor(0),
        Packed(torch.ops.aten._wrapped_linear_prepack(torch.rand(5, 3), torch.tensor(0.1), torch.tensor(0), torch.rand(5))),
        torch.tensor(0.2), torch.tensor(0), 5,
    ),
    "aten::_convert_weight_to_int4pack_for_cpu": lambda: Sample(torch.randint(0, 15, (32, 64), dtype=torch.int32), 2),
    "aten::_weight_int4pack_mm_for_cpu": _int4,
    "aten::_dyn_quant_matmul_4bit": _dynamic_int4,
    "aten::_weight_int8pack_mm": lambda: Sample(
        torch.rand(4, 16).bfloat16(), torch.randint(-9, 9, (8, 16), dtype=torch.int8), torch.rand(8).bfloat16()
    ),
    "aten::_int_mm": lambda: Sample(*(torch.randint(-9, 9, (32, 32), dtype=torch.int8) for _ in range(2))),
    "aten::_scaled_mm": lambda: Sample(*_scaled(), torch.tensor(0.5), torch.tensor(2.0), None, None, torch.float32, False),
    "aten::_scaled_mm_v2": lambda: Sample(
        *_scaled(), [torch.tensor(0.5)], [0], [0], [torch.tensor(2.0)], [0], [0], None, torch.float32, [], False
    ),
    "aten::_grouped_mm": lambda: Sample(
        torch.rand(8, 16).bfloat16(), torch.rand(2, 16, 8).bfloat16(), torch.tensor([3, 8], dtype=torch.int32), None, None
    ),
    # ---- convolutions, pools and resampling ----
    **{
        f"aten::_convolution{which}": functools.partial(
            lambda flags: _convolved(2, torch.rand(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *[False] * flags), flags
        )
        for which, flags in {"": 4, ".deprecated": 3}.items()
    },
    "aten::_convolution_mode": lambda: _convolved(2, torch.rand(3), [1, 1], "same", [1, 1], 1),
    "aten::_convolution_double_backward": lambda: Sample(
        torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), torch.rand(3), torch.rand(1, 3, 4, 4), torch.rand(3, 2, 2, 2),
        torch.rand(1, 2, 5, 5), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True],
    ),
    "aten::_slow_conv2d_forward": lambda: _slow(2, [0, 0]),
    "aten::thnn_conv2d": lambda: _slow(2, [0, 0]),
    "aten::slow_conv_dilated2d": lambda: _slow(2, [0, 0], [2, 2]),
    "aten::slow_conv_dilated3d": lambda: _slow(3, [0] * 3, [2] * 3),
    "aten::slow_conv_transpose3d": lambda: Sample(
        torch.rand(1, 3, 4, 4, 4), torch.rand(3, 2, 2, 2, 2), [2] * 3, torch.rand(2), [1] * 3, [0] * 3, [0] * 3, [1] * 3
    ),
    "aten::_slow_conv2d_backward.output_mask": lambda: Sample(
        torch.rand(1, 3, 4, 4), torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), [2, 2], [1, 1], [0, 0], [True, True, True]
    ),
    "aten::_slow_conv2d_backward.grad_input": lambda: Sample(
        torch.rand(1, 3, 4, 4), torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), [2, 2], [1, 1], [0, 0],
        grad_input=torch.empty(0), grad_weight=torch.empty(0), grad_bias=torch.empty(0),
    ),
    "aten::conv_tbc": lambda: Sample(torch.rand(5, 2, 3), torch.rand(2, 3, 4), torch.rand(4), 1),
    "aten::mkldnn_convolution": lambda: _convolved(2, torch.rand(3), [0, 0], [1, 1], [1, 1], 1),
    **{
        f"aten::_upsample_{which}2d_aa_backward": lambda: Sample(
            torch.rand(1, 2, 6, 6), [6, 6], [1, 2, 4, 4], False, None, None
        )
        for which in ("bicubic", "lanczos")
    },
    "aten::grid_sampler": _grid,
    "aten::_grid_sampler_2d_cpu_fallback": _grid,
    "aten::_grid_sampler_2d_cpu_fallback_backward": lambda: _grid(torch.rand(1, 2, 4, 4)),
    # ---- normalization, losses, embeddings and attention ----
    "aten::_batch_norm_no_update": lambda: Sample(*_of_channels(torch.rand(2, 3, 4)), 0.1, 1e-5),
    "aten::_native_batch_norm_legit_no_training": lambda: Sample(*_of_channels(torch.rand(2, 3, 4)), 0.1, 1e-5),
    "aten::instance_norm": lambda: Sample(*_of_channels(torch.rand(2, 3, 4)), True, 0.1, 1e-5, False),
    "aten::ctc_loss.IntList": lambda: _ctc(list),
    "aten::ctc_loss.Tensor": lambda: _ctc(torch.tensor),
    "aten::embedding_bag.padding_idx": lambda: _embedded(False, 0, False, torch.rand(5), False, None),
    "aten::_embedding_bag_forward_only": lambda: _embedded(False, 0, False, torch.rand(5), False, -1),
    "aten::_embedding_bag_sparse_backward": lambda: Sample(
        torch.rand(2, 3), torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2]), torch.tensor([0, 0, 1, 1, 1]),
        torch.tensor([2, 3]), 7, False, 0, None, -1,
    ),
    "aten::_native_multi_head_attention": lambda: Sample(
        *[torch.rand(2, 4, 8)] * 3, 8, 2, *_projections(), None, True, True, None
    ),
    "aten::_transformer_encoder_layer_fwd": lambda: Sample(
        torch.rand(2, 4, 8), 8, 2, *_projections(), False, False, 1e-5, *(torch.rand(8) for _ in range(4)),
        torch.rand(5, 8), torch.rand(5), torch.rand(8, 5), torch.rand(8), None, None,
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": lambda: Sample(
        *(torch.rand(1, 2, 4, 8) for _ in range(4)), torch.rand(1, 2, 4, 4), [True, True, True, False], torch.rand(1, 2, 4, 8),
        torch.rand(1, 2, 4), *[torch.empty(0, dtype=torch.int64)] * 2, 4, 4, 0.0, False,
        *[torch.empty(0, dtype=torch.int64)] * 2, scale=None,
    ),
    "aten::_efficient_attention_forward": lambda: Sample(
        *_attended(), None, None, None, None, None, 0.0, 0, True, scale=None, seqlen_k=None, window_size=None
    ),
    "aten::_efficient_attention_backward": lambda: Sample(
        *_attended(4), None, torch.rand(1, 4, 2, 8), None, None, 4, 4, torch.rand(1, 2, 32), 0.0,
        torch.tensor(0), torch.tensor(0), 0, False, scale=None, num_splits_key=None, window_size=None,
        shared_storage_dqdkdv=False,
    ),
    "aten::_flash_attention_forward": _flash,
    "aten::_flash_attention_forward_no_dropout_inplace": lambda: _flash(*_attended(1, torch.bfloat16)),
    "aten::_flash_attention_backward": lambda: Sample(
        *_attended(5, torch.bfloat16), torch.rand(1, 2, 4), None, None, 4, 4, 0.0, False,
        torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), **_NO_WINDOW,
    ),
    "aten::glu_jvp": lambda: Sample(torch.rand(2, 2), torch.rand(2, 4), torch.rand(2, 4), 1),
    # ---- with packed weights ----
    "quantized::linear_dynamic": _dynamic_linear,
    "quantized::linear_dynamic_fp16": _dynamic_half_linear,
    "quantized::linear_relu_dynamic_fp16": _dynamic_half_linear,
    "quantized::conv1d_dynamic": lambda: _dynamic_convolution(1),
    "quantized::conv2d_dynamic": lambda: _dynamic_convolution(2),
    "quantized::conv3d_dynamic": lambda: _dynamic_convolution(3),
    "quantized::embedding_byte": lambda: Sample(_embedding(8), torch.tensor([0, 2, 5])),
    "quantized::embedding_4bit": lambda: Sample(_embedding(4), torch.tensor([0, 2, 5])),
    "quantized::embedding_bag_byte": lambda: Sample(_embedding(8), torch.tensor([0, 2, 5]), torch.tensor([0, 2])),
    "quantized::embedding_bag_4bit": lambda: Sample(_embedding(4), torch.tensor([0, 2, 5]), torch.tensor([0, 2])),
    "quantized::max_pool2d": lambda: Sample(_quantized(1, 2, 4, 4, dtype=torch.quint8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    # ---- others ----
    "aten::_amp_update_scale": _amp,
    "aten::_amp_update_scale_": _amp,
    "aten::_reshape_from_tensor": lambda: Sample(torch.rand(2, 3), torch.tensor([3, 2])),
    "aten::_sobol_engine_scramble_": _sobol,
    "aten::histogramdd.TensorList_bins": lambda: Sample(
        torch.rand(6, 2), [torch.linspace(0, 1, 3), torch.linspace(0, 1, 4)], None, torch.rand(6), False
    ),
    "aten::istft": lambda: Sample(
        torch.stft(torch.rand(16), 4, window=torch.ones(4), return_complex=True), 4, None, None, torch.ones(4), True, False,
        True, None, False,
    ),
    "aten::lu_solve": _factors,
    "aten::scatter.value_reduce": lambda: Sample(
        torch.rand(2, 3), 1, torch.tensor([[0, 2, 2], [1, 1, 0]]), 2.0, reduce="multiply"
    ),
    "aten::addr_": lambda: Sample(torch.rand(2, 3), torch.rand(2), torch.rand(3), beta=1, alpha=2),
    "aten::_backward": lambda: Sample(RequiresGrad(torch.rand(1)), [], None, None, False),
}  # fmt: skip
