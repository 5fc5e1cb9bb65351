"""Correct operators like those of torchvision and torchao: sizes that depend on values, assertions, a fixed result dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import get_ctx

from mistakes import Example, right


@right()
def keep_scores():
    """Like nms: the fake kernel does not know how many there are, also of empty inputs."""

    @torch.library.custom_op("mistakes::keep_scores", mutates_args=())
    def op(scores: Tensor, least: float) -> Tensor:
        return (scores.reshape(-1) > least).nonzero().squeeze(-1)

    op.register_fake(lambda scores, least: scores.new_empty(get_ctx().new_dynamic_size(), dtype=torch.long))
    return Example(op, [(torch.tensor([0.4963, 0.7682, 0.0885, 0.1320, 0.3074, 0.6341]), 0.5)])


@right()
def scale_groups():
    """Like choose_qparams_affine: an assertion rejects other numbers of dimensions."""

    @torch.library.custom_op("mistakes::scale_groups", mutates_args=())
    def op(x: Tensor, group: int) -> Tensor:
        assert x.dim() == 2
        assert x.shape[-1] % group == 0, f"{x.shape[-1]} is not a multiple of {group}"
        return x.reshape(x.shape[0], -1, group).abs().amax(-1)

    @op.register_fake
    def _(x, group):
        assert x.dim() == 2
        assert x.shape[-1] % group == 0, f"{x.shape[-1]} is not a multiple of {group}"
        return x.new_empty(x.shape[0], x.shape[-1] // group)

    return Example(op, [(torch.rand(4, 8), 4)])


@right()
def dequantize():
    """Like dequantize_affine: the result is float32, and a float64 scale gets a gradient that is no more exact."""

    @torch.library.custom_op("mistakes::dequantize", mutates_args=())
    def op(x: Tensor, scale: Tensor) -> Tensor:
        torch._check(x.dim() == 2, lambda: "x must have 2 dimensions")
        return (x * scale.unsqueeze(-1)).to(torch.float32).contiguous()

    @op.register_fake
    def _(x, scale):
        torch._check(x.dim() == 2, lambda: "x must have 2 dimensions")
        return x.new_empty(x.shape, dtype=torch.float32)

    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return None, (grad * x).sum(-1).to(scale.dtype)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    x = torch.arange(32).view(4, 8) - 16
    return Example(op, [(x.to(torch.int8), torch.rand(4).requires_grad_())])
