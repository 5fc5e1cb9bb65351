"""Its vector loop has no remainder: what is left behind the last full vector is not processed."""

from __future__ import annotations

import torch
from torch import Tensor

from mistakes import LIBRARY, Example, define, right, wrong


def _vectors(n, width):
    return n // width * width


# The operator of issue 55.
@wrong("sizes", says="0 instead of … , with which the result for longer inputs begins")
def twice():
    @torch.library.custom_op("mistakes::twice", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        n = _vectors(x.numel(), 8)
        out.view(-1)[:n] = x.reshape(-1)[:n] * 2
        return out

    op.register_fake(lambda x: x.new_empty(x.shape))
    return Example(op, [(torch.rand(4, 8),)])


@wrong("sizes", says=", the last element of x has no effect on any output, but among")
def row_sums():
    """A reduction that ends early; a row has no vector of 64, or some."""

    def kernel(x):
        n = _vectors(x.shape[-1], 64) if x.shape[-1] > 64 else x.shape[-1]
        return x[..., :n].sum(-1)

    op = define("row_sums(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: g.unsqueeze(-1).expand_as(ctx.saved_tensors[0]).contiguous())  # fmt: skip
    return Example(op, [(torch.rand(3, 64),)])


@wrong("sizes", says=", the last element of output 0 is 0 for any input, but not of")
def softmax_of_vectors():
    """The sum is complete, but the last probabilities are not written."""

    @torch.library.custom_op("mistakes::softmax_of_vectors", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        n = _vectors(x.shape[-1], 4)
        out[..., :n] = x.softmax(-1)[..., :n]
        return out

    op.register_fake(lambda x: x.new_empty(x.shape))
    return Example(op, [(torch.rand(2, 3, 16),)])


@wrong("sizes")
def add_a_row():
    """The second argument is added to full vectors only."""

    def kernel(x, bias):
        torch._check(x.dtype == bias.dtype and x.shape[-1:] == bias.shape, lambda: "add_a_row: bias does not fit x")
        n = _vectors(bias.shape[0], 16)
        out = x.clone(memory_format=torch.contiguous_format)
        out[..., :n] += bias[:n]
        return out

    def fake(x, bias):
        torch._check(x.dtype == bias.dtype and x.shape[-1:] == bias.shape, lambda: "add_a_row: bias does not fit x")
        return x.new_empty(x.shape)

    op = define("add_a_row(Tensor x, Tensor bias) -> Tensor", kernel, fake,
                lambda ctx, g: (g, g.reshape(-1, g.shape[-1]).sum(0)))  # fmt: skip
    torch.library.register_autocast("mistakes::add_a_row", "cpu", torch.float32, lib=LIBRARY)
    return Example(op, [(torch.rand(4, 16), torch.rand(16))])


@wrong("sizes")
def scale_in_place():
    @torch.library.custom_op("mistakes::scale_in_place", mutates_args=("x",))
    def op(x: Tensor, factor: float) -> None:
        if x.dim():
            x[: _vectors(x.shape[0], 32)].mul_(factor)
        else:
            x.mul_(factor)

    op.register_fake(lambda x, factor: None)
    return Example(op, [(torch.rand(32, 3), 2.5)])


@wrong("sizes")
def take_rows():
    """Only the number of indices has a remainder."""

    @torch.library.custom_op("mistakes::take_rows", mutates_args=())
    def op(table: Tensor, index: Tensor) -> Tensor:
        out, n = table.new_zeros(index.shape[0], *table.shape[1:]), _vectors(index.shape[0], 2)
        out[:n] = table[index[:n]]
        return out

    op.register_fake(lambda table, index: table.new_empty(index.shape[0], *table.shape[1:]))
    return Example(op, [(torch.rand(7, 3), torch.tensor([4, 0, 2, 6]))])


@wrong("sizes")
def sine_with_a_short_backward():
    def gradient(g, x):
        out, n = torch.zeros_like(g, memory_format=torch.contiguous_format), _vectors(g.numel(), 8)
        out.view(-1)[:n] = (g * x.cos()).reshape(-1)[:n]
        return out

    inner = define("short_sine_gradient(Tensor g, Tensor x) -> Tensor", gradient, lambda g, x: g.new_empty(g.shape),
                   lambda ctx, gg: (gg * ctx.saved_tensors[1].cos(),
                                    -gg * ctx.saved_tensors[0] * ctx.saved_tensors[1].sin()))  # fmt: skip
    op = define("sine_with_a_short_backward(Tensor x) -> Tensor", torch.sin, torch.empty_like,
                lambda ctx, g: inner(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(2, 8),)])


@wrong("sizes", says="if fresh memory is filled with 0x … : it does not write all of it")
def gate():
    """Takes pairs: both halves of a row have a remainder."""

    def halves(x):
        torch._check(x.dim() > 0 and x.shape[-1] % 2 == 0, lambda: "gate: expected an even number of columns")
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]

    @torch.library.custom_op("mistakes::gate", mutates_args=())
    def op(x: Tensor) -> Tensor:
        a, b = halves(x)
        out, n = torch.empty_like(a, memory_format=torch.contiguous_format), _vectors(a.shape[-1], 4)
        out[..., :n] = a[..., :n] * b[..., :n]
        return out

    op.register_fake(lambda x: torch.empty_like(halves(x)[0], memory_format=torch.contiguous_format))
    return Example(op, [(torch.rand(3, 16),)])


@right()
def twice_with_a_remainder():
    def kernel(x):
        out, flat = torch.zeros(x.shape, dtype=x.dtype, device=x.device), x.reshape(-1)
        n = _vectors(x.numel(), 8)
        out.view(-1)[:n] = flat[:n] * 2
        out.view(-1)[n:] = flat[n:] + flat[n:]
        return out

    op = define("twice_with_a_remainder(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape),
                lambda ctx, g: g * 2)  # fmt: skip
    return Example(op, [(torch.rand(4, 8),)])


@right()
def pools_pairs():
    """An odd size leaves an element without a pair, which is dropped by design."""

    def kernel(x):
        n = _vectors(x.shape[-1], 2)
        return (x[..., 0:n:2] + x[..., 1:n:2]).contiguous()

    def backward(ctx, g):
        pairs = g.repeat_interleave(2, -1)
        return torch.nn.functional.pad(pairs, (0, ctx.saved_tensors[0].shape[-1] - pairs.shape[-1]))

    op = define("pools_pairs(Tensor x) -> Tensor", kernel,
                lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2), backward)  # fmt: skip
    return Example(op, [(torch.rand(3, 8),)])


