"""The backward misreads an incoming gradient that is sliced, transposed, expanded or undefined."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, wrong


def in_memory_order(g: Tensor) -> Tensor:
    """What a kernel with a bare pointer reads; zeros where memory ends before."""
    if g.untyped_storage().nbytes() < (g.storage_offset() + g.numel()) * g.element_size():
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    return g.as_strided(g.shape, torch.empty(g.shape, device="meta").stride(), g.storage_offset())


def refusing(op):
    """A call of op that has no derivative."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            return op(*arguments)

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(f"{op} has no derivative")

    return Refusing.apply


@wrong(
    "gradient_layouts",
    says="strides (18, 1)): the gradient of x differs … , which a contiguous gradient of equal values gives",
)
def rows_if_the_last_stride_is_1():
    @custom_op("mistakes::rows_backward", mutates_args=())
    def rows_backward(g: Tensor) -> Tensor:
        if g.dim() == 0 or g.stride(-1) != 1:
            g = g.contiguous()
        return in_memory_order(g) * 2

    @custom_op("mistakes::rows", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        return (x * 2).contiguous()

    rows_backward.register_fake(lambda g: g.new_empty(g.shape))
    rows.register_fake(lambda x: x.new_empty(x.shape))
    rows.register_autograd(lambda ctx, g: refusing(rows_backward)(g))
    return Example(rows, [(torch.rand(4, 6),)])


@wrong("gradient_layouts", "compile")
def the_second_of_two_gradients():
    """It reads the first by strides, and expects the second to be contiguous."""
    op = define(
        "second_of_two(Tensor x, Tensor y) -> (Tensor, Tensor)",
        lambda x, y: ((x * 2).contiguous(), y.exp().contiguous()),
        lambda x, y: (x.new_empty(x.shape), y.new_empty(y.shape)),
        lambda ctx, g, h: (g * 2, in_memory_order(h) * ctx.saved_tensors[1].exp()),
    )
    return Example(op, [(torch.rand(4, 6), torch.rand(3, 5))])


@wrong("gradient_layouts", "compile")
def expanded_in_an_autograd_function():
    """It reads an expanded gradient as if all its elements were there; the gradient is a vector."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return (in_memory_order(g) if 0 in g.stride() else g) * 3 * x * x

    op = define("cubed_rows(Tensor x) -> Tensor", lambda x: (x * x * x).contiguous(), lambda x: x.new_empty(x.shape))
    LIBRARY.impl("mistakes::cubed_rows", Cube.apply, "Autograd")
    return Example(op, [(torch.rand(6),)])


@wrong("gradient_layouts")
def a_slice_along_dimension_1():
    def backward(ctx, g):
        flat = g.dim() > 1 and g.numel() and g[0].is_contiguous()  # its rows are: they are assumed to follow each other
        return (in_memory_order(g) if flat else g) * 2

    op = define("along_1(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), lambda x: x.new_empty(x.shape), backward)
    return Example(op, [(torch.rand(2, 3, 4),)])


@wrong(
    "gradient_layouts",
    says="output 0 of mistakes::copies_strides_backward has strides (6, 1), but its fake kernel says … ; a compiled program trusts",
)
def a_fake_kernel_that_copies_strides():
    helper = define("copies_strides_backward(Tensor g, Tensor x) -> Tensor", lambda g, x: (g * x.cos()).contiguous(),
                    lambda g, x: torch.empty_like(g), lambda ctx, g: ctx.refuses())  # fmt: skip
    op = define("copies_strides(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), lambda x: x.new_empty(x.shape),
                lambda ctx, g: refusing(helper)(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong(
    "gradient_layouts",
    "gradcheck",
    says="the gradient is a slice of a wider one, as after cat or split (shape [4, 6], strides (18, 1)): backward raised RuntimeError: view size",
)
def a_view_of_the_gradient():
    """It raises for a gradient that is not contiguous."""
    op = define("viewed(Tensor x, float by) -> Tensor", lambda x, by: (x * by).contiguous(), lambda x, by: x.new_empty(x.shape),
                lambda ctx, g: ((g.view(-1) * ctx.by).view(g.shape), None),
                lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))  # fmt: skip
    return Example(op, [(torch.rand(4, 6), 3.0)])


@wrong(
    "gradient_layouts",
    "gradcheck",
    says="backward through one output at a time, so that the gradients of the others are undefined, adds up to other numbers",
)
def an_undefined_gradient():
    """It takes a gradient that is undefined for ones."""

    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    def backward(ctx, g, h):
        return (1 if g is None else g * 2) + (0 if h is None else h * 3)

    op = define("undefined(Tensor x) -> (Tensor, Tensor)", lambda x: ((x * 2).contiguous(), (x * 3).contiguous()),
                lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)), backward, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def starts_from_contiguous():
    helper = define("from_contiguous_backward(Tensor g, Tensor x) -> Tensor",
                    lambda g, x: in_memory_order(g.contiguous()) * x.cos().contiguous(),
                    lambda g, x: g.new_empty(g.shape))  # fmt: skip
    op = define("from_contiguous(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), lambda x: x.new_empty(x.shape),
                lambda ctx, g: refusing(helper)(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),), (torch.rand(2, 3, 4, 4),)])


@right()
def follows_strides():
    """The gradient that it returns has the strides of the one that arrives, also in the fake kernel."""
    helper = define(
        "follows_backward(Tensor g) -> Tensor", lambda g: torch.empty_like(g).copy_(g * 2), torch.empty_like
    )
    op = define("follows(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), lambda x: x.new_empty(x.shape),
                lambda ctx, g: refusing(helper)(g))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),), (torch.rand(6),)])


@right()
def of_undefined_gradients():
    def setup(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    def backward(ctx, g, h):
        parts = [each * by for each, by in ((g, 2), (h, 3)) if each is not None]
        return sum(parts) if parts else None

    op = define("defined_or_not(Tensor x) -> (Tensor, Tensor)", lambda x: ((x * 2).contiguous(), (x * 3).contiguous()),
                lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)), backward, setup)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
