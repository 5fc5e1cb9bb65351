"""The checker: an operator for each thing that it says, good ones that pass, and how it runs.

tests/tools/mistakes has operators of different shape for each kind of mistake, and what the checker says of them.
"""

from __future__ import annotations

import argparse
import ast
import collections
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from pathlib import Path

import mistakes
import pytest
import torch
from processes import python
from torch import Tensor

import openreg_ops
from openreg_ops import _C
from openreg_ops.testing import Sample, check
from openreg_tools.check import command as check_command
from openreg_tools.check.case import Case
from openreg_tools.check.checker import derived, operator
from openreg_tools.check.checks import ANY_LAYOUT, CHECKS, SLOW, streams
from openreg_tools.check.checks.derivatives import derivative
from openreg_tools.check.report import Report, Result
from openreg_tools.check.settings import preserved
from openreg_tools.conformance import generate
from openreg_tools.core.options import Wrong

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytest_openreg_ops"]

LIBRARY = torch.library.Library("broken", "FRAGMENT")
NUMBERS = (torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5,)
ONES = (torch.ones(4, 6),)


# ---- an operator for each sentence ----


class Broken:
    """An operator broken::NAME, its sample, and the sentence that a check must end in; correct ones have another status."""

    def __init__(self, row, sentence, kernel=None, *, inputs=NUMBERS, device=None, reference=None, status="fail",
                 mode="error", intended_gradient=None, **how):  # fmt: skip
        self.intended_gradient = intended_gradient
        self.row, self.sentence, self.status, self.kernel, self.how = row, sentence, status, kernel, how
        self.inputs, self.device, self.reference, self.mode = inputs, device, reference, mode

    def make(self, name):
        return define(name, self.kernel, **self.how)


def define(
    name,
    kernel,
    fake=torch.empty_like,
    key="CPU",
    schema="(Tensor x) -> Tensor",
    backward=None,
    setup=lambda ctx, inputs, output: ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor))),
    vmap=None,
    autocast=None,
    out=None,
    sharding=None,
    **kernels,
):
    """Define one; the schema may follow its name. `kernels` are those at other dispatch keys, and get the operator first."""
    if "(" in name:
        name, schema = name.partition("(")[0], name[name.index("(") :]
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, kernel, key)
    op = getattr(torch.ops.broken, name).default
    if fake and key != "CompositeImplicitAutograd":
        torch.library.register_fake(f"broken::{name}", fake, lib=LIBRARY)
    if backward:
        torch.library.register_autograd(f"broken::{name}", backward, setup_context=setup, lib=LIBRARY)
    if vmap:
        torch.library.register_vmap(f"broken::{name}", vmap, lib=LIBRARY)
    if autocast:
        torch.library.register_autocast(f"broken::{name}", "cpu", autocast, lib=LIBRARY)
    if out:
        LIBRARY.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        LIBRARY.impl(f"{name}.out", out, "CPU")
    for where, function in kernels.items():
        LIBRARY.impl(name, functools.partial(function, op) if function else torch.library.fallthrough_kernel, where)
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
    """Returns true if a compiler traces this."""
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


class ExactInFloat64(Function):
    """Derivatives that are rough in float32."""

    @staticmethod
    def backward(ctx, g):
        return None, g * rough(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx, op, tangent):
        return tangent * rough(ctx.saved_tensors[0])


def rough(x):
    return x.cos() * (1 if x.dtype == torch.float64 else 1 + 1e-4 * x)


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


def double_whose_backward_raises(error):
    def raises(g):
        raise error

    def reference(x):
        y = x * 2
        if y.requires_grad:
            y.register_hook(raises)
        return y

    return reference


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


def y_alone():
    raise NotImplementedError("y alone")


def refuses_a_generator(g):
    if g is not None:
        raise ValueError("no generator")
    return torch.ones(3)


def aligned(x):
    if x.is_contiguous() and type(x) is Tensor and x.data_ptr() % 16:
        raise RuntimeError("misaligned address")
    return x * 2


