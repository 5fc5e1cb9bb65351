"""Its kernel computes on the host while it is called, instead of on the device's stream."""

from __future__ import annotations

import ctypes
import functools

import torch

from mistakes import Example, contiguous_like, define, no_derivative, right, wrong

X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.25
ONLY = {"devices": ("openreg",)}
define = functools.partial(define, key="PrivateUse1")


def on_the_host(x):
    """The elements of a contiguous tensor of float32 or float64, without a copy."""
    kind = ctypes.c_double if x.dtype == torch.float64 else ctypes.c_float
    return (kind * x.numel()).from_address(x.data_ptr()) if x.numel() else []


def wide(x):
    """In a type that ctypes has; a tensor that has it already is not copied."""
    return (x if x.dtype == torch.float64 else x.float()).contiguous()


@wrong("stream", "large", "threads", **ONLY)
def reads_and_writes_at_once():
    def kernel(x):
        read = wide(x)
        out = torch.empty(read.shape, dtype=read.dtype, device=x.device)
        written = on_the_host(out)
        for i, value in enumerate(on_the_host(read)):
            written[i] = 2 * value
        return out.to(x.dtype)

    return Example(
        define("reads_and_writes_at_once(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative), [(X,)]
    )


@wrong("stream", **ONLY, says="its kernel computes on the host: called before its arguments' values have arrived")
def factor_read_at_once():
    def kernel(x, factor):
        return (x * on_the_host(wide(factor))[0]).contiguous()

    op = define("factor_read_at_once(Tensor x, Tensor factor) -> Tensor", kernel, contiguous_like, no_derivative)
    return Example(op, [(X, X[0, 1:3])])


@wrong("stream", **ONLY)
def gradient_computed_at_once():
    def kernel(grad, x):
        read, grad = wide(x), wide(grad)
        out = torch.empty(read.shape, dtype=read.dtype, device=x.device)
        written = on_the_host(out)
        for i, (g, value) in enumerate(zip(on_the_host(grad), on_the_host(read), strict=True)):
            written[i] = 2 * g * value
        return out.to(x.dtype)

    of = define("gradient_computed_at_once_backward(Tensor grad, Tensor x) -> Tensor", kernel,
                lambda grad, x: x.new_empty(x.shape), no_derivative)  # fmt: skip
    op = define("gradient_computed_at_once(Tensor x) -> Tensor", lambda x: x.square().contiguous(), contiguous_like,
                lambda ctx, grad: of(grad, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(X,)])


@right(**ONLY)
def computes_on_a_copy():
    def kernel(x):
        return torch.from_numpy(2 * wide(x).cpu().numpy()).to(x.device, x.dtype).contiguous()

    return Example(define("computes_on_a_copy(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative), [(X,)])


@right(**ONLY)
def calls_torch():
    op = define("calls_torch(Tensor x) -> Tensor", lambda x: torch.softmax(x.sort(-1).values, -1).contiguous(),
                contiguous_like, no_derivative)  # fmt: skip
    return Example(op, [(X,)])
