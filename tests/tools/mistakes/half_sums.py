"""It sums in half precision, so long rows lose what is added last."""

from __future__ import annotations

import torch
from torch import Tensor

from mistakes import Example, define, right, wrong


def _sum(x, dim, lanes=1):
    """A sum in the dtype of x, one element after the other; `lanes` of them are added at the end."""
    x = x.movedim(dim, 0)
    total = x.new_zeros(lanes, *x.shape[1:])
    for part in x[: x.shape[0] // lanes * lanes].view(-1, lanes, *x.shape[1:]):
        total = total + part
    for element in (*x[x.shape[0] // lanes * lanes :], *total[1:]):
        total = total + element * torch.nn.functional.pad(total.new_ones(1), (0, lanes - 1)).view(
            -1, *[1] * (x.dim() - 1)
        )
    return total[0]


@wrong("half_precision", says="output 0 differs from that of the same values in float32 by … of its largest element")
def mean_of_rows():
    op = define("mean_of_rows(Tensor x) -> Tensor", lambda x: _sum(x, -1) / x.shape[-1],
                lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: (g / ctx.saved_tensors[0].shape[-1]).unsqueeze(-1).expand_as(ctx.saved_tensors[0]),
                )  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong("half_precision")
def softmax_with_a_half_sum():
    """Only the denominator, in eight lanes."""

    @torch.library.custom_op("mistakes::softmax_with_a_half_sum", mutates_args=())
    def op(x: Tensor) -> Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        return (e / _sum(e, -1, 8).unsqueeze(-1)).contiguous()

    op.register_fake(lambda x: x.new_empty(x.shape))
    return Example(op, [(torch.rand(3, 10),)])


@wrong("half_precision")
def dot_of_columns():
    """Two arguments, and the sum runs over the first dimension."""

    def kernel(x, y):
        torch._check(
            x.shape == y.shape and x.dtype == y.dtype, lambda: "dot_of_columns: expected equal shapes and dtypes"
        )
        return _sum(x * y, 0)

    def fake(x, y):
        torch._check(
            x.shape == y.shape and x.dtype == y.dtype, lambda: "dot_of_columns: expected equal shapes and dtypes"
        )
        return x.new_empty(x.shape[1:])

    op = define("dot_of_columns(Tensor x, Tensor y) -> Tensor", kernel, fake,
                lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]))  # fmt: skip
    torch.library.register_autocast("mistakes::dot_of_columns", "cpu", torch.float32)
    return Example(op, [(torch.rand(6, 4), torch.rand(6, 4))])


@wrong("half_precision")
def scale_with_a_half_weight_gradient():
    """Only the gradient of the weight."""

    def kernel(x, weight):
        torch._check(
            x.dim() > 0 and x.dtype == weight.dtype and x.shape[-1:] == weight.shape, lambda: "weight does not fit x"
        )
        return (x * weight).contiguous()

    def fake(x, weight):
        torch._check(
            x.dim() > 0 and x.dtype == weight.dtype and x.shape[-1:] == weight.shape, lambda: "weight does not fit x"
        )
        return x.new_empty(x.shape)

    reduce = define("half_weight_gradient(Tensor x) -> Tensor", lambda x: _sum(x, 0), lambda x: x.new_empty(x.shape[1:]),
                    lambda ctx, g: g.expand_as(ctx.saved_tensors[0]))  # fmt: skip

    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * weight, reduce((g * x).reshape(-1, x.shape[-1]))

    op = define("scale_with_a_half_weight_gradient(Tensor x, Tensor weight) -> Tensor", kernel, fake, backward)
    torch.library.register_autocast("mistakes::scale_with_a_half_weight_gradient", "cpu", torch.float32)
    return Example(op, [(torch.rand(5, 3), torch.rand(3))])


@wrong("half_precision")
def norm_that_adds_squares():
    @torch.library.custom_op("mistakes::norm_that_adds_squares", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return _sum((x * x).reshape(-1), 0).sqrt()

    op.register_fake(lambda x: x.new_empty(()))
    return Example(op, [(torch.rand(7),)])


@right()
def sum_in_float32():
    op = define("sum_in_float32(Tensor x) -> Tensor", lambda x: x.to(torch.promote_types(x.dtype, torch.float32)).sum(-1).to(x.dtype),
                lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: g.unsqueeze(-1).expand_as(ctx.saved_tensors[0]))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def sine_of_a_sum():
    """Rounding the sum changes its sine completely: ill-conditioned, not wrong."""
    op = define("sine_of_a_sum(Tensor x) -> Tensor", lambda x: x.sum(-1).sin(), lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: (g * ctx.saved_tensors[0].sum(-1).cos()).unsqueeze(-1).expand_as(ctx.saved_tensors[0]),
                )  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def variance_of_rounded_steps():
    """Each step rounds to half, and each sum is of float32."""

    @torch.library.custom_op("mistakes::variance_of_rounded_steps", mutates_args=())
    def op(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return (((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * x).contiguous()

    op.register_fake(lambda x: x.new_empty(x.shape))
    return Example(op, [(torch.randn(4, 6),)])


@right()
def rounds_to_steps():
    """The results are whole numbers: rounding an input may move one by 1."""

    @torch.library.custom_op("mistakes::rounds_to_steps", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return (x * 10).floor()

    op.register_fake(torch.empty_like)
    return Example(op, [(torch.rand(4, 6),)])


@right()
def only_float32():
    def only(x):
        torch._check(x.dtype == torch.float32, lambda: "only_float32: expected float32")
        return x.new_empty(x.shape[:-1])

    def kernel(x):
        only(x)
        return x.sum(-1)

    @torch.library.custom_op("mistakes::only_float32", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return kernel(x)

    op.register_fake(only)
    torch.library.register_autocast("mistakes::only_float32", "cpu", torch.float32)
    return Example(op, [(torch.rand(4, 6),)])
