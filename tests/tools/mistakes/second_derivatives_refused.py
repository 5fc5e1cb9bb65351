"""Correct: an operator with a derivative, whose second derivative raises an error."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right


def contiguous(x, *_):
    return x.new_empty(x.shape)


@right()
def once_in_a_custom_op():
    @custom_op("mistakes::once_backward", mutates_args=())
    def once_backward(g: Tensor, x: Tensor) -> Tensor:
        return (g * x.cos()).contiguous()

    @custom_op("mistakes::once", mutates_args=())
    def once(x: Tensor) -> Tensor:
        return x.sin().contiguous()

    once_backward.register_fake(lambda g, x: x.new_empty(x.shape))
    once.register_fake(contiguous)
    once.register_autograd(
        once_differentiable(lambda ctx, g: once_backward(g, *ctx.saved_tensors)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return Example(once, [(torch.rand(4, 6),)])


@right()
def once_in_a_function_of_two():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, y)

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return (g * y).sum_to_size(x.shape), (g * x).sum_to_size(y.shape)

    op = define("once_product(Tensor x, Tensor y) -> Tensor", lambda x, y: (x * y).contiguous(),
                lambda x, y: (x * y).contiguous())  # fmt: skip
    LIBRARY.impl("mistakes::once_product", Product.apply, "Autograd")
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6))])


@right()
def once_under_torch_func():
    """A Function with setup_context, which torch.func differentiates."""

    class Square(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    LIBRARY.define("once_square(Tensor x) -> Tensor")
    LIBRARY.impl("mistakes::once_square", Square.apply, "CompositeImplicitAutograd")
    return Example(torch.ops.mistakes.once_square.default, [(torch.rand(4, 6),)])


@right()
def an_error_of_its_own():
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, x):
            return 3 * g * x * x

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("cube has no second derivative")

    op = define("own_error(Tensor x) -> Tensor", lambda x: (x**3).contiguous(), contiguous,
                lambda ctx, g: Backward.apply(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
