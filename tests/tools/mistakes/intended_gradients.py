"""A gradient that is not the derivative, such as a straight-through gradient, differs from the one that the author declares."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, wrong

NUMBERS = torch.arange(24.0).reshape(4, 6) / 2 + 0.125  # not at a step, in half precision either


def contiguous(x, *_):
    return x.new_empty(x.shape)


@wrong("gradcheck", says="the gradient of x differs … , which the function given as intended_gradient has")
def scaled_by_mistake():
    op = define("rounds_and_scales(Tensor x) -> Tensor", lambda x: x.round().contiguous(), contiguous,
                lambda ctx, g: g * 2, lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(NUMBERS,)], {"intended_gradient": lambda x: x})


@wrong("gradcheck")
def clipped_at_the_wrong_bound():
    op = define("clipped_wrong(Tensor x, float bound) -> Tensor", lambda x, bound: x.sign().contiguous(), contiguous,
                lambda ctx, g: (g * (ctx.saved_tensors[0].abs() <= 2 * ctx.bound), None),
                lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "bound", inputs[1])))  # fmt: skip
    return Example(
        op,
        [((torch.arange(24.0).reshape(4, 6) - 12) / 8 + 1 / 16, 0.5)],
        {"intended_gradient": lambda x, bound: x.clamp(-bound, bound)},
    )


@wrong("gradcheck")
def no_gradient_of_the_scale():
    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, scale)

        @staticmethod
        def backward(ctx, g):
            x, scale = ctx.saved_tensors
            return g * 1, (g * (x / scale).round()).sum() * 0.5

    op = define("quantized_wrong(Tensor x, Tensor scale) -> Tensor", lambda x, scale: ((x / scale).round() * scale).contiguous(),
                lambda x, scale: x.new_empty(x.shape, dtype=torch.result_type(x, scale)))  # fmt: skip
    LIBRARY.impl("mistakes::quantized_wrong", Quantize.apply, "Autograd")
    return Example(op, [(NUMBERS, torch.tensor(0.5))], {"intended_gradient": quantized})


def quantized(x, scale):
    return x + (((x / scale).round() - x / scale).detach() * scale)


@right()
def rounds_straight_through():
    @custom_op("mistakes::rounds_straight", mutates_args=())
    def rounds(x: Tensor) -> Tensor:
        return x.round().contiguous()

    rounds.register_fake(contiguous)
    rounds.register_autograd(lambda ctx, g: g * 1)
    return Example(rounds, [(NUMBERS,)], {"intended_gradient": lambda x: x, "reference": torch.round})


@right()
def sign_with_a_clipped_gradient():
    op = define("clipped_sign(Tensor x, float bound) -> Tensor", lambda x, bound: x.sign().contiguous(), contiguous,
                lambda ctx, g: (g * (ctx.saved_tensors[0].abs() <= ctx.bound), None),
                lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "bound", inputs[1])))  # fmt: skip
    return Example(
        op,
        [((torch.arange(24.0).reshape(4, 6) - 12) / 8 + 1 / 16, 0.5)],
        {"intended_gradient": lambda x, bound: x.clamp(-bound, bound)},
    )


@right()
def quantizes_with_a_learned_scale():
    """It has two outputs, of which the integers have no gradient."""

    def setup(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    def backward(ctx, g, _):
        x, scale = ctx.saved_tensors
        return g * 1, (g * ((x / scale).round() - x / scale)).sum()

    def kernel(x, scale):
        whole = (x / scale).round()
        return (whole * scale).contiguous(), whole.to(torch.int32).contiguous()

    op = define("quantized(Tensor x, Tensor scale) -> (Tensor, Tensor)", kernel,
                lambda x, scale: (x.new_empty(x.shape, dtype=torch.result_type(x, scale)),
                                  x.new_empty(x.shape, dtype=torch.int32)), backward, setup)  # fmt: skip

    def intended(x, scale):
        return quantized(x, scale), (x / scale).round().to(torch.int32)

    return Example(op, [(NUMBERS, torch.tensor(0.5))], {"intended_gradient": intended})
