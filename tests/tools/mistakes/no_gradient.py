"""Correct: an operator that has no gradient, and says so."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right


def contiguous(x, *_):
    return x.new_empty(x.shape)


@right()
def without_a_formula():
    @custom_op("mistakes::without_formula", mutates_args=())
    def without_formula(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).contiguous()

    without_formula.register_fake(lambda x, y: (x * y).contiguous())
    return Example(without_formula, [(torch.rand(4, 6), torch.rand(4, 6))])


@right()
def raises_when_it_is_called():
    def refuse(x):
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("raises_at_call is for inference; call it under torch.no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            return op(x)

    op = define("raises_at_call(Tensor x) -> Tensor", lambda x: x.exp().contiguous(), contiguous)
    LIBRARY.impl("mistakes::raises_at_call", refuse, "Autograd")
    return Example(op, [(torch.rand(4, 6),)])


@right()
def raises_in_backward():
    def backward(ctx, g, h):
        raise NotImplementedError("raises_in_backward has no derivative")

    op = define("raises_in_backward(Tensor x) -> (Tensor, Tensor)", lambda x: ((x * 2).contiguous(), x.exp().contiguous()),
                lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)), backward)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def whole_numbers():
    op = define("ranks(Tensor x) -> Tensor", lambda x: x.argsort(-1).contiguous(),
                lambda x: x.new_empty(x.shape, dtype=torch.int64))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
