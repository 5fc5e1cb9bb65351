"""It takes tensors by keyword only, which register_vmap, register_autograd and DTensor do not support."""

from __future__ import annotations

import torch

from mistakes import LIBRARY, Example, define, right
from openreg_tools.core.samples import Sample


def product(x, *, weight):
    torch._check(x.shape[-1:] == weight.shape, lambda: f"expected weight of shape {x.shape[-1:]}")
    return (x * weight).contiguous()


def samples(**keywords):
    return [Sample(torch.rand(4, 6), **keywords)]


def without_autograd(*args, **kwargs):
    raise NotImplementedError("this operator has no derivative")


@right()
def keyword_weight():
    op = define("keyword_weight(Tensor x, *, Tensor weight) -> Tensor", product, product)
    LIBRARY.impl("keyword_weight", lambda keys, x, *, weight: without_autograd() if x.requires_grad or weight.requires_grad
                 else op.redispatch(keys & torch._C._after_autograd_keyset, x, weight=weight), "Autograd",
                 with_keyset=True)  # fmt: skip
    return Example(op, samples(weight=torch.rand(6)))


@right()
def keyword_indices():
    def kernel(x, shift=1, *, indices=None, where):
        rows = x[where] if indices is None else x[indices]
        return (rows + shift).contiguous()

    def fake(x, shift=1, *, indices=None, where):
        return x.new_empty([*(where if indices is None else indices).shape, *x.shape[1:]])

    schema = "keyword_indices(Tensor x, int shift=1, *, Tensor? indices=None, Tensor where) -> Tensor"
    op = define(schema, kernel, fake)
    at, x = torch.tensor([0, 2]), torch.arange(24).view(4, 6)
    return Example(op, [Sample(x, 2, where=at), Sample(x, where=at, indices=torch.tensor([1, 1, 3]))])


@right()
def keyword_function():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x, weight):
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, weight=weight)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g * weight, (g * x).sum_to_size(weight.shape)

    op = define("keyword_function(Tensor x, *, Tensor weight) -> Tensor", product, product)
    LIBRARY.impl("keyword_function", lambda x, *, weight: Function.apply(x, weight), "Autograd")
    return Example(op, samples(weight=torch.rand(6)))


@right()
def keyword_sharded():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    op = define("keyword_sharded(Tensor x, *, Tensor weight) -> Tensor", product, product)

    @register_sharding(op)
    def rows(x, weight):
        replicated = [Replicate()], [Replicate(), Replicate()]
        return [replicated, ([Shard(0)], [Shard(0), Replicate()]), ([Shard(1)], [Shard(1), Shard(0)])]

    return Example(op, [Sample(torch.arange(24).view(4, 6), weight=torch.arange(6))])
