"""The gradient of an argument that is broadcast is not summed to the argument's shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, wrong


def product(x, y):
    return (x * y).contiguous()


def fake(x, y):
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.result_type(x, y))


@wrong("broadcast_gradients", says="is broadcast to [4, 6], and backward raised")
def cannot_view_it():
    """It raises unless the shapes are equal."""

    @custom_op("mistakes::cannot_view", mutates_args=())
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return product(x, y)

    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y).reshape(x.shape), (g * x).reshape(y.shape)

    multiply.register_fake(fake)
    multiply.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return Example(multiply, [(torch.rand(4, 6), torch.rand(4, 6))])


@wrong("broadcast_gradients", "gradcheck")
def takes_the_first_row():
    def first(grad, x):
        grad = grad[(0,) * (grad.dim() - x.dim())]
        return grad[tuple(slice(0, size) for size in x.shape)]

    op = define("first_row(Tensor x, Tensor y) -> Tensor", product, fake,
                lambda ctx, g: (first(g * ctx.saved_tensors[1], ctx.saved_tensors[0]),
                                first(g * ctx.saved_tensors[0], ctx.saved_tensors[1])))  # fmt: skip
    return Example(op, [(torch.rand(2, 3, 4), torch.rand(2, 3, 4))])


@wrong(
    "broadcast_gradients", says=", and the gradient of … differs … , which the sum over the broadcast dimensions gives"
)
def averages_a_bias():
    """The last of three arguments; its gradient is the mean instead of the sum."""

    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, by, bias):
            ctx.by, ctx.size = by, bias.shape
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, by, bias)

        @staticmethod
        def backward(ctx, g):
            count = max(1, g.numel() // max(1, torch.Size(ctx.size).numel()))
            return (g * ctx.by).sum_to_size(g.shape), None, g.sum_to_size(ctx.size) / count

    def kernel(x, by, bias):
        torch._check(bias.dim() <= x.dim(), lambda: "affine_mean: bias does not fit x")
        return (x * by + bias.expand(x.shape)).contiguous()

    def fake_kernel(x, by, bias):
        torch._check(bias.dim() <= x.dim(), lambda: "affine_mean: bias does not fit x")
        return x.new_empty(bias.expand(x.shape).shape, dtype=torch.promote_types(x.dtype, bias.dtype))

    op = define("affine_mean(Tensor x, float by, Tensor bias) -> Tensor", kernel, fake_kernel)
    LIBRARY.impl("mistakes::affine_mean", Affine.apply, "Autograd")
    return Example(op, [(torch.rand(4, 6), 2.0, torch.rand(4, 6))])


@right()
def sums_to_the_shape():
    op = define("sums_to_shape(Tensor x, Tensor y) -> Tensor", product, fake,
                lambda ctx, g: ((g * ctx.saved_tensors[1]).sum_to_size(ctx.saved_tensors[0].shape),
                                (g * ctx.saved_tensors[0]).sum_to_size(ctx.saved_tensors[1].shape)))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6)), (torch.rand(4, 6), torch.rand(6))])


@right()
def leaves_the_sum_to_autograd():
    """Autograd sums a gradient whose shape the argument's expands to."""
    op = define("autograd_sums(Tensor x, Tensor y) -> Tensor", product, fake,
                lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6))])


@right()
def does_not_broadcast():
    def check(x, y):
        torch._check(x.dim() == y.dim(), lambda: "no_broadcast: x and y differ")
        for a, b in zip(x.shape, y.shape, strict=True):
            torch._check(a == b, lambda: "no_broadcast: x and y differ")

    op = define("no_broadcast(Tensor x, Tensor y) -> Tensor", lambda x, y: (check(x, y), (x * y).contiguous())[1],
                lambda x, y: (check(x, y), fake(x, y))[1],
                lambda ctx, g: ((g * ctx.saved_tensors[1]), (g * ctx.saved_tensors[0])))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6))])