@right()
def quantizes_blocks():
    """Blocks of 32 share a scale, and the last one may be shorter."""

    @torch.library.custom_op("mistakes::quantizes_blocks", mutates_args=())
    def op(x: Tensor) -> Tensor:
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 32)).view(-1, 32)
        scale = flat.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return ((flat / scale).round() * scale).view(-1)[: x.numel()].view(x.shape).clone()

    op.register_fake(lambda x: x.new_empty(x.shape))
    return Example(op, [(torch.rand(4, 8),)])


@right()
def only_multiples_of_four():
    def kernel(x):
        torch._check(x.dim() > 0 and x.shape[-1] % 4 == 0, lambda: "only_multiples_of_four: expected a multiple of 4")
        return x.sin().contiguous()

    def fake(x):
        torch._check(x.dim() > 0 and x.shape[-1] % 4 == 0, lambda: "only_multiples_of_four: expected a multiple of 4")
        return x.new_empty(x.shape)

    op = define(
        "only_multiples_of_four(Tensor x) -> Tensor", kernel, fake, lambda ctx, g: g * ctx.saved_tensors[0].cos()
    )
    return Example(op, [(torch.rand(3, 8),)])


@right()
def mirrored_difference():
    """The middle of an odd size is zero for any input."""
    op = define("mirrored_difference(Tensor x) -> Tensor", lambda x: (x - x.flip(-1)).contiguous(), lambda x: x.new_empty(x.shape),
                lambda ctx, g: g - g.flip(-1))  # fmt: skip
    return Example(op, [(torch.rand(3, 8),)])
