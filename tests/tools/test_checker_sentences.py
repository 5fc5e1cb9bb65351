"""A broken operator in this table provokes every message that ends a check; a new message needs a new operator."""

from __future__ import annotations

import ast
import collections
import ctypes
import functools
import importlib
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import openreg_ops
from openreg_ops import _C
from openreg_ops.testing import check
from openreg_tools.check.checks import CHECKS

MODULES = sorted({function.__module__ for function in CHECKS.values()})
LIBRARY = torch.library.Library("sentences", "FRAGMENT")
ONES = (torch.ones(4, 6),)
NUMBERS = (torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5,)


class Broken:
    """An operator sentences::NAME, its sample, and the sentence that a check must end in."""

    def __init__(self, row, sentence, kernel=None, *, inputs=NUMBERS, device=None, reference=None, status="fail",
                 mode="error", intended_gradient=None, **how):  # fmt: skip
        self.intended_gradient = intended_gradient
        self.row, self.sentence, self.status, self.kernel, self.how = row, sentence, status, kernel, how
        self.inputs, self.device, self.reference, self.mode = inputs, device, reference, mode

    def make(self, name):
        return operator(name, self.kernel, **self.how)


def operator(
    name,
    kernel,
    schema="(Tensor x) -> Tensor",
    fake=torch.empty_like,
    key="CPU",
    backward=None,
    setup=lambda ctx, inputs, output: ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor))),
    vmap=None,
    autocast=None,
    out=None,
    sharding=None,
    **kernels,
):
    """Define one; `kernels` are those at other dispatch keys, and get the operator first."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, kernel, key)
    op = getattr(torch.ops.sentences, name).default
    if fake and key != "CompositeImplicitAutograd":
        torch.library.register_fake(f"sentences::{name}", fake, lib=LIBRARY)
    if backward:
        torch.library.register_autograd(f"sentences::{name}", backward, setup_context=setup, lib=LIBRARY)
    if vmap:
        torch.library.register_vmap(f"sentences::{name}", vmap, lib=LIBRARY)
    if autocast:
        torch.library.register_autocast(f"sentences::{name}", "cpu", autocast, lib=LIBRARY)
    if out:
        LIBRARY.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        LIBRARY.impl(f"{name}.out", out, "CPU")
    for where, function in kernels.items():
        LIBRARY.impl(name, functools.partial(function, op), where)
    if sharding:
        from torch.distributed.tensor.experimental import register_sharding

        register_sharding(op)(sharding)
    return op


def double(x):
    return x * 2


def double_backward(ctx, g):
    return g * 2


def noise(x):
    return x * 2 + torch.rand(())


def traced(x):
    """Whether a compiler traces this."""
    return type(x) is not Tensor


def not_contiguous():
    raise RuntimeError("not contiguous")


def accident(*_arguments):
    return {}["slot"]


def below(op, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


PAIR = "(Tensor x, Tensor y) -> Tensor"
PAIRS = (NUMBERS[0], NUMBERS[0] + 1)
TWO = "(Tensor x) -> (Tensor, Tensor)"
VIEW = "(Tensor(a) x) -> Tensor(a)"


def pair_backward(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, g * x


class Function(torch.autograd.Function):
    """The sine, by the operator `op`; what is wrong with it is in subclasses."""

    @staticmethod
    def forward(ctx, op, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return below(op, x)

    @staticmethod
    def backward(ctx, g):
        return None, g * ctx.saved_tensors[0].cos()


class WrongJvp(Function):
    @staticmethod
    def jvp(ctx, op, tangent):
        return tangent * ctx.saved_tensors[0].sin()


class RaisingJvp(Function):
    jvp = staticmethod(accident)


class Cosine(torch.autograd.Function):
    """With its own second derivative."""

    @staticmethod
    def forward(ctx, x, second):
        ctx.second = second
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        return ctx.second(g, *ctx.saved_tensors), None


def sine_whose_second(second):
    return dict(kernel=torch.sin, backward=lambda ctx, g: g * Cosine.apply(*ctx.saved_tensors, second))


def refuse(*_arguments):
    raise RuntimeError("it has no second derivative")


def keeps(second, x):
    """Its derivative is a constant under torch.func, and what `second` says elsewhere."""
    if torch._C._are_functorch_transforms_active():
        constant = x.detach()
        return constant.sin() + (x - constant) * constant.cos()

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * Cosine.apply(*ctx.saved_tensors, second)

    return Sine.apply(x)


def grad_in_no_grad(x):
    with torch.enable_grad():
        return (x if x.requires_grad else x.detach().requires_grad_()).sin()


def refuses_but_not_functorch(x):
    if torch._C._are_functorch_transforms_active():
        return x.detach() * 2
    if x.requires_grad:
        raise NotImplementedError("it has no derivative")
    return x * 2


def refuses_but_not_traced(op, x):
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return below(op, x)

        @staticmethod
        def backward(ctx, g):
            raise NotImplementedError("it has no derivative")

    return below(op, x) if traced(x) else Refused.apply(x)


def in_memory_order(x):
    return (x.as_strided((x.numel(),), (1,), x.storage_offset()) * 2).reshape(x.shape)


def aligned(x):
    if x.is_contiguous() and type(x) is Tensor and x.data_ptr() % 16:
        raise RuntimeError("misaligned address")
    return x * 2


def vectors_of(x, new):
    """Only whole vectors of 8 elements are written."""
    out, n = new(x.shape), x.numel() // 8 * 8
    out.view(-1)[:n] = x.reshape(-1)[:n]
    return out


def reads_whole_vectors(x):
    """The maximum of x and of what completes its last vector in memory."""
    n = min(-(-x.numel() // 8) * 8, x.untyped_storage().nbytes() // x.element_size() - x.storage_offset())
    whole = x.as_strided((n,), (1,), x.storage_offset()) if x.is_contiguous() and x.numel() else x
    return x * (2 if not whole.isnan().any() else 3)


def writes_around(x):
    x.mul_(2)
    if x.numel() and not x.is_contiguous():
        x.as_strided((1,), (1,), 0).zero_()


def sum_in_half(x):
    total = torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        total += x[..., i]
    return total


def of_threads(x):
    return x * (1 if x.numel() < 1000 or torch.get_num_threads() == 1 else 2)


BUFFER = torch.empty(4, 6)
STUCK = threading.Event()


def shares_a_buffer(x):
    BUFFER.copy_(x)
    time.sleep(0.001)
    return BUFFER.clone()


BUFFERS = {}
DRAWS = "(Tensor x, Generator? g=None) -> Tensor"


def buffer_for(x):
    return BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)


def doubles_once(x, memo={}):  # noqa: B006 -- it keeps the tensors, so that no other gets the address of one
    return memo.setdefault(x.data_ptr(), (x, x * 2))[1].clone()


def of_the_first_device(x, memo={}):  # noqa: B006
    return x * (2 if memo.setdefault("device", x.device.type) == x.device.type else 3)


def by_the_number_of_dtypes(x, memo=set()):  # noqa: B006
    memo.add(x.dtype)
    return x * len(memo)


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


def on_the_default_stream(x):
    with torch.openreg.stream(torch.openreg.default_stream(x.device)):
        return x * 2


def first_of(x, at_once):
    """The first element, read on the host: at once, or after waiting for the stream."""
    return ctypes.c_float.from_address(x.data_ptr()).value if at_once else x.flatten()[0].item()


def stuck(x):
    if threading.current_thread() is not threading.main_thread():
        STUCK.wait(60)
    return x * 2


def drifts(x, calls=[]):  # noqa: B006 -- it counts the calls
    calls.append(1)
    return x + len(calls) % 3 * 1e-7


def unwritten(x):
    return torch.empty_like(x).mul_(0) + x


def stream_id(x):
    return torch.accelerator.current_stream().stream_id


def puts_back(x):
    out = x.add_(1) * 2
    x.sub_(1)
    return out


def by_numpy(x):
    x.numpy()[...] *= 2


def shared_outputs(x):
    y = x * 2
    return y, y.view_as(y)


def of_equal_shapes(x, y):
    torch._check(x.shape == y.shape, lambda: "pairs: expected y of the shape of x")
    return x * y


def half_refused(x, y):
    torch._check(x.dtype == y.dtype, lambda: "expected one dtype")
    return x * y


def bare_double_size(x):
    if any(isinstance(n, torch.SymInt) for n in x.shape):
        accident()
    return torch.empty_like(x)


def triples(name):
    def kernel(x: Tensor) -> None:
        x.mul_(3)

    return torch.library.custom_op(f"sentences::{name}", kernel, mutates_args=("x",))


@functools.cache
def helper(which):
    """Operators that the backward of another one calls."""
    if which == "warns":
        return operator("helper_warns", lambda g, x: g * x.cos(), "(Tensor g, Tensor x) -> Tensor")
    if which == "raises":

        def kernel(g: Tensor, x: Tensor) -> Tensor:
            return g * x.cos()

        return torch.library.custom_op("sentences::helper_raises", kernel, mutates_args=())
    if which == "strides":
        return operator("helper_strides", lambda g: (g * 2).contiguous())
    if which == "loop":
        return operator("helper_loop", double)
    if which == "int":
        return operator(
            "helper_int", lambda g, n: g * 2, "(Tensor g, int n) -> Tensor", lambda g, n: torch.empty_like(g)
        )
    return operator("helper_vmap", double, vmap=lambda info, dims, x: (x * 3, dims[0]))


def shrink(x):
    return x.new_empty((2, 6))


def by_rows(x):
    """A sharding strategy."""
    from torch.distributed.tensor import Replicate, Shard

    return [([place], [place]) for place in (Replicate(), Shard(0))]


def refused_by_functorch(op, x):
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("it must override the setup_context staticmethod")
    return x.sin()


def constant_in_functorch(x, depth=1):
    """Without a gradient in `depth` transforms of torch.func."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return x.detach().sin() if len(retrieve_all_functorch_interpreters()) >= depth else x.sin()


