"""It takes or returns float8, which has no arithmetic and no gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import Example, define, right, without_gradient


@right()
def quant():
    @custom_op("mistakes::quant", mutates_args=())
    def quant(x: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(x.dim() == 2, lambda: "x must be 2-d")
        scale = x.abs().amax(-1, keepdim=True).float() / 448 + 1e-12
        return (x.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale.contiguous()

    @quant.register_fake
    def _(x):
        torch._check(x.dim() == 2, lambda: "x must be 2-d")
        scale = x.new_empty([*x.shape[:-1], 1], dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale

    return Example(quant, [(torch.rand(4, 8),)])


@right()
def dequant():
    @custom_op("mistakes::dequant", mutates_args=())
    def dequant(q: Tensor, scale: Tensor) -> Tensor:
        return (q.float() * scale.float()).contiguous()

    dequant.register_fake(lambda q, scale: q.new_empty(q.shape, dtype=torch.float32))
    return Example(dequant, [(torch.rand(4, 8).to(torch.float8_e5m2), torch.rand(4, 1))])


@right()
def scaled_matmul():
    def check(a, b):
        torch._check(a.dim() == 2 and b.dim() == 2, lambda: "a and b must be matrices")
        torch._check(a.shape[1] == b.shape[0], lambda: "a and b do not fit")

    def kernel(a, b, scale):
        check(a, b)
        return (a.float() @ b.float() * scale).to(torch.bfloat16).contiguous()

    def fake(a, b, scale):
        check(a, b)
        return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return None, None, (g.float() * (a.float() @ b.float())).sum()

    op = define("scaled_matmul(Tensor a, Tensor b, Tensor scale) -> Tensor", kernel, fake, backward,
                lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))  # fmt: skip
    a, b = (torch.rand(shape).to(torch.float8_e4m3fn) for shape in ((4, 8), (8, 6)))
    return Example(op, [(a, b, torch.tensor(0.5))])


@right()
def cast_with_a_gradient():
    def kernel(x):
        return x.to(torch.float8_e4m3fn).contiguous(), (x * 2).contiguous()

    def fake(x):
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape)

    op = define("cast_with_a_gradient(Tensor x) -> (Tensor, Tensor)", kernel, fake, lambda ctx, _, g: g * 2,
                lambda ctx, inputs, output: ctx.mark_non_differentiable(output[0]))  # fmt: skip
    return Example(op, [(torch.rand(4, 8),)])


@right()
def shuffle_float8():
    op = without_gradient("shuffle_float8(Tensor q) -> Tensor", lambda q: q[..., ::2].contiguous(),
                          lambda q: q.new_empty([*q.shape[:-1], (q.shape[-1] + 1) // 2]))  # fmt: skip
    return Example(op, [(torch.rand(4, 8).to(torch.float8_e4m3fn),)])
