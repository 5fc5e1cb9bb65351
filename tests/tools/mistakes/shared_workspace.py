"""Threads share a workspace, so that one overwrites what another computes."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import Example, contiguous_like, define, keeps_nothing, no_derivative, right, wrong

X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.25


def buffer(buffers, x):
    key = x.shape, x.dtype, x.device
    if key not in buffers:
        buffers[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return buffers[key]


@wrong("threads", says="called from four threads on separate inputs, output 0 differs")
def squares_in_a_workspace():
    buffers = {}

    @custom_op("mistakes::squares_in_a_workspace", mutates_args=())
    def op(x: Tensor) -> Tensor:
        work = buffer(buffers, x)
        torch.mul(x, x, out=work)
        return (work + 1).contiguous()

    op.register_fake(contiguous_like)
    op.register_autograd(no_derivative)
    return Example(op, [(X,)])


@wrong("threads")
def scale_in_a_global():
    plan = {}

    def kernel(x, y):
        plan["scale"] = x.abs().amax()
        time.sleep(0)
        return (y / plan["scale"]).to(y.dtype).contiguous()

    op = define(
        "scale_in_a_global(Tensor x, Tensor y) -> Tensor", kernel, lambda x, y: y.new_empty(y.shape), no_derivative
    )
    return Example(op, [(X, X + 1)])


@wrong("threads")
def parts_in_a_list():
    parts = []

    def kernel(xs, scale=1.0):
        parts.clear()
        for x in xs:
            parts.append((x * scale).sum())
        return torch.stack(parts[: len(xs)]).sum().reshape(1) if parts else xs[0].new_zeros(1)

    op = define("parts_in_a_list(Tensor[] xs, float scale=1.0) -> Tensor", kernel, lambda xs, scale=1.0: xs[0].new_empty(1),
                no_derivative, keeps_nothing)  # fmt: skip
    return Example(op, [([X, X + 1],)])


@wrong("threads")
def gradient_in_a_workspace():
    buffers = {}

    def kernel(grad, x):
        work = buffer(buffers, x)
        torch.cos(x, out=work)
        return (work * grad).contiguous()

    of = define("gradient_in_a_workspace_backward(Tensor grad, Tensor x) -> Tensor", kernel,
                lambda grad, x: x.new_empty(x.shape), no_derivative)  # fmt: skip
    op = define("gradient_in_a_workspace(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), contiguous_like,
                lambda ctx, grad: of(grad, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(X,)])


@right()
def squares_in_a_workspace_for_each_thread():
    local = threading.local()

    def kernel(x):
        if not hasattr(local, "buffers"):
            local.buffers = {}
        work = buffer(local.buffers, x)
        torch.mul(x, x, out=work)
        return (work + 1).contiguous()

    op = define("squares_in_a_workspace_for_each_thread(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative)
    return Example(op, [(X,)])


@right()
def squares_in_a_workspace_with_a_lock():
    buffers, lock = {}, threading.Lock()

    def kernel(x):
        with lock:
            work = buffer(buffers, x)
            torch.mul(x, x, out=work)
            return (work + 1).contiguous()

    op = define("squares_in_a_workspace_with_a_lock(Tensor x) -> Tensor", kernel, contiguous_like, no_derivative)
    return Example(op, [(X,)])