def reads_whole_vectors(x):
    """The maximum of x and of what completes its last vector in memory."""
    n = min(-(-x.numel() // 8) * 8, x.untyped_storage().nbytes() // x.element_size() - x.storage_offset())
    whole = x.as_strided((n,), (1,), x.storage_offset()) if x.is_contiguous() and x.numel() else x
    return x * (2 if not whole.isnan().any() else 3)


def far(x):
    """2, or 3 if elements are far apart."""
    return 2 + (max(x.stride(), default=0) >= 2**31)


def writes_around(x):
    x.mul_(2)
    if x.numel() and not x.is_contiguous():
        x.as_strided((1,), (1,), 0).zero_()


def of_threads(x):
    return x * (1 if x.numel() < 1000 or torch.get_num_threads() == 1 else 2)


STUCK = threading.Event()


DRAWS = "(Tensor x, Generator? g=None) -> Tensor"


def of_the_first_device(x, memo={}):  # noqa: B006
    return x * (2 if memo.setdefault("device", x.device.type) == x.device.type else 3)


def by_the_number_of_dtypes(x, memo=set()):  # noqa: B006
    memo.add(x.dtype)
    return x * len(memo)


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


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


def slow(x):
    """Takes a fifth of a second of the processor's time."""
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    return x * 2


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

    return torch.library.custom_op(f"broken::{name}", kernel, mutates_args=("x",))


@functools.cache
def helper(which):
    """Operators that the backward of another one calls."""
    if which == "warns":
        return define("helper_warns(Tensor g, Tensor x) -> Tensor", lambda g, x: g * x.cos())
    if which == "raises":

        def kernel(g: Tensor, x: Tensor) -> Tensor:
            return g * x.cos()

        return torch.library.custom_op("broken::helper_raises", kernel, mutates_args=())
    if which == "loop":
        return define("helper_loop", double)
    if which == "halves":
        return define("helper_halves", halves, sharding=by_rows)
    return define("helper_vmap", double, vmap=lambda info, dims, x: (x * 3, dims[0]))


def if_contiguous(x, out):
    out = out.resize_(x.shape) if not out.numel() else out
    return out.copy_(x * 2) if out.is_contiguous() else out


def shrink(x):
    return x.new_empty((2, 6))


def by_rows(x):
    """A sharding strategy."""
    from torch.distributed.tensor import Replicate, Shard

    return [([place], [place]) for place in (Replicate(), Shard(0))]


def halves(x):
    if len(x) < 4:
        raise RuntimeError("halves")
    return x * 2


def refuses_vmap(*_arguments):
    raise TypeError("vmap is not supported")


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
    Broken("gradgradcheck", "it calls broken::helper_warns, which has no derivative, and double backward only warns and "
           "leaves it out", torch.sin, backward=lambda ctx, g: helper("warns")(g, *ctx.saved_tensors)),
    Broken("gradgradcheck", "the gradient of x does not require a gradient under create_graph=True, so second derivatives "
           "leave it out without an error", torch.sin,
           backward=lambda ctx, g: (g * ctx.saved_tensors[0].cos()).detach()),
    Broken("gradgradcheck", "the second derivative raised KeyError", **sine_whose_second(accident)),
    Broken("gradgradcheck", "it calls broken::helper_raises, which has no derivative, so double backward ends in that "
           "operator's error: ", torch.sin, backward=lambda ctx, g: helper("raises")(g, *ctx.saved_tensors), status="warn"),
    Broken("forward_ad", "forward-mode AD gives … where backward gives ", torch.sin, Autograd=WrongJvp.apply),
    Broken("forward_ad", "forward-mode AD (torch.func.jvp, make_dual) silently loses the tangent: the output has none, and "
           "its derivative is not zero", double, backward=double_backward, status="warn"),
    Broken("forward_ad", "a call with forward-mode tangents raised KeyError", torch.sin, Autograd=RaisingJvp.apply),
    *(Broken(row, "", torch.sin, Autograd=ExactInFloat64.apply, status="pass")
      for row in ("backward", "gradcheck", "gradgradcheck", "forward_ad")),
    Broken("func_grad", "backward gives its gradient, but torch.func.grad raises RuntimeError: it must override the setup_con",
           torch.sin, Autograd=refused_by_functorch, status="warn"),
    Broken("func_grad", "torch.func.grad raised KeyError", raises_in_functorch, key="CompositeImplicitAutograd"),
    Broken("func_grad", "under torch.func.grad the gradient of x differs … , which backward gives",
           constant_in_functorch, key="CompositeImplicitAutograd"),
    Broken("func_grad", "torch.func.grad of the outputs of torch.func.vjp raised KeyError",
           functools.partial(raises_in_functorch, depth=2), key="CompositeImplicitAutograd"),
    Broken("func_grad", "under torch.func.grad of the outputs of torch.func.vjp the gradient of x",
           functools.partial(constant_in_functorch, depth=2), key="CompositeImplicitAutograd"),
    Broken("backward", "it writes to x without telling autograd, so a gradient does not pass through, without an error",
           triples, status="warn"),
    Broken("gradcheck", "the function given as intended_gradient returns shapes [[2, 6]], and the operator [[4, 6]]", double,
           backward=double_backward, intended_gradient=lambda x: x[:2]),
    Broken("backward", "its outputs do not depend on the values of its inputs", lambda x: x.detach().round(), AutogradCPU=None,
           inputs=(torch.tensor([0.25, 1.25, -2.125]),), status="skip"),
    Broken("backward", "no floating output", torch.argsort, AutogradCPU=None, status="skip"),
    Broken("backward", "no floating tensor argument", torch.argsort, inputs=(torch.arange(3),), status="skip"),
    # The finite difference is taken in float64, whose step does not reach the next integer.
    Broken("backward", "", torch.floor, key="CompositeImplicitAutograd", inputs=(torch.tensor([1.001, 2.001]),), status="pass"),
    # gradients
    Broken("gradient_layouts", ": backward rejects it: RuntimeError: not contiguous", double, status="warn",
           backward=lambda ctx, g: g * 2 if g.is_contiguous() else not_contiguous()),
    Broken("saved_tensors", "it keeps x for backward without save_for_backward, which holds its memory; "
           "saved_tensors_hooks, checkpointing and offloading do not see it", double, status="warn",
           backward=lambda ctx, g: (g * 2).view(ctx.x.shape), setup=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])),
    # distributed
    Broken("dtensor", "a call on DTensors with every argument replicated raised RuntimeError: 'slot'", double,
           sharding=accident),
    Broken("dtensor", "on DTensors with x sharded along dimension 0 output 0 differs … , which plain tensors give",
           lambda x: x.cumsum(0), sharding=by_rows),
    Broken("dtensor", "its backward does not run on DTensors: NotImplementedError: Operator broken.helper_loop.default",
           double, sharding=by_rows, backward=lambda ctx, g: helper("loop")(g), status="warn"),
    Broken("dtensor", "backward on DTensors with every argument replicated raised KeyError", double, sharding=by_rows,
           backward=lambda ctx, g: accident() if traced(g) else g * 2),
    Broken("dtensor", "on DTensors with every argument replicated the gradient of x differs … , which "
           "plain tensors give", double, sharding=by_rows,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
    Broken("dtensor", "DTensor has no sharding strategy for it … register_sharding", double, status="refused"),
    Broken("dtensor", "stays sharded with x sharded along 0", double, sharding=by_rows, status="pass"),
    Broken("dtensor", "a call on DTensors with x sharded along dimension 0 raised RuntimeError: halves", halves,
           sharding=by_rows),
    Broken("dtensor", "with x sharded along dimension 0 one raises RuntimeError: halves", lambda x: helper("halves")(x),
           key="CompositeImplicitAutograd", status="refused"),
    # DTensor cannot move an argument that is written to.
    Broken("dtensor", "no sharding stays", lambda x: (halves(x), x)[1], schema="(Tensor(a!) x) -> Tensor(a!)", fake=lambda x: x,
           inputs=(torch.ones(4),),
           sharding=by_rows, status="pass"),
    # fakes
    Broken("compile", "under torch.compile with static shapes the gradient of x differs", double,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
    Broken("compile", "torch.compile with static shapes raised", double, fake=None),
    Broken("compile", "under torch.compile with static shapes output 0 has strides (1, 4) instead of (6, 1)",
           lambda x: (x * 2).t().contiguous().t() if torch.compiler.is_compiling() else x * 2, key="CompositeImplicitAutograd"),
    Broken("compile", "eager mode refuses the gradient with an error, but under torch.compile there is neither error nor gradient",
           double, Autograd=refuses_but_not_traced),
    Broken("int_sizes", "n is the size of dimension 0 of output 0, and the schema says int", lambda x, n=3: x.new_zeros(n),
           schema="(Tensor x, int n=3) -> Tensor", fake=lambda x, n=3: x.new_empty(n), status="warn"),
    Broken("fake_dynamic", "its backward fixes dimension 0 of x to 4, although it takes other sizes; every new size compiles again", double,
           backward=lambda ctx, g: g * 2 if int(g.shape[0]) else g, status="warn"),
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
    Broken("fake_dtypes", "given float16 x output 0 is float32, but the CPU kernel gives float16", lambda x: x.float().sum(-1),
           fake=lambda x: x.new_empty(x.shape[:-1], dtype=torch.float32), key="PrivateUse1", device="openreg",
           CPU=lambda op, x: x.sum(-1)),
    # inputs
    Broken("empty", "output 0 is float64 instead of float32, which the reference gives", key="PrivateUse1", device="openreg",
           kernel=lambda x: x + 0 if x.numel() else x.double(), CPU=lambda op, x: x + 0),
    Broken("zero_dim", "output 0 is float64 instead of float32, which the reference gives", key="PrivateUse1", device="openreg",
           kernel=lambda x: x + 0 if x.dim() else x.double(), CPU=lambda op, x: x + 0),
    Broken("large", "output 0 is float64 instead of float32, which the reference gives", key="PrivateUse1", device="openreg",
           kernel=lambda x: x + 0 if x.numel() < 1000 else x.double(), CPU=lambda op, x: x + 0),
    Broken("empty", " it ended in ZeroDivisionError", lambda x: x * (8 // len(x))),
    Broken("layouts", "for inputs in permuted layout output 0 differs … , which contiguous inputs give", in_memory_order),
    Broken("layouts", "for inputs in permuted layout the gradient of x differs … , which "
           "contiguous inputs give", torch.sin,
           backward=lambda ctx, g: g * in_memory_order(ctx.saved_tensors[0])),
    Broken("layouts", "for contiguous inputs that start one element into their storage, which is not aligned to 16 bytes its "
           "backward raised RuntimeError: misaligned address", double, backward=lambda ctx, g: g * aligned(ctx.saved_tensors[0])),
    # A refusal names the inputs, and the backward if that refuses.
    Broken("layouts", "inputs in permuted layout: RuntimeError: not contiguous", status="refused",
           kernel=lambda x: x * 2 if x.is_contiguous() else not_contiguous()),
    Broken("layouts", "inputs in permuted layout, backward of: NotImplementedError: y alone", double, status="refused",
           backward=lambda ctx, g: g * 2 if ctx.saved_tensors[0].is_contiguous() else y_alone()),
    Broken("sizes", "a call takes too long", slow, status="refused"),
    # Wrong everywhere in an odd size, so that only a reference, or a fake kernel, tells.
    Broken("sizes", "given x [ … ], output 0 differs … , which the reference gives", reference=lambda x: x * x.mean(),
           kernel=lambda x: x * x.mean() * (1 + x.shape[-1] % 2)),
    Broken("sizes", "given x [ … ], output 0 has dtype float64, but the fake kernel says float32",
           lambda x: x * x.mean() if x.shape[-1] % 2 == 0 else (x * x.mean()).double()),
    Broken("sizes", "output 0 differs … if NaN surrounds them in memory: it reads past their ends", reads_whole_vectors),
    Broken("large_strides", "given x with rows 4294967296 elements apart, it raised OverflowError",
           lambda x: x * 2 if max(x.stride(), default=0) < 2**31 else (2**31).to_bytes(4, signed=True)),
    *(Broken("large_strides", f"given x with rows 4294967296 elements apart, {what} differs … , which near ones give", **how)
      for what, how in (
          ("output 0", dict(kernel=lambda x: x * far(x))),
          ("the gradient of x", dict(kernel=torch.sin, backward=lambda ctx, g: g * far(ctx.saved_tensors[0]))),
      )),
    Broken("zero_dim", "output 0 differs in 1 of 1 elements: 0 instead of 2 at [], which the reference gives", inputs=ONES,
           kernel=lambda x: x * [0, 1, 2][x.dim()], reference=double),
    Broken("zero_dim", "output 0 has dtype float64, but the fake kernel says float32",
           lambda x: x * 2 if x.dim() else x.double()),
    Broken("empty", "size 4 are empty, its backward raised RuntimeError: Function", double,
           backward=lambda ctx, g: g * 2 if g.numel() else g.new_ones(3, 3)),
    Broken("large", "given inputs whose dimensions of size … are … long, … , which one thread gives", of_threads),
    *(Broken(row, "", lambda x: x + 0, inputs=(torch.ones(1, 1),), status="skip") for row in ("empty", "large", "fake_dynamic")),
    # With half a million elements, as many as other inputs get, the result would have 2**38.
    Broken("large", "2048 instead of 5", lambda x: torch.outer(x, x), fake=lambda x: x.new_empty(len(x), len(x)),
           inputs=(torch.rand(5),), status="pass"),
    # It is enough for threads, however often a size occurs in one argument, and however many elements the other has.
    *(Broken("large", "724 instead of 4", lambda x, w: x.sum() * w, schema=PAIR, fake=lambda x, w: torch.empty_like(w),
             inputs=(torch.ones(4, 4), torch.ones(others)), status="pass")
      for others in (2**11, 2**15)),
    # A long sum may round more, by the root of its terms: roundings have either sign.
    *(Broken(row, "", lambda x, error=error: x.sum() * (1 + error), fake=lambda x: x.new_empty(()), reference=torch.sum,
             inputs=ONES, status=status)
      for row, error, status in (("zero_dim", 1.2e-4, "pass"), ("zero_dim", 2.4e-4, "fail"), ("large", 5e-4, "pass"),
                                 ("large", 3e-3, "fail"))),
    # machine
    Broken("stream", "on another stream it does not wait for the work before it: output 0 differs",
           lambda x: x * first_of(x, at_once=stream_id(x)), key="PrivateUse1", device="openreg"),
    Broken("devices", "on openreg:1, while openreg:0 is the current device, output 0 differs … , which openreg:0 gives",
           lambda x: x * (2 + x.device.index), key="PrivateUse1", device="openreg"),
    Broken("devices", "output 0 is on openreg:0, but the arguments are on openreg:1", lambda x: x.to("openreg:0") * 2,
           key="PrivateUse1", device="openreg"),
    Broken("devices", "is the current device, it does not wait for the stream of openreg:1: output 0 differs",
           lambda x: x * first_of(x, at_once=x.device.index), key="PrivateUse1", device="openreg"),
    Broken("stream", "on another stream output 0 differs … , which the default stream gives",
           lambda x: x + stream_id(x), key="PrivateUse1", device="openreg"),
    Broken("stream", "on another stream the gradient of x differs … , which the default stream "
           "gives", double, key="PrivateUse1", device="openreg", backward=lambda ctx, g: g + stream_id(g)),
    Broken("poison", "it reads memory that was never written: with fresh memory filled with 0xFF bytes instead of 0x5A, "
           "output 0", unwritten),
    Broken("poison", "bytes instead of 0x5A, the gradient of x", double, backward=lambda ctx, g: unwritten(g) * 2),
    Broken("determinism", "the same call again gives a different result: output 0 differs", noise),
    Broken("determinism", "the same call again rounds differently: output 0 differs", drifts, status="warn"),
    Broken("generator", "given a generator as g, it also draws from the global generator of cpu",
           lambda x, g=None: x + torch.rand(x.shape, generator=g) + 0 * torch.rand(()), schema=DRAWS),
    Broken("generator", "without g, its numbers do not follow torch.manual_seed",
           lambda x, g=None: x + torch.rand(x.shape, generator=g or unseeded()), schema=DRAWS),
    Broken("generator", "with any generator as g it gives the same numbers",
           lambda x, g=None: x * 2 if g else x + torch.rand(x.shape), schema=DRAWS),
    Broken("state", "after a call on openreg, a call on the CPU gives output 0 differs", of_the_first_device,
           key="CompositeExplicitAutograd", device="openreg"),
    Broken("state", "after other calls, a call with … gives output 0 differs", by_the_number_of_dtypes, key="PrivateUse1",
           device="openreg"),
    Broken("threads", "four threads that call it on separate inputs do not end", stuck),
    # transforms
    Broken("out", "with out= of the right size: output 0 differs in 24 of 24 elements: 0 instead of 2 at [0, 0], which the "
           "operator returns", double, inputs=ONES, out=lambda x, out: out.resize_(x.shape).zero_()),
    Broken("out", "with out= with other strides: output 0 differs", double, out=if_contiguous),
    Broken("out", "with out= with other strides: output 0 differs", double, inputs=(torch.ones(5),), out=if_contiguous),
    Broken("out", " returns a tensor other than out", double,
           out=lambda x, out: out.resize_(x.shape).copy_(x * 2).view_as(out)),
    Broken("out", " changed the strides of out, which has the right size", double,
           out=lambda x, out: out.resize_(0).resize_(x.shape).as_strided_(x.shape, x.stride()).copy_(x * 2)),
    Broken("vmap", "with x batched, torch.vmap raised KeyError", double, vmap=accident),
    Broken("vmap", "torch.vmap is right but takes PyTorch's slow loop over the samples", double, status="warn"),
    Broken("vmap", "vmap is not supported", double, vmap=refuses_vmap, status="refused"),
    Broken("vmap_grad", "under torch.vmap of torch.func.grad with x batched, the gradient of x differs",
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
    Broken("autocast", "under autocast, given x bfloat16, the gradient of x differs … , which float32 "
           "gives", double,
           backward=lambda ctx, g: g * (2 if ctx.saved_tensors[0].dtype != torch.bfloat16 else 3)),
    Broken("autocast", "the backward of a call under autocast (x bfloat16) raised KeyError", double,
           backward=lambda ctx, g: g * 2 if ctx.saved_tensors[0].dtype != torch.bfloat16 else accident()),
    # unbacked
    Broken("fake_unbacked", " it raised KeyError", double, fake=bare_double_size),
    Broken("fake_unbacked", " it asks for a size that is not known before the program runs (… guard on … ); a program "
           "with such sizes (nonzero, item, masks) does not compile", double, status="warn",
           fake=lambda x: torch.empty_like(x) if x.shape[0] > 2 else torch.empty_like(x)),
    Broken("fake_unbacked", "output 0 has dtype float64, but the fake kernel says float32", lambda x: x.double()),
    Broken("compile_unbacked", "with its backward", double, backward=double_backward, status="pass"),
    Broken("compile_unbacked", "without a backward", double, status="pass"),
    Broken("compile_unbacked", "under torch.compile with every dimension unbacked output 0 differs", noise),
    Broken("compile_unbacked", "under torch.compile with every dimension unbacked the gradient of x", double,
           backward=lambda ctx, g: g * (3 if traced(g) else 2)),
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
    Broken("reference", "the gradient of x differs", double, reference=double,
           backward=lambda ctx, g: g * 3),
    Broken("reference", "the check reference ended in RuntimeError: lost", double, backward=double_backward,
           reference=double_whose_backward_raises(RuntimeError("lost"))),
    Broken("reference", "outputs only, as the reference has no gradient; against the reference", double, status="pass",
           backward=double_backward, reference=double_whose_backward_raises(NotImplementedError("not yet"))),
    Broken("schema", "output 0 shares the memory of x, and the schema does not say so", lambda x: [x[:1], x[1:].clone()],
           schema="(Tensor x) -> Tensor[]"),
    Broken("schema", "", lambda x: [x[:1], x[1:]], schema="(Tensor(a) x) -> Tensor(a)[]", status="pass"),
    Broken("schema", "", Tensor.to_sparse, status="pass"),
    *(Broken("reference", "output 0 differs", lambda x: x * 1.2, inputs=(torch.ones(3, dtype=dtype),), reference=lambda x: x)
      for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)),
    Broken("reference", "output 0 is float32 instead of float64", lambda x: x + 0, key="PrivateUse1", device="openreg",
           CPU=lambda op, x: x.double()),
    Broken("reference", ", which its CPU kernel gives", lambda x: x * 3, key="PrivateUse1", device="openreg",
           CPU=lambda op, x: x * 2),
    Broken("autograd_registration", "an output requires a gradient, but no kernel is registered at "
           "AutogradPrivateUse1", torch.sin, key="PrivateUse1", device="openreg", mode="nothing"),
    # An output that is an argument has its gradient.
    Broken("autograd_registration", "", lambda x: x, schema=VIEW, fake=lambda x: x, key="PrivateUse1", device="openreg",
           mode="nothing", status="pass"),
    Broken("autograd_registration", "", lambda x: x, schema="(Tensor(a!) x) -> Tensor(a!)", fake=lambda x: x, key="PrivateUse1",
           device="openreg", mode="nothing", status="skip"),
    # reasons to skip; see also SKIPPED
    *(Broken(row, "its gradient changes from call to call: see determinism", torch.sin, status="skip",
             backward=lambda ctx, g: noise(g)) for row in ("frozen_arguments", "gradient_layouts")),
    *(Broken(row, sentence, kernel, status="skip")
      for sentence, kernel in (("its outputs have no strides", Tensor.to_sparse),
                               ("it reads memory that was never written: see poison", unwritten))
      for row in ("sizes", "large_strides", "half_precision")),
    Broken("effects", "compilers keep the operators that it is made of", lambda x: None, schema="(Tensor x) -> ()",
           key="CompositeImplicitAutograd", status="skip"),
    Broken("fake_numbers", "the fake kernel gives no number: KeyError", lambda x: x.numel(), schema="(Tensor x) -> int",
           fake=accident, status="skip"),
    Broken("vmap", "the shapes of its outputs depend on values, and vmap returns equal ones", lambda x: x[x > 1],
           fake=None, status="skip"),
    Broken("vmap", "PyTorch's loop over slices gives another result (output 0 differs … ): see layouts", in_memory_order,
           status="skip"),
    Broken("generator", "it refuses a generator of cpu: ValueError: no generator", lambda x, g=None: refuses_a_generator(g),
           schema=DRAWS, status="skip"),
    # refusals, and limits of PyTorch
    Broken("vmap", "PyTorch's loop over slices raises RuntimeError: not contiguous", status="refused",
           kernel=lambda x: x * 2 if x.is_contiguous() else not_contiguous()),
    Broken("large", "inputs whose dimensions of size 4 are … long", status="refused",
           kernel=lambda x: x * 2 if x.numel() < 1000 else not_contiguous()),
    Broken("frozen_arguments", "if only y requires a gradient: NotImplementedError: y alone", torch.mul, schema=PAIR,
           inputs=PAIRS, fake=torch.mul, status="refused",
           backward=lambda ctx, g: tuple(g * x for x in reversed(ctx.saved_tensors)) if ctx.needs_input_grad[0] else y_alone()),
    Broken("dtensor", "DTensor does not redistribute a tensor that is given by keyword only", lambda x, *, y: x * y,
           schema="(Tensor x, *, Tensor y) -> Tensor", inputs=Sample(NUMBERS[0], y=NUMBERS[0]),
           fake=lambda x, *, y: torch.empty_like(x), sharding=lambda x, y: by_rows(x), status="limit"),
    Broken("autocast", "torch.library.register_autocast does not support keyword-only arguments", lambda x, *, y: x * y,
           schema="(Tensor x, *, Tensor y) -> Tensor", inputs=Sample(NUMBERS[0], y=NUMBERS[0]),
           fake=lambda x, *, y: torch.empty_like(x), autocast=torch.float32, status="limit"),
]  # fmt: skip


@pytest.mark.parametrize("broken", TABLE, ids=[f"{broken.row}-{i}" for i, broken in enumerate(TABLE)])
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
    assert re.search(mistakes.pattern(broken.sentence), found[0].sentence), found[0].sentence
    if broken.status in ("fail", "warn"):
        assert found[0].sentence.startswith("broken::") and found[0].remedy


# ---- reasons to skip ----


def skips(reason, checks):
    return dict.fromkeys(checks.split(), reason)


GRADIENTS = "gradient_layouts frozen_arguments broadcast_gradients saved_tensors"
NO_DERIVATIVE = {
    **skips("there is no derivative: see backward", "autograd_registration"),
    **skips("there is no derivative to check: see backward", f"gradcheck gradgradcheck func_grad {GRADIENTS}"),
}
CONSTANT = NO_DERIVATIVE | skips("there is no derivative to check: see backward", "forward_ad vmap_grad")
NO_FLOATS = skips("no floating tensor argument", "backward fake_dtypes autocast half_precision")
ONE_ARGUMENT = {"frozen_arguments": "one argument is differentiable", "broadcast_gradients": "it does not broadcast"}
ONE_ELEMENT = {
    **skips("no strided tensor of more than one element", "empty large fake_dynamic sizes half_precision"),
    **skips("no strided tensor of more than one element, or too many elements", "large_strides"),
    **skips("no tensor has more than one element", "fake_unbacked compile_unbacked"),
}
OFTEN = {
    "reference": "no reference was given",
    "fake_numbers": "it returns no number",
    "int_sizes": "no argument is an int; SymInt is right for a size",
    "defaults": "no argument has a default",
    "effects": "it returns or writes something",
    **skips("cpu has no streams", "stream devices"),
    "generator": "its schema has no Generator argument",
}
# These take long, and run only where they are to be skipped.
LONG = {"compile", "fake_dynamic", "fake_unbacked", "compile_unbacked", "dtensor", "large", "sizes", "large_strides",
        "half_precision", "stream", "devices", "poison", "determinism", "state", "threads"}  # fmt: skip
# An operator, its sample, and why each check skips it; None if it does not.
SKIPPED = [
    ("sin.out", Sample(*NUMBERS, out=torch.empty(4, 6)), NO_DERIVATIVE | {"out": "it is an out= overload"}),
    ("bernoulli.p", Sample(*NUMBERS, 0.5), {
        **NO_DERIVATIVE,
        **skips("its numbers are random", "compile compile_unbacked vmap vmap_grad dtensor sizes half_precision"),
        **skips("its numbers are random, and drawn in the order of memory", "layouts large_strides"),
        "reference": "its numbers are random, and no reference was given",
        "threads": "its numbers are random, and the generator is shared",
        **dict.fromkeys(("defaults", "generator")),
    }),
    ("native_dropout", Sample(*NUMBERS, 0.5, True), {
        **ONE_ARGUMENT,
        "broadcast_gradients": "its numbers are random",
        **skips("its numbers are random", "vmap vmap_grad"),
        "layouts": "its numbers are random, and drawn in the order of memory",
        "reference": "its numbers are random, and no reference was given",
    }),
    ("sin", Sample(torch.tensor(1)), CONSTANT | NO_FLOATS | ONE_ELEMENT),
    ("item", Sample(torch.tensor(1.0)), {
        **CONSTANT,
        **ONE_ELEMENT,
        **skips("it returns no tensor, and a compiler does not know its result",
                "compile fake_layouts fake_dtypes fake_unbacked compile_unbacked fake_errors"),
        "backward": "no floating output",
        "fake_numbers": None,
        "out": "it has no out= overload",
        **skips("it takes or returns no tensor", "vmap dtensor"),
    }),
    ("ones", Sample([3]), {
        **CONSTANT,
        **NO_FLOATS,
        **ONE_ELEMENT,
        "out": "it has no out= overload",
        **skips("it takes or returns no tensor", "vmap dtensor"),
        "zero_dim": "no strided tensor with elements",
        **dict.fromkeys(("int_sizes", "defaults")),
    }),
    ("unbind_copy.int", Sample(*NUMBERS), {
        **ONE_ARGUMENT,
        "out": "its out= takes a list",
        **dict.fromkeys(("int_sizes", "defaults")),
    }),
    ("sin", Sample(NUMBERS[0].to(torch.complex64)), {
        **ONE_ARGUMENT,
        **NO_FLOATS,
        **skips("torch.func.grad is for real numbers", "func_grad vmap_grad"),
        "backward": None,
    }),
    ("sin", Sample(NUMBERS[0].double().to("openreg")), {
        **ONE_ARGUMENT,
        "autocast": "autocast leaves float64 alone",
        "large_strides": "this needs memory that is not used until it is touched, which openreg may not have",
        **dict.fromkeys(("reference", "stream", "devices")),
    }),
    ("_to_copy", Sample(*NUMBERS, dtype=torch.bfloat16), {
        **ONE_ARGUMENT,
        **skips("it does not compute in float64, and finite differences in a half type are meaningless",
                "gradcheck gradgradcheck"),
        "out": "it has no out= overload",
        **dict.fromkeys(("int_sizes", "defaults")),
    }),
    ("sin", Sample(torch.empty(0, 3)), {
        **ONE_ARGUMENT,
        **skips("the sample is empty", "gradcheck gradgradcheck"),
        "zero_dim": "no strided tensor with elements",
        "large_strides": "no strided tensor of more than one element, or too many elements",
    }),
    ("threshold_backward", Sample(*NUMBERS, *NUMBERS, 0.0), {
        "autocast": "autograd calls a backward operator in the dtypes that its forward saw, with autocast off",
    }),
    ("sin", Sample(NUMBERS[0].to_sparse()), {
        **skips("it applies to strided tensors only", " ".join(CHECKS.keys() - ANY_LAYOUT)),
        "reference": "no reference was given",
        "generator": "its schema has no Generator argument",
    }),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, sample, reasons", SKIPPED, ids=[f"{row[0]}-{i}" for i, row in enumerate(SKIPPED)])
def test_reasons_to_skip(name, sample, reasons):
    expected = {check: reason for check, reason in (OFTEN | reasons).items() if reason}
    report = check(
        f"aten::{name}", [sample], only=[check for check in CHECKS if check not in LONG or check in expected]
    )
    assert {result.check: result.sentence for result in report.of("skip")} == expected


def test_an_argument_of_a_c_class():
    of = "__torch__.torch.classes.quantized.LinearPackedParamsBase"
    op = define(
        f"takes_packed(Tensor x, {of}? weights=None, float scale=2.) -> Tensor",
        lambda x, weights=None, scale=2.0: (x * scale).contiguous(),
        lambda x, weights=None, scale=2.0: x.new_empty(x.shape),
        backward=lambda ctx, g: (g * ctx.scale, None, None),
        setup=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
    )
    packed = torch.ops.quantized.linear_prepack_fp16(torch.rand(3, 6), torch.rand(3))
    report = check(op, [Sample(torch.rand(4, 6), packed)], only=["fast", "compile", "compile_unbacked", "state"])
    assert report.passed, str(report)
    sentence = f"PyTorch's compilers and tracers do not take every object of {of} as an argument"
    found = {result.check: (result.status, result.sentence) for result in report.results}
    assert found["compile"] == found["compile_unbacked"] == ("limit", sentence)
    assert found["state"] == ("skip", "its sample has an object with a state of its own")


@pytest.mark.parametrize("device", ["cpu", "openreg", "openreg:1"])
def test_the_samples_give_the_device(device):
    x = torch.ones(3, device=device)
    assert check("openreg::custom_abs", [(x,)], only=["runs"]).device == str(x.device)


def test_a_fake_kernel_gets_tensors_of_the_device():
    def fake(x):
        assert x.device.type == "openreg"
        return torch.empty_like(x)

    op = define("on_the_device(Tensor x) -> Tensor", lambda x: x + 0, fake, "PrivateUse1")
    only = ["fake_layouts", "fake_dtypes", "fake_dynamic", "fake_unbacked", "fake_errors", "compile", "large"]
    report = check(op, [(torch.rand(3, 4, device="openreg"),)], only=only)
    assert not report.failures and len(report.of("pass")) == len(only), str(report)


# ---- refusals are not failures ----


def test_gradient_that_torch_func_does_not_find():
    """pytorch/pytorch#168393: the Function of register_autograd has no setup_context."""
    cubed = define("cubed", lambda x: x**3, backward=lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2)
    (result,) = check(cubed, [NUMBERS], only=["func_grad"]).results
    try:
        torch.func.grad(lambda x: cubed(x).sum())(*NUMBERS)
    except RuntimeError as error:
        assert "must override the setup_context" in str(error)
        assert result.status == "limit" and "pytorch#168393" in result.sentence
    else:
        assert result.status in ("pass", "fail")  # where its vjp inside another transform has no gradient


def test_refusals():
    @torch.library.custom_op("broken::refuses", mutates_args=())
    def refuses(x: Tensor) -> Tensor:
        return x.sin()

    refuses.register_fake(torch.empty_like)
    report = check(refuses, [(torch.randn(4, 6),)], only=["backward", "gradcheck", "compile", "vmap_grad"])
    assert report.passed and "no autograd formula was registered" in report.of("refused", "backward")[0].sentence


@pytest.mark.parametrize(
    "accident, sentence",
    [
        (lambda g: g * None, "unsupported operand type"),
        (lambda g: g if None < 1 else g, "'<' not supported between instances"),
        (lambda g: {}["no gradient slot"], "no gradient slot"),
        (lambda g: g.not_supported, "no attribute 'not_supported'"),
    ],
    ids=["operand", "instances", "key", "attribute"],
)
def test_accidents_are_no_refusals(accident, sentence):
    name = re.sub(r"\W+", "_", sentence)
    op = define(name, double, backward=lambda ctx, g: accident(g), vmap=lambda info, dims, x: (accident(x), 0))
    report = check(op, [NUMBERS], only=["backward", "vmap"])
    assert [r.check for r in report.failures] == ["backward", "vmap"], str(report)
    assert all(sentence in r.sentence for r in report.failures)


# ---- good operators pass ----


@pytest.fixture(scope="module")
def good():
    """A custom_op with everything an author can register."""

    @torch.library.custom_op("good::scaled", mutates_args=())
    def scaled(x: Tensor, weight: Tensor, factor: float = 2.0) -> Tensor:
        torch._check(x.dtype == weight.dtype, lambda: f"scaled: expected weight of {x.dtype}, but got {weight.dtype}")
        torch._check(x.shape[-1:] == weight.shape, lambda: f"scaled: expected weight of {x.shape[-1:]}")
        return (x * weight * factor).contiguous()

    @scaled.register_fake
    def _(x, weight, factor=2.0):
        torch._check(x.dtype == weight.dtype, lambda: f"scaled: expected weight of {x.dtype}, but got {weight.dtype}")
        last = x.shape[-1:]
        same = len(last) == weight.dim() and (not last or last[0] == weight.shape[0])
        torch._check(same, lambda: f"scaled: expected weight of {x.shape[-1:]}")
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, weight, ctx.factor = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * weight * ctx.factor, (g * x * ctx.factor).sum_to_size(weight.shape), None

    def batched(info, dims, x, weight, factor=2.0):
        x = x.movedim(dims[0], 0) if dims[0] is not None else x.expand(info.batch_size, *x.shape)
        if dims[1] is not None:
            weight = weight.movedim(dims[1], 0).reshape(
                info.batch_size, *[1] * (x.dim() - 2), weight.shape[1 - dims[1] % 2]
            )
        return (x * weight * factor).contiguous(), 0

    scaled.register_autograd(backward, setup_context=setup_context)
    scaled.register_vmap(batched)
    scaled.register_autocast("cpu", torch.float32)
    return scaled


@pytest.mark.slow
def test_good_custom_op(good):
    """Every check of one sample, and the fast ones of samples of other dimensions and by keyword."""
    reference = lambda x, weight, factor=2.0: x * weight * factor  # noqa: E731
    others = [(torch.randn(2, 3, 5), torch.randn(5), 0.5), Sample(torch.randn(5), torch.randn(5), factor=3.0)]
    assert (report := check(good, others, reference=reference, only=["fast"])).passed, str(report)
    report = check(good, [(torch.randn(4, 6), torch.randn(6))], reference=reference)
    assert report.passed, str(report)
    assert {r.check for r in report.of("warn")} <= {"forward_ad", "func_grad", "zero_dim"}, str(report)
    assert "silently loses the tangent" in report.of("warn", "forward_ad")[0].sentence  # as every custom_op does
    assert {"vmap", "autocast", "gradgradcheck", "reference", "compile"} <= {r.check for r in report.of("pass")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, sample, device, passes",
    [
        ("addcmul", Sample(*torch.randn(2, 4, 6), torch.randn(6), value=0.5), "cpu", "out"),
        ("addcmul", Sample(*torch.randn(2, 4, 6), torch.randn(6), value=0.5), "openreg", "out"),
        ("mul_.Tensor", Sample(torch.randn(4, 6), torch.randn(6)), "cpu", "schema"),
        ("cat", Sample([torch.randn(4, 6), torch.randn(2, 6)], 0), "cpu", "backward"),
        ("argmax", Sample(torch.randn(4, 6), -1), "cpu", "fake_layouts"),
    ],
    ids=["addcmul", "addcmul on openreg", "mul_", "cat", "argmax"],
)
def test_good_operator_of_torch(op, sample, device, passes):
    only = [] if op == "addcmul" else ["fast"]
    report = check(f"aten::{op}", [sample], device, only=only)
    assert report.passed and report.of("pass", passes), str(report)


def test_good_operator_with_random_numbers():
    x = torch.randn(4, 6)
    report = check("openreg::dropout_add", [(x, x, 0.5)], "openreg:1", only=["runs", "reference", "zero_dim", "large"])
    assert report.passed, str(report)
    assert "its numbers are random" in report.of("skip", "reference")[0].sentence
    report = check("openreg::dropout_add", [(x, x, 0.5)], "openreg:1", only=["reference"], reference=lambda x, y, p: x)
    assert report.failures


# ---- nothing ends the run, and all state is restored ----


def test_a_check_that_crashes_is_a_failure(monkeypatch):
    def crash(case):
        raise KeyError("lost")

    crash.__name__ = "runs"
    monkeypatch.setitem(CHECKS, "schema", crash)
    crash.__doc__ = "It crashes."
    report = check("aten::sin", [(torch.randn(4),)], only=["schema", "determinism"])
    assert "KeyError: 'lost'" in report.failures[0].sentence and report.of("pass", "determinism")


def test_a_refused_sample_is_said_once():
    report = check(
        "aten::mm",
        [(torch.randn(4, 6), torch.randn(5)), (torch.randn(4, 6), torch.randn(6, 2))],
        only=["runs", "determinism", "state"],
    )
    assert [r.check for r in report.failures] == ["runs"]
    for check_ in "determinism", "state":
        assert [r.status for r in report.row(check_)] == ["skip", "pass"]


def test_known_failures():
    """They pass, with their cause; a note names one that no longer fails."""
    op = define("known_wrong(Tensor x) -> Tensor", double)

    def results(**known):
        report = check(op, [NUMBERS], only=["runs", "reference"], reference=lambda x: x, known=known)
        return report, {result.check: (result.status, result.remedy) for result in report.results}

    report, found = results(reference="issue 7")
    assert report.passed and found["reference"] == ("known", "issue 7") and found["runs"][0] == "pass"
    assert "Cause: issue 7" in str(report)
    report, found = results(runs="issue 7", reference="issue 8")
    assert report.passed and found["runs"][0] == "pass" and found["reference"][0] == "known"
    assert report.notes == ["runs was known to fail, but does not: issue 7"]
    with pytest.raises(ValueError, match="unknown check 'referenc'"):
        results(referenc="issue 7")


SETTINGS = [  # functions that get and set each, and a value; None is the opposite
    (torch.get_num_threads, torch.set_num_threads, 3),
    (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    (torch.is_grad_enabled, torch.set_grad_enabled, None),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, None),
    (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        functools.partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"),
        None,
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    (torch._C._get_autograd_fallback_mode, torch._C._set_autograd_fallback_mode, "nothing"),
    (torch._C._functorch._is_vmap_fallback_enabled, torch._C._functorch._set_vmap_fallback_enabled, None),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, None),
    *(
        (functools.partial(get, device), functools.partial(put, device), value)
        for device in ("cpu", "openreg")
        for get, put, value in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled, None),
            (torch.get_autocast_dtype, torch.set_autocast_dtype, torch.float64),
        )
    ),
    (openreg_ops.autograd.get_fallback_mode, openreg_ops.autograd.set_fallback_mode, "nothing"),
    (_C.poison, _C.set_poison, None),
]


@pytest.mark.slow
def test_nothing_stays_changed():
    import torch._dynamo.config as dynamo

    def state():
        return (
            *(get() for get, _, _ in SETTINGS), openreg_ops.fallback.get_policy(), dynamo.suppress_errors, dynamo.verbose,
            torch._C._debug_only_are_vmap_fallback_warnings_enabled(), torch.openreg.current_device(),
            bytes(torch.get_rng_state().numpy()), bytes(torch.openreg.get_rng_state().cpu().numpy()),
        )  # fmt: skip

    before = state()
    check("openreg::swiglu", [(torch.ones(3), torch.ones(3))], "openreg")
    assert state() == before
    with pytest.raises(KeyError), preserved("openreg"):
        torch.manual_seed(7)
        for (get, put, value), was in zip(SETTINGS, before, strict=False):
            put(not was if value is None else value)
            assert get() != was
        raise KeyError
    assert state() == before


def test_vmap_warns_of_its_loop_after_a_check(capfd):
    """As before it, once in a call: PyTorch prints it, and from 2.15 on it is a Python warning."""
    op = define("looped(Tensor x) -> Tensor", torch.sin, torch.empty_like)
    for _ in range(2):
        with warnings.catch_warnings(record=True, action="always") as raised:
            torch.vmap(op)(torch.ones(3, 2))
        said = "".join([capfd.readouterr().err, *(str(warning.message) for warning in raised)])
        assert said.count("performance drop") == 1 and "broken::looped" in said
        assert check(op, [(torch.ones(4),)], only=["vmap"]).of("warn", "vmap")


# ---- operators and samples ----


def test_ways_to_name_an_operator(good):
    default = torch.ops.aten.sin.default
    for op in (default, torch.ops.aten.sin, "aten::sin", "aten::sin.default", "torch.ops.aten.sin.default"):
        assert operator(op) is default
    assert operator("aten::sin.out") is torch.ops.aten.sin.out
    assert operator(good) is torch.ops.good.scaled.default
    assert operator(openreg_ops.rms_norm) is torch.ops.openreg.rms_norm.default

    @torch.library.triton_op("good::triton", mutates_args=())
    def triton(x: Tensor) -> Tensor:
        return x + 1

    assert operator(triton) is torch.ops.good.triton.default
    assert check(triton, [(torch.randn(4, 6),)], only=["runs", "schema", "compile"]).passed


@pytest.mark.parametrize(
    "op, sentence",
    [
        ("nothing::here", "unknown operator 'nothing::here'; available: none. Import the module that defines it first"),
        (
            "openreg::rms_nor",
            "unknown operator 'openreg::rms_nor'; did you mean 'openreg::rms_norm'? Import the module",
        ),
        ("rms_norm", "expected an operator's name such as mylib::foo, but got 'rms_norm'"),
        ("aten::sin.inplace", "aten::sin has no overload inplace, only"),
        (torch.ops.aten.add, "has no default overload; name one of"),
        (torch.nn.functional.rms_norm, "is a function, and its code names none"),
        (3, "expected an operator, its name, or what custom_op returned, but got int 3"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_such_operator(op, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(op)


def test_other_wrong_requests():
    with pytest.raises(ValueError, match="unknown check 'stream_'; did you mean 'stream'\\? \\(--help lists all\\)"):
        check("aten::sin", only=["stream_"])
    with pytest.raises(ValueError, match="aten::sin: sample_inputs is empty"):
        check("aten::sin", [])
    with pytest.raises(ValueError, match="it accepts none of the inputs that were generated from its schema"):
        check("aten::convolution")
    with pytest.raises(ValueError, match="that returns them, but got int 5"):
        check("aten::sin", 5)
    with pytest.raises(ValueError, match="cannot use device 'openreg:9': "):
        check("aten::sin", [(torch.randn(4),)], "openreg:9")
    assert {r.check for r in check("aten::sin", [(torch.randn(4),)], only="runs").results} == {"runs"}


def test_forms_of_samples():
    x = torch.randn(4)
    like = types.SimpleNamespace(input=x, args=(), kwargs={})
    report = check("aten::sin", [(x,), Sample(x), like, x], only=["runs", "fake-layouts"])
    assert report.passed and report.samples == ["float32[4]"] * 4
    report = check(
        "aten::sin",
        lambda device, dtype: [(torch.ones(2, dtype=dtype, device=device),)],
        "openreg",
        dtype=torch.float64,
        only=["runs"],
    )
    assert report.samples == ["float64[2]"] and report.device == "openreg"
    assert "generated from the schema" in check("aten::addmm", only=["runs"]).notes[0]


def case_of(op, *arguments, **options):
    return Case(op, Sample(*arguments, **options), "cpu", None, derivative)


def test_a_keyword_argument_that_is_written():
    case = case_of(torch.ops.aten.add.out, torch.ones(2), torch.ones(2), alpha=2, out=torch.zeros(2))
    assert case.names == ["self", "other", "out"] and case.written == [2]
    _, written = case.function()(*(given := case.fresh()))
    assert torch.equal(written, torch.full((2,), 3.0)) and torch.equal(given[2], torch.zeros(2))


def test_fresh_arguments_of_another_dtype():
    case = case_of(torch.ops.aten.where.self, torch.ones(2, dtype=torch.bool), torch.ones(2), torch.ones(2) + 1j)
    assert [x.dtype for x in case.fresh(dtype=torch.float64)] == [torch.bool, torch.float64, torch.complex128]


def test_a_case_has_no_derivative_by_default():
    case = case_of(torch.ops.aten.sin.default, torch.ones(2, requires_grad=True))
    assert case.has_derivative and len(case.results().grads) == 1
    alone = Case(case.op, case.sample, "cpu")
    for without in (alone, case.of_sample(case.sample)):
        assert (without.derivative.status, without.gradients, without.results().grads) == ("skip", [], [])


def test_made_up_samples():
    for name in ("mm", "addmm", "cat", "mul.Tensor", "_softmax", "conv2d"):
        assert derived(operator(f"aten::{name}"), "cpu", torch.float32)


# ---- the report ----


@pytest.fixture(scope="module")
def report():
    return check(
        "aten::mul.Tensor",
        [(torch.randn(4, 6), torch.randn(4, 6)), (torch.randn(3), torch.randn(4))],
        only=["runs", "schema", "out", "determinism"],
    )


def test_table(report):
    text = str(report)
    assert all(len(line) <= 80 for line in text.splitlines()[1:]), text
    assert "\n  0  float32[4, 6], float32[4, 6]\n  1  float32[3], float32[4]\n" in text
    assert re.search(r"^runs +\. +FAIL$", text, re.M) and re.search(r"^schema +\. +-$", text, re.M)
    assert "FAIL runs (sample 1)" in text and "Remedy: give samples that the operator accepts" in text
    assert "aten::mul.Tensor FAILS" in text
    with pytest.raises(AssertionError, match="aten::mul.Tensor fails 1 checks"):
        report.raise_if_failed()


def test_many_samples_fit_the_table():
    text = str(check("aten::sin", [(torch.ones(2),)] * 100, only=["runs"]))
    assert all(len(line) <= 80 for line in text.splitlines()) and re.search(r"^runs +100$", text, re.M)


def test_json(report):
    data = json.loads(report.json())
    assert data["operator"] == "aten::mul.Tensor" and data["passed"] is False and len(data["results"]) == 8


def failing(*statuses):
    """A report of one sample with these results, as (check, status)."""
    about = dict.fromkeys(CHECKS, "what it tests")
    results = [
        Result(check, 0, status, f"mine::op: {check} " + "words " * 200, "do " * 200) for check, status in statuses
    ]
    return Report("mine::op", "mine::op(Tensor x) -> Tensor", "cpu", "2", ["float32[3]"], about, results)


@pytest.mark.parametrize(
    "failed, causes",
    [
        ("layouts", {"layouts": []}),
        ("gradcheck layouts compile vmap", {"layouts": ["gradcheck", "compile", "vmap"]}),
        ("fake_unbacked fake_layouts compile", {"fake_layouts": ["fake_unbacked", "compile"]}),
        ("gradcheck fake_dtypes compile", {"gradcheck": ["compile"], "fake_dtypes": []}),
        ("vmap compile", {"compile": ["vmap"]}),
        ("autocast out layouts", {"autocast": [], "out": [], "layouts": []}),
    ],
)
def test_one_cause_is_one_failure(failed, causes):
    found = failing(*((check, "fail") for check in failed.split())).causes()
    assert {cause.result.check: {also.check for also in cause.also} for cause in found} == {
        check: set(also) for check, also in causes.items()
    }


def test_failures_come_last_and_are_short():
    report = failing(
        ("layouts", "fail"), ("gradcheck", "fail"), ("compile", "fail"), ("vmap", "warn"), ("dtensor", "limit")
    )
    end = str(report).partition("FAIL layouts\n")[2].partition("\n\nmine::op FAILS")[0]
    assert len(end.splitlines()) < 15 and all(len(line) <= 80 for line in end.splitlines()), end
    assert "Also fails: gradcheck, compile (--verbose" in end and "check --explain layouts" in end and "warn" not in end
    assert "PyTorch's own limits" in str(report) and "mine::op: dtensor" not in str(report)
    assert "mine::op: gradcheck words" in report.text(verbose=True) and "mine::op: dtensor" in report.text(verbose=True)
    page = report.html()
    order = ['<p class="verdict fail">mine::op FAILS', "mine::op: layouts", "what it verifies", "mine::op: vmap"]
    assert sorted(order, key=page.index) == order and '<pre class="wrapped"></pre>' not in page


def test_fast_is_a_choice_of_checks():
    chosen = check("aten::sin", [(torch.ones(2),)], only="fast", skip=["layouts"]).about
    assert list(chosen) == [name for name in CHECKS if name not in SLOW and name != "layouts"]
    assert list(check("aten::sin", [(torch.ones(2),)], only=["fast", "large"], skip=list(chosen)).about) == [
        "layouts",
        "large",
    ]


def test_explain(capsys):
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    for name in CHECKS:
        assert check_command.main(parser.parse_args(["--explain", name])) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{name}\n\n") and "Remedy" in said and "\n## " not in said


def test_every_check_has_its_section():
    text = (ROOT / "docs" / "checker.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)
    headings = [section.split("\n")[0].strip() for section in sections[1:]]
    assert [h for h in headings if h in CHECKS] == list(CHECKS)
    for section in sections:
        name = section.split("\n")[0].strip()
        if name in CHECKS:
            assert "opcheck" in section and "Remedy" in section, (
                f"{name} says neither why opcheck misses it nor the remedy"
            )
    assert all(function.__doc__ for function in CHECKS.values())


# ---- command line and pytest ----


def command(*arguments, cwd):
    installed = Path(openreg_ops.__file__).parents[1]
    return python(
        "-m",
        "openreg_ops",
        "check",
        *arguments,
        cwd=cwd,
        dynamo=True,
        nested=True,
        PYTHONPATH=f"{installed}{os.pathsep}{cwd}",
    )


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("module")
    (folder / "my_module.py").write_text(
        textwrap.dedent(
            """
            import torch

            @torch.library.custom_op("mine::twice", mutates_args=())
            def my_op(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            my_op.register_fake(torch.empty_like)
            my_op.register_autograd(lambda ctx, g: g * 2)

            def samples(device, dtype):
                yield (torch.ones(3, 5, device=device, dtype=dtype),)

            def reference(x):
                return x + x

            def wrong(x):
                return x + 1
            """
        )
    )
    return folder


@pytest.mark.slow
def test_command(module):
    only = ["--only", "runs", "fake_layouts", "reference", "state"]  # the last has a process of its own
    given = "--samples my_module:samples --reference my_module:reference --html page.html --json data.json"
    result = command("my_module:my_op", *given.split(), *only, cwd=module)
    assert result.returncode == 0, result.stderr
    assert "mine::twice(Tensor x) -> Tensor" in result.stdout and "float32[3, 5]" in result.stdout
    assert (module / "page.html").read_text().startswith("<!DOCTYPE html>")
    data = json.loads((module / "data.json").read_text())
    assert data["operator"] == "mine::twice" and len(data["results"]) == 4


ENDS = """
import os, sys, time
import torch
from torch.library import Library

library, calls = Library("ends", "FRAGMENT"), 0


def operator(name, end, after=3):
    def kernel(x):
        global calls
        calls += 1
        if calls >= after:
            end()
        return x.clone()

    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CompositeExplicitAutograd")


operator("leaves", lambda: os._exit(0))
operator("leaves_first", lambda: os._exit(0), after=1)
operator("exits_first", lambda: sys.exit(0), after=1)
operator("hangs", lambda: time.sleep(1000))
operator("hangs_first", lambda: time.sleep(1000), after=1)


def samples(device, dtype):
    print("said by samples")
    yield (torch.ones(3),)
    yield (torch.ones(4),)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    (folder / "ends.py").write_text(ENDS)
    return folder


@pytest.fixture
def checked(ends):
    """The command `check` of an operator of the module `ends`: its status, its report, and what it prints to stderr."""

    def run(name, *words):
        result = command(f"ends::{name}", "--import=ends", *words, "--json=-", cwd=ends)
        return result.returncode, json.loads(result.stdout), result.stderr

    return run


@pytest.mark.processes
def test_an_operator_that_exits_fails(ends):
    """The report is written in every form, what the program prints is shown on stderr, and other checks run."""
    only = ["--only", "runs,determinism,schema"]
    forms = ["--html", "page.html", "--json", "data.json"]
    result = command("ends::leaves", "--import", "ends", "--samples", "ends:samples", *only, *forms, cwd=ends)
    assert result.returncode == 1, result.stderr
    report = json.loads((ends / "data.json").read_text())
    assert len(report["results"]) == 6 and not report["passed"]
    (failure,) = [result for result in report["results"] if result["check"] == "determinism" and not result["sample"]]
    assert failure["sentence"].startswith("ends::leaves: the process ends in this check: exit 0")
    assert "ends::leaves FAILS: " in result.stdout and "FAIL" in (ends / "page.html").read_text()
    assert "said by samples" in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "before", ["", "torch.ones(1, requires_grad=True).sum().backward()"], ids=["", "after a backward"]
)
@pytest.mark.parametrize(
    "end, sentence",
    [
        ("ctypes.string_at(1)", "signal 11: Fatal Python error: Segmentation fault"),
        ("os.kill(os.getpid(), 2)", "the process ends in this check: signal 2"),
        ("os._exit(0)", "exit 0"),
        ("time.sleep(1000)", "the check does not end: no result after 4 s"),
    ],
    ids=["crashes", "interrupts itself", "exits", "hangs"],
)
def test_a_program_outlives_its_operator(before, end, sentence):
    """Where the operator ends or hangs for inputs that its author did not give."""
    code = f"""
        import ctypes, os, time, torch
        from openreg_ops.testing import check

        @torch.library.custom_op("mine::ends", mutates_args=())
        def ends(x: torch.Tensor) -> torch.Tensor:
            if not x.numel():
                {end}
            return x * 2

        {before}
        report = check(ends, [(torch.ones(3),)], only=["runs", "empty", "poison"], timeout=4)
        print([(result.status, result.sentence) for result in report.results])
    """
    result = python("-c", textwrap.dedent(code), dynamo=True)
    statuses = ast.literal_eval(result.stdout)
    assert [status for status, _ in statuses] == ["pass", "fail", "pass"], result.stderr
    assert sentence in statuses[1][1]


@pytest.mark.processes
def test_an_operator_that_never_returns_skips_the_sample(checked):
    status, report, _ = checked("leaves_first", "--input=f32[3]", "--input=f32[4]", "--only=runs,determinism,poison")
    assert status == 1 and [result["status"] for result in report["results"]] == ["fail", "skip", "skip"] * 2
    assert report["results"][4]["sentence"] == "ends::leaves_first does not return for this sample"


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, outcome", [("exits_first", "SystemExit: 0"), ("leaves_first", "the process ends in this check")]
)
def test_an_operator_that_ends_the_process_with_generated_inputs(checked, name, outcome):
    status, report, _ = checked(name, "--only=schema,runs")
    assert status == 1 and report["results"][0]["status"] == "fail"
    assert outcome in report["results"][0]["sentence"]


@pytest.mark.processes
@pytest.mark.parametrize("name, most", [("leaves", 20), ("hangs", 2)])
def test_too_many_ends_of_the_process(checked, name, most):
    """The remaining checks are skipped, and say why."""
    inputs = [f"--input=f32[{n}]" for n in range(3, 25)]
    timeout = 0.5 if name == "hangs" else 60  # what ends late on a busy machine would count as hanging
    status, report, _ = checked(name, *inputs, "--only=determinism", f"--timeout={timeout}")
    assert status == 1 and [result["status"] for result in report["results"]] == ["fail"] * most + ["skip"] * (
        22 - most
    )
    why = "did not end" if name == "hangs" else "ended the process"
    assert report["results"][-1]["sentence"] == f"earlier checks {why}, so this one was not run"


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_exceptions_that_are_not_errors_fail_a_check(error):
    """In this process: the report is complete, and other checks run."""
    calls = 0

    def kernel(x):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise error
        return x.clone()

    name = type(error).__name__
    op = define(f"raises_{name}(Tensor x) -> Tensor", kernel, torch.empty_like)
    report = check(op, [(torch.ones(3),)], only=["runs", "determinism", "threads", "fake_layouts"])
    sentences = {result.check: result.sentence for result in report.of("fail")}
    assert report.of("pass", "runs") and name in sentences["determinism"], str(report)
    assert name in sentences["threads"], str(report)
    calls = 2
    report = check(op, [(torch.ones(3),)], only=["runs", "determinism"])
    assert [result.status for result in report.results] == ["fail", "skip"] and name in report.results[0].sentence


@pytest.mark.processes
def test_ctrl_c_ends_the_command(ends):
    """The terminal interrupts both processes; here, only the one that the user started."""
    words = ["ends::hangs_first", "--import", "ends", "--input", "f32[3]", "--only", "runs"]
    process = subprocess.Popen(
        [sys.executable, "-m", "openreg_ops", "check", *words], cwd=ends, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{Path(openreg_ops.__file__).parents[1]}"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while "sample 0: runs" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "check: interrupted" in said, said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["mine::thrice"], "unknown operator 'mine::thrice'"),
        (["my_module:my_op", "--input", "q[3]"], "'q[3]' is neither a tensor such as f32[3,4] nor a Python literal"),
        (["my_module:my_op", "--samples", "my_module"], "expected MODULE:NAME, but got 'my_module'"),
        (["my_module:my_op", "--samples", "sys:maxsize"], "function of (device, dtype) that returns them, but got int"),
        (["my_module:my_op", "--reference", "sys:maxsize"], "expected reference to be a function, but got int"),
        (["my_module:my_op", "--input", "f32[3]", "--device", "openreg:9"], "cannot use device 'openreg:9': "),
        (["my_module:my_op", "--input", "f32[3]@openreg:9"], "cannot use device 'openreg:9': "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_refuses(module, monkeypatch, arguments, sentence):
    monkeypatch.syspath_prepend(module)
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    with pytest.raises((Wrong, ValueError), match=re.escape(sentence)):
        check_command.prepared(parser.parse_args(arguments))


OPTIONS = {
    "--samples my_module:samples": lambda report: report["samples"] == ["float32[3, 5]"],
    "--samples my_module:samples --dtype float64": lambda report: report["samples"] == ["float64[3, 5]"],
    "--input f32[2] --input f64[3]": lambda report: report["samples"] == ["float32[2]", "float64[3]"],
    "--input f32[2] --device openreg": lambda report: report["device"] == "openreg",
    "--input f32[2] --only schema": lambda report: list(report["checks"]) == ["schema"],
    "--input f32[2] --only runs schema --skip runs": lambda report: list(report["checks"]) == ["schema"],
    "--input f32[2] --reference my_module:wrong --only reference": lambda report: not report["passed"],
    "--input f32[2] --intended-gradient my_module:wrong --only gradcheck": lambda report: not report["passed"],
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_reach_the_checks(module, monkeypatch, words):
    monkeypatch.syspath_prepend(module)
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    only = [] if "--only" in words else ["--only", "runs"]
    checks = check_command.prepared(parser.parse_args(["my_module:my_op", *words.split(), *only]))
    report = checks.report
    report.results = [checks.result(i, name) for i, name in report.planned()]
    assert OPTIONS[words](report.dict()), report.dict()


def test_an_out_overload_may_have_a_list_among_its_arguments():
    """Only lists of tensors to write to are skipped."""
    (result,) = check("aten::sum.dim_IntList", [(NUMBERS[0], [0])], only=["out"]).results
    assert result.status == "pass"


def test_poison_fills_memory_of_the_device():
    """Where it is not filled already, as the tests have it."""
    op = define("unwritten_there", torch.empty_like, key="PrivateUse1")
    _C.set_poison(False)
    x = torch.ones(1 << 16, device="openreg")
    torch.zeros_like(x)  # in the memory that the operator gets
    (result,) = check(op, [(x,)], "openreg", only=["poison"]).results
    assert result.status == "fail" and not _C.poison()


def test_options_reach_the_processes_of_generated_calls(module, monkeypatch):
    """They import the modules that the operator and its samples are in, and have the seed, the samples and the limits."""
    monkeypatch.syspath_prepend(module)
    found = types.SimpleNamespace(
        seconds=2.0, findings=[], passed=True, summary=lambda: "3 calls",
        operators=[types.SimpleNamespace(reached=3, never="", notes=collections.Counter(memory=2))],
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(generate, "search", lambda *arguments: seen.append(arguments) or found)
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    words = ["my_module:my_op", "--samples=my_module:samples", "--import=json", "--generate=7", "--seed=5", "--quiet"]
    for limit, expected in ((9, 9.0), (600, 60)):
        asked = parser.parse_args([*words, f"--timeout={limit}"])
        report = check_command.prepared(asked).report
        check_command._generated(report, asked)
        options, names = seen.pop()
        assert vars(options) == {
            "device": "cpu", "generate": 7, "seed": 5, "jobs": 1, "threads": 1, "timeout": expected, "quiet": True,
            "modules": ["json", "my_module", "my_module"], "given": {"samples": "my_module:samples", "inputs": []},
        }  # fmt: skip
        assert names == ["mine::twice"]
        assert [result.status for result in report.results] == ["pass"] and "generated" in report.about
        assert report.notes == ["3 calls", "Allowed in 2 generated calls: memory"] and report.seconds == 2.0


def test_fixture(openreg_check, good):
    assert openreg_check(good, [(torch.randn(4, 6), torch.randn(6))], only=["runs"]).passed
    with pytest.raises(pytest.fail.Exception, match="FAIL runs"):
        openreg_check("aten::mm", [(torch.randn(4, 6), torch.randn(5))], only=["runs"])


@pytest.mark.slow
def test_outputs_that_were_not_asked_for_are_none():
    """As the gradients of ATen's backward operators are where their mask says no."""

    def of(gradient, x, mask):
        wanted = zip((gradient * x, gradient.sum(-1)), mask, strict=True)
        return tuple(value if asked else None for value, asked in wanted)

    op = define("masked_backward(Tensor gradient, Tensor x, bool[2] mask) -> (Tensor, Tensor)", of, of)
    x = torch.rand(3, 4)
    only = ["runs", "reference", "compile", "fake_layouts", "fake_dtypes", "fake_dynamic", "layouts"]
    for mask, count in (([True, True], 2), ([False, True], 1), ([True, False], 1), ([False, False], 0)):
        sample = Sample(x, x, mask)
        report = check(op, [sample], only=only)
        assert report.passed and report.of("pass", "runs"), str(report)
        assert len(Case(op, sample, "cpu", None, derivative).expected) == count


def test_a_stream_that_was_not_busy_long_enough_is_busy_for_longer(monkeypatch):
    """The values of the arguments arrive before the call, unless the stream sleeps for long enough."""
    sleep = torch.openreg._sleep
    monkeypatch.setattr(torch.openreg, "_sleep", lambda cycles: cycles > streams.DELAY and sleep(cycles))

    def kernel(x):
        time.sleep(0.05)
        return x * first_of(x, at_once=True)

    op = define("reads_on_the_host(Tensor x) -> Tensor", kernel, key="PrivateUse1")
    report = check(op, [NUMBERS], "openreg", only=["stream"])
    assert "its kernel computes on the host" in report.failures[0].sentence, str(report)


def test_the_check_of_streams_has_no_race():
    """It copies the inputs on the default stream."""
    with torch.openreg._sanitizer.sanitize():
        report = check("openreg::swiglu", [Sample(*torch.rand(2, 3, 4, device="openreg"))], only=["stream"])
    assert report.of("pass", "stream"), str(report)
