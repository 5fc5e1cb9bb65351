"""It returns numbers and tensors, which TorchScript and the files of torch.export do not support."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from mistakes import Example, define, right


@right()
def keep():
    @custom_op("mistakes::keep", mutates_args=())
    def keep(x: Tensor) -> tuple[int, Tensor]:
        return int((x > 0.5).sum()), (x * 2).contiguous()

    keep.register_fake(lambda x: (get_ctx().new_dynamic_size(), x.new_empty(x.shape)))
    return Example(keep, [(torch.rand(4, 6),)])


@right()
def blocks():
    def kernel(x, size=4):
        return (x + 1).contiguous(), -x.shape[-1] % size, x.sum(-1).contiguous()

    def fake(x, size=4):
        return x.new_empty(x.shape), -x.shape[-1] % size, torch.empty_like(x.sum(-1))

    op = define("blocks(Tensor x, SymInt size=4) -> (Tensor, SymInt, Tensor)", kernel, fake,
                lambda ctx, g, _, h: (g + h.unsqueeze(-1), None), lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),), (torch.rand(2, 3), 8)])


@right()
def nonzeros():
    def kernel(x):
        at = x.reshape(-1).nonzero().squeeze(1)
        return at, len(at)

    def fake(x):
        count = get_ctx().new_dynamic_size()
        return x.new_empty(count, dtype=torch.int64), count

    op = define("nonzeros(Tensor x) -> (Tensor, SymInt)", kernel, fake)
    return Example(op, [(torch.tensor([[0, 1, 2], [3, 0, 0]]),)])
