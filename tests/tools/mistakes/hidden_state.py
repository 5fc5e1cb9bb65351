"""A call gives another result because of an earlier or later one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import Example, define, keeps_nothing, no_derivative, right, wrong

NUMBERS = torch.Generator().manual_seed(0)
X = torch.rand(4, 6, generator=NUMBERS) + 0.25


def rotation(table):
    """x times a table of angles: `table(n, theta, like)`."""
    return lambda x, theta: (x * table(x.shape[-1], theta, x)).contiguous()


def angles(n, theta, like):
    torch._check(like.dim() > 0, lambda: "x needs a dimension")
    return torch.arange(n, dtype=like.dtype, device=like.device) / theta


def shaped(x, *rest):
    torch._check(x.dim() > 0, lambda: "x needs a dimension")
    return x.new_empty(x.shape)


@wrong(
    "state",
    "compile",
    "autocast",
    says="after a call with … , a call with … gives another result: output 0 differs … , which a new process gives",
)
def table_by_size_alone():
    tables = {}

    def table(n, theta, like):
        key = n, like.dtype, like.device
        if key not in tables:
            tables[key] = angles(n, theta, like)
        return tables[key]

    op = custom_op(
        "mistakes::table_by_size_alone", rotation(table), mutates_args=(), schema="(Tensor x, float theta) -> Tensor"
    )
    op.register_fake(shaped)
    op.register_autograd(no_derivative)
    return Example(op, [(X, 10.0), (X, 3.0)])


@wrong("state")
def table_of_the_first_dtype():
    tables = {}

    def kernel(x):
        torch._check(x.dim() > 0, lambda: "x needs a dimension")
        key = x.shape[-1], x.device
        if key not in tables:
            tables[key] = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device) / 3
        return torch.add(x, tables[key]).to(x.dtype).contiguous()

    return Example(define("table_of_the_first_dtype(Tensor x) -> Tensor", kernel, shaped, no_derivative), [(X,)])


@wrong("state", "threads", "vmap", says="a later call, with … , changes what an earlier one returned: output 0 differs")
def output_in_a_buffer_of_its_own():
    buffers = {}

    def kernel(x, scale=2.0):
        key = x.shape, x.dtype, x.device
        if key not in buffers:
            buffers[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return torch.mul(x, scale, out=buffers[key])

    op = define("output_in_a_buffer_of_its_own(Tensor x, float scale=2.0) -> Tensor", kernel,
                lambda x, scale=2.0: x.new_empty(x.shape), no_derivative, keeps_nothing)  # fmt: skip
    return Example(op, [(X,), (X, 3.0)])


@wrong(
    "state", "threads", "vmap_grad", says="a later backward, with … , changes what an earlier one returned: gradient"
)
def gradient_in_a_buffer_of_its_own():
    buffers = {}

    def kernel(grad, x):
        key = x.shape, x.dtype, x.device
        if key not in buffers:
            buffers[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return buffers[key].copy_(grad * x.cos())

    of = define("gradient_in_a_buffer_backward(Tensor grad, Tensor x) -> Tensor", kernel,
                lambda grad, x: x.new_empty(x.shape), no_derivative, keeps_nothing)  # fmt: skip
    op = define("gradient_in_a_buffer(Tensor x) -> Tensor", lambda x: x.sin().contiguous(),
                lambda x: x.new_empty(x.shape), lambda ctx, grad: of(grad, *ctx.saved_tensors))  # fmt: skip
    return Example(op, [(X,)])


@wrong(
    "state",
    says="after its arguments were changed in place, output 0 differs … , which the same values in other tensors give",
)
def packed_weight_by_address():
    packed = {}

    @custom_op("mistakes::packed_weight_by_address", mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        torch._check(weight.dim() == 2 and x.dim() == 2, lambda: "x and weight need two dimensions")
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device
        if key not in packed:
            packed[key] = weight, weight.t().contiguous()  # holds the weight, so that no other gets its address
        return x @ packed[key][1]

    @op.register_fake
    def _(x, weight):
        torch._check(weight.dim() == 2 and x.dim() == 2, lambda: "x and weight need two dimensions")
        return x.new_empty(x.shape[0], weight.shape[0])

    op.register_autograd(no_derivative)
    return Example(op, [(X, torch.rand(3, 6, generator=NUMBERS))])


@wrong(
    "state",
    "gradcheck",
    "gradgradcheck",
    "func_grad",
    "threads",
    "compile",
    "vmap_grad",
    "saved_tensors",
    "compile",
    says="if another forward, with … , comes between forward and backward, gradient",
)
def input_kept_in_a_global():
    kept = {}

    def backward(ctx, grad):
        return grad * kept["x"].cos()

    op = define("input_kept_in_a_global(Tensor x) -> Tensor", lambda x: x.sin().contiguous(), lambda x: x.new_empty(x.shape),
                backward, lambda ctx, inputs, output: kept.update(x=inputs[0]))  # fmt: skip
    return Example(op, [(X,)])


@wrong("state", devices=("cpu",))  # later, this process has its scratch
def scratch_of_the_first_size():
    scratch = []

    def kernel(xs):
        total = sum(x.numel() for x in xs)
        if not scratch:
            scratch.append(total)
        flat = torch.cat([x.reshape(-1) for x in xs])[: scratch[0]]  # no more fit
        return flat.sum().reshape(1)

    op = define("scratch_of_the_first_size(Tensor[] xs) -> Tensor", kernel, lambda xs: xs[0].new_empty(1),
                no_derivative, keeps_nothing)  # fmt: skip
    return Example(op, [([X, X[:2] + 1],), ([X[:1], X[:2]],)])


@right()
def table_by_all_that_it_depends_on():
    table = functools.cache(lambda n, theta, dtype, device: torch.arange(n, dtype=dtype, device=device) / theta)

    def kernel(x, theta=10.0):
        torch._check(x.dim() > 0, lambda: "x needs a dimension")
        return (x * table(x.shape[-1], theta, x.dtype, x.device)).contiguous()

    op = define("table_by_all_that_it_depends_on(Tensor x, float theta=10.0) -> Tensor", kernel,
                shaped, no_derivative, keeps_nothing)  # fmt: skip
    return Example(op, [(X,), (X, 3.0)])


@right()
def output_copied_from_a_buffer():
    buffers = {}

    def kernel(x):
        import threading

        key = threading.get_ident(), x.shape, x.dtype, x.device
        if key not in buffers:
            buffers[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return torch.mul(x, 2, out=buffers[key]).clone()

    op = define("output_copied_from_a_buffer(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape),
                lambda ctx, grad: grad * 2, lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(X,)])


@right()
def packed_weight_by_version():
    packed = {}

    @custom_op("mistakes::packed_weight_by_version", mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        torch._check(weight.dim() == 2 and x.dim() == 2, lambda: "x and weight need two dimensions")
        kept, version, made = packed.get(id(weight), (None, None, None))
        if kept is not weight or version != weight._version:
            made = weight.t().contiguous()
            packed.clear()
            packed[id(weight)] = weight, weight._version, made
        return x @ made

    @op.register_fake
    def _(x, weight):
        torch._check(weight.dim() == 2 and x.dim() == 2, lambda: "x and weight need two dimensions")
        return x.new_empty(x.shape[0], weight.shape[0])

    op.register_autograd(no_derivative)
    return Example(op, [(X, torch.rand(3, 6, generator=NUMBERS))])
