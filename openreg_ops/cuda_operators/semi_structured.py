"""2:4 sparsity: of four elements that follow each other in a row, two are kept, with the positions that they had.

A group of four (for float32, of two) has four bits of metadata: the lower two are the position of its first element,
the upper two of its second. CUTLASS stores the metadata in a tensor of its own, in the order of its threads, as
`torch.sparse._semi_structured_conversions` describes. cuSPARSELt stores it behind the elements, in an order that NVIDIA
does not publish; here that is the order of the groups.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.sparse import _semi_structured_conversions as conversions

from openreg_ops.cuda_operators.registry import expect, kernel

_HALVES = (torch.float16, torch.bfloat16)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _product(dense: Tensor, other: Tensor) -> Tensor:
    """Accumulated as on tensor cores: in int32 for integers, else in float32."""
    wide = torch.int32 if dense.dtype == torch.int8 else torch.float32
    return torch.mm(dense.to(wide), other.to(wide))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted to a dtype; CUDA saturates integers."""
    if dtype == torch.int8:
        x = x.round().clamp(-128, 127) if x.is_floating_point() else x.clamp(-128, 127)
    return x.to(dtype)


# ---- CUTLASS ----


@kernel("_to_sparse_semi_structured")
def to_sparse_semi_structured(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The kept elements and the metadata of a matrix with exactly two elements in each group."""
    op = "_to_sparse_semi_structured"
    expect(dense.dim() == 2, f"{op} : Expected dense argument to be 2D tensor, got {dense.dim()} dims")
    expect(
        dense.dtype in (torch.int8, *_HALVES, torch.float32),
        f"{op}: Invalid dense argument datatype {dense.dtype} encountered",
    )
    rows, columns = (16, 32) if dense.dtype == torch.int8 else (32, 8 if dense.dtype == torch.float32 else 16)
    expect(
        dense.size(0) % rows == 0,
        f"{op}: Number of rows of dense matrix must be divisible by {rows}, but it is {dense.size(0)}",
    )
    expect(
        dense.size(1) % columns == 0,
        f"{op}: Number of columns of dense matrix must be divisible by {columns}, but it is {dense.size(1)}",
    )
    group, kept, pattern = (2, 1, "1:2") if dense.dtype == torch.float32 else (4, 2, "2:4")
    counts = (dense != 0).reshape(-1, group).sum(1)
    expect(bool((counts == kept).all()), f"{op}: dense argument does not match {pattern}sparsity pattern")
    return conversions.sparse_semi_structured_from_dense_cutlass(dense.contiguous())


def _from_cutlass(kept: Tensor, meta: Tensor) -> Tensor:
    """The dense matrix; `_sparse_semi_structured_tile` returns metadata of three dimensions, in the same memory."""
    if meta.dim() == 3:
        meta = meta.permute(2, 0, 1).reshape(kept.size(0), -1)
    return conversions.sparse_semi_structured_to_dense_cutlass(kept.contiguous(), meta)


def _multiply_add(
    op: str,
    mat1: Tensor,
    meta: Tensor,
    mat2: Tensor,
    added: Tensor | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out_dtype = mat2.dtype if out_dtype is None else out_dtype
    expect(
        mat2.dtype in (torch.int8, *_HALVES, torch.float32), f"{op} : The mat2 datatype {mat2.dtype} is not supported"
    )
    expect(mat1.dtype == mat2.dtype, f"{op} : Expected mat1 datatype {mat2.dtype}, but got {mat1.dtype}")
    allowed = (torch.int8, torch.int32) if mat2.dtype == torch.int8 else (mat2.dtype,)
    expect(out_dtype in allowed, f"{op} : out_dtype {out_dtype} is not supported for {mat2.dtype}")
    for name, mat in (("mat1", mat1), ("mat2", mat2)):
        expect(mat.dim() == 2, f"{op} : Expected {name} argument to be 2D tensor, got {mat.dim()} dims")
        row, column = mat.stride()
        expect(
            1 in (row, column),
            f"{op} : Invalid strides for {name} argument: row stride = {row}, column stride = {column}",
        )
    expect(
        mat1.size(1) == mat2.size(0) // 2,
        f"{op} : Expected mat1 argument to have {mat2.size(0) // 2} columns, but got {mat1.size(1)}",
    )
    result = _product(_from_cutlass(mat1, meta), mat2)
    if alpha != 1:
        result = alpha * result
    if added is not None and added.numel():
        expect(added.dtype == out_dtype, f"{op} : Expected input datatype {out_dtype}, but got {added.dtype}")
        expect(added.dim() == 1, f"{op} : Expected input argument to be 1D tensor, got {added.dim()} dims")
        expect(
            added.size(0) == mat1.size(0),
            f"{op} : Expected input argument to have {mat1.size(0)} elements, but got {added.size(0)}",
        )
        result = result + beta * added.to(result.dtype).unsqueeze(1)
    return _rounded(result, out_dtype)


@kernel("_sparse_semi_structured_mm")
def semi_structured_mm(
    mat1: Tensor, mat1_meta: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`mat1 @ mat2`, of which mat1 is sparse."""
    return _multiply_add("sparse_semi_structured_mad_op", mat1, mat1_meta, mat2, None, 1, 0, out_dtype)


@kernel("_sparse_semi_structured_addmm")
def semi_structured_addmm(
    input: Tensor,
    mat1: Tensor,
    mat1_meta: Tensor,
    mat2: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`alpha * mat1 @ mat2 + beta * input`, of which mat1 is sparse and input is a column."""
    return _multiply_add("sparse_semi_structured_mad_op", mat1, mat1_meta, mat2, input, alpha, beta, out_dtype)


@kernel("_sparse_semi_structured_linear")
def semi_structured_linear(
    input: Tensor,
    weight: Tensor,
    meta: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`activation(input @ weight.T + bias)`, of which weight is sparse; a result of two dimensions is transposed."""
    op = "_sparse_semi_structured_linear"
    activations = {None: None, "none": None, "relu": torch.relu, "silu": torch.nn.functional.silu}
    expect(activation in activations, f'{op} : Activation type "{activation}" is not supported')
    rows = input.reshape(-1, input.size(-1)).t()
    result = _multiply_add(op, weight, meta, rows, bias, 1, 1, out_dtype)
    if function := activations[activation]:
        result = function(result)
    return result.t().reshape(*input.shape[:-1], weight.size(0)) if input.dim() != 2 else result.t()


# ---- cuSPARSELt ----


def _positions(nonzero: Tensor) -> tuple[Tensor, Tensor]:
    """Which two elements of each group to keep, as CUTLASS chooses if there are more or fewer than two."""
    if nonzero.size(-1) == 2:  # of float32: one of two, whose halves are kept
        first = torch.where(nonzero[..., 0], 0, 2)
        return first, first + 1
    zeroth, oneth, _, third = nonzero.unbind(-1)
    first = torch.where(zeroth, 0, torch.where(oneth, 1, 2))
    second = torch.where(zeroth & oneth, 1, torch.where(third | (first == 2), 3, 2))
    return first, second


def _bytes_behind(dtype: torch.dtype) -> int:
    """Sixteenths of the dense matrix that its compressed form takes: 8 are kept, the others are metadata."""
    return 10 if dtype in _EIGHT_BITS else 9


@kernel("_cslt_compress")
def cslt_compress(input: Tensor) -> Tensor:
    """The kept elements, then the metadata, in one tensor with the rows of `input`."""
    expect(
        input.dtype in (*_EIGHT_BITS, *_HALVES, torch.float32),
        "Unsupported dtype for cuSPARSELt compressed matrix",
    )
    rows, columns = input.shape
    expect(
        rows % 16 == 0 and columns % 16 == 0,
        f"_cslt_compress: expected rows and columns that are multiples of 16, but got {[rows, columns]}",
    )
    return _compress(input, input.float() != 0)


def _compress(input: Tensor, mask: Tensor) -> Tensor:
    """The elements of a matrix where a mask is true, then their positions."""
    group = 2 if input.dtype == torch.float32 else 4
    groups, mask = (x.reshape(input.size(0), -1, group) for x in (_bits(input), mask))
    first, second = _positions(mask)
    which = first.unsqueeze(-1) // 2 if group == 2 else torch.stack((first, second), dim=-1)
    pairs = (first | (second << 2)).to(torch.uint8).reshape(-1, 2)
    meta = (pairs[:, 0] | (pairs[:, 1] << 4)).view(groups.dtype)
    kept = groups.gather(-1, which).reshape(-1)
    return torch.cat((kept, meta)).view(input.dtype).view(input.size(0), -1)


def _bits(x: Tensor) -> Tensor:
    """Integers of the same bytes: operators that move elements do not support every 8-bit float."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _from_cslt(compressed: Tensor, columns: int) -> Tensor:
    """The dense matrix."""
    group = 2 if compressed.dtype == torch.float32 else 4
    total = compressed.numel() * 16 // _bytes_behind(compressed.dtype)
    flat = _bits(compressed.reshape(-1))
    kept, meta = flat[: total // 2], flat[total // 2 :].view(torch.uint8)
    nibbles = torch.stack((meta & 0xF, meta >> 4), dim=-1).view(-1).to(torch.int64)
    first, second = nibbles & 3, nibbles >> 2
    where = first.unsqueeze(-1) // 2 if group == 2 else torch.stack((first, second), dim=-1)
    dense = kept.new_zeros(total // group, group).scatter_(-1, where, kept.view(total // group, -1))
    return dense.view(compressed.dtype).view(-1, columns)


@kernel("_cslt_sparse_mm")
def cslt_sparse_mm(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    alg_id: int = 0,
    split_k: int = 1,
    split_k_mode: int = -1,
) -> Tensor:
    """`alpha * compressed_A @ dense_B + bias`, of which bias is a column."""
    expect(
        compressed_A.dtype in (*_EIGHT_BITS, *_HALVES, torch.float32),
        "Unsupported dtype for cuSPARSELt compressed matrix multiplication.",
    )
    expect(
        dense_B.dim() == 2 and dense_B.dtype == compressed_A.dtype,
        f"_cslt_sparse_mm: expected a matrix dense_B of {compressed_A.dtype}, but got {dense_B.dtype} of shape "
        f"{list(dense_B.shape)}",
    )
    if out_dtype is not None:
        expect(compressed_A.dtype in _EIGHT_BITS, "out_dtype support only available for int8/fp8 inputs")
        allowed = {torch.int8: (torch.int32,), torch.float8_e4m3fn: (torch.float32,)}[compressed_A.dtype]
        expect(
            out_dtype in (*_HALVES, *allowed, compressed_A.dtype),
            f"Unsupported out_dtype passed, must be one of {{fp16, bf16, {str(allowed[0])[6:]}}}",
        )
    result = _product(_from_cslt(compressed_A, dense_B.size(0)), dense_B)
    if alpha is not None:
        result = result * alpha
    if bias is not None:
        expect(
            bias.shape == result.shape[:1],
            f"_cslt_sparse_mm: expected a bias of shape {[result.size(0)]}, but got {list(bias.shape)}",
        )
        result = result + (bias if result.dtype == torch.int32 else bias.float()).unsqueeze(1)
    result = _rounded(result, dense_B.dtype if out_dtype is None else out_dtype)
    return result.t().contiguous() if transpose_result else result


@kernel("_cslt_sparse_mm_search")
def cslt_sparse_mm_search(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
) -> int:
    """The fastest algorithm: the device has one, number 0."""
    cslt_sparse_mm(compressed_A, dense_B, bias, alpha, out_dtype, transpose_result)  # raises what it raises
    return 0


# ---- pruning: which elements to keep, for a matrix and its transpose at once ----


def _greedy(values: Tensor) -> Tensor:
    """The largest elements of each tile of 4 x 4, at most two in a row and in a column."""
    order = values.flatten(1).sort(dim=1, descending=True, stable=True).indices
    row, column = order // 4, order % 4
    rows, columns = (torch.zeros(len(values), 4, dtype=torch.int64, device=values.device) for _ in range(2))
    mask = torch.zeros(len(values), 16, dtype=torch.bool, device=values.device)
    for i in range(16):
        r, c, at = row[:, i : i + 1], column[:, i : i + 1], order[:, i : i + 1]
        selected = (rows.gather(1, r) < 2) & (columns.gather(1, c) < 2)
        rows.scatter_add_(1, r, selected.long())
        columns.scatter_add_(1, c, selected.long())
        mask.scatter_(1, at, selected)
    return mask


def _causal(values: Tensor) -> Tensor:
    """The largest elements of each row, 1, 1, 2 and 2 of them, at most two in a column; earlier rows come first."""
    columns = torch.zeros(len(values), 4, dtype=torch.int64, device=values.device)
    mask = torch.zeros(len(values), 16, dtype=torch.bool, device=values.device)
    for row, most in enumerate((1, 1, 2, 2)):
        order = values[:, row].sort(dim=1, descending=True, stable=True).indices
        count = torch.zeros(len(values), 1, dtype=torch.int64, device=values.device)
        for i in range(4):
            c = order[:, i : i + 1]
            selected = (columns.gather(1, c) < 2) & (count < most)
            columns.scatter_add_(1, c, selected.long())
            count += selected
            mask.scatter_(1, 4 * row + c, selected)
    return mask


_ALGORITHMS = {
    "": _greedy,
    "largest_values_greedy": _greedy,
    "largest_abs_values_greedy": lambda values: _greedy(values.abs()),
    "causal1122": _causal,
}
_WARP = 32, 64  # the part of a matrix that is packed together


def _pad(x: Tensor, rows: int, columns: int, value: float) -> Tensor:
    size = _round_up(x.size(0), rows), _round_up(x.size(1), columns)
    return torch.nn.functional.pad(x, (0, size[1] - x.size(1), 0, size[0] - x.size(0)), value=value)


def _to_bytes(mask: Tensor) -> Tensor:
    """A mask as eight bytes for each 8 x 8 elements: two for each of its four tiles, with the first element lowest."""
    rows, columns = mask.size(0) // 8, mask.size(1) // 8
    tiles = mask.view(rows, 2, 4, columns, 2, 4).permute(0, 3, 1, 4, 2, 5).reshape(rows, columns, 8, 8)
    return (tiles.int() << torch.arange(8, device=mask.device, dtype=torch.int32)).sum(-1).to(torch.uint8)


def _from_bytes(masks: Tensor, like: Tensor) -> Tensor:
    """The mask of `like` from the bytes of `_to_bytes`."""
    rows, columns = (_round_up(size, warp) // 8 for size, warp in zip(like.shape, _WARP, strict=True))
    expect(
        masks.dtype == torch.uint8 and masks.shape == (rows, columns, 8),
        f"expected thread_masks of torch.uint8 and shape {[rows, columns, 8]}, but got {masks.dtype} and "
        f"{list(masks.shape)}",
    )
    bits = (masks.unsqueeze(-1) >> torch.arange(8, device=masks.device, dtype=torch.uint8)) & 1
    tiles = bits.view(rows, columns, 2, 2, 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(rows * 8, columns * 8)
    return tiles.bool()[: like.size(0), : like.size(1)]


def _pack_cutlass(pruned: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    pattern = _pad(mask, *_WARP, 0).to(pruned.dtype).contiguous()
    _, meta = conversions.sparse_semi_structured_from_dense_cutlass(pattern)
    return _keep(pruned, mask), meta.view(-1, meta.size(0), 2).permute(1, 2, 0)


def _keep(input: Tensor, mask: Tensor) -> Tensor:
    """The two elements of each group that a mask selects, with 0 for what it does not select."""
    input, mask = (_pad(x, *_WARP, 0).contiguous() for x in (torch.where(mask, input, 0), mask))
    positions = torch.stack(_positions(mask.view(input.size(0), -1, 4)), dim=-1)
    return input.view(input.size(0), -1, 4).gather(-1, positions).view(input.size(0), -1)


def _expect_half_matrix(input: Tensor) -> None:
    expect(input.dtype in _HALVES, f"expected an input of torch.float16 or torch.bfloat16, but got {input.dtype}")
    expect(input.dim() == 2, "Can only sparsify 2d tensors")


@kernel("_sparse_semi_structured_tile")
def semi_structured_tile(
    input: Tensor, algorithm: str = "", use_cutlass: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Prune a matrix, and compress it and its transpose; the last result is the mask.

    Equal elements are kept in the order of the matrix; CUDA does not define which of them it keeps.
    """
    _expect_half_matrix(input)
    expect(input.stride(1) == 1, "Can only sparsify contiguous tensors. Sparsify the transpose otherwise.")
    if not use_cutlass:
        expect(input.size(0) % 128 == 0 and input.size(1) % 128 == 0, "Only supports rows/cols multiples of 128")
    expect(input.size(1) % 32 == 0, "Number of cols should be multiple of 32")
    expect(algorithm in _ALGORITHMS, f'Unknown algorithm "{algorithm}"')
    padded = _pad(input, *_WARP, -float("inf"))
    rows, columns = padded.shape
    tiles = padded.view(rows // 4, 4, columns // 4, 4).permute(0, 2, 1, 3).reshape(-1, 4, 4)
    mask = _ALGORITHMS[algorithm](tiles).view(rows // 4, columns // 4, 4, 4).permute(0, 2, 1, 3).reshape(rows, columns)
    here = mask[: input.size(0), : input.size(1)]
    pruned, results = torch.where(here, input, 0), []
    for matrix, kept in ((pruned, here), (pruned.t(), here.t())):
        if use_cutlass:
            results += _pack_cutlass(matrix, kept)
            continue
        compressed = _compress(matrix, kept).view(-1)
        meta = compressed[matrix.numel() // 2 :].view(matrix.size(0) // 128, matrix.size(1) // 32, 256)
        results += [compressed, meta]
    return *results, _to_bytes(mask)


@kernel("_sparse_semi_structured_apply")
def semi_structured_apply(input: Tensor, thread_masks: Tensor) -> tuple[Tensor, Tensor]:
    """The kept elements of a matrix and of its transpose, by a mask of `_sparse_semi_structured_tile`."""
    _expect_half_matrix(input)
    mask = _from_bytes(thread_masks, input)
    return _keep(input, mask), _keep(input.t(), mask.t())


@kernel("_sparse_semi_structured_apply_dense")
def semi_structured_apply_dense(input: Tensor, thread_masks: Tensor) -> Tensor:
    """A matrix with zeros where a mask of `_sparse_semi_structured_tile` keeps nothing."""
    expect(input.dtype in _HALVES, "Unsupported `input` dtype")
    expect(
        1 in input.stride(),
        "`input` should be either RowMajor or ColMajor. Invalid memory layout - try .contiguous()?",
    )
    return torch.where(_from_bytes(thread_masks, input), input, 0).contiguous()


def accept_the_device() -> None:
    """Let `torch.sparse.to_sparse_semi_structured` accept the device: PyTorch asks for `is_cuda`."""
    validate = torch.sparse.SparseSemiStructuredTensor._validate_device_dim_dtype_shape.__func__

    def as_on_cuda(cls: type, original_tensor: Any) -> None:
        tensor = original_tensor
        if tensor.device.type == "openreg":
            original_tensor = types.SimpleNamespace(
                is_cuda=True,
                device=tensor.device,
                dim=tensor.dim,
                is_contiguous=tensor.is_contiguous,
                dtype=tensor.dtype,
                shape=tensor.shape,
            )
        validate(cls, original_tensor)

    torch.sparse.SparseSemiStructuredTensor._validate_device_dim_dtype_shape = classmethod(as_on_cuda)
