"""It takes an object of a C++ class, for which compilers and TorchScript have no literal."""

from __future__ import annotations

import torch

from mistakes import Example, define, right, without_gradient
from openreg_tools.core.samples import Sample

LINEAR = "__torch__.torch.classes.quantized.LinearPackedParamsBase"


def packed():
    return torch.ops.quantized.linear_prepack_fp16(torch.rand(3, 6), torch.rand(3))


@right()
def applies_packed():
    def kernel(x, weights):
        torch._check(x.dim() > 0 and x.shape[-1] == 6, lambda: "expected six columns")
        return torch.ops.quantized.linear_dynamic_fp16(x.cpu().float(), weights).to(x.device).contiguous()

    def fake(x, weights):
        torch._check(x.dim() > 0 and x.shape[-1] == 6, lambda: "expected six columns")
        return x.new_empty([*x.shape[:-1], 3], dtype=torch.float32)

    op = without_gradient(f"applies_packed(Tensor x, {LINEAR} weights) -> Tensor", kernel, fake)
    return Example(op, [(torch.rand(4, 6), packed())])


@right()
def scales_without_reading():
    op = define(f"scales_without_reading(Tensor x, {LINEAR}? weights=None, float scale=2.) -> Tensor",
                lambda x, weights=None, scale=2.0: (x * scale).contiguous(),
                lambda x, weights=None, scale=2.0: x.new_empty(x.shape), lambda ctx, g: (g * ctx.scale, None, None),
                lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), packed()), (torch.rand(4, 6),)])


@right()
def sums_with_object():
    op = without_gradient(f"sums_with_object(Tensor[] xs, *, {LINEAR} weights) -> (Tensor, SymInt)",
                          lambda xs, weights: (sum(xs[1:], xs[0] * 1).contiguous(), len(xs)),
                          lambda xs, weights: (sum(xs[1:], xs[0] * 1).contiguous(), len(xs)))  # fmt: skip
    return Example(op, [Sample([torch.rand(4, 6), torch.rand(4, 6)], weights=packed())])
