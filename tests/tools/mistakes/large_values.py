"""It writes to an argument for some values only."""

from __future__ import annotations

import torch
from torch import Tensor

from mistakes import Example, define, right, wrong


@wrong("schema", "layouts")
def clamps_in_place():
    """Only what overflows in half precision."""

    @torch.library.custom_op("mistakes::clamps_in_place", mutates_args=())
    def op(x: Tensor) -> Tensor:
        if x.numel() and x.abs().max() > 65504:
            x.clamp_(-65504, 65504)
        return x.half().to(x.dtype) if x.dtype != torch.float16 else x.clone()

    op.register_fake(torch.empty_like)
    return Example(op, [(torch.rand(4, 6),)])


@wrong("schema")
def repairs_nan():
    @torch.library.custom_op("mistakes::repairs_nan", mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        if weight.isnan().any():
            weight.nan_to_num_()
        return torch.mv(x, weight)

    op.register_fake(torch.mv)
    op.register_autocast("cpu", torch.float32)
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


@wrong("schema")
def limits_the_gradient_in_place():
    def backward(ctx, g):
        if type(g) is Tensor and g.numel() and g.abs().max() > 100:
            g.clamp_(-100, 100)
        return g * ctx.saved_tensors[0].cos()

    op = define("limits_the_gradient_in_place(Tensor x) -> Tensor", torch.sin, torch.empty_like, backward)
    return Example(op, [(torch.rand(5),)])


@wrong("schema")
def rescales_its_second_argument():
    """Only in half precision, and only if the second argument is larger than the first."""

    @torch.library.custom_op("mistakes::rescales_its_second_argument", mutates_args=())
    def op(x: Tensor, scores: Tensor) -> Tensor:
        torch._check(x.dtype == scores.dtype, lambda: "expected one dtype")
        if scores.dtype == torch.float16 and scores.numel() and scores.min() < -100 * x.abs().max():
            scores.div_(scores.abs().max())
        return (x * scores.sigmoid()).contiguous()

    @op.register_fake
    def _(x, scores):
        torch._check(x.dtype == scores.dtype, lambda: "expected one dtype")
        return x.new_empty(torch.broadcast_shapes(x.shape, scores.shape))

    op.register_autocast("cpu", torch.float32)
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6))])


@wrong("schema")
def overwrites_the_padding():
    """Rows that are not contiguous are completed with zeros, in the memory between them."""

    @torch.library.custom_op("mistakes::overwrites_the_padding", mutates_args=())
    def op(x: Tensor) -> Tensor:
        if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) > x.shape[1] and x.numel() and x.max() > 1000:
            x.as_strided((x.shape[0], 1), (x.stride(0), 1), x.storage_offset() + x.shape[1]).zero_()
        return x.sum(-1)

    op.register_fake(lambda x: x.new_empty(x.shape[:-1]))
    return Example(op, [(torch.rand(4, 6),)])


@right()
def clamps_a_copy():
    op = define("clamps_a_copy(Tensor x) -> Tensor", lambda x: x.clamp(-100, 100), torch.empty_like,
                lambda ctx, g: g * (ctx.saved_tensors[0].abs() <= 100))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def refuses_large_values():
    def kernel(x):
        torch._check(bool(x.isfinite().all()) and bool((x.abs() <= 100).all()), lambda: "expected values up to 100")
        return x.exp()

    op = define("refuses_large_values(Tensor x) -> Tensor", kernel, torch.empty_like,
                lambda ctx, g: g * ctx.saved_tensors[0].exp())  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def declares_the_clamp():
    @torch.library.custom_op("mistakes::declares_the_clamp", mutates_args=("x",))
    def op(x: Tensor) -> Tensor:
        x.clamp_(-100, 100)
        return x * 2

    op.register_fake(torch.empty_like)
    return Example(op, [(torch.rand(4, 6),)])
