"""int8_linear: a linear layer with int8 weights that quantizes its input; forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


@op.operator(differentiable=False, batch_first=["x"])  # the kernel takes one weight for all rows
def int8_linear(x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x by a weight from `quantize_rowwise`, in int8.

    x_q, x_scale = quantize_rowwise(x)
    y = (x_q @ weight_q.T) * unsqueeze(x_scale, -1) * weight_scale + bias

    The products are int8 and their sums are int32, so they are exact. For normally distributed numbers, y differs from
    the float weight's result by about 1 % of its norm; one outlier in a row of x widens the steps of the entire row. A
    row of x with
    a NaN or an infinity gives a row of NaN.

    Args:
        x: `[..., K]`, float32, float64, float16 or bfloat16; any strides. K is at most 132104.
        weight_q: `[N, K]`, int8.
        weight_scale: `[N]`, float32.
        bias: `[N]`, dtype of x or float32.
    Returns:
        y: `[..., N]`, dtype of x, contiguous.
    Raises:
        RuntimeError: another shape, dtype or device; at backward, on every device: "derivative for
            openreg::int8_linear is not implemented".

    Not differentiable: it is for inference. The half types are scaled and added in float32. Autocast leaves the dtypes
    alone: y has the dtype of x.
    Source: Dettmers et al. 2022, arXiv:2208.07339, section 2, without its treatment of outliers.
    """
    wide = op.acc_dtype(x.dtype)
    q, scale = torch.ops.openreg.quantize_rowwise(x)
    total = torch.nn.functional.linear(q.double(), weight_q.double())  # exact, and on every device
    y = total.to(wide) * scale.to(wide).unsqueeze(-1) * weight_scale.to(wide)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).contiguous()


@int8_linear.fake
def _(x, weight_q):
    return x.new_empty((*x.shape[:-1], weight_q.shape[0]))


@int8_linear.sharded
def _(x, bias):
    last = x.dim() - 1
    for d in range(last):
        yield dict(x=d), (d,)
    yield dict(weight_q=0, weight_scale=0, bias=0), (last,)


@int8_linear.samples
def _(device, dtype):
    for shape, rows, *bias in (((4, 6), 5), ((8,), 3, dtype), ((2, 3, 16), 7, torch.float32)):
        yield (
            torch.randn(shape, dtype=dtype, device=device),
            torch.randint(-127, 128, (rows, shape[-1]), dtype=torch.int8, device=device),
            torch.rand(rows, device=device),
            *(torch.randn(rows, dtype=of, device=device) for of in bias),
        )
