"""Matrix products that have another dtype than their factors, and products of scaled 8-bit floats in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import expect, kernel

__all__ = ["DTYPE_PRODUCTS"]

_HALVES = (torch.float16, torch.bfloat16)


def _expect_dtypes(first: Tensor, second: Tensor, out_dtype: torch.dtype, unequal: str) -> None:
    expect(first.dtype == second.dtype, unequal)
    expect(
        out_dtype == first.dtype or (out_dtype == torch.float32 and first.dtype in _HALVES),
        "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs",
    )


def _expect_out(out: Tensor | None, out_dtype: torch.dtype) -> None:
    expect(out is None or out.dtype == out_dtype, "out_dtype must be the same as the dtype of the provided out tensor")


def _expect_matrices(first: Tensor, second: Tensor, name: str) -> None:
    expect(first.dim() == 2, f"{name} must be a matrix, got {first.dim()}-D tensor")
    expect(second.dim() == 2, f"mat2 must be a matrix, got {second.dim()}-D tensor")
    expect(
        first.size(1) == second.size(0),
        f"mat1 and mat2 shapes cannot be multiplied ({first.size(0)}x{first.size(1)} and "
        f"{second.size(0)}x{second.size(1)})",
    )


def _wide(out_dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [x.to(out_dtype) for x in tensors]


@kernel("mm.dtype", "mm.dtype_out")
def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """`self @ mat2`, accumulated in float32 for half types and returned as `out_dtype`. Unlike other operators, CUDA's
    does not resize `out`."""
    _expect_matrices(self, mat2, "self")
    _expect_out(out, out_dtype)
    _expect_dtypes(self, mat2, out_dtype, "input dtypes must be the same")
    if out is not None:
        expect(out.dim() == 2, "tensors must be 2-D")
        expect(out.size(0) == self.size(0), "self_ dim 0 must match mat1 dim 0")
        expect(out.size(1) == mat2.size(1), "self_ dim 1 must match mat2 dim 1")
    return torch.mm(*_wide(out_dtype, self, mat2), out=out)


@kernel("addmm.dtype", "addmm.dtype_out")
def addmm(
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`beta * self + alpha * mat1 @ mat2`; `self` broadcasts and has either dtype."""
    _expect_matrices(mat1, mat2, "mat1")
    _expect_dtypes(
        mat1, mat2, out_dtype, f"mat1 and mat2 must have the same dtype, but got {mat1.dtype} and {mat2.dtype}"
    )
    expect(self.dtype in (out_dtype, mat1.dtype), "self dtype must match either out_dtype or mat1 dtype")
    _expect_out(out, out_dtype)
    return torch.addmm(*_wide(out_dtype, self, mat1, mat2), beta=beta, alpha=alpha, out=out)


def _expect_batches(batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, added: Tensor | None) -> None:
    expect(batch1.dim() == 3, "batch1 must be a 3D tensor")
    expect(batch2.dim() == 3, "batch2 must be a 3D tensor")
    batches, _, inner = batch1.shape
    expect(
        batch2.size(0) == batches and batch2.size(1) == inner,
        f"Expected size for first two dimensions of batch2 tensor to be: [{batches}, {inner}] but got: "
        f"[{batch2.size(0)}, {batch2.size(1)}].",
    )
    _expect_dtypes(batch1, batch2, out_dtype, "batch1 and batch2 must have the same dtype")
    if added is not None:
        expect(added.dim() == 3, "self must be a 3D tensor")
        expect(added.shape == (batches, batch1.size(1), batch2.size(2)), "self must have the same shape as the output")


@kernel("bmm.dtype", "bmm.dtype_out")
def bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """`self @ mat2` for each matrix of a batch; `out` is not resized."""
    _expect_batches(self, mat2, out_dtype, out)
    _expect_out(out, out_dtype)
    return torch.bmm(*_wide(out_dtype, self, mat2), out=out)


