"""The fake kernel gives a constant for a number that depends on values, or on other sizes than it says."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from mistakes import Example, define, right, without_gradient, wrong

FINDS = ("fake_numbers", "compile")


@wrong(
    *FINDS,
    says="given the sample number 0 of its outputs is … but the fake kernel says 0, which a compiled program takes for the result",
)
def counts():
    @custom_op("mistakes::counts", mutates_args=())
    def counts(x: Tensor) -> int:
        return int((x > 0.5).sum())

    counts.register_fake(lambda x: 0)
    return Example(counts, [(torch.rand(4, 6),)])


@wrong(*FINDS)
def sums():
    @custom_op("mistakes::sums", mutates_args=())
    def sums(x: Tensor, weight: Tensor) -> float:
        return float((x * weight).sum())

    sums.register_fake(lambda x, weight: 0.0)
    return Example(sums, [(torch.rand(4, 6), torch.rand(6))])


@wrong(*FINDS)
def kept_count():
    def kernel(x, limit=0.5):
        return int((x > limit).sum()), (x * 2).contiguous(), bool((x > limit).all())

    op = without_gradient("kept_count(Tensor x, float limit=0.5) -> (SymInt, Tensor, bool)", kernel,
                          lambda x, limit=0.5: (get_ctx().new_dynamic_size(), x.new_empty(x.shape), False))  # fmt: skip
    return Example(op, [(torch.rand(4, 6) + 0.6,)])


@wrong("fake_numbers", "compile")
def right_for_the_sample():
    def kernel(x, block):
        return -x.shape[0] % block

    op = without_gradient("right_for_the_sample(Tensor x, int block) -> SymInt", kernel, lambda x, block: 4)
    return Example(op, [(torch.rand(4, 6), 8)])


@right()
def new_size():
    @custom_op("mistakes::new_size", mutates_args=())
    def new_size(x: Tensor) -> int:
        return int((x > 0.5).sum())

    new_size.register_fake(lambda x: get_ctx().new_dynamic_size())
    return Example(new_size, [(torch.rand(4, 6),)])


@right()
def padding():
    def kernel(x, block):
        return -x.shape[0] % block

    op = without_gradient("padding(Tensor x, SymInt block) -> SymInt", kernel, kernel)
    return Example(op, [(torch.rand(4, 6), 8)])


@right()
def pads():
    def kernel(x, size=4):
        return (x + 1).contiguous(), -x.shape[-1] % size, x.sum(-1).contiguous()

    def fake(x, size=4):
        return x.new_empty(x.shape), -x.shape[-1] % size, torch.empty_like(x.sum(-1))

    op = define("pads(Tensor x, SymInt size=4) -> (Tensor, SymInt, Tensor)", kernel, fake,
                lambda ctx, g, _, h: (g + h.unsqueeze(-1), None), lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),), (torch.rand(2, 3), 8)])


@right()
def is_wide():
    def kernel(x):
        return x.dim() > 0, x.numel() / 2, (x * 2).contiguous()

    op = without_gradient("is_wide(Tensor x) -> (bool, float, Tensor)", kernel,
                          lambda x: (x.dim() > 0, 0.5 * x.numel(), x.new_empty(x.shape)))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
