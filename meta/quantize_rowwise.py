"""quantize_rowwise and dequantize_rowwise: symmetric int8 quantization by rows, forward only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x to int8, in steps that take its largest absolute value to 127.

    scale = max(abs(x), -1) / 127
    q = round(x / scale), halves to even

    A row of zeros, or of no elements, has scale 0 and q 0, so that it comes back exactly; as the row statistics of
    bitsandbytes and the scales of vLLM, where torchao puts the smallest positive step. The same for a row so small that
    its scale is 0 in float32. A row with a NaN or an infinity has q 0 and the scale NaN or infinity, so that all of it
    comes back NaN: no bad number hides in a row of good ones.

    Args:
        x: `[..., N]`, float32, float64, float16 or bfloat16; any strides.
    Returns:
        q: `[..., N]`, int8 from -127 to 127, contiguous.
        scale: `[...]`, float32, contiguous.
    Raises:
        RuntimeError: x has no dimension or another dtype; at backward, on every device: "derivative for
            openreg::quantize_rowwise is not implemented".

    Not differentiable: rounding has derivative 0 almost everywhere. Detach x, or write the straight-through estimator
    that suits you. Autocast leaves the dtype alone.
    Source: Dettmers et al. 2022, arXiv:2208.07339, section 2; bitsandbytes' `int8_vectorwise_quant`.
    """
    return torch.ops.openreg.quantize_rowwise.default(x)


def dequantize_rowwise(q: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """What `quantize_rowwise` rounded: q * scale.

    Args:
        q: `[..., N]`, int8; any strides.
        scale: `[...]`, float32.
        dtype: of the result, float32 (the default), float64, float16 or bfloat16.
    Returns:
        `[..., N]`, dtype, contiguous. Finite rows are within scale / 2 of what was quantized.
    Raises:
        RuntimeError: q is not int8 or has no dimension; scale is not like q's rows; another dtype; at backward, on
            every device: "derivative for openreg::dequantize_rowwise is not implemented".

    Not differentiable. Autocast takes the scale in float32.
    """
    return torch.ops.openreg.dequantize_rowwise.default(q, scale, dtype=dtype)


def _check(x: Tensor) -> None:
    name = "quantize_rowwise"
    op.check_floating(name, "x", x)
    torch._check(
        x.dim() >= 1, lambda: f"{name}: expected x of at least one dimension, but got a scalar; use x.unsqueeze(0)"
    )


def _check_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    name = "dequantize_rowwise"
    torch._check(
        q.dtype == torch.int8,
        lambda: f"{name}: expected q of int8, but got {op.dtype_name(q.dtype)}; make it with quantize_rowwise",
    )
    torch._check(
        q.dim() >= 1, lambda: f"{name}: expected q of at least one dimension, but got a scalar; use q.unsqueeze(0)"
    )
    op.check_same_device(name, "q", q, "scale", scale)
    op.check_dtype(name, "scale", scale, torch.float32, "its quantize_rowwise output")
    op.check_shape(name, "scale", scale, q.shape[:-1], "that of q without its last dimension")
    torch._check(
        dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16),
        lambda: (
            f"{name}: expected dtype to be float32, float64, float16 or bfloat16, but got {op.dtype_name(dtype)}; "
            "convert the result with .to()"
        ),
    )


@torch.library.register_fake("openreg::quantize_rowwise")
def fake(x: Tensor) -> tuple[Tensor, Tensor]:
    _check(x)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("openreg::dequantize_rowwise")
def fake_dequantize(q: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or torch.float32
    _check_dequantize(q, scale, dtype)
    return q.new_empty(q.shape, dtype=dtype)


@op.reference("quantize_rowwise", differentiable=False)
def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    _check(x)
    wide = x.to(op.acc_dtype(x.dtype))
    scale = (torch.nn.functional.pad(wide.abs(), (0, 1)).amax(-1) / 127).float()  # a 0 for rows of no elements
    step = scale.to(wide.dtype).unsqueeze(-1)
    steps = (wide / step).clamp(-127, 127).round()
    q = torch.where((step > 0) & step.isfinite(), steps, 0).to(torch.int8)
    return q.contiguous(), scale.contiguous()


@op.reference("dequantize_rowwise", differentiable=False)
def reference_dequantize(q: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or torch.float32
    _check_dequantize(q, scale, dtype)
    wide = op.acc_dtype(dtype)
    return (q.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype).contiguous()


@op.batched("quantize_rowwise")
def batched(in_dims: Sequence[int | None], x: Tensor) -> Any:
    return torch.ops.openreg.quantize_rowwise(*op.all_batch_first(in_dims, (x,))), (0, 0)


@op.batched("dequantize_rowwise")
def batched_dequantize(
    in_dims: Sequence[int | None], q: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None
) -> Any:
    return torch.ops.openreg.dequantize_rowwise(*op.all_batch_first(in_dims[:2], (q, scale)), dtype=dtype), 0


@op.samples("quantize_rowwise")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        yield (torch.randn(shape, dtype=dtype, device=device),)


@op.samples("dequantize_rowwise")
def samples_dequantize(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        q = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        yield q, torch.rand(shape[:-1], device=device)