@kernel("baddbmm.dtype", "baddbmm.dtype_out")
def baddbmm(
    self: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`beta * self + alpha * batch1 @ batch2`; `self` has either dtype, and the shape of the result; `out` is not
    resized."""
    _expect_batches(batch1, batch2, out_dtype, self)
    expect(self.dtype in (out_dtype, batch1.dtype), "self dtype must match either out_dtype or batch1 dtype")
    _expect_batches(batch1, batch2, out_dtype, out)
    _expect_out(out, out_dtype)
    return torch.baddbmm(*_wide(out_dtype, self, batch1, batch2), beta=beta, alpha=alpha, out=out)


#: The products that CUDA's Inductor compiles and others refuse: what they decompose to, by overload.
DTYPE_PRODUCTS = {"mm.dtype": mm, "bmm.dtype": bmm, "addmm.dtype": addmm, "baddbmm.dtype": baddbmm}


def correct_baddbmm() -> None:
    """Replace what fake tensors compute of `baddbmm`: PyTorch's decomposition takes `out_dtype` for `beta`."""
    torch._decomp.decomposition_table[torch.ops.aten.baddbmm.dtype] = baddbmm
    torch.library.register_fake("aten::baddbmm.dtype", baddbmm, allow_override=True)


# ---- scaled products in groups ----


def _is_transposed(mat: Tensor) -> bool:
    """Returns true if a matrix, or each of a batch, is stored by columns. Its rows or columns must be aligned."""
    rows, columns = mat.dim() - 2, mat.dim() - 1
    aligned = 16 // mat.element_size()
    for step, unit, transposed in ((columns, rows, True), (rows, columns, False)):
        if mat.stride(unit) == 1 and mat.stride(step) >= max(1, mat.size(unit)):
            expect(mat.stride(step) % aligned == 0, "strides should be multiple of 16 bytes")
            return transposed
    raise RuntimeError(f"Invalid strides/sizes, got {list(mat.stride())} for strides and {list(mat.shape)} for sizes")


def _expect_scale(mat: Tensor, scale: Tensor, dim: int, position: int, groups: int) -> None:
    if mat.dim() == 2:
        expect(scale.dim() == 1, f"scale must be a 1D tensor, but got {scale.dim()}D, arg {position}")
        expect(scale.is_contiguous(), f"scale must be contiguous for arg {position}")
        expect(scale.size(0) == mat.size(dim) * groups, f"scale must have the same length as mat for arg {position}")
        return
    expect(scale.dim() == 2, f"scale must be a 2D tensor, but got {scale.dim()}D for arg {position}")
    expect(scale.stride(1) == 1, f"scale must be contiguous in the last dimension for arg {position}")
    expect(scale.size(0) == mat.size(0), f"scale must have the same batch dimension as mat for arg {position}")
    expect(scale.size(1) == mat.size(1 + dim), f"scale must have the same first dimension as mat for arg {position}")


def _expect_count(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None) -> None:
    for mat in (mat_a, mat_b):
        if mat.dim() == 3:
            groups = (mat_a if mat is mat_b else mat_b).size(0) if offs is None else offs.size(0)
            expect(mat.size(0) == groups, "matrix batch sizes have to match")


def _expect_groups(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    expect(not _is_transposed(mat_a), "Expected mat1 to not be transposed", ValueError)
    expect(_is_transposed(mat_b), "Expected mat2 to be transposed", ValueError)
    expect(mat_a.dim() in (2, 3), "mat_a has to be 2 or 3d", ValueError)
    expect(mat_b.dim() in (2, 3), "mat_b has to be 2 or 3d", ValueError)
    flat = mat_a.dim() == 2 or mat_b.dim() == 2
    if mat_a.dim() == 3 or mat_b.dim() == 3:
        expect(mat_a.size(-1) == mat_b.size(-2), "contraction dimension of mat_a and mat_b must match", ValueError)
    expect(
        mat_a.size(-1) % 16 == 0,
        f"Expected trailing dimension of mat_a to be divisible by 16 but got mat1 shape: ({list(mat_a.shape)}).",
        ValueError,
    )
    expect(
        mat_b.size(-2) % 16 == 0 and mat_b.size(-1) % 16 == 0,
        f"Expected mat_b shape to be divisible by 16 but got mat_b shape: ({list(mat_b.shape)}).",
        ValueError,
    )
    expect(bias is None, "Bias not supported yet", ValueError)
    expect((offs is not None) == flat, "Have to provide offsets if there is a 2d matrix", ValueError)
    if offs is not None:
        expect(offs.dim() == 1, "offs has to be 1D", ValueError)
        expect(offs.dtype == torch.int32, "Offsets have to be int32", ValueError)
    expect(
        out_dtype in (None, torch.bfloat16),
        "Only bf16 high precision output types are supported for grouped gemm",
        ValueError,
    )
    _expect_count(mat_a, mat_b, offs)


def _scaled_in_groups(mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None) -> Tensor:
    both_flat = mat_a.dim() == 2 and mat_b.dim() == 2
    groups = offs.size(0) if offs is not None and both_flat else 1
    _expect_scale(mat_a, scale_a, 0, 0, groups)
    _expect_scale(mat_b, scale_b, 1, 1, groups)
    for name, mat in (("mat_a", mat_a), ("mat_b", mat_b)):
        expect(
            mat.dtype == torch.float8_e4m3fn, f"Expected {name} to be Float8_e4m3 matrix got {mat.dtype}", ValueError
        )
    if both_flat:  # each group has scales of its own
        product = _in_groups(mat_a.float(), mat_b.float(), offs)
        product = product * scale_a.view(groups, -1, 1) * scale_b.view(groups, 1, -1)
    else:
        product = _in_groups(mat_a.float() * scale_a.unsqueeze(-1), mat_b.float() * scale_b.unsqueeze(-2), offs)
    return product.bfloat16()


def _in_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """`torch._grouped_mm` without a copy of the offsets to the host, so that a graph can capture it.

    The matrix of two dimensions takes part in each group as a whole, and a mask selects the group's part.
    """
    if offs is None:
        return torch.bmm(a, b)
    shared = a.size(0) if b.dim() == 3 else b.size(1) if a.dim() == 3 else a.size(1)  # the dimension that is divided
    before = torch.arange(shared, device=offs.device) < offs.unsqueeze(1)
    masks = before.clone()
    masks[1:] &= ~before[:-1]
    if a.dim() == b.dim():
        return torch.stack([torch.mm(torch.where(mask, a, 0), torch.where(mask.unsqueeze(1), b, 0)) for mask in masks])
    product = a.new_zeros(a.size(-2), b.size(-1))
    for group, mask in enumerate(masks):
        part = torch.mm(a if a.dim() == 2 else a[group], b if b.dim() == 2 else b[group])
        product = torch.where(mask.unsqueeze(1) if a.dim() == 2 else mask, part, product)
    return product


_NO_BLOCKS = "{} grouped gemm requires compile with USE_FBGEMM_GENAI, which PyTorch uses only on CUDA"


@kernel("_scaled_grouped_mm")
def scaled_grouped_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Products of float8_e4m3fn matrices, scaled by row of `self` and column of `mat2`, in bfloat16."""
    expect(scale_result is None, "Scale result not supported yet", ValueError)
    _expect_groups(self, mat2, offs, bias, out_dtype)
    dtypes = {scale_a.dtype, scale_b.dtype}
    expect(
        dtypes in ({torch.float32}, {torch.float8_e8m0fnu}),
        "For FP8 tensorwise and rowwise, both scales must both be float32 tensors. For MXFP8, scales must both be "
        "float8_e8m0fnu tensors.",
        ValueError,
    )
    expect(dtypes == {torch.float32}, _NO_BLOCKS.format("mxfp8_mxfp8"), NotImplementedError)
    return _scaled_in_groups(self, mat2, scale_a, scale_b, offs)


_ROWWISE = 1  # torch.nn.functional.ScalingType.RowWise


@kernel("_scaled_grouped_mm_v2")
def scaled_grouped_mm_v2(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """The operator behind `torch.nn.functional.scaled_grouped_mm`: see `_scaled_grouped_mm`."""
    expect(
        len(contraction_dim) == 0 or tuple(contraction_dim) == (-1, -2),
        "Curently contraction dims must be (-1, -2) only",
        ValueError,
    )
    _expect_groups(self, mat2, offs, bias, out_dtype)
    rowwise = list(recipe_a) == list(recipe_b) == [_ROWWISE] and len(scale_a) == len(scale_b) == 1
    if not (rowwise and scale_a[0].dtype == scale_b[0].dtype == torch.float32):
        blocked = {scale.dtype for scale in (*scale_a[:1], *scale_b[:1])} & {torch.float8_e8m0fnu, torch.float8_e4m3fn}
        expect(not blocked, _NO_BLOCKS.format("block-scaled"), NotImplementedError)
        raise ValueError("No gemm implementation was found")
    return _scaled_in_groups(self, mat2, scale_a[0], scale_b[0], offs)
