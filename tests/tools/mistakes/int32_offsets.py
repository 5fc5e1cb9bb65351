"""It computes offsets in 32 bits, so it reads other elements when strides are beyond 2**31."""

from __future__ import annotations

import ctypes
import itertools

import torch
from torch import Tensor

from mistakes import Example, define, right, wrong


def _gather(x, offset):
    """The elements of x, which a kernel with a pointer reads at `offset(indices)`."""
    if x.numel() > 500:  # the loop would take long
        return x.clone(memory_format=torch.contiguous_format)
    out = torch.empty(x.shape, dtype=x.dtype)
    size = x.element_size()
    for i, place in enumerate(itertools.product(*map(range, x.shape))):
        ctypes.memmove(out.data_ptr() + i * size, x.data_ptr() + offset(place) * size, size)
    return out


def _int32(x):
    return ctypes.c_int32(x).value


@wrong(
    "large_strides",
    devices=("cpu",),
    says="given x with rows 4294967296 elements apart, output 0 differs … , which near ones give",
)
def offset_in_int32():
    """The whole offset, in any number of dimensions."""

    def kernel(x):
        return _gather(x, lambda place: _int32(sum(i * s for i, s in zip(place, x.stride(), strict=True)))) * 2

    op = define("offset_in_int32(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape), lambda ctx, g: g * 2)
    return Example(op, [(torch.rand(3, 4),), (torch.rand(5),)])


@wrong("large_strides", devices=("cpu",))
def rows_in_uint32():
    """Only the rows of the second argument: the first one is copied."""

    @torch.library.custom_op("mistakes::rows_in_uint32", mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        torch._check(x.shape == y.shape, lambda: "rows_in_uint32: expected equal shapes")
        if y.dim() != 2 or y.stride(1) != 1:
            y = y.contiguous()
        y = _gather(y, lambda p: ctypes.c_uint32(p[0] * y.stride(0)).value + p[1]) if y.dim() == 2 else y
        return (x * y).contiguous()

    @op.register_fake
    def _(x, y):
        torch._check(x.shape == y.shape, lambda: "rows_in_uint32: expected equal shapes")
        return x.new_empty(x.shape, dtype=torch.result_type(x, y))

    return Example(op, [(torch.rand(3, 4), torch.rand(3, 4))])


@wrong("large_strides", devices=("cpu",))
def bytes_in_int32():
    """Strides in bytes, cut before they are multiplied; a sum of batches."""

    @torch.library.custom_op("mistakes::bytes_in_int32", mutates_args=())
    def op(x: Tensor) -> Tensor:
        size = x.element_size()
        strides = [_int32(s * size) // size for s in x.stride()]
        return _gather(x, lambda place: sum(i * s for i, s in zip(place, strides, strict=True))).sum(0)

    op.register_fake(lambda x: x.new_empty(x.shape[1:]))
    return Example(op, [(torch.rand(2, 3, 4),)])


@wrong("large_strides", devices=("cpu",))
def backward_in_int32():
    def gradient(g, x):
        torch._check(g.shape == x.shape, lambda: "expected equal shapes")
        x = _gather(x, lambda place: _int32(sum(i * s for i, s in zip(place, x.stride(), strict=True))))
        return (g * x.cos()).contiguous()

    inner = define("sine_gradient_in_int32(Tensor g, Tensor x) -> Tensor", gradient, lambda g, x: g.new_empty(g.shape),
                   lambda ctx, gg: (gg * ctx.saved_tensors[1].cos(),
                                    -gg * ctx.saved_tensors[0] * ctx.saved_tensors[1].sin()))  # fmt: skip
    op = define("backward_in_int32(Tensor x) -> Tensor", torch.sin, torch.empty_like,
                lambda ctx, g: inner(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(3, 4),)])


@right(devices=("cpu",))
def offset_in_int64():
    def kernel(x):
        return _gather(x, lambda place: sum(i * s for i, s in zip(place, x.stride(), strict=True))) * 2

    op = define("offset_in_int64(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape), lambda ctx, g: g * 2)
    return Example(op, [(torch.rand(3, 4),), (torch.rand(5),)])


@right(devices=("cpu",))
def contiguous_in_int32():
    def kernel(x):
        x = x.contiguous()
        return _gather(x, lambda place: _int32(sum(i * s for i, s in zip(place, x.stride(), strict=True)))).sum(-1)

    op = define("contiguous_in_int32(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: g.unsqueeze(-1).expand_as(ctx.saved_tensors[0]))  # fmt: skip
    return Example(op, [(torch.rand(3, 4),)])


@right(devices=("cpu",))
def refuses_large_strides():
    def kernel(x):
        torch._check(all(s < 2**31 for s in x.stride()), lambda: "refuses_large_strides: strides must fit in 32 bits")
        return x.sin()

    op = define("refuses_large_strides(Tensor x) -> Tensor", kernel, torch.empty_like,
                lambda ctx, g: g * ctx.saved_tensors[0].cos())  # fmt: skip
    return Example(op, [(torch.rand(3, 4),)])


@right(devices=("cpu",))
def keeps_the_strides():
    """Its output has the strides of its input, for which there may be no memory."""
    op = define("keeps_the_strides(Tensor x) -> Tensor",
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x).mul_(2),
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
                lambda ctx, g: g * 2)  # fmt: skip
    return Example(op, [(torch.rand(3, 4),)])
