"""The backward uses a tensor that was not saved with save_for_backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, wrong


def contiguous(x, *_):
    return x.new_empty(x.shape)


def below(op, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


@wrong(
    "saved_tensors",
    says="it keeps output 0 for backward without save_for_backward: the output and its graph refer to each other",
)
def output_as_an_attribute():
    @custom_op("mistakes::output_attribute", mutates_args=())
    def exp(x: Tensor) -> Tensor:
        return x.exp().contiguous()

    def setup(ctx, inputs, output):
        ctx.y = output

    exp.register_fake(contiguous)
    exp.register_autograd(lambda ctx, g: g * ctx.y, setup_context=setup)
    return Example(exp, [(torch.rand(4, 6),)])


@wrong(
    "saved_tensors", says="after changing x in place between forward and backward, without an error, the gradient of"
)
def inputs_in_a_list():
    """Two of three arguments."""

    def setup(ctx, inputs, output):
        ctx.held = {"factors": [inputs[0], inputs[2]]}

    def backward(ctx, g):
        x, y = ctx.held["factors"]
        return g * y, None, g * x

    def check(x, y):
        torch._check(x.dim() == y.dim(), lambda: "x and y have different shapes")
        for a, b in zip(x.shape, y.shape, strict=True):
            torch._check(a == b, lambda: "x and y have different shapes")

    op = define(
        "held_in_list(Tensor x, float by, Tensor y) -> Tensor",
        lambda x, by, y: (check(x, y), (x * y).contiguous())[1],
        lambda x, by, y: (check(x, y), x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype)))[1],
        backward,
        setup,
    )
    return Example(op, [(torch.rand(4, 6), 1.0, torch.rand(4, 6))])


@wrong("saved_tensors", says="it keeps a bool tensor of shape [4, 6] for backward without save_for_backward")
def a_mask_that_the_forward_computes():
    class Positive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mask = x > 0.5
            return below(op, x)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.mask

    op = define("mask_attribute(Tensor x) -> Tensor", lambda x: torch.where(x > 0.5, x, 0.5).contiguous(), contiguous)
    LIBRARY.impl("mistakes::mask_attribute", Positive.apply, "Autograd")
    return Example(op, [(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)),)])


@wrong("saved_tensors", "gradgradcheck")
def detached_through_data():
    """Autograd does not see that it is modified."""
    op = define("through_data(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), contiguous,
                lambda ctx, g: g * ctx.saved_tensors[0].cos(),
                lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].data))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong(
    "saved_tensors",
    "gradgradcheck",
    says="after another call, of other values, between forward and backward, without an error, the gradient of x differs",
)
def in_a_global():
    """The next call overwrites it."""
    last = {}

    def setup(ctx, inputs, output):
        last["x"] = inputs[0].detach().clone()

    op = define("in_a_global(Tensor x) -> Tensor", lambda x: (x * x).contiguous(), contiguous,
                lambda ctx, g: 2 * g * last["x"].to(g.device), setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong("saved_tensors")
def statistics_of_two_outputs():
    """It keeps an output that has no gradient of its own."""

    def setup(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.norm = output[1]
        ctx.save_for_backward(inputs[0])

    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        x, norm = ctx.saved_tensors[0], (ctx.saved_tensors[0] ** 2).sum(-1, keepdim=True).sqrt()
        return g / ctx.norm - x * (g * x).sum(-1, keepdim=True) / norm**3

    def kernel(x):
        norm = (x * x).sum(-1, keepdim=True).sqrt().contiguous()
        return (x / norm).contiguous(), norm

    op = define("normed(Tensor x) -> (Tensor, Tensor)", kernel, lambda x: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1) if x.dim() else ())),
                backward, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def saves_a_mask():
    class Positive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x > 0.5)
            return below(op, x)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    op = define("saves_mask(Tensor x) -> Tensor", lambda x: torch.where(x > 0.5, x, 0.5).contiguous(), contiguous)
    LIBRARY.impl("mistakes::saves_mask", Positive.apply, "Autograd")
    return Example(op, [(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)),)])


@right()
def saves_its_output_and_a_shape():
    def setup(ctx, inputs, output):
        ctx.shape, ctx.by = inputs[0].shape, inputs[1]
        ctx.save_for_backward(output)

    op = define("saves_output(Tensor x, float by) -> Tensor", lambda x, by: (x * by).exp().contiguous(), contiguous,
                lambda ctx, g: ((g * ctx.saved_tensors[0] * ctx.by).view(ctx.shape), None), setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), 2.0)])


@right()
def a_table_that_depends_on_no_input():
    def table(x):
        return torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype) if x.dim() else x.new_ones(())

    def setup(ctx, inputs, output):
        ctx.table = table(inputs[0])

    op = define("weighed_by_table(Tensor x) -> Tensor",
                lambda x: (x * table(x)).contiguous(), contiguous, lambda ctx, g: g * ctx.table, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def saves_nothing():
    op = define("saves_nothing(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), contiguous, lambda ctx, g: g * 2,
                lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
