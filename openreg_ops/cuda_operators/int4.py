"""Products with weights of 4 bits, in the layout of CUDA's tensor cores; gpt-fast and torchao call them.

CUDA packs eight weights into an int32: a tile has 8 rows and 16 columns, `inner_k_tiles` tiles that follow each other
along the columns are stored together, and each of 32 threads has the elements that its tensor core takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import expect, kernel

_ROWS, _COLUMNS, _THREADS = 8, 16, 32  # of a tile; its elements are divided among so many threads


@kernel("_convert_weight_to_int4pack")
def convert_weight_to_int4pack(self: Tensor, innerKTiles: int) -> Tensor:
    """Pack weights of shape `[n, k / 2]`, two in a byte and the first one in its upper half."""
    op = "_convert_weight_to_int4pack"
    expect(self.dim() == 2, f"{op}: expected a weight of shape [n, k / 2], but got {list(self.shape)}")
    expect(self.dtype == torch.uint8, f"{op}: expected a weight of torch.uint8, but got {self.dtype}")
    expect(self.is_contiguous(), f"{op}: expected a contiguous weight; call .contiguous()")
    expect(innerKTiles in (2, 4, 8), f"{op}: expected innerKTiles to be 2, 4 or 8, but got {innerKTiles}")
    n, k = self.size(0), self.size(1) * 2
    expect(
        k > 0 and k % (innerKTiles * _COLUMNS) == 0,
        f"{op}: expected k to be a multiple of {innerKTiles * _COLUMNS}, innerKTiles * 16, but got {k}",
    )
    tiles = -(-n // _ROWS)
    padded = torch.nn.functional.pad(self, (0, 0, 0, tiles * _ROWS - n))
    # Row tile, row, outer column tile, pair of tiles, quarter of a pair, thread of a row.
    parts = padded.view(tiles, _ROWS, k // (innerKTiles * _COLUMNS), innerKTiles // 2, 4, 4)
    parts = parts.permute(0, 2, 1, 5, 3, 4).reshape(tiles, -1, _THREADS, innerKTiles // 2, 4)
    first, second, third, fourth = parts.unbind(-1)
    words = (
        (first >> 4) | (second & 0xF0),
        (third >> 4) | (fourth & 0xF0),
        (first & 0xF) | (second << 4),
        (third & 0xF) | (fourth << 4),
    )
    return torch.stack(words, dim=-1).view(torch.int32).squeeze(-1)


def unpack(packed: Tensor) -> Tensor:
    """The weights of `_convert_weight_to_int4pack`, from 0 to 15, as float32 of shape `[n, k]`."""
    tiles, outer, _, pairs = packed.shape
    words = packed.unsqueeze(-1).view(torch.uint8)
    low, high = words & 0xF, words >> 4
    upper = torch.stack((low[..., 0], high[..., 0], low[..., 1], high[..., 1]), dim=-1)
    lower = torch.stack((low[..., 2], high[..., 2], low[..., 3], high[..., 3]), dim=-1)
    both = torch.stack((upper, lower), dim=-1).view(tiles, outer, _ROWS, 4, pairs, 4, 2)
    return both.permute(0, 2, 1, 4, 5, 3, 6).reshape(tiles * _ROWS, -1).float()


@kernel("_weight_int4pack_mm")
def weight_int4pack_mm(self: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> Tensor:
    """`self @ w.T`, where w = (weight - 8) * scale + zero, rounded to bfloat16 as on CUDA.

    A scale and a zero stand in `qScaleAndZeros[group, n]`, for each `qGroupSize` columns of a row.
    """
    op = "_weight_int4pack_mm"
    expect(
        self.dtype == torch.bfloat16 and self.dim() == 2 and self.is_contiguous(),
        f"{op}: expected a contiguous matrix of torch.bfloat16, but got {self.dtype} of shape {list(self.shape)}",
    )
    expect(
        mat2.dtype == torch.int32 and mat2.dim() == 4 and mat2.is_contiguous() and mat2.size(3) in (1, 2, 4),
        f"{op}: expected mat2 from _convert_weight_to_int4pack, but got {mat2.dtype} of shape {list(mat2.shape)}",
    )
    k, n = self.size(1), mat2.size(0) * _ROWS
    expect(
        mat2.size(1) == k // (mat2.size(3) * 2 * _COLUMNS) and mat2.size(2) == _THREADS,
        f"{op}: expected mat2 of {k} columns, those of self, but got shape {list(mat2.shape)}",
    )
    expect(
        qGroupSize in (32, 64, 128, 256), f"{op}: expected qGroupSize to be 32, 64, 128 or 256, but got {qGroupSize}"
    )
    expect(k >= qGroupSize and k % qGroupSize == 0, f"{op}: expected k to be a multiple of {qGroupSize}, but got {k}")
    expect(
        qScaleAndZeros.shape == (k // qGroupSize, n, 2) and qScaleAndZeros.dtype == torch.bfloat16,
        f"{op}: expected qScaleAndZeros of shape {[k // qGroupSize, n, 2]} and torch.bfloat16, but got "
        f"{list(qScaleAndZeros.shape)} and {qScaleAndZeros.dtype}",
    )
    scales, zeros = qScaleAndZeros.float().permute(2, 1, 0).repeat_interleave(qGroupSize, dim=2).unbind(0)
    weight = ((unpack(mat2) - 8) * scales + zeros).bfloat16()
    return torch.mm(self, weight.t())
