"""Arguments of ATen operators for which random choices find none, or which the CPU does not have to say which are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openreg_ops.testing.generated import Call, Stays, StorageOf

__all__ = ["RECIPES"]


def _recurrent(weights: int, lstm: bool, packed: bool) -> Call:
    """A bidirectional layer with biases, [4, 2, 3] to 5 features."""
    hidden = torch.rand(2, 2, 5)
    params = [torch.rand(weights * 5, size) for size in (3, 5)] + [torch.rand(weights * 5) for _ in range(2)]
    first = [torch.rand(7, 3), Stays(torch.tensor([2, 2, 2, 1]))] if packed else [torch.rand(4, 2, 3)]
    rest = [True, 1, 0.0, True, True] if packed else [True, 1, 0.0, True, True, False]
    return Call([*first, [hidden, hidden.clone()] if lstm else hidden, params * 2, *rest], {})


def _cell(weights: int, lstm: bool) -> Call:
    hidden = torch.rand(2, 5)
    params = [torch.rand(weights * 5, 3), torch.rand(weights * 5, 5), torch.rand(weights * 5), torch.rand(weights * 5)]
    return Call([torch.rand(2, 3), [hidden, hidden.clone()] if lstm else hidden, *params], {})


def _fused_cell(weights: int) -> Call:
    return Call([torch.rand(2, weights * 5), torch.rand(2, weights * 5), torch.rand(2, 5),
                 torch.rand(weights * 5), torch.rand(weights * 5)], {})  # fmt: skip


def _of_channels(*first: Any) -> list[Any]:
    """The arguments of batch normalization, [2, 3, 4], that follow its tensors."""
    return [*first, torch.rand(3), torch.rand(3), torch.rand(3), torch.rand(3)]


RECIPES: dict[str, Callable[[], Call]] = {
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
    "aten::_thnn_fused_gru_cell_backward": lambda: Call([torch.rand(2, 5), torch.rand(2, 25), True], {}),
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: Call(
        [torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 20), True], {}
    ),
    "aten::batch_norm_stats": lambda: Call([torch.rand(2, 3, 4), 1e-5], {}),
    "aten::batch_norm_gather_stats": lambda: Call(
        [torch.rand(2, 3, 4), torch.rand(2, 3), torch.rand(2, 3), torch.rand(3), torch.rand(3), 0.1, 1e-5, 8], {}
    ),
    "aten::batch_norm_gather_stats_with_counts": lambda: Call(
        [torch.rand(2, 3, 4), torch.rand(2, 3), torch.rand(2, 3), torch.rand(3), torch.rand(3), 0.1, 1e-5,
         torch.tensor([8.0, 8.0])], {},
    ),
    "aten::batch_norm_elemt": lambda: Call([*_of_channels(torch.rand(2, 3, 4)), 1e-5], {}),
    "aten::batch_norm_elemt.out": lambda: Call(
        [*_of_channels(torch.rand(2, 3, 4)), 1e-5], {"out": torch.empty(2, 3, 4)}
    ),
    "aten::batch_norm_backward_reduce": lambda: Call(
        [*_of_channels(torch.rand(2, 3, 4), torch.rand(2, 3, 4))[:5], True, True, True], {}
    ),
    "aten::batch_norm_backward_elemt": lambda: Call(
        [*_of_channels(torch.rand(2, 3, 4), torch.rand(2, 3, 4)), torch.rand(3), torch.tensor([8], dtype=torch.int32)], {}
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda: Call(
        [torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 8), None, 0.0, False, False], {"scale": None}
    ),
    "aten::_copy_from": lambda: Call([torch.rand(2, 3), torch.empty(2, 3), False], {}),
    "aten::_copy_from_and_resize": lambda: Call([torch.rand(2, 3), torch.empty(0)], {}),
    "aten::_reshape_alias": lambda: Call([torch.rand(2, 3), [3, 2], [2, 1]], {}),
    "aten::convolution_overrideable": lambda: Call(
        [torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), torch.rand(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1], {}
    ),
    "aten::convolution_backward_overrideable": lambda: Call(
        [torch.rand(1, 3, 4, 4), torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
         [True, True, True]], {},
    ),
    "aten::set_.source_Storage_storage_offset": lambda: Call(
        [torch.empty(0), StorageOf(torch.rand(16)), 1, [2, 3], [3, 1]], {}
    ),
    "aten::set_.source_Tensor": lambda: Call([torch.empty(0), torch.rand(2, 3)], {}),
}  # fmt: skip
