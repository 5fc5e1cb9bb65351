"""It assumes that contiguous memory starts its storage, or is aligned to 16 bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mistakes import LIBRARY, Example, define, right, wrong


def _at(pointer, x):
    """What a kernel with a bare pointer reads."""
    memory = (ctypes.c_char * (x.numel() * x.element_size())).from_address(pointer)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape) if x.numel() else x


def _cosine(ctx, g):
    return g * ctx.saved_tensors[0].cos()


# The two operators of issue 55.


@wrong(
    "layouts",
    "vmap",
    "vmap_grad",
    "autocast",
    says="one element into their storage, which is not aligned to 16 bytes it raised",
)
def raises_if_unaligned():
    @torch.library.custom_op("mistakes::raises_if_unaligned", mutates_args=())
    def op(x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        return x * 2

    op.register_fake(lambda x: x.new_empty(x.shape))
    op.register_vmap(lambda info, dims, x: (op(x.movedim(dims[0], 0)), 0))
    return Example(op, [(torch.rand(4, 6),)])


@wrong("layouts", devices=("cpu",))
def starts_at_the_storage():
    @torch.library.custom_op("mistakes::starts_at_the_storage", mutates_args=())
    def op(x: Tensor) -> Tensor:
        x = x.contiguous()
        return _at(x.untyped_storage().data_ptr(), x) * 2

    op.register_fake(lambda x: x.new_empty(x.shape))
    op.register_vmap(lambda info, dims, x: (op(x.movedim(dims[0], 0).contiguous().clone()), 0))
    return Example(op, [(torch.rand(4, 6),)])


@wrong("layouts", "vmap", devices=("cpu",))
def offset_of_the_other():
    """The second argument is read at the first one's offset."""

    def kernel(x, y):
        torch._check(x.shape == y.shape, lambda: "expected equal shapes")
        torch._check(x.dtype == y.dtype, lambda: "expected one dtype")
        x, y = x.contiguous(), y.contiguous()
        offset = x.storage_offset() * y.element_size()
        return x * 2 + _at(y.untyped_storage().data_ptr() + offset, y)

    def fake(x, y):
        torch._check(x.shape == y.shape, lambda: "expected equal shapes")
        torch._check(x.dtype == y.dtype, lambda: "expected one dtype")
        return x.new_empty(x.shape)

    op = define("offset_of_the_other(Tensor x, Tensor y) -> Tensor", kernel, fake, lambda ctx, g: (g * 2, g),
                lambda ctx, inputs, output: None)  # fmt: skip
    torch.library.register_autocast("mistakes::offset_of_the_other", "cpu", torch.float32, lib=LIBRARY)
    return Example(op, [(torch.rand(3, 4, 5), torch.rand(3, 4, 5))])


@wrong("layouts", "vmap", "vmap_grad", devices=("cpu",))
def rounds_the_pointer_down():
    def kernel(x):
        x = x.contiguous()
        return _at(x.data_ptr() // 16 * 16, x).sum(-1)

    op = define("rounds_the_pointer_down(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape[:-1]),
                lambda ctx, g: g.unsqueeze(-1).expand_as(ctx.saved_tensors[0]))  # fmt: skip
    return Example(op, [(torch.rand(8),), (torch.rand(3, 8),)])


@wrong("layouts", devices=("cpu",))
def writes_at_the_storage():
    """In place: the written argument is found from its storage."""

    @torch.library.custom_op("mistakes::writes_at_the_storage", mutates_args=("cache",))
    def op(cache: Tensor, x: Tensor) -> None:
        torch._check(
            cache.is_contiguous() and cache.shape == x.shape, lambda: "expected a contiguous cache of x's shape"
        )
        cache.as_strided(cache.shape, cache.stride(), 0).copy_(x)

    op.register_fake(lambda cache, x: None)
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6))])


@wrong("layouts", devices=("cpu",))
def backward_starts_at_the_storage():
    def gradient(g, x):
        x = x.contiguous()
        return g * _at(x.untyped_storage().data_ptr(), x).cos()

    inner = define("sine_gradient_at_the_storage(Tensor g, Tensor x) -> Tensor", gradient,
                   lambda g, x: torch.empty_like(g))  # fmt: skip

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, x):
            ctx.save_for_backward(g, x)
            return inner(g, x)

        @staticmethod
        def backward(ctx, gg):
            g, x = ctx.saved_tensors
            return gg * x.cos(), -gg * g * x.sin()

    op = define("backward_starts_at_the_storage(Tensor x) -> Tensor", torch.sin, torch.empty_like,
                lambda ctx, g: Gradient.apply(g, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right()
def copies_what_is_not_aligned():
    def kernel(x):
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % 16 else x
        assert x.data_ptr() % 16 == 0
        return x.sin()

    op = define("copies_what_is_not_aligned(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape), _cosine)
    return Example(op, [(torch.rand(4, 6),), (torch.rand(25)[1:],)])


@right()
def refuses_what_is_not_aligned():
    def kernel(x):
        x = x.contiguous()
        torch._check(x.data_ptr() % 16 == 0, lambda: "refuses: x must be aligned to 16 bytes; call x.clone()")
        return x.sin()

    def rule(info, dims, x):
        return op(x.movedim(dims[0], 0).clone(memory_format=torch.contiguous_format)), 0

    op = define("refuses_what_is_not_aligned(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape), _cosine,
                vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@right(devices=("cpu",))
def reads_at_the_pointer():
    @torch.library.custom_op("mistakes::reads_at_the_pointer", mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        x, index = x.contiguous(), index.contiguous()
        return _at(x.data_ptr(), x)[_at(index.data_ptr(), index)].clone()

    op.register_fake(lambda x, index: x.new_empty(index.shape + x.shape[1:]))
    return Example(op, [(torch.rand(5, 3), torch.tensor([4, 0, 2])), (torch.rand(5), torch.tensor(3))])