def raises_in_functorch(x, depth=1):
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return accident() if len(retrieve_all_functorch_interpreters()) >= depth else x.sin()


TABLE = [
    # derivatives
    Broken("backward", "it has no derivative, its output says requires_grad, and backward only warns and leaves the "
           "operator out: a program gets a partial gradient", torch.sin),
    Broken(
        "backward", "the gradient of y is missing, but the output depends on y", torch.mul, schema=PAIR, inputs=PAIRS,
        fake=torch.mul, backward=lambda ctx, g: (g * ctx.saved_tensors[1], None),
    ),
    Broken(
        "backward", "the gradient of y is zero, but the output depends on y", torch.mul, schema=PAIR, inputs=PAIRS,
        fake=torch.mul, backward=lambda ctx, g: (g * ctx.saved_tensors[1], torch.zeros_like(g)),
    ),
    Broken("backward", "a call whose inputs require a gradient raised KeyError", double,
           Autograd=lambda op, x: accident() if x.requires_grad else below(op, x)),
    Broken("backward", "backward raised KeyError", double, backward=accident),
    Broken("backward", "it depends on x, which requires a gradient, but its output does not; a program's gradient leaves "
           "the operator out, without an error or a warning", double, Autograd=below),
    Broken("backward", "it writes to x, which requires a gradient, without telling autograd: the gradient passes as if x",
           triples, inputs=(NUMBERS[0].clone().requires_grad_(),)),
    Broken(
        "backward", "output 1 depends on x but does not require a gradient; everything computed from it is left out of a "
        "program's gradient", lambda x: (x * 2, x * 3), schema=TWO, status="warn",
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)), backward=lambda ctx, g, h: g * 2,
        setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
    ),
    Broken("backward", "an output requires a gradient under torch.no_grad()", grad_in_no_grad,
           key="CompositeImplicitAutograd"),
    Broken("gradcheck", ": its gradient is not the derivative: Jacobian mismatch", double, backward=lambda ctx, g: g * 3),
    Broken("gradgradcheck", ": its backward is not differentiable: the second derivative is wrong",
           **sine_whose_second(lambda g, x: g * x.sin())),
    Broken("gradgradcheck", "torch.func.grad of a function that calls torch.func.vjp gives zero, without an error; eager "
           "refuses the second derivative", functools.partial(keeps, refuse), key="CompositeImplicitAutograd"),
    Broken("gradgradcheck", "torch.func.grad of a function that calls torch.func.vjp gives zero, without an error; eager "
           "has a second derivative", functools.partial(keeps, lambda g, x: -g * x.sin()),
           key="CompositeImplicitAutograd"),
    Broken("gradgradcheck", "it calls sentences::helper_warns, which has no derivative, and double backward only warns and "
           "leaves it out", torch.sin, backward=lambda ctx, g: helper("warns")(g, *ctx.saved_tensors)),
    Broken("gradgradcheck", "the gradient of x does not require a gradient under create_graph=True, so second derivatives "
           "leave it out without an error", torch.sin,
           backward=lambda ctx, g: (g * ctx.saved_tensors[0].cos()).detach()),
    Broken("gradgradcheck", "the second derivative raised KeyError", **sine_whose_second(accident)),
    Broken("gradgradcheck", "it calls sentences::helper_raises, which has no derivative, so double backward ends in that "
           "operator's error: ", torch.sin, backward=lambda ctx, g: helper("raises")(g, *ctx.saved_tensors), status="warn"),
    Broken("forward_ad", "forward-mode AD gives … where backward gives ", torch.sin, Autograd=WrongJvp.apply),
    Broken("forward_ad", "forward-mode AD (torch.func.jvp, make_dual) silently loses the tangent: the output has none, and "
           "its derivative is not zero", double, backward=double_backward, status="warn"),
    Broken("forward_ad", "a call with forward-mode tangents raised KeyError", torch.sin, Autograd=RaisingJvp.apply),
    Broken("func_grad", "backward gives its gradient, but torch.func.grad raises RuntimeError: it must override the setup_con",
           torch.sin, Autograd=refused_by_functorch, status="warn"),
    Broken("func_grad", "torch.func.grad raised KeyError", raises_in_functorch, key="CompositeImplicitAutograd"),
    Broken("func_grad", "under torch.func.grad the gradient of differentiable argument 0 differs … , which backward gives",
           constant_in_functorch, key="CompositeImplicitAutograd"),
    Broken("func_grad", "torch.func.grad of the outputs of torch.func.vjp raised KeyError",
           functools.partial(raises_in_functorch, depth=2), key="CompositeImplicitAutograd"),
    Broken("func_grad", "under torch.func.grad of the outputs of torch.func.vjp the gradient of differentiable argument 0",
           functools.partial(constant_in_functorch, depth=2), key="CompositeImplicitAutograd"),
    Broken("backward", "it writes to x without telling autograd, so a gradient does not pass through, without an error",
           triples, status="warn"),
    Broken("gradcheck", "the function given as intended_gradient returns shapes [[2, 6]], and the operator [[4, 6]]", double,
           backward=double_backward, intended_gradient=lambda x: x[:2]),
    Broken("gradcheck", "the gradient of differentiable argument 0 differs … , which the function given as intended_gradient has",
           torch.round, backward=double_backward, intended_gradient=lambda x: x),
    # gradients
    Broken("gradient_layouts", "the gradient is transposed (shape [4, 6], strides (1, 4)): output 0 of sentences::helper_strides has "
           "strides (6, 1), but its fake kernel says (1, 4) (given [4, 6] of strides (1, 4)); a compiled program trusts the fake kernel",
           double, backward=lambda ctx, g: helper("strides")(g)),
    Broken("gradient_layouts", "backward through one output at a time, so that the gradients of the others are undefined, adds up "
           "to other numbers than backward through all: the gradient of x differs", lambda x: (x * 2, x * 3), schema=TWO,
           fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
           setup=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
           backward=lambda ctx, g, h: (1 if g is None else g * 2) + (1 if h is None else h * 3)),
    Broken("gradient_layouts", "the gradient is a slice of a wider one, as after cat or split (shape [4, 6], strides (18, 1)): backward "
           "raised RuntimeError: view size is not compatible", double, backward=lambda ctx, g: g.view(-1).view(g.shape) * 2),
    Broken("gradient_layouts", "the gradient of x differs … , which a contiguous gradient of equal values gives", double,
           backward=lambda ctx, g: g * (2 if g.is_contiguous() else 3)),
    Broken("gradient_layouts", ": backward rejects it: RuntimeError: not contiguous", double, status="warn",
           backward=lambda ctx, g: g * 2 if g.is_contiguous() else not_contiguous()),
    Broken("frozen_arguments", "if only x requires a gradient, backward raised KeyError", torch.mul, schema=PAIR, inputs=PAIRS,
           fake=torch.mul, backward=lambda ctx, g: pair_backward(ctx, g) if all(ctx.needs_input_grad) else accident()),
    Broken("frozen_arguments", "if only x requires a gradient, the gradient of x differs … , which backward gives when every "
           "argument requires one", torch.mul, schema=PAIR, inputs=PAIRS, fake=torch.mul,
           backward=lambda ctx, g: pair_backward(ctx, g) if all(ctx.needs_input_grad) else (g, g)),
    Broken("broadcast_gradients", "x of shape [1, 6] is broadcast to [4, 6], and backward raised RuntimeError: shape", torch.mul,
           schema=PAIR, inputs=PAIRS, fake=torch.mul,
           backward=lambda ctx, g: tuple(map(Tensor.reshape, pair_backward(ctx, g), [x.shape for x in ctx.saved_tensors]))),
    Broken("broadcast_gradients", "x of shape [1, 6] is broadcast to [4, 6], and the gradient of x differs … , which the sum over the "
           "broadcast dimensions gives", torch.mul, schema=PAIR, inputs=PAIRS, fake=torch.mul,
           backward=lambda ctx, g: tuple(d if d.shape == x.shape else d.mean(0, True).expand(x.shape) if x.dim() == 2 else None
                                         for d, x in zip(pair_backward(ctx, g), ctx.saved_tensors, strict=True))),
    Broken("saved_tensors", "it keeps output 0 for backward without save_for_backward: the output and its graph refer to each "
           "other, so their memory leaks, and saved_tensors_hooks, checkpointing and offloading do not see it", torch.exp, backward=lambda ctx, g: g * ctx.y,
           setup=lambda ctx, inputs, output: setattr(ctx, "y", output)),
    Broken("saved_tensors", "it keeps a float32 tensor of shape [4, 6] for backward without save_for_backward, so saved_tensors_hooks, "
           "checkpointing and offloading do not see it", torch.sin, backward=lambda ctx, g: g * ctx.slope,
           setup=lambda ctx, inputs, output: setattr(ctx, "slope", inputs[0].cos())),
    Broken("saved_tensors", "after changing x in place between forward and backward, without an error, the gradient of x differs",
           torch.sin, backward=lambda ctx, g: g * ctx.x.cos(),
           setup=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])),
    Broken("saved_tensors", "it keeps x for backward without save_for_backward, which holds its memory; "
           "saved_tensors_hooks, checkpointing and offloading do not see it", double, status="warn",
           backward=lambda ctx, g: (g * 2).view(ctx.x.shape), setup=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])),
    # distributed
    Broken("dtensor", "a call on DTensors with every argument replicated raised RuntimeError: 'slot'", double,
           sharding=accident),
    Broken("dtensor", "on DTensors with x sharded along dimension 0 output 0 differs … , which plain tensors give",
           lambda x: x.cumsum(0), sharding=by_rows),
    Broken("dtensor", "its backward does not run on DTensors: NotImplementedError: Operator sentences.helper_loop.default",
           double, sharding=by_rows, backward=lambda ctx, g: helper("loop")(g), status="warn"),
    Broken("dtensor", "backward on DTensors with every argument replicated raised KeyError", double, sharding=by_rows,
           backward=lambda ctx, g: accident() if traced(g) else g * 2),
    Broken("dtensor", "on DTensors with every argument replicated the gradient of differentiable argument 0 differs … , which "
           "backward on plain tensors gives", double, sharding=by_rows,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
    # fakes
    Broken("compile", "under torch.compile with static shapes zeros like output 0 is float32", lambda x: x.double() * 2),
    Broken("compile", "under torch.compile with static shapes contiguous() of output 0 has strides (1, 4) instead of (6, 1)",
           lambda x: (x * 2).mT.contiguous().mT),
    Broken("compile", "under torch.compile with static shapes the gradient of differentiable argument 0 differs", double,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
    Broken("compile", "torch.compile with static shapes raised", double, fake=None),
    Broken("compile", "eager mode refuses the gradient with an error, but under torch.compile there is neither error nor gradient",
           double, Autograd=refuses_but_not_traced),
    Broken("fake_numbers", "given the sample number 0 of its outputs is 24, but the fake kernel says 0, which a compiled "
           "program takes for the result of every call", lambda x: x.numel(), schema="(Tensor x) -> SymInt", fake=lambda x: 0),
    Broken("int_sizes", "n is the size of dimension 0 of output 0, and the schema says int", lambda x, n: x.new_zeros(n),
           schema="(Tensor x, int n) -> Tensor", fake=lambda x, n: x.new_empty(n), inputs=(*NUMBERS, 3)),
    Broken("int_sizes", "n is the size of dimension 0 of output 0, and the schema says int", lambda x, n=3: x.new_zeros(n),
           schema="(Tensor x, int n=3) -> Tensor", fake=lambda x, n=3: x.new_empty(n), status="warn"),
    Broken("fake_dynamic", "its backward fixes dimension 0 of x to 4, although it takes other sizes; every new size compiles again", double,
           backward=lambda ctx, g: g * 2 if int(g.shape[0]) else g, status="warn"),
    Broken("fake_dynamic", "its backward fixes dimension 0 of x to 4, although it takes other sizes; every new size compiles again: "
           "sentences::helper_int takes the size as an int", double, backward=lambda ctx, g: helper("int")(g, g.shape[0])),
    Broken("defaults", "in a call with eps=1.5, the fake kernel raised TypeError", lambda x, eps=0.5: x + eps,
           schema="(Tensor x, float eps=0.5) -> Tensor"),
    Broken("defaults", "in a call with keep=True, output 0 has shape [4, 1], but the fake kernel says [4]",
           lambda x, keep=False: x.sum(-1, keep), schema="(Tensor x, bool keep=False) -> Tensor",
           fake=lambda x, keep=False: x.sum(-1)),
    Broken("defaults", "with scale=3.0, its gradient is not the derivative", lambda x, scale=2.0: x * scale,
           schema="(Tensor x, float scale=2.) -> Tensor", fake=lambda x, scale=2.0: torch.empty_like(x),
           backward=lambda ctx, g: (g * 2.0, None)),
    Broken("effects", "it returns nothing, and its schema says that it writes nothing, so compilers remove its calls",
           lambda x: None, schema="(Tensor x) -> ()", fake=lambda x: None),
    Broken("vmap_grad", "eager mode refuses the gradient with an error, but under torch.func.grad there is neither error nor",
           refuses_but_not_functorch, key="CompositeImplicitAutograd"),
    Broken("fake_layouts", " the fake kernel gives 2 outputs, the kernel 1", lambda x: [x * 2], schema="(Tensor x) -> Tensor[]",
           fake=lambda x: [torch.empty_like(x), torch.empty_like(x)]),
    Broken("fake_layouts", "it has no fake kernel, which compilers and exporters call", double, fake=None),
    Broken("fake_layouts", " the fake kernel raised KeyError", double, fake=lambda x: accident()),
    Broken("fake_layouts", "has strides (1, 4), but the fake kernel says (6, 1)", lambda x: torch.empty_like(x).copy_(x),
           fake=lambda x: x.new_empty(x.shape)),
    Broken("fake_layouts", "output 0 has shape [4, 6], but the fake kernel says [2, 6]", double, fake=shrink),
    Broken("fake_layouts", "output 0 has dtype float64, but the fake kernel says float32", lambda x: x.double()),
    Broken("fake_layouts", "output 0 has device cpu, but the fake kernel says meta", double,
           fake=lambda x: torch.empty_like(x, device="meta")),
    Broken("fake_layouts", "output 0 has layout torch.sparse_coo, but the fake kernel says torch.strided",
           Tensor.to_sparse),
    Broken("fake_layouts", "shares the memory of x, but the fake kernel says otherwise", lambda x: x.view_as(x),
           schema=VIEW),
    Broken("fake_layouts", "does not share the memory of x, but the fake kernel says otherwise", double, schema=VIEW,
           fake=lambda x: x.view_as(x)),
    Broken("fake_dtypes", "given float16 x output 0 is float32, but the fake kernel says float16",
           lambda x: x.float() * 2),
    Broken("fake_dtypes", " the kernel runs, but the fake kernel raised KeyError", double,
           fake=lambda x: torch.empty_like(x) if x.dtype == torch.float32 else accident()),
    Broken("fake_dynamic", "with dynamic sizes the fake kernel says that output 0 has shape [2, 6] instead of [4, 6]",
           double, fake=shrink),
    Broken("fake_dynamic", "the fake kernel fixes dimension 0 of x to 4, and the kernel takes other sizes; every new size "
           "compiles again, and export with a dynamic dimension fails", double,
           fake=lambda x: x.new_empty([int(n) for n in x.shape])),
    Broken("fake_errors", " more such)", of_equal_shapes, schema=PAIR, inputs=PAIRS, status="warn",
           fake=lambda x, y: torch.empty_like(x)),
    Broken("fake_errors", " the kernel runs, but the fake kernel raised RuntimeError: expected one dtype", torch.mul,
           schema=PAIR, inputs=PAIRS, fake=half_refused),
    # inputs
    Broken("empty", " it ended in ZeroDivisionError", lambda x: x * (8 // len(x))),
    Broken("layouts", "for inputs in permuted layout output 0 differs … , which contiguous inputs give", in_memory_order),
    Broken("layouts", "for inputs in permuted layout the gradient of differentiable argument 0 differs … , which "
           "contiguous inputs give", torch.sin,
           backward=lambda ctx, g: g * in_memory_order(ctx.saved_tensors[0])),
    Broken("layouts", "for contiguous inputs that start one element into their storage, which is not aligned to 16 bytes it "
           "raised RuntimeError: misaligned address, which other contiguous inputs do not", aligned),
    Broken("layouts", "for contiguous inputs that start one element into their storage, which is not aligned to 16 bytes its "
           "backward raised RuntimeError: misaligned address", double, backward=lambda ctx, g: g * aligned(ctx.saved_tensors[0])),
    Broken("sizes", "output 0 differs in … elements: … if fresh memory is filled with 0x5A bytes: it does not write all of it",
           lambda x: vectors_of(x, torch.empty)),
    Broken("sizes", "output 0 differs in 7 of … elements: 0 instead of … at … , with which the result for longer inputs begins",
           lambda x: vectors_of(x, torch.zeros)),
    Broken("sizes", "output 0 differs … if NaN surrounds them in memory: it reads past their ends", reads_whole_vectors),
    Broken("sizes", ", the last element of x has no effect on any output, but among 192 it has",
           lambda x: x.reshape(-1)[: x.numel() // 8 * 8].sum(), fake=lambda x: x.new_empty(())),
    Broken("sizes", ", the last element of output 0 is 0 for any input, but not of 192",
           lambda x: vectors_of(x.reshape(-1).softmax(0).view(x.shape), torch.zeros)),
    Broken("large_strides", "given x with rows 4294967296 elements apart, output 0 differs … , which near ones give",
           lambda x: x.as_strided(x.shape, [s % 2**32 for s in x.stride()]) * 2),
    Broken("large_strides", "given x with rows 4294967296 elements apart, it raised OverflowError",
           lambda x: x * 2 if max(x.stride(), default=0) < 2**31 else (2**31).to_bytes(4, signed=True)),
    Broken("half_precision", "output 0 differs from that of the same values in float32 by … of its largest element",
           lambda x: x.cumsum(-1)[..., -1] if x.element_size() > 2 else sum_in_half(x), fake=lambda x: x.new_empty(x.shape[:-1])),
    Broken("zero_dim", "output 0 differs in 1 of 1 elements: 0 instead of 2 at [], which the reference gives", inputs=ONES,
           kernel=lambda x: x * [0, 1, 2][x.dim()], reference=double),
    Broken("zero_dim", "output 0 is float64 instead of float32, which the fake kernel gives",
           lambda x: x * 2 if x.dim() else x.double()),
    Broken("empty", "size 4 are empty, its backward raised RuntimeError: Function", double,
           backward=lambda ctx, g: g * 2 if g.numel() else g.new_ones(3, 3)),
    Broken("large", "given inputs whose dimensions of size … are … long, … , which one thread gives", of_threads),
    # machine
    Broken("stream", "it runs aten::mul.Tensor on the default stream, and the caller's stream does not wait for it",
           on_the_default_stream, key="PrivateUse1", device="openreg"),
    Broken("stream", "on another stream it does not wait for the work before it: output 0 differs",
           lambda x: x * first_of(x, at_once=stream_id(x)), key="PrivateUse1", device="openreg"),
    Broken("devices", "output 0 is on openreg:0, but the arguments are on openreg:1",
           lambda x: torch.empty(x.shape, device="openreg").copy_(x), key="PrivateUse1", device="openreg"),
    Broken("devices", "is the current device, it does not wait for the stream of openreg:1: output 0 differs",
           lambda x: x * first_of(x, at_once=x.device.index), key="PrivateUse1", device="openreg"),
    Broken("devices", "on openreg:1, while openreg:0 is the current device, it raised RuntimeError: aten::add",
           lambda x: x + torch.ones(6, device="openreg"), key="PrivateUse1", device="openreg"),
    Broken("launch", "its kernel computes on the host: called before its arguments' values have arrived",
           lambda x: x * first_of(x, at_once=True), key="PrivateUse1", device="openreg"),
    Broken("stream", "on another stream output 0 differs … , which the default stream gives",
           lambda x: x + stream_id(x), key="PrivateUse1", device="openreg"),
    Broken("stream", "on another stream the gradient of differentiable argument 0 differs … , which the default stream "
           "gives", double, key="PrivateUse1", device="openreg", backward=lambda ctx, g: g + stream_id(g)),
    Broken("poison", "it reads memory that was never written: with fresh memory filled with 0xFF bytes instead of 0x5A, "
           "output 0", unwritten),
    Broken("poison", "bytes instead of 0x5A, gradient 0", double, backward=lambda ctx, g: unwritten(g) * 2),
    Broken("determinism", "the same call again gives a different result: result 0 differs", noise),
    Broken("determinism", "the same call again rounds differently: result 0 differs", drifts, status="warn"),
    Broken("generator", "with equal generators as g it gives different numbers: it draws from the global generator of cpu",
           lambda x, g=None: x + torch.rand(x.shape), schema=DRAWS),
    Broken("generator", "given a generator as g, it also draws from the global generator of cpu",
           lambda x, g=None: x + torch.rand(x.shape, generator=g) + 0 * torch.rand(()), schema=DRAWS),
    Broken("generator", "the state of the generator g is the same after the call, so the next call gives the same numbers "
           "again", lambda x, g=None: x + torch.rand(x.shape, generator=g and g.clone_state()), schema=DRAWS),
    Broken("generator", "without g, its numbers do not follow torch.manual_seed",
           lambda x, g=None: x + torch.rand(x.shape, generator=g or unseeded()), schema=DRAWS),
    Broken("generator", "with any generator as g it gives the same numbers",
           lambda x, g=None: x * 2 if g else x + torch.rand(x.shape), schema=DRAWS),
    Broken("generator", "neither g nor torch.manual_seed changes its numbers", lambda x, g=None: x * 2, schema=DRAWS,
           inputs=(*NUMBERS, torch.Generator())),
    Broken("state", "after a call with …, a call with the sample … gives another result: output 0 differs …, which a new "
           "process gives", lambda x, memo={}: x * memo.setdefault("rows", x.shape[0])),  # noqa: B006
    Broken("state", "after a call on openreg, a call on the CPU gives output 0 differs", of_the_first_device,
           key="CompositeExplicitAutograd", device="openreg"),
    Broken("state", "after other calls, a call with … gives output 0 differs", by_the_number_of_dtypes, key="PrivateUse1",
           device="openreg"),
    Broken("state", "a later call, with …, changes what an earlier one returned: output 0 differs", buffer_for),
    Broken("state", "a later backward, with …, changes what an earlier one returned: the gradient", double,
           backward=lambda ctx, g: buffer_for(g).mul_(2)),
    Broken("state", "if another forward, with …, comes between forward and backward, the gradient", lambda x: x * x / 2,
           setup=lambda ctx, inputs, output: BUFFERS.update(x=inputs[0]), backward=lambda ctx, g: g * BUFFERS["x"]),
    Broken("state", "after its arguments were changed in place, output 0 differs …, which the same values in other tensors give",
           doubles_once),
    Broken("threads", "four threads that call it on separate inputs do not end", stuck),
    Broken("threads", "called from four threads on separate inputs, output 0 differs", shares_a_buffer),
    # programs
    Broken("export", "torch.export raised ", double, fake=None),
    Broken("export", "exported, zeros like output 0 has shape [4, 6] instead of [2, 6], which eager gives",
           lambda x: x[:2] * 2),
    Broken("jit_trace", "under torch.jit.trace output 0 differs", noise),
    Broken("jit_script", "under torch.jit.script output 0 differs", noise),
    Broken("copies", "after copy.deepcopy of a program that calls it, output 0 differs", noise),
    # transforms
    Broken("functionalization", "functionalized, output 0 differs … , which eager gives", noise),
    Broken("functionalization", "torch.func.functionalize raised KeyError", double, Functionalize=accident),
    Broken("out", "with out= of the right size: output 0 differs in 24 of 24 elements: 0 instead of 2 at [0, 0], which the "
           "operator returns", double, inputs=ONES, out=lambda x, out: out.resize_(x.shape).zero_()),
    Broken("out", " returns a tensor other than out", double,
           out=lambda x, out: out.resize_(x.shape).copy_(x * 2).view_as(out)),
    Broken("out", " changed the strides of out, which has the right size", double,
           out=lambda x, out: out.resize_(0).resize_(x.shape).as_strided_(x.shape, x.stride()).copy_(x * 2)),
    Broken("vmap", "with x batched, torch.vmap raised KeyError", double, vmap=accident),
    Broken("vmap", "under one torch.vmap inside another, output 0 differs", double, status="warn",
           vmap=lambda info, dims, x: (x * (3 if torch._C._functorch.is_batchedtensor(x) else 2), dims[0])),
    Broken("vmap", "torch.vmap is right but takes PyTorch's slow loop over the samples", double, status="warn"),
    Broken("vmap", "under torch.vmap with x batched, output 0 differs …, which a loop gives", double,
           vmap=lambda info, dims, x: (x * 3, dims[0])),
    Broken("vmap_grad", "under torch.vmap of torch.func.grad with x batched, the gradient of differentiable argument 0 differs",
           lambda x: x * helper("vmap")(x.detach()), key="CompositeImplicitAutograd"),
    Broken("vmap_grad", "torch.vmap of torch.func.grad is right but takes PyTorch's slow loop", status="warn",
           kernel=lambda x: x * helper("loop")(x.detach()), key="CompositeImplicitAutograd"),
    Broken("autocast", "it has no autocast policy (no kernel at AutocastCPU) and computes with whatever dtypes arrive: mixed "
           "inputs give float32", torch.mul, schema=PAIR, inputs=PAIRS, fake=torch.mul, status="warn"),
    Broken("autocast", "under autocast, given x bfloat16, output 0 differs … , which float32 gives",
           lambda x: x * (2 if x.dtype == torch.float32 else 3)),
    Broken("autocast", "it raised KeyError: 'slot'; it has no kernel at AutocastCPU",
           lambda x: x * 2 if x.dtype == torch.float32 else accident(), status="warn"),
    Broken("autocast", "it raised KeyError: 'slot'; it has no kernel at AutocastCPU",
           lambda x: x * 2 if x.dtype == torch.float32 else accident(), backward=lambda ctx, g: g * 2),
    Broken("autocast", "under autocast, given what a linear returns (x bfloat16), it raised KeyError: 'slot'; its autocast "
           "kernel does not cast", double, AutocastCPU=accident),
    Broken("autocast", "under autocast (x bfloat16) the gradient of differentiable argument 0 differs … , which float32 "
           "gives", double,
           backward=lambda ctx, g: g * (2 if ctx.saved_tensors[0].dtype != torch.bfloat16 else 3)),
    Broken("autocast", "the backward of a call under autocast (x bfloat16) raised KeyError", double,
           backward=lambda ctx, g: g * 2 if ctx.saved_tensors[0].dtype != torch.bfloat16 else accident()),
    # unbacked
    Broken("fake_unbacked", " it raised KeyError", double, fake=bare_double_size),
    Broken("fake_unbacked", " it asks for a size that is not known before the program runs (… guard on … ); a program "
           "with such sizes (nonzero, item, masks) does not compile", double, status="warn",
           fake=lambda x: torch.empty_like(x) if x.shape[0] > 2 else torch.empty_like(x)),
    Broken("fake_unbacked", "the fake kernel says that output 0 is float32 of shape", lambda x: x.double()),
    Broken("compile_unbacked", "under torch.compile with every dimension unbacked output 0 differs", noise),
    Broken("compile_unbacked", "under torch.compile with every dimension unbacked the gradient of differentiable", double,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
    Broken("export_unbacked", "behind nonzero() output 0 differs … , which eager gives", noise),
    # values
    Broken("runs", "the sample was refused: KeyError", accident),
    Broken("schema", "its backward writes to the gradient of output 0, which others still use", double,
           backward=lambda ctx, g: g.mul_(2)),
    Broken("schema", "its backward writes to x, which others still use", torch.sin,
           backward=lambda ctx, g: g * ctx.saved_tensors[0].detach().cos_()),
    Broken("schema", "the schema says that x is not written to, but the call changed the memory of x (the sample's",
           lambda x: x.mul_(2) * 2),
    Broken("schema", "the schema says that x is not written to, but its version counter went from 0 to 2: it is written to "
           "and put back", puts_back, inputs=ONES),
    Broken("schema", "it writes to x, as its schema says, but the version counter of x stays at 0, so autograd uses the "
           "changed x where it saved the old one, without an error", by_numpy, schema="(Tensor(a!) x) -> ()",
           fake=lambda x: None),
    Broken("schema", "it writes to x, as its schema says, but also to memory around the elements of x (padded [4, 6])",
           writes_around, schema="(Tensor(a!) x) -> ()", fake=lambda x: None),
    Broken("schema", "the schema says that output 0 is an alias of an input, but it has its own memory", inputs=ONES,
           kernel=lambda x: x.mul_(2) * 1, schema="(Tensor(a!) x) -> Tensor(a!)"),
    Broken("schema", "the schema says that output 0 is an alias of an input, but it has its own memory", double,
           schema=VIEW, status="warn"),
    Broken("schema", "outputs 0 and 1 share memory, and the schema does not say so", shared_outputs, schema=TWO,
           fake=lambda x: (torch.empty_like(x), torch.empty_like(x))),
    Broken("schema", "output 0 shares the memory of x, and the schema does not say so", lambda x: x.view_as(x)),
    Broken("reference", "output 0 differs in 24 of 24 elements: 3 instead of 2 at [0, 0], which the reference gives",
           lambda x: x * 3, inputs=ONES, reference=double),
    Broken("reference", "the gradient of differentiable argument 0 differs", double, reference=double,
           backward=lambda ctx, g: g * 3),
    Broken("reference", ", which its CPU kernel gives", lambda x: x * 3, key="PrivateUse1", device="openreg",
           CPU=lambda op, x: x * 2),
    Broken("opcheck_schema", "opcheck's test_schema says: ", lambda x: x.mul_(2) * 2),
    Broken("opcheck_faketensor", "opcheck's test_faketensor says: ", double, fake=shrink),
    Broken("opcheck_autograd_registration", "opcheck's test_autograd_registration says: ", torch.sin),
    Broken("opcheck_aot_dispatch_dynamic", "opcheck's test_aot_dispatch_dynamic says: ", double, fake=None),
    Broken("opcheck_autograd_registration", "an output requires a gradient, but no kernel is registered at "
           "AutogradPrivateUse1", torch.sin, key="PrivateUse1", device="openreg", mode="nothing"),
]  # fmt: skip


@pytest.mark.parametrize("broken", TABLE, ids=[f"{each.row}-{i}" for i, each in enumerate(TABLE)])
def test_sentence(broken, request, monkeypatch):
    machine = sys.modules[CHECKS["threads"].__module__]
    monkeypatch.setattr(machine, "PATIENCE", 0.2 if broken.kernel is stuck else machine.PATIENCE)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    _C.set_poison(False)
    name = f"broken_{TABLE.index(broken)}"
    op = triples(name) if broken.kernel is triples else broken.make(name)
    try:
        with openreg_ops.autograd.fallback_mode(broken.mode):
            report = check(op, [broken.inputs], broken.device, reference=broken.reference, only=broken.row,
                           intended_gradient=broken.intended_gradient)  # fmt: skip
    finally:
        torch.set_num_threads(threads)
        if broken.kernel is stuck:
            STUCK.set()
    found = report.of(broken.status, broken.row)
    assert found, str(report)
    pattern = ".*".join(re.escape(part) for part in re.split(r" ?… ?", broken.sentence))
    assert found[0].sentence.startswith("sentences::") and re.search(pattern, found[0].sentence)
    assert found[0].remedy


def sentences():
    """The fixed part of each sentence that a check may end in, the longest piece of it, by where it stands."""
    for name in MODULES:
        path = Path(importlib.import_module(name).__file__)
        tree = ast.parse(path.read_text())
        assigned = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called not in ("fail", "warn", "refuse_or_fail"):
                continue
            said = node.args[2 if called == "refuse_or_fail" else 0]
            said = assigned[said.id] if isinstance(said, ast.Name) else said
            shown = {id(x) for each in ast.walk(said) if isinstance(each, ast.FormattedValue) for x in ast.walk(each)}
            fixed = [x.value for x in ast.walk(said) if isinstance(x, ast.Constant) and id(x) not in shown]
            longest = max((piece.removeprefix(": ") for piece in fixed if isinstance(piece, str)), key=len)
            yield longest + (" raised" if called == "refuse_or_fail" else ""), f"{path.name}:{node.lineno}"


def test_every_sentence_has_a_broken_operator():
    where = collections.defaultdict(list)
    for piece, line in sentences():
        where[piece].append(line)
    assert sum(map(len, where.values())) > 80
    for piece, lines in where.items():
        count = sum(piece in each.sentence for each in TABLE)
        assert count >= len(lines), f"TABLE needs {len(lines)} broken operators for {piece!r} ({', '.join(lines)})"
