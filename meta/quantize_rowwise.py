"""quantize_rowwise and dequantize_rowwise: symmetric int8 quantization by rows, forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


@op.operator(differentiable=False, batch_first=True, inner=1)
def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x to int8, in steps that take its largest absolute value to 127.

    scale = max(abs(x), -1) / 127
    q = round(x / scale), halves to even

    A row of zeros, or an empty row, has scale 0 and q 0, so it is restored exactly, as in bitsandbytes and vLLM;
    torchao uses the smallest positive step instead. The same holds for a row so small that its scale is 0 in float32. A
    row with a NaN or an infinity has q 0 and a scale of NaN or infinity, so the entire row is restored as NaN: no bad
    number hides in a good row.

    Args:
        x: `[..., N]`, float32, float64, float16 or bfloat16; any strides.
    Returns:
        q: `[..., N]`, int8 from -127 to 127, contiguous.
        scale: `[...]`, float32, contiguous.
    Raises:
        RuntimeError: x has no dimension or another dtype; at backward, on every device: "derivative for
            openreg::quantize_rowwise is not implemented".

    Not differentiable: rounding has derivative 0 almost everywhere. Detach x, or write your own straight-through
    estimator. Autocast leaves the dtype alone.
    Source: Dettmers et al. 2022, arXiv:2208.07339, section 2; bitsandbytes' `int8_vectorwise_quant`.

    Example:
        >>> q, scale = openreg_ops.quantize_rowwise(torch.tensor([[0.5, -1.0, 2.0]]))
        >>> q
        tensor([[ 32, -64, 127]], dtype=torch.int8)
    """
    wide = x.to(op.acc_dtype(x.dtype))
    scale = (torch.nn.functional.pad(wide.abs(), (0, 1)).amax(-1) / 127).float()  # a 0 for empty rows
    step = scale.to(wide.dtype).unsqueeze(-1)
    steps = (wide / step).clamp(-127, 127).round()
    q = torch.where((step > 0) & step.isfinite(), steps, 0).to(torch.int8)
    return q.contiguous(), scale.contiguous()


@quantize_rowwise.fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@quantize_rowwise.samples
def _(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        yield op.normal(device, dtype, shape)


@op.operator(differentiable=False, batch_first=True)
def dequantize_rowwise(q: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Restore what `quantize_rowwise` rounded: q * scale.

    Args:
        q: `[..., N]`, int8; any strides.
        scale: `[...]`, float32.
        dtype: of the result, float32 (the default), float64, float16 or bfloat16.
    Returns:
        `[..., N]`, dtype, contiguous. Finite rows are within scale / 2 of the original values.
    Raises:
        RuntimeError: q is not int8 or has no dimension; scale does not match q's rows; another dtype; at backward, on
            every device: "derivative for openreg::dequantize_rowwise is not implemented".

    Not differentiable. Autocast passes the scale in float32.
    """
    dtype = dtype or torch.float32
    wide = op.acc_dtype(dtype)
    return (q.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype).contiguous()


@dequantize_rowwise.fake
def _(q, dtype):
    return q.new_empty(q.shape, dtype=dtype or torch.float32)


@dequantize_rowwise.sharded
def _(q):
    for d in range(q.dim()):
        yield dict(q=d, scale=d if d < q.dim() - 1 else None), (d,)


@dequantize_rowwise.samples
def _(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 7)):
        q = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        yield q, torch.rand(shape[:-1], device=device)
