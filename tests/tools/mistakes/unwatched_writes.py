"""Correct: an operator that writes to tensors that nobody differentiates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import Example, define, right
from openreg_tools.core.samples import Sample


@right()
def into_an_output_buffer():
    @custom_op("mistakes::into", mutates_args=("out",))
    def into(out: Tensor, x: Tensor) -> None:
        out.copy_(x * 2)

    into.register_fake(lambda out, x: None)
    return Example(into, [(torch.rand(4, 6), torch.rand(4, 6))])


@right()
def into_a_cache():
    """It also returns something."""

    @custom_op("mistakes::put", mutates_args=("cache",))
    def put(cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(x)
        return x.sum(0)

    put.register_fake(lambda cache, x: x.new_empty(x.shape[1:]))
    return Example(put, [(torch.rand(4, 6), torch.rand(4, 6))])


@right(devices=("cpu",))  # on openreg, what a kernel calls does not increase version counters
def into_two_of_a_library():
    """Without a kernel at an Autograd key; it writes at places that an index names."""

    def kernel(keys, values, x, at):
        keys[at] = x.to(keys.dtype)
        values[at] = -x.to(values.dtype)

    op = define("cache_rows(Tensor(a!) keys, Tensor(b!) values, Tensor x, Tensor at) -> ()", kernel,
                lambda keys, values, x, at: None)  # fmt: skip
    return Example(op, [(torch.rand(8, 6), torch.rand(8, 6), torch.rand(4, 6), torch.tensor([5, 0, 3, 6]))])


if hasattr(torch.Tag, "inplace"):

    @right()
    def with_the_tag_for_in_place():
        @custom_op("mistakes::tagged_", mutates_args=("x",), tags=torch.Tag.inplace)
        def tagged_(x: Tensor, by: float) -> Tensor:
            return x.mul_(by)

        return Example(tagged_, [(torch.rand(4, 6), 2.0)])

    @right()
    def with_the_tag_for_out():
        @custom_op("mistakes::tagged_out", mutates_args=("out",), tags=torch.Tag.out)
        def tagged_out(x: Tensor, *, out: Tensor) -> Tensor:
            return out.copy_(x * 2)

        return Example(tagged_out, [Sample(torch.rand(4, 6), out=torch.rand(4, 6))])


@right(devices=("cpu",))  # on openreg, what a kernel calls does not increase version counters
def into_a_list_that_may_be_none():
    @torch.no_grad()
    def kernel(x, outs=None):
        for out in outs or ():
            out.copy_(x)
        return (x * 2).contiguous()

    op = define(
        "optional_outs(Tensor x, Tensor(a!)[]? outs=None) -> Tensor", kernel, lambda x, outs=None: x.new_empty(x.shape)
    )
    x = torch.rand(4, 6)
    return Example(op, [(x, [torch.rand(4, 6), torch.rand(4, 6)]), (x, None)])


@right(devices=("cpu",))  # on openreg, what a kernel calls does not increase version counters
def into_a_list_of_a_library():
    def kernel(x, outs=None):
        for out in outs or ():
            out.copy_(x)

    op = define("list_of_library(Tensor x, Tensor(a!)[]? outs=None) -> ()", kernel, lambda x, outs=None: None)
    return Example(op, [(torch.rand(4, 6), [torch.rand(4, 6), torch.rand(4, 6)])])
