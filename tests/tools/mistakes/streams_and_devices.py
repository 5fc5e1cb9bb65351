"""It works on the default stream instead of the current one, or on device 0 instead of the tensors' device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import Example, contiguous_like, define, no_derivative, right, wrong

X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.25
ONLY = {"devices": ("openreg",)}
define = functools.partial(define, key="PrivateUse1")


@wrong(
    "stream",
    **ONLY,
    says="it runs aten::mul.Tensor on the default stream, and the caller's stream does not wait for it",
)
def doubles_on_the_default_stream():
    @custom_op("mistakes::doubles_on_the_default_stream", mutates_args=(), device_types="openreg")
    def op(x: Tensor) -> Tensor:
        with torch.openreg.stream(torch.openreg.default_stream(x.device)):
            return (x * 2).contiguous()

    op.register_fake(contiguous_like)
    op.register_autograd(no_derivative)
    return Example(op, [(X,)])


@wrong("stream", **ONLY)
def backward_on_the_default_stream():
    def backward(ctx, grad):
        with torch.openreg.stream(torch.openreg.default_stream(grad.device)):
            return grad * ctx.saved_tensors[0].cos()

    op = define(
        "backward_on_the_default_stream(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), contiguous_like, backward
    )
    return Example(op, [(X,)])


@wrong("stream", **ONLY)
def second_part_on_a_stream_of_its_own():
    def kernel(x, y):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        side = torch.openreg.Stream(x.device)
        side.wait_stream(torch.openreg.current_stream(x.device))
        with torch.openreg.stream(side):
            torch.mul(x, y, out=out)  # the caller's stream does not wait for it
        return out

    op = define(
        "second_part_on_a_stream_of_its_own(Tensor x, Tensor y) -> Tensor", kernel, contiguous_like, no_derivative
    )
    return Example(op, [(X, X + 1)])


@wrong("devices", **ONLY, says="output 0 is on openreg:0, but the arguments are on openreg:1")
def allocates_on_the_current_device():
    def kernel(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device.type)
        out.copy_(x * 2)
        return out

    op = define("allocates_on_the_current_device(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative)
    return Example(op, [(X,)])


@wrong("devices", **ONLY, says="on openreg:1, while openreg:0 is the current device, it raised RuntimeError")
def ones_on_device_zero():
    def kernel(x, weight):
        return x * weight + torch.ones(
            x.shape, dtype=x.dtype, device=f"{x.device.type}:0" if x.device.type != "cpu" else "cpu"
        )

    op = define("ones_on_device_zero(Tensor x, Tensor weight) -> Tensor", kernel,
                lambda x, weight: torch.empty_like(x * weight), no_derivative)  # fmt: skip
    return Example(op, [(X, X + 1)])


@wrong("devices", **ONLY)
def second_output_on_the_current_device():
    def kernel(x):
        index = torch.zeros(x.shape, dtype=torch.int64, device=x.device.type)
        return (x * 2).contiguous(), index

    op = define("second_output_on_the_current_device(Tensor x) -> (Tensor, Tensor)", kernel,
                lambda x: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)), no_derivative)  # fmt: skip
    return Example(op, [(X,)])


@wrong("devices", **ONLY)
def gradient_on_device_zero():
    def backward(ctx, grad):
        return torch.zeros(grad.shape, dtype=grad.dtype, device=f"{grad.device.type}:0").copy_(grad * 2)

    op = define(
        "gradient_on_device_zero(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), contiguous_like, backward
    )
    return Example(op, [(X,)])


@right(**ONLY)
def doubles_on_the_current_stream():
    def kernel(x):
        with torch.openreg.stream(torch.openreg.current_stream(x.device)):
            return (x * 2).contiguous()

    return Example(
        define("doubles_on_the_current_stream(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative), [(X,)]
    )


@right(**ONLY)
def parts_on_two_streams_that_wait():
    def kernel(x, y):
        side, current = torch.openreg.Stream(x.device), torch.openreg.current_stream(x.device)
        side.wait_stream(current)
        with torch.openreg.stream(side):
            part = x * 2
        current.wait_stream(side)
        part.record_stream(current)
        return (part + y).to(x.dtype).contiguous()

    op = define("parts_on_two_streams_that_wait(Tensor x, Tensor y) -> Tensor", kernel,
                lambda x, y: x.new_empty((x + y).shape), no_derivative)  # fmt: skip
    return Example(op, [(X, X + 1)])


@right(**ONLY)
def waits_for_its_stream_on_the_host():
    def kernel(x):
        return (x * float(x.sum())).contiguous()

    return Example(
        define("waits_for_its_stream_on_the_host(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative), [(X,)]
    )
