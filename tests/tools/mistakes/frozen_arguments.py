"""The gradient of an argument is wrong when other arguments are frozen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, wrong


def fits(x, w):
    torch._check(x.dim() > 0 and w.dim() == 1, lambda: "x needs a dimension, w one")
    torch._check(w.shape[0] == x.shape[-1], lambda: "w does not fit x")


def empty(x, w):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, w.dtype))


def fake(x, w):
    fits(x, w)
    return empty(x, w)


@wrong(
    "frozen_arguments",
    says="if only x requires a gradient, the gradient of x differs … , which backward gives when every argument requires one",
)
def forgets_a_frozen_weight():
    @custom_op("mistakes::forgets_weight", mutates_args=())
    def weigh(x: Tensor, w: Tensor) -> Tensor:
        fits(x, w)
        return (x * w).contiguous()

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return g.clone(), None
        return g * w, (g * x).reshape(-1, x.shape[-1]).sum(0)

    weigh.register_fake(fake)
    weigh.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return Example(weigh, [(torch.rand(4, 6), torch.rand(6))])


@wrong("frozen_arguments")
def saves_too_little():
    """Without a gradient of w it saves no w; a bias is in between."""

    def setup(ctx, inputs, output):
        x, _, w = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w if ctx.needs_input_grad[2] else None)

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (
            g if w is None else g * w,
            g.reshape(-1, g.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None,
            (g * x).reshape(-1, g.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None,
        )

    def kernel(x, b, w):
        fits(x, w), fits(x, b)
        return (x * w + b).contiguous()

    op = define("saves_too_little(Tensor x, Tensor b, Tensor w) -> Tensor", kernel,
                lambda x, b, w: (fits(x, w), fits(x, b), empty(empty(x, w), b))[2], backward, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6), torch.rand(6))])


@wrong("frozen_arguments", says="if only x requires a gradient, backward raised")
def returns_one_gradient_too_few():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, by):
            ctx.save_for_backward(x, by)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, by)

        @staticmethod
        def backward(ctx, g):
            x, by = ctx.saved_tensors
            wanted = [g * by, (g * x).sum()]
            return tuple(each for each, needed in zip(wanted, ctx.needs_input_grad, strict=True) if needed)

    def check(x, by):
        torch._check(by.dim() == 0, lambda: "by is one number")

    op = define("one_too_few(Tensor x, Tensor by) -> Tensor", lambda x, by: (check(x, by), (x * by).contiguous())[1],
                lambda x, by: (check(x, by), x.new_empty(x.shape, dtype=torch.result_type(x, by)))[1])  # fmt: skip
    LIBRARY.impl("mistakes::one_too_few", Scale.apply, "Autograd")
    return Example(op, [(torch.rand(4, 6), torch.tensor(1.5))])


@wrong("frozen_arguments")
def of_a_list():
    """All gradients of the list, or none of it, are right."""

    def backward(ctx, g):
        *xs, by = ctx.saved_tensors
        needed = ctx.needs_input_grad[0]
        return [g * by if all(needed) else g for _ in xs], (g * sum(xs)).sum()

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[0], inputs[1])

    def check(xs, by):
        torch._check(all(x.shape == xs[0].shape for x in xs), lambda: "unequal")
        torch._check(by.dim() == 0, lambda: "by is one number")

    op = define("summed_list(Tensor[] xs, Tensor by) -> Tensor", lambda xs, by: (check(xs, by), (sum(xs) * by).contiguous())[1],
                lambda xs, by: (check(xs, by), torch.empty_like(sum(xs) * by, memory_format=torch.contiguous_format))[1], backward, setup)  # fmt: skip
    return Example(op, [([torch.rand(4, 6), torch.rand(4, 6)], torch.tensor(1.5))])


@wrong("frozen_arguments")
def a_fake_kernel_without_the_mask():
    """The operator for the backward computes what the mask asks for; its fake kernel allocates everything."""

    def kernel(g, x, w, needed):
        return ((g * w).contiguous() if needed[0] else g.new_empty(0),
                (g * x).reshape(-1, x.shape[-1]).sum(0) if needed[1] else g.new_empty(0))  # fmt: skip

    helper = define("masked_backward(Tensor g, Tensor x, Tensor w, bool[2] needed) -> (Tensor, Tensor)", kernel,
                    lambda g, x, w, needed: (empty(x, w), empty(x, w).new_empty(w.shape)))  # fmt: skip

    def backward(ctx, g):
        with torch.no_grad():
            grads = helper(g, *ctx.saved_tensors, list(ctx.needs_input_grad))
        return tuple(each if needed else None for each, needed in zip(grads, ctx.needs_input_grad, strict=True))

    op = define("masked(Tensor x, Tensor w) -> Tensor", lambda x, w: (fits(x, w), (x * w).contiguous())[1], fake,
                torch.autograd.function.once_differentiable(backward))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


@right()
def leaves_out_what_is_frozen():
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (
            g * w if ctx.needs_input_grad[0] else None,
            (g * x).reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None,
        )

    op = define(
        "leaves_out(Tensor x, Tensor w) -> Tensor", lambda x, w: (fits(x, w), (x * w).contiguous())[1], fake, backward
    )
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


@right()
def saves_what_is_needed():
    def setup(ctx, inputs, output):
        x, w = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return None if w is None else g * w, None if x is None else (g * x).reshape(-1, x.shape[-1]).sum(0)

    op = define("saves_needed(Tensor x, Tensor w) -> Tensor", lambda x, w: (fits(x, w), (x * w).contiguous())[1], fake,
                backward, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


def turned(name, of_x):
    """x turned by tables that have no gradient: asking for theirs is refused, and x's gradient is `of_x`."""

    def refuse_or(ctx, g):
        if any(ctx.needs_input_grad[1:]):
            raise NotImplementedError(f"{name} has no gradient of cos and sin")
        return of_x(g, *ctx.saved_tensors), None, None

    op = define(
        f"{name}(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        lambda x, cos, sin: (x * cos + x.flip(-1) * sin).to(x.dtype).contiguous(),
        lambda x, cos, sin: x.new_empty(torch.broadcast_shapes(x.shape, cos.shape, sin.shape)),
        refuse_or,
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    )
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6), torch.rand(4, 6))])


@right()
def refuses_the_gradients_of_tables():
    return turned("refuses_the_gradients_of_tables", lambda g, cos, sin: g * cos + (g * sin).flip(-1))


@wrong("gradcheck", "func_grad", "vmap_grad")
def refuses_those_of_tables_and_forgets_the_flip():
    return turned("refuses_those_of_tables_and_forgets_the_flip", lambda g, cos, sin: g * cos + g * sin)
