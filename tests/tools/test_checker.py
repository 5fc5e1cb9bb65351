"""The checker: it catches broken operators that opcheck passes, passes good ones, and restores all state."""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import ctypes
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from openreg_tools.generate import search
from processes import python
from torch import Tensor
from torch.library import opcheck

import openreg_ops
from openreg_ops import _C
from openreg_ops.testing import Sample, check
from openreg_tools.check import command as checker_command
from openreg_tools.check.case import Case
from openreg_tools.check.checker import derived, operator, preserved
from openreg_tools.check.checks import CHECKS, SLOW, UNUSUAL, unbacked
from openreg_tools.check.checks.derivatives import derivative
from openreg_tools.check.report import MARKS, PARTS, Report, Result
from openreg_tools.core.samples import parse
from openreg_tools.forms import Wrong

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytest_openreg_ops"]

LIBRARY = torch.library.Library("broken", "FRAGMENT")


def define(schema, kernel, fake, key="CPU"):
    """A C++-style operator: TORCH_LIBRARY's def, impl, and a fake kernel."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"broken::{name}", fake)
    return getattr(torch.ops.broken, name).default


@contextlib.contextmanager
def zeroed_memory():
    """Fresh CPU memory holds zeros, as most of a new process's does; other tests leave NaN in what they freed."""
    perturb = -6  # glibc's M_PERTURB: malloc fills memory with the complement; 0 is off
    ctypes.CDLL(None).mallopt(perturb, 0xFF)
    try:
        yield
    finally:
        ctypes.CDLL(None).mallopt(perturb, 0)


def caught(op, samples, row, *, only=None, device=None, status="fail"):
    """The sentence of a check that must end so, for an operator that opcheck passes."""
    with zeroed_memory():
        for sample in samples:
            assert set(opcheck(op, sample).values()) == {"SUCCESS"}
    report = check(
        op, [tuple(x.detach() if isinstance(x, Tensor) else x for x in s) for s in samples], device, only=only or [row]
    )
    found = report.of(status, row)
    assert found, str(report)
    assert found[0].docs == f"docs/checker.md#{row}" and (found[0].remedy or status == "refused")
    assert found[0].sentence.startswith(op.name() if isinstance(op, torch._ops.OpOverload) else "broken::")
    return found[0].sentence


# ---- broken operators that opcheck passes ----


def test_forward_only_with_a_warning():
    """Its output says requires_grad, and backward leaves it out: f(x) + x gets the gradient of x alone."""

    def kernel(x):
        with torch.no_grad():
            return x.sin()

    op = define("forward_only(Tensor x) -> Tensor", kernel, torch.empty_like)
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        (op(x) + x).sum().backward()
    assert (x.grad == 1).all()  # partial
    sentence = caught(op, [(x.detach().requires_grad_(),)], "backward")
    assert "backward only warns and leaves the operator out: a program gets a partial gradient" in sentence


def test_forward_only_that_detaches():
    """Its output does not even say requires_grad."""
    op = define("detaches(Tensor x) -> Tensor", lambda x: x.sin(), torch.empty_like)

    def autograd(x):
        with torch._C._AutoDispatchBelowAutograd():
            return op(x)

    LIBRARY.impl("detaches", autograd, "Autograd")
    sentence = caught(op, [(torch.randn(4, 6, requires_grad=True),)], "backward")
    assert "it depends on x, which requires a gradient, but its output does not" in sentence


def test_gradient_of_one_argument_missing():
    @torch.library.custom_op("broken::one_gradient", mutates_args=())
    def one_gradient(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    one_gradient.register_fake(lambda x, y: torch.empty_like(x))
    one_gradient.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    assert "the gradient of y is missing" in caught(one_gradient, [(x, y)], "backward")


def test_fake_strides_of_a_permuted_input():
    op = define(
        "fake_strides(Tensor x) -> Tensor", lambda x: torch.empty_like(x).copy_(x), lambda x: x.new_empty(x.shape)
    )
    sentence = caught(op, [(torch.randn(4, 6),)], "fake_layouts")
    assert "in permuted layout (x [4, 6] of strides (1, 4))" in sentence
    assert "has strides (1, 4), but the fake kernel says (6, 1)" in sentence


def test_fake_dtype_of_a_half_input():
    """The kernel accumulates in float32; the fake kernel says so for float32 alone."""

    @torch.library.custom_op("broken::rms", mutates_args=())
    def rms(x: Tensor) -> Tensor:
        return x.float().square().mean(-1).sqrt()

    rms.register_fake(lambda x: x.new_empty(x.shape[:-1]))
    sentence = caught(rms, [(torch.randn(4, 6),)], "fake_dtypes")
    assert "given float16 x output 0 is float32, but the fake kernel says float16" in sentence


def test_fake_dtype_of_mixed_inputs():
    """It promotes; the fake kernel takes the dtype of the first."""

    @torch.library.custom_op("broken::promotes", mutates_args=())
    def promotes(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    promotes.register_fake(lambda x, y: torch.empty_like(x))
    sentence = caught(promotes, [(torch.randn(4, 6), torch.randn(4, 6))], "fake_dtypes")
    assert "given float16 x output 0 is float32, but the fake kernel says float16" in sentence


def test_fake_kernel_that_takes_no_half_types():
    def fake(x):
        torch._check(x.dtype == torch.float32, lambda: "floats: expected float32")
        return torch.empty_like(x)

    op = define("floats(Tensor x) -> Tensor", lambda x: x * 2, fake)
    sentence = caught(op, [(torch.randn(4, 6),)], "fake_dtypes")
    assert "given float16 x the kernel runs, but the fake kernel raised RuntimeError: floats: expected f" in sentence


def test_cpu_kernel_of_another_dtype():
    """In half types, the CPU's kernel returns a different dtype than the device's."""
    define("sums(Tensor x) -> Tensor", lambda x: x.sum(-1), lambda x: x.new_empty(x.shape[:-1], dtype=torch.float32))
    LIBRARY.impl("sums", lambda x: x.float().sum(-1), "PrivateUse1")
    (failure,) = check(
        "broken::sums", lambda device, dtype: [(torch.ones(4, 6),)], "openreg", only="fake_dtypes"
    ).failures
    assert "given float16 x output 0 is float32, but the CPU kernel gives float16" in failure.sentence


@pytest.fixture(scope="module")
def not_differentiable():
    @torch.library.custom_op("broken::square", mutates_args=())
    def square(x: Tensor) -> Tensor:
        return x * x

    @torch.library.custom_op("broken::square_backward", mutates_args=())
    def square_backward(g: Tensor, x: Tensor) -> Tensor:
        return 2 * g * x

    square.register_fake(torch.empty_like)
    square_backward.register_fake(lambda g, x: torch.empty_like(x))
    square.register_autograd(
        lambda ctx, g: square_backward(g, ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return square


def test_backward_operator_without_autograd(not_differentiable):
    """A warning: double backward raises, but the error is about an operator that the program does not call."""
    samples = [(torch.randn(4, 6, requires_grad=True),)]
    sentence = caught(not_differentiable, samples, "gradgradcheck", status="warn")
    assert "its backward is not differentiable: it calls broken::square_backward, which has no derivative" in sentence


def test_backward_without_a_graph():
    @torch.library.custom_op("broken::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    def backward(ctx, g):
        with torch.no_grad():
            return 3 * g * ctx.saved_tensors[0] ** 2

    cube.register_fake(torch.empty_like)
    cube.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    sentence = caught(cube, [(torch.randn(4, 6, requires_grad=True),)], "gradgradcheck")
    assert "does not require a gradient under create_graph=True" in sentence


def test_backward_operator_that_only_warns():
    """The backward operator is C++-style: double backward warns, and is wrong."""

    def kernel(g, x):
        with torch.no_grad():
            return g * x.cos()

    sin_backward = define("sin_backward(Tensor g, Tensor x) -> Tensor", kernel, lambda g, x: torch.empty_like(x))

    @torch.library.custom_op("broken::sin", mutates_args=())
    def sin(x: Tensor) -> Tensor:
        return x.sin()

    sin.register_fake(torch.empty_like)
    sin.register_autograd(
        lambda ctx, g: sin_backward(g, ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    sentence = caught(sin, [(torch.randn(4, 6, requires_grad=True),)], "gradgradcheck")
    assert "it calls broken::sin_backward, which has no derivative, and double backward only warns" in sentence


def test_autocast_ineligible():
    @torch.library.custom_op("broken::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor:
        torch._check(x.dtype == weight.dtype, lambda: f"scale: expected weight of {x.dtype}, but got {weight.dtype}")
        return x * weight

    @scale.register_fake
    def _(x, weight):
        torch._check(x.dtype == weight.dtype, lambda: f"scale: expected weight of {x.dtype}, but got {weight.dtype}")
        return x * weight

    sentence = caught(scale, [(torch.randn(4, 6), torch.randn(6))], "autocast")
    assert "given what a linear returns (x bfloat16, weight float32)" in sentence
    assert "expected weight of torch.bfloat16, but got torch.float32; it has no kernel at AutocastCPU" in sentence


def test_autocast_without_a_policy():
    op = define("adds(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y, lambda x, y: x + y)
    sentence = caught(op, [(torch.randn(4, 6), torch.randn(4, 6))], "autocast", status="warn")
    assert "it has no autocast policy" in sentence and "mixed inputs give float32" in sentence


def test_undeclared_mutation_within_rounding():
    """It scales its input and scales it back: equal within opcheck's tolerance, not in bits."""

    def kernel(x):
        out = x.mul_(3).sum(-1)
        x.div_(3)
        return out

    op = define("scales_back(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape[:-1]))
    sentence = caught(op, [(torch.randn(40, 6),)], "schema")
    assert "the schema says that x is not written to, but the call changed the memory of x (the sample's" in sentence


def test_undeclared_mutation_around_a_view():
    """It clears the memory between the rows of a padded input."""

    def kernel(x):
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        whole[: x.storage_offset()] = 0
        return x.clone()

    op = define("clears_padding(Tensor x) -> Tensor", kernel, torch.empty_like)
    assert "changed the memory of x (padded" in caught(op, [(torch.randn(4, 6),)], "schema")


def test_undeclared_mutation_of_other_values():
    """It clips its input in place: the samples lie inside, what arrives later does not."""
    op = define("clips(Tensor x) -> Tensor", lambda x: x.clamp_(-1, 1) * 2, torch.empty_like)
    x = torch.rand(4, 6)
    assert set(opcheck(op, (x,)).values()) == {"SUCCESS"}
    assert not check(op, [(x,)], only=["schema"]).passed


def test_declared_mutation_that_autograd_does_not_see():
    """Writing through numpy leaves the version counter: a saved tensor changes without an error."""

    def kernel(x):
        x.numpy()[...] *= 2

    op = define("doubles(Tensor(a!) x) -> ()", kernel, lambda x: None)
    assert "the version counter of x stays at 0" in caught(op, [(torch.randn(4, 6),)], "schema")


def test_mutation_that_autograd_is_not_told_of():
    """What a mutating custom_op writes has the gradient of what was there before."""

    @torch.library.custom_op("broken::triples", mutates_args=("x",))
    def triples(x: Tensor) -> None:
        x.mul_(3)

    x = torch.randn(4, requires_grad=True)
    y = x.clone()
    triples(y)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0] * 4  # of 3 * x
    (failure,) = check(triples, [(torch.randn(4, 6, requires_grad=True),)], only=["backward"]).failures
    assert "it writes to x, which requires a gradient, without telling autograd" in failure.sentence
    report = check(triples, [(torch.randn(4, 6),)], only=["backward"])
    assert report.passed and "it writes to x without telling autograd" in report.of("warn")[0].sentence


def test_backward_that_writes_to_the_gradient():
    @torch.library.custom_op("broken::writes_gradient", mutates_args=())
    def writes_gradient(x: Tensor) -> Tensor:
        return x * 2

    writes_gradient.register_fake(torch.empty_like)
    writes_gradient.register_autograd(lambda ctx, g: g.mul_(2))
    sentence = check(writes_gradient, [(torch.randn(4, 6),)], only=["schema"]).failures[0].sentence
    assert "its backward writes to the gradient of output 0" in sentence


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_uninitialised_memory(device):
    """0 * NaN is NaN: what torch.empty gave is scaled by 0, not overwritten."""
    name = f"unwritten_{device}"
    key = "CPU" if device == "cpu" else "PrivateUse1"
    op = define(
        f"{name}(Tensor x) -> Tensor",
        lambda x: torch.zeros_like(x) + torch.empty_like(x).mul_(0) + x,
        torch.empty_like,
        key,
    )
    _C.set_poison(False)
    x = torch.randn(4, 6)
    if device == "cpu":
        sentence = caught(op, [(x,)], "poison")
    else:
        sentence = check(op, [(x,)], device, only=["poison"]).failures[0].sentence
    assert "it reads memory that was never written" in sentence and "nan instead of" in sentence


def test_race_between_threads():
    """One buffer for all calls, and time for another thread in between."""
    buffer = torch.empty(4, 6)

    def kernel(x):
        import time

        buffer.copy_(x)
        time.sleep(0.001)
        return buffer.clone()

    op = define("shares_a_buffer(Tensor x) -> Tensor", kernel, torch.empty_like)
    assert "called from four threads on separate inputs" in caught(op, [(torch.randn(4, 6),)], "threads")


def test_wrong_batching_rule():
    @torch.library.custom_op("broken::last_sum", mutates_args=())
    def last_sum(x: Tensor) -> Tensor:
        return x.sum(-1)

    last_sum.register_fake(lambda x: x.new_empty(x.shape[:-1]))
    last_sum.register_vmap(lambda info, dims, x: (x.sum(-1), 0))  # right only where the batch comes first
    sentence = caught(last_sum, [(torch.randn(4, 6),)], "vmap")
    assert "under torch.vmap with x batched along its last dimension" in sentence


def test_batching_rule_that_raises():
    @torch.library.custom_op("broken::times", mutates_args=())
    def times(x: Tensor, factor: float) -> Tensor:
        return x * factor

    times.register_vmap(lambda info, dims, x, factor: (x * factor.expand(3), 0))  # factor is no tensor
    LIBRARY.define("calls_times(Tensor x) -> Tensor")
    LIBRARY.impl("calls_times", lambda x: x * times(x.detach(), 2.0), "CompositeImplicitAutograd")
    (failure,) = check("broken::calls_times", [(torch.randn(4, 6),)], only=["vmap_grad"]).failures
    assert "'float' object has no attribute 'expand'" in failure.sentence
    assert failure.remedy.startswith("fix the batching rules") and "None for all but tensors" in failure.remedy


def test_slow_vmap_is_flagged(not_differentiable):
    sentence = caught(not_differentiable, [(torch.randn(4, 6, requires_grad=True),)], "vmap", status="warn")
    assert "slow loop" in sentence


def test_fake_kernel_that_fixes_a_size():
    op = define("fixes(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty([int(n) for n in x.shape]))
    report = check(op, [(torch.randn(4, 6),)], only=["fake_dynamic", "fake_unbacked"])
    assert "fixes dimension 0 of x to 4" in report.failures[0].sentence
    assert [r.check for r in report.of("warn")] == ["fake_unbacked"]


@pytest.mark.parametrize("name, said", [("sin", "with its backward"), ("argmax", "without a backward")])
def test_what_was_compiled_with_unbacked_sizes(name, said):
    (result,) = check(f"aten::{name}", [(torch.randn(3),)], only=["compile_unbacked"]).results
    assert (result.status, result.sentence) == ("pass", said)


def test_fake_kernel_that_refuses_nothing():
    def kernel(x, y):
        torch._check(x.shape == y.shape, lambda: "pairs: expected y of the shape of x")
        return x * y

    op = define("pairs(Tensor x, Tensor y) -> Tensor", kernel, lambda x, y: torch.empty_like(x))
    sentence = caught(op, [(torch.randn(4, 6), torch.randn(4, 6))], "fake_errors", status="warn")
    assert "pairs: expected y of the shape of x, and the fake kernel takes it" in sentence


def test_ignores_strides():
    """It reads memory in order: right for contiguous inputs alone."""

    def kernel(x):
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
        return (flat * 2).reshape(x.shape)

    op = define("ignores_strides(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape))
    assert "for inputs in permuted layout output 0 differs" in caught(op, [(torch.randn(4, 6),)], "layouts")


def test_not_deterministic():
    calls = []

    def kernel(x):
        calls.append(1)
        return x + len(calls) % 3 * 1e-7

    op = define("drifts(Tensor x) -> Tensor", kernel, torch.empty_like)
    assert check(op, [(torch.full((4, 6), 0.5),)], only=["determinism"]).of("warn")


def test_wrong_out_overload():
    op = define("plus(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    LIBRARY.define("plus.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    LIBRARY.impl("plus.out", lambda x, out: out.fill_(x[0, 0] + 1), "CPU")
    report = check(op, [(torch.rand(1, 1),)], only=["out"])
    assert "broken::plus.out with out= of no elements" in report.failures[0].sentence


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)], ids=str)
def test_out_overload_that_leaves_other_strides_unwritten(shape):
    name = f"contiguous_{len(shape)}"
    op = define(f"{name}(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    LIBRARY.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")

    def kernel(x, out):
        out = out.resize_(x.shape) if not out.numel() else out
        return out.copy_(x + 1) if out.is_contiguous() else out

    LIBRARY.impl(f"{name}.out", kernel, "CPU")
    report = check(op, [(torch.rand(shape),)], only=["out"])
    assert f"broken::{name}.out with out= with other strides: output 0 differs" in report.failures[0].sentence


def test_wrong_on_large_inputs():
    op = define(
        "chunks(Tensor x) -> Tensor", lambda x: torch.where(torch.arange(len(x)) < 1000, x.T, 0).T, torch.empty_like
    )
    sentence = check(op, [(torch.rand(4, 6),)], reference=lambda x: x, only=["large", "reference"]).failures[0].sentence
    assert "which the reference gives" in sentence


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex128", "complex64"])
def test_values_that_are_a_fifth_too_large(dtype):
    op = define(f"larger_{dtype}(Tensor x) -> Tensor", lambda x: x * 1.2, torch.empty_like)
    report = check(op, [(torch.ones(3, dtype=getattr(torch, dtype)),)], reference=lambda x: x, only=["reference"])
    assert "output 0 differs" in report.failures[0].sentence


def test_another_dtype_than_the_cpu_kernel():
    op = define("wider_on_cpu(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
    LIBRARY.impl("wider_on_cpu", lambda x: x + 0, "PrivateUse1")
    report = check(op, [(torch.rand(3),)], "openreg", only=["reference"])
    assert "output 0 is float32 instead of float64" in report.failures[0].sentence


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        ("empty", lambda x: x + 0 if x.numel() else x.double()),
        ("zero_dim", lambda x: x + 0 if x.dim() else x.double()),
        ("large", lambda x: x + 0 if x.numel() < 1000 else x.double()),
    ],
    ids=["empty", "zero_dim", "large"],
)
def test_unusual_inputs_keep_the_dtype_of_the_cpu_kernel(row, kernel):
    """A reference may return another dtype; the CPU kernel may not."""
    op = define(f"dtype_of_{row}(Tensor x) -> Tensor", lambda x: x + 0, torch.empty_like)
    LIBRARY.impl(f"dtype_of_{row}", kernel, "PrivateUse1")
    sentence = check(op, [(torch.rand(3),)], "openreg", only=[row]).failures[0].sentence
    assert sentence.endswith("output 0 is float64 instead of float32, which the reference gives")
    report = check(op, [(torch.rand(3),)], "openreg", reference=lambda x: x + 0, only=[row])
    assert report.of("pass", row), str(report)


@pytest.mark.parametrize(("error", "status"), [(5e-4, "pass"), (3e-3, "fail")])
def test_a_long_sum_may_round_more(error, status):
    """By the root of its terms: roundings have either sign."""

    def total(x):
        return x.sum(0) * (1 + error * (len(x) > 1000))

    op = define(f"long_sum_{status}(Tensor x) -> Tensor", total, lambda x: x.new_empty(x.shape[1:]))
    report = check(op, [(torch.rand(4, 6),)], reference=lambda x: x.sum(0), only=["large"])
    assert report.of(status, "large"), str(report)


@pytest.mark.parametrize(("error", "status"), [(1.2e-4, "pass"), (2.4e-4, "fail")])
def test_how_much_a_result_of_unusual_inputs_may_round(error, status):
    op = define(f"rounds_{status}(Tensor x) -> Tensor", lambda x: x * (1 + error), torch.empty_like)
    report = check(op, [(torch.ones(4),)], reference=lambda x: x, only=["zero_dim"])
    assert report.of(status, "zero_dim"), str(report)


def test_a_large_input_has_no_huge_result():
    """With half a million elements, as many as other inputs get, it would have 2**38."""
    op = define("outer(Tensor x) -> Tensor", lambda x: torch.outer(x, x), lambda x: x.new_empty(len(x), len(x)))
    (result,) = check(op, [(torch.rand(5),)], only=["large"]).of("pass", "large")
    assert result.sentence == "2048 instead of 5"


@pytest.mark.parametrize("others", [2**11, 2**15])
def test_a_large_input_is_of_the_size_for_threads(others):
    """However often a size occurs in one argument, and however many elements the other has."""
    seen = []
    op = define(
        f"of_two_{others}(Tensor x, Tensor w) -> Tensor",
        lambda x, w: seen.append(x.numel()) or x.sum() * w,
        lambda x, w: torch.empty_like(w),
    )
    report = check(op, [(torch.ones(4, 4), torch.ones(others))], only=["large"])
    assert report.of("pass", "large"), str(report)
    assert 2**18 < max(seen) <= 2**19


@pytest.mark.parametrize("device", ["cpu", "openreg", "openreg:1"])
def test_the_samples_give_the_device(device):
    x = torch.ones(3, device=device)
    assert check("openreg::custom_abs", [(x,)], only=["runs"]).device == str(x.device)


def test_a_fake_kernel_gets_tensors_of_the_device():
    def fake(x):
        assert x.device.type == "openreg"
        return torch.empty_like(x)

    op = define("on_the_device(Tensor x) -> Tensor", lambda x: x + 0, fake, "PrivateUse1")
    only = ["fake_layouts", "fake_dtypes", "fake_dynamic", "fake_unbacked", "fake_errors", "compile", "export", "large"]
    report = check(op, [(torch.rand(3, 4, device="openreg"),)], only=only)
    assert not report.failures and len(report.of("pass")) == len(only), str(report)


def test_a_step_near_a_value_has_no_gradient_there():
    """The finite difference is taken in float64, whose step does not reach it."""
    report = check(torch.ops.aten.floor.default, [(torch.tensor([1.001, 2.001, 3.001]),)], only=["backward"])
    assert report.of("pass", "backward"), str(report)


def test_wrong_gradient():
    @torch.library.custom_op("broken::wrong_gradient", mutates_args=())
    def wrong_gradient(x: Tensor) -> Tensor:
        return x.sin()

    wrong_gradient.register_fake(torch.empty_like)
    wrong_gradient.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].cos() * 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    sentence = caught(wrong_gradient, [(torch.randn(4, 6, requires_grad=True),)], "gradcheck")
    assert "its gradient is not the derivative: Jacobian mismatch for output 0 with respect to input 0" in sentence


def test_wrong_forward_mode():
    op = define("wrong_jvp(Tensor x) -> Tensor", lambda x: x.sin(), torch.empty_like)

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            with torch._C._AutoDispatchBelowAutograd():
                return op(x)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0].sin()

    LIBRARY.impl("wrong_jvp", Sin.apply, "Autograd")
    sentence = caught(op, [(torch.randn(4, 6, requires_grad=True),)], "forward_ad")
    assert re.search(r"forward-mode AD gives \S+ where backward gives", sentence)


def test_unwritten_gradient():
    """The forward is right; the backward adds to what torch.empty gave."""

    @torch.library.custom_op("broken::unwritten_gradient", mutates_args=())
    def unwritten_gradient(x: Tensor) -> Tensor:
        return x * 2

    unwritten_gradient.register_fake(torch.empty_like)
    unwritten_gradient.register_autograd(lambda ctx, g: torch.empty_like(g).mul_(0) + 2 * g)
    _C.set_poison(False)
    sentence = caught(unwritten_gradient, [(torch.randn(4, 6, requires_grad=True),)], "poison")
    assert "gradient 0 differs" in sentence


def test_another_stream():
    def kernel(x):
        return x + torch.accelerator.current_stream().stream_id

    op = define("knows_its_stream(Tensor x) -> Tensor", kernel, torch.empty_like, "PrivateUse1")
    report = check(op, [(torch.zeros(4, 6),)], "openreg", only=["stream"])
    assert "on another stream output 0 differs in 24 of 24 elements" in report.failures[0].sentence


@pytest.mark.parametrize(
    "row, kernel, sentence",
    [
        ("reference", lambda x: x * 3, "output 0 differs in 24 of 24 elements: 3 instead of 2 at [0, 0], which the reference"),
        ("empty", lambda x: x * (8 // len(x)), "size 4 are empty it ended in ZeroDivisionError"),
        ("zero_dim", lambda x: x * [0, 1, 2][x.dim()], "output 0 differs in 1 of 1 elements: 0 instead of 2"),
        ("opcheck_faketensor", lambda x: x[:2] * 2, "opcheck's test_faketensor says"),
        ("opcheck_schema", lambda x: x, "opcheck's test_schema says"),
        ("schema", lambda x: x, "output 0 shares the memory of x, and the schema does not say so"),
        ("fake_layouts", lambda x: x.double() * 2, "output 0 has dtype float64, but the fake kernel says float32"),
        ("compile", lambda x: x.double() * 2, "with static shapes zeros like output 0 is float32 instead of float64"),
        ("export", lambda x: x[:2] * 2, "exported, zeros like output 0 has shape"),
        ("determinism", lambda x: x + torch.rand(()), "the same call again gives a different result"),
    ],
)  # fmt: skip
def test_every_row_fails_where_it_should(row, kernel, sentence):
    op = define(f"row_{row}(Tensor x) -> Tensor", kernel, torch.empty_like)
    report = check(op, [(torch.ones(4, 6),)], reference=lambda x: x * 2, only=[row])
    assert report.failures, str(report)
    assert sentence in report.failures[0].sentence


def test_tensors_without_storage_share_none():
    op = define("sparse(Tensor x) -> Tensor", lambda x: x.to_sparse() if x.numel() else x, torch.empty_like)
    report = check(op, [(torch.ones(0, 3),), (torch.eye(3),)], only=["schema"])
    assert len(report.of("pass", "schema")) == 2, str(report)


def test_no_fake_kernel():
    LIBRARY.define("no_fake(Tensor x) -> Tensor")
    LIBRARY.impl("no_fake", lambda x: x * 2, "CPU")
    report = check("broken::no_fake", [(torch.ones(4, 6),)], only=["fake_layouts", "compile", "export"])
    assert [r.check for r in report.failures] == ["compile", "fake_layouts", "export"]


# ---- refusals are not failures ----


def test_gradient_that_torch_func_does_not_find():
    """pytorch/pytorch#168393: the Function of register_autograd has no setup_context. What the remedy says works."""

    @torch.library.custom_op("broken::cubed", mutates_args=())
    def cubed(x: Tensor) -> Tensor:
        return x**3

    cubed.register_fake(torch.empty_like)
    setup = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)  # noqa: E731
    cubed.register_autograd(lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2, setup_context=setup)

    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return cubed(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 3 * g * ctx.saved_tensors[0] ** 2

    x = torch.rand(4, 6)
    (result,) = check(cubed, [(x,)], only=["func_grad"]).results
    try:
        torch.func.grad(lambda x: cubed(x).sum())(x)
    except RuntimeError as error:
        assert "must override the setup_context" in str(error)
        assert result.status == "limit" and "pytorch#168393" in result.sentence
    else:
        assert result.status in ("pass", "fail")  # where its vjp inside another transform has no gradient
    torch.testing.assert_close(torch.func.grad(lambda x: Cubed.apply(x).sum())(x), 3 * x**2)
    torch.testing.assert_close(torch.func.grad(lambda x: torch.func.vjp(Cubed.apply, x)[0].sum())(x), 3 * x**2)


def test_sharding_strategies():
    """None is a refusal that says what to register; one that is right passes, and the report says what stays sharded."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    op = define("without_strategy(Tensor x, Tensor w) -> Tensor", torch.mul, lambda x, w: torch.empty_like(x))
    samples = [(torch.rand(4, 6), torch.rand(4, 6))]
    (result,) = check(op, samples, only=["dtensor"]).results
    assert result.status == "refused" and "register_sharding" in result.sentence

    @register_sharding(op)
    def rows(x, w):
        return [([place], [place, place]) for place in (Replicate(), Shard(0))]

    (result,) = check(op, samples, only=["dtensor"]).results
    assert result.status == "pass", result.sentence
    assert result.sentence == "stays sharded with every argument sharded along 0, x sharded along 0, w sharded along 0"
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("schema", "own", "status", "sentence"),
    [
        ("(Tensor x) -> Tensor", True, "fail", "a call on DTensors with x sharded along dimension 0 raised RuntimeError: halves"),
        ("(Tensor x) -> Tensor", False, "refused", "with x sharded along dimension 0 one raises RuntimeError: halves"),
        ("(Tensor(a!) x) -> Tensor(a!)", True, "pass", "no sharding stays"),
        ("(Tensor(a!) x) -> Tensor(a!)", "none", "fail", "with every argument replicated raised RuntimeError: no place"),
    ],
    ids=["own", "of others", "written", "written, replicated"],
)  # fmt: skip
def test_an_error_on_sharded_arguments(request, schema, own, status, sentence):
    """It is the operator's, unless DTensor would have to move an argument that is written to."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def kernel(x):
        if len(x) < 4:
            raise RuntimeError("halves")
        return x if "!" in schema else x * 1

    def places(x):
        if own == "none":
            raise RuntimeError("no place")
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]

    name = "halves_" + re.sub(r"\W+", "_", request.node.callspec.id)
    op = define(f"{name}{schema}", kernel, lambda x: x if "!" in schema else torch.empty_like(x))
    register_sharding(op)(places)
    if not own:
        LIBRARY.define(f"made_of_{name}{schema}")
        LIBRARY.impl(f"made_of_{name}", op, "CompositeImplicitAutograd")
        op = getattr(torch.ops.broken, f"made_of_{name}").default
    (result,) = check(op, [(torch.rand(4),)], only=["dtensor"]).results
    assert (result.status, sentence in result.sentence) == (status, True), result


@pytest.mark.parametrize("right", [True, False])
def test_a_sharding_strategy_of_a_backward(right):
    """If it is wrong, the result stays right, and each device sums only its own part for the gradient."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    name = f"by_sum_{right}".lower()
    by_sum = define(f"{name}(Tensor x) -> Tensor", lambda x: x * x.sum(), torch.empty_like)
    backward = define(f"{name}_backward(Tensor g, Tensor x) -> Tensor", lambda g, x: g * x.sum() + (g * x).sum(),
                      lambda g, x: torch.empty_like(x))  # fmt: skip
    torch.library.register_autograd(
        f"broken::{name}",
        lambda ctx, g: backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=LIBRARY,
    )
    places = [Replicate()] if right else [Replicate(), Shard(0)]
    register_sharding(by_sum)(lambda x: [([Replicate()], [Replicate()])])
    register_sharding(backward)(lambda g, x: [([place], [place, place]) for place in places])
    (result,) = check(by_sum, [(torch.rand(4, 6),)], only=["dtensor"]).results
    assert result.status == ("pass" if right else "fail")
    assert right or "which backward on plain tensors gives" in result.sentence, result.sentence


def test_an_error_of_the_simulated_devices_is_none_of_the_operator():
    """They have no number that differs between them."""
    LIBRARY.define("of_a_number(Tensor x) -> Tensor")
    LIBRARY.impl("of_a_number", lambda x: x * x.sum().item(), "CompositeImplicitAutograd")
    op = torch.ops.broken.of_a_number.default
    (result,) = check(op, [(torch.rand(4),)], only=["dtensor"]).results
    assert result.status == "skip" and "devices cannot run it: AssertionError: " in result.sentence, result.sentence


def test_sharding_in_a_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        (result,) = check("aten::sin", [(torch.rand(4),)], only=["dtensor"]).results
    finally:
        torch.distributed.destroy_process_group()
    assert result.status == "skip" and "process group" in result.sentence


def test_refusals():
    @torch.library.custom_op("broken::refuses", mutates_args=())
    def refuses(x: Tensor) -> Tensor:
        return x.sin()

    refuses.register_fake(torch.empty_like)
    report = check(refuses, [(torch.randn(4, 6),)], only=["backward", "gradcheck", "compile", "vmap_grad"])
    assert report.passed and "no autograd formula was registered" in report.of("refused", "backward")[0].sentence
    report = check("openreg::custom_abs", only=["backward"])
    assert {r.sentence for r in report.results} == {
        "RuntimeError: derivative for openreg::custom_abs is not implemented"
    }


def test_gradient_that_only_eager_refuses():
    """A Python kernel below autograd refuses; while tracing, the fake kernel is all there is."""
    op = define("half_refuses(Tensor x) -> Tensor", lambda x: x.sin(), torch.empty_like)

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return op(x)

        @staticmethod
        def backward(ctx, g):
            raise NotImplementedError("half_refuses has no derivative")

    def autograd(x):
        with torch._C._AutoDispatchBelowAutograd():
            y = op(x)
        return Sin.apply(x) if type(x) is Tensor else y

    LIBRARY.impl("half_refuses", autograd, "Autograd")
    report = check(op, [(torch.randn(4, 6),)], only=["backward", "compile"])
    assert report.of("refused", "backward")
    assert (
        "eager mode refuses the gradient with an error, but under torch.compile there is neither"
        in report.failures[0].sentence
    )


def test_second_derivative_refused():
    @torch.library.custom_op("broken::once", mutates_args=())
    def once(x: Tensor) -> Tensor:
        return x.sin()

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, x):
            return g * x.cos()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *grads):
            raise AssertionError

    class Refused(Backward):
        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError("broken::once has no second derivative")

    once.register_fake(torch.empty_like)
    for function, sentence in ((Refused, "has no second derivative"),):
        once.register_autograd(
            lambda ctx, g, function=function: function.apply(g, ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        report = check(once, [(torch.randn(4, 6),)], only=["gradgradcheck"])
        assert report.passed and sentence in report.of("refused")[0].sentence


def test_second_derivative_lost_after_vjp():
    """It refuses, but under torch.func takes the gradient for a constant."""

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.cos()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("broken::keeps has no second derivative")

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * Refused.apply(*ctx.saved_tensors)

    def kernel(x):
        if not torch._C._are_functorch_transforms_active():
            return Sin.apply(x)
        constant = x.detach()
        return constant.sin() + (x - constant) * constant.cos()

    LIBRARY.define("keeps(Tensor x) -> Tensor")
    LIBRARY.impl("keeps", kernel, "CompositeImplicitAutograd")
    (failure,) = check("broken::keeps", [(torch.randn(4, 6),)], only="gradgradcheck").failures
    assert "torch.func.vjp gives zero, without an error; eager refuses the second derivative" in failure.sentence


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
    @torch.library.custom_op("broken::accident", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return x * 2

    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, g: accident(g))
    operator.register_vmap(lambda info, dims, x: (accident(x), 0))
    report = check(operator, [(torch.randn(4, 6),)], only=["backward", "vmap"])
    assert [r.check for r in report.failures] == ["backward", "vmap"], str(report)
    assert all(sentence in r.sentence for r in report.failures)


def test_a_type_error_may_refuse():
    @torch.library.custom_op("broken::no_vmap", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return x * 2

    def refuse(info, dims, x):
        raise TypeError("broken::no_vmap: vmap is not supported")

    operator.register_fake(torch.empty_like)
    operator.register_vmap(refuse)
    report = check(operator, [(torch.randn(4, 6),)], only=["vmap"])
    assert report.passed and report.of("refused", "vmap")


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


def test_good_custom_op(good):
    report = check(
        good,
        [
            (torch.randn(4, 6), torch.randn(6)),
            (torch.randn(2, 3, 5), torch.randn(5), 0.5),
            Sample(torch.randn(5), torch.randn(5), factor=3.0),
        ],
        reference=lambda x, weight, factor=2.0: x * weight * factor,
    )
    assert report.passed, str(report)
    assert {r.check for r in report.of("warn")} <= {"forward_ad", "func_grad", "zero_dim"}, str(report)
    assert "silently loses the tangent" in report.of("warn", "forward_ad")[0].sentence  # as every custom_op does
    assert {"vmap", "autocast", "gradgradcheck", "reference", "compile", "export"} <= {
        r.check for r in report.of("pass")
    }


def test_good_operator_of_ours():
    report = check("openreg::rms_norm")
    assert report.passed, str(report)
    assert report.device == "openreg" and len(report.samples) == 3
    assert {r.check for r in report.of("warn")} <= {"vmap"}  # C++ autograd functions take the loop
    assert report.seconds > 0


@pytest.mark.parametrize("written", [False, True])
def test_an_output_that_is_an_argument_has_its_gradient(written):
    """It needs no kernel at the Autograd key, unlike an output that is new."""
    name = "same_written" if written else "same"
    op = define(
        f"{name}(Tensor(a{'!' * written}) x) -> Tensor(a{'!' * written})", lambda x: x, lambda x: x, "PrivateUse1"
    )
    with openreg_ops.autograd.fallback_mode("nothing"):
        report = check(op, [(torch.rand(4, 6),)], "openreg", only=["opcheck_autograd_registration"])
    assert report.of("pass", "opcheck_autograd_registration"), str(report)


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_good_operator_of_torch(device):
    x, y, z = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    report = check(torch.ops.aten.addcmul.default, [Sample(x, y, z, value=0.5)], device)
    assert report.passed, str(report)
    assert report.of("pass", "out")


def test_good_operator_with_random_numbers():
    x = torch.randn(4, 6)
    report = check("openreg::dropout_add", [(x, x, 0.5)], "openreg:1", only=["runs", "reference", "zero_dim", "large"])
    assert report.passed, str(report)
    assert "its numbers are random" in report.of("skip", "reference")[0].sentence
    report = check("openreg::dropout_add", [(x, x, 0.5)], "openreg:1", only=["reference"], reference=lambda x, y, p: x)
    assert report.failures


def test_good_operator_of_which_one_output_has_no_derivative():
    """Its value depends on y, whose gradient is zero; the other output's value does not."""

    @torch.library.custom_op("good::sum_and_rank", mutates_args=())
    def sum_and_rank(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    sum_and_rank.register_fake(lambda x, y: (torch.empty_like(x), torch.empty_like(y)))
    sum_and_rank.register_autograd(
        lambda ctx, g, _: (g * 2, None),
        setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
    )
    report = check(sum_and_rank, [(torch.randn(3), torch.randn(3))], only=["backward"])
    assert not report.failures and "output 1 depends on y but does not" in report.of("warn", "backward")[0].sentence


def test_operators_without_a_derivative_to_check():
    with torch.library._scoped_library("good_constants", "DEF") as library:
        for name, kernel in (("rounded", lambda x: x.detach().round()), ("places", torch.argsort)):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, kernel, "CPU")
            library.impl(name, torch.library.fallthrough_kernel, "AutogradCPU")
        for name, inputs, sentence in (
            ("rounded", torch.tensor([0.25, 1.25, -2.125]), "its outputs do not depend on the values of its inputs"),
            ("places", torch.randn(3), "no floating output"),
            ("places", torch.arange(3), "no floating tensor argument"),
        ):
            (skipped,) = check(f"good_constants::{name}", [(inputs,)], only=["backward"]).of("skip", "backward")
            assert skipped.sentence.endswith(sentence)


@pytest.mark.parametrize("row", ["empty", "large", "fake_dynamic"])
def test_sizes_of_one_are_not_changed(row):
    """They are those that broadcast, and often the only ones that a program has."""
    (skipped,) = check("aten::sin", [(torch.randn(1, 1),)], only=[row]).of("skip", row)
    assert "no strided tensor of more than one element" in skipped.sentence


def test_the_largest_tensor_says_which_size_becomes_large():
    (passed,) = check("aten::add.Tensor", [(torch.randn(3), torch.randn(1, 6, 3))], only=["large"]).of("pass", "large")
    assert passed.sentence.endswith("instead of 6")


def test_what_a_call_costs():
    for inputs, on in (
        ((torch.randn(4, 6), torch.randn(6)), "empty inputs"),
        ((torch.randn(()), torch.randn(())), "the sample"),
    ):
        (told,) = check("aten::mul.Tensor", [inputs], only=["overhead"]).of("pass", "overhead")
        assert re.search(
            rf"[\d,]+ ns a call on {on}, [\d,]+ ns if a gradient is required; aten::neg takes ", told.sentence
        )


def test_outputs_in_a_list_may_alias_as_the_list_says():
    with torch.library._scoped_library("good_lists", "DEF") as library:
        library.define("parts(Tensor(a) x) -> Tensor(a)[]")
        library.impl("parts", lambda x: [x[:1], x[1:]], "CPU")
        library.define("copies(Tensor x) -> Tensor[]")
        library.impl("copies", lambda x: [x[:1], x[1:].clone()], "CPU")
        ops = torch.ops.good_lists
        assert check(ops.parts.default, [(torch.randn(4),)], only=["schema"]).of("pass", "schema")
        (failed,) = check(ops.copies.default, [(torch.randn(4),)], only=["schema"]).of("fail", "schema")
        assert "output 0 shares the memory of x, and the schema does not say so" in failed.sentence


def test_good_operators_that_write():
    @torch.library.custom_op("good::counts", mutates_args=("x",))
    def counts(x: Tensor) -> None:
        x.add_(1)

    for op, sample in (
        (counts, (torch.arange(24).reshape(4, 6),)),
        ("aten::mul_.Tensor", (torch.randn(4, 6), torch.randn(6))),
    ):
        report = check(op, [sample], skip=["overhead"])
        assert report.passed, str(report)
        assert report.of("pass", "schema") and report.of("pass", "functionalization")


def test_good_operator_with_lists_and_whole_numbers():
    assert check(
        "aten::index_select",
        [(torch.randn(4, 6), 1, torch.tensor([0, 5, 2]))],
        only=["runs", "schema", "backward", "fake_layouts"],
    ).passed
    report = check("aten::cat", [([torch.randn(4, 6), torch.randn(2, 6)], 0)], skip=["overhead"])
    assert report.passed, str(report)
    report = check("aten::argmax", [(torch.randn(4, 6), -1)], skip=["overhead"])
    assert report.passed, str(report)


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
        only=["runs", "determinism"],
    )
    assert [r.check for r in report.failures] == ["runs"]
    assert [r.status for r in report.row("determinism")] == ["skip", "pass"]


def test_nothing_stays_changed():
    import torch._dynamo.config as dynamo

    def state():
        return (
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("openreg"), torch.get_autocast_dtype("openreg"), torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory, torch._C._get_autograd_fallback_mode(),
            openreg_ops.autograd.get_fallback_mode(), openreg_ops.fallback.get_policy(), _C.poison(),
            torch._C._functorch._is_vmap_fallback_enabled(), torch._C._debug_only_are_vmap_fallback_warnings_enabled(),
            dynamo.suppress_errors, dynamo.verbose, torch.openreg.current_device(), bytes(torch.get_rng_state().numpy()),
            bytes(torch.openreg.get_rng_state().cpu().numpy()),
        )  # fmt: skip

    def rude(x):
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        torch.set_autocast_enabled("cpu", True)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(len(x))
        return x.clone()

    op = define("rude(Tensor x) -> Tensor", rude, torch.empty_like)
    before = state()
    check("openreg::swiglu", [(torch.randn(3), torch.randn(3))], "openreg")
    before = (*before[:-2], *state()[-2:])  # the samples above drew numbers
    check(op, [(torch.ones(3),)])
    assert state() == before
    with pytest.raises(KeyError), preserved("cpu"):
        rude(torch.ones(3))
        raise KeyError
    assert state() == before


@pytest.mark.parametrize(
    ("get", "put", "value"),  # None: the opposite
    [
        (torch.get_num_threads, torch.set_num_threads, 3),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (torch.is_grad_enabled, torch.set_grad_enabled, None),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, None),
        (
            lambda: torch.utils.deterministic.fill_uninitialized_memory,
            lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
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
    ],
)
def test_each_state_is_put_back(get, put, value):
    before = get()
    value = not before if value is None else value
    try:
        with preserved("openreg"):
            put(value)
            assert get() == value != before
        assert get() == before
    finally:
        put(before)


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
        ("nothing::here", "there is no operator nothing::here; the namespace nothing has no operators"),
        ("openreg::rms", "there is no operator openreg::rms; openreg has adamw_step_"),
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
    with pytest.raises(ValueError, match="unknown check 'strides'; did you mean 'large_strides'"):
        check("aten::sin", only=["strides"])
    with pytest.raises(ValueError, match="aten::sin: sample_inputs is empty"):
        check("aten::sin", [])
    with pytest.raises(ValueError, match="it accepts none of the inputs that were generated from its schema"):
        check("aten::convolution")
    with pytest.raises(ValueError, match="that returns them, but got int 5"):
        check("aten::sin", 5)
    for device in ("banana", "openreg:9"):
        with pytest.raises(
            ValueError, match=f"(unknown|cannot use) device '{device}'.*; available: cpu, meta, openreg"
        ):
            check("aten::sin", [(torch.randn(4),)], device)
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


def test_samples_keep_strides_and_memory():
    whole = torch.randn(8, 6)
    case = Case(torch.ops.aten.add.Tensor, Sample(whole[::2, 1:], whole[1::2, 1:]), "openreg", None, derivative)
    x, y = case.fresh()
    assert x.stride() == (12, 1) and x.storage_offset() == 1 and x.untyped_storage().nbytes() == 192
    assert x.untyped_storage()._cdata == y.untyped_storage()._cdata
    assert torch.equal(x.cpu(), whole[::2, 1:])


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


def test_which_sizes_are_unbacked_together():
    case = case_of(torch.ops.aten.addmm.default, torch.ones(5), torch.ones(4, 6), torch.ones(6, 5))
    variants = dict(unbacked._variants(case))
    alone = [
        f"with an unbacked dimension {d} of {name}"
        for name, d in (("self", 0), ("mat1", 0), ("mat1", 1), ("mat2", 0), ("mat2", 1))
    ]
    together = {5: {(0, 0), (2, 1)}, 6: {(1, 1), (2, 0)}}
    every = "with every dimension unbacked"
    assert [*variants] == [*alone, *(f"with an unbacked size instead of {size}" for size in together), every]
    for size, dims in together.items():
        symbols = variants[f"with an unbacked size instead of {size}"]
        assert symbols.keys() == dims and len(set(symbols.values())) == 1
    assert len(set(variants[every].values())) == len(variants[every]) == 5


def test_made_up_samples():
    for name in ("mm", "addmm", "cat", "mul.Tensor", "_softmax", "conv2d"):
        assert derived(operator(f"aten::{name}"), "cpu", torch.float32)


def test_inputs_as_text():
    sample = parse("f32[3,4], bf16[2,2]@(1,2), [i64[2], i64[]], 1e-5, 'a, b', none, dim=-1, dtype=torch.float64")
    x, y, z, *rest = sample.args
    assert (x.dtype, x.shape) == (torch.float32, (3, 4)) and y.stride() == (1, 2) and [t.dim() for t in z] == [1, 0]
    assert rest == [1e-5, "a, b", None] and sample.kwargs == {"dim": -1, "dtype": torch.float64}
    kinds = "b8[3], bool[2], float8_e4m3fn[2], c64[1], u8[9]"
    assert [x.dtype for x in parse(kinds).args] == [
        torch.bool,
        torch.bool,
        torch.float8_e4m3fn,
        torch.cfloat,
        torch.uint8,
    ]
    with pytest.raises(Wrong, match="there is no dtype 'f33'; short names are f64, "):
        parse("f33[3]")


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
    assert re.search(r"^runs +\. FAIL$", text, re.M) and re.search(r"^schema +\. +-$", text, re.M)
    assert "FAIL runs (sample 1)" in text and "Remedy: give samples that the operator accepts" in text
    assert "aten::mul.Tensor FAILS" in text
    with pytest.raises(AssertionError, match="aten::mul.Tensor fails 1 checks"):
        report.raise_if_failed()


def test_many_samples_fit_the_table():
    text = str(check("aten::sin", [(torch.ones(2),)] * 100, only=["runs"]))
    assert all(len(line) <= 80 for line in text.splitlines()) and re.search(r"^runs +\.{60}", text, re.M)


def test_json(report):
    data = json.loads(report.json())
    assert data["operator"] == "aten::mul.Tensor" and data["passed"] is False and len(data["results"]) == 8
    assert {r["docs"] for r in data["results"]} == {f"docs/checker.md#{name}" for name in data["checks"]}


def test_html(report):
    from html.parser import HTMLParser

    page = report.html()
    tags = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, dict(attrs)))

    Parser().feed(page)
    names = [tag for tag, _ in tags]
    assert re.findall(r'<b class="(\w+)">(.*?)</b> ', page) == [*MARKS.items()]
    assert names.count("table") == 1 and names.count("tr") == 5 and "link" not in names
    assert sum(tag == "details" and "open" in attrs for tag, attrs in tags) == 1
    assert all(attrs["href"].partition("#")[2] in CHECKS for tag, attrs in tags if tag == "a")


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
        ("opcheck_faketensor fake_layouts compile", {"fake_layouts": ["opcheck_faketensor", "compile"]}),
        ("gradcheck fake_dtypes compile", {"gradcheck": ["compile"], "fake_dtypes": []}),
        ("export compile", {"compile": ["export"]}),
        ("autocast out layouts", {"autocast": [], "out": [], "layouts": []}),
    ],
)
def test_one_cause_is_one_failure(failed, causes):
    found = failing(*((check, "fail") for check in failed.split())).causes()
    assert {each.result.check: {also.check for also in each.also} for each in found} == {
        check: set(also) for check, also in causes.items()
    }


def test_failures_come_last_and_are_short():
    report = failing(
        ("layouts", "fail"), ("gradcheck", "fail"), ("compile", "fail"), ("vmap", "warn"), ("export", "limit")
    )
    end = str(report).partition("FAIL layouts\n")[2].partition("\n\nmine::op FAILS")[0]
    assert len(end.splitlines()) < 15 and all(len(line) <= 80 for line in end.splitlines()), end
    assert "Also fails: gradcheck, compile (--verbose" in end and "check --explain layouts" in end and "warn" not in end
    assert "PyTorch's own limits" in str(report) and "mine::op: export" not in str(report)
    assert "mine::op: gradcheck words" in report.text(verbose=True) and "mine::op: export" in report.text(verbose=True)
    page = report.html()
    assert page.index("mine::op: layouts") < page.index("<table") < page.index("mine::op: vmap")


def test_parts_are_of_checks():
    listed = [check for checks in PARTS.values() for check in checks]
    assert set(listed) <= set(CHECKS) and len(set(listed)) == len(listed)
    assert set(CHECKS) >= UNUSUAL | SLOW


def test_fast_is_a_choice_of_checks():
    chosen = check("aten::sin", [(torch.ones(2),)], only="fast", skip=["layouts"]).about
    assert list(chosen) == [name for name in CHECKS if name not in SLOW and name != "layouts"]
    assert list(check("aten::sin", [(torch.ones(2),)], only=["fast", "large"], skip=list(chosen)).about) == [
        "layouts",
        "large",
    ]


def test_explain(capsys):
    parser = argparse.ArgumentParser()
    checker_command.add_arguments(parser)
    for name in CHECKS:
        assert checker_command.main(parser.parse_args(["--explain", name])) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{name}\n\n") and "Remedy" in said and "\n## " not in said
    assert checker_command.main(parser.parse_args(["--explain", "all"])) == 2
    assert "unknown check 'all'; --help lists all" in capsys.readouterr().err


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


def test_command(module):
    only = ["--only", "runs", "fake_layouts", "reference"]
    result = command(
        "my_module:my_op",
        "--samples",
        "my_module:samples",
        "--reference",
        "my_module:reference",
        "--html",
        "page.html",
        "--json",
        "data.json",
        *only,
        cwd=module,
    )
    assert result.returncode == 0, result.stderr
    assert "mine::twice(Tensor x) -> Tensor" in result.stdout and "float32[3, 5]" in result.stdout
    assert (module / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((module / "data.json").read_text())["operator"] == "mine::twice"


def test_command_by_name(module):
    result = command(
        "mine::twice", "--import", "my_module", "--input", "f32[3,4]", "--json", "-", "--only", "runs", cwd=module
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["samples"] == ["float32[3, 4]"]
    result = command("openreg_ops:rms_norm", "--only", "runs,fake_layouts", "--skip", "out,", "vmap", cwd=module)
    assert result.returncode == 0 and "openreg::rms_norm passes" in result.stdout, result.stderr


ENDS = """
import ctypes, os, signal, sys, time
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


def raises(error):
    raise error


operator("leaves", lambda: os._exit(0))
operator("leaves_first", lambda: os._exit(0), after=1)
operator("exits_first", lambda: sys.exit(0), after=1)
operator("segfaults", lambda: ctypes.string_at(1))
operator("signals", lambda: os.kill(os.getpid(), signal.SIGINT))
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
    only = ["--only", "runs,determinism,opcheck_schema"]
    forms = ["--html", "page.html", "--json", "data.json"]
    result = command("ends::leaves", "--import", "ends", "--samples", "ends:samples", *only, *forms, cwd=ends)
    assert result.returncode == 1, result.stderr
    report = json.loads((ends / "data.json").read_text())
    assert len(report["results"]) == 6 and not report["passed"]
    (failure,) = [each for each in report["results"] if each["check"] == "determinism" and not each["sample"]]
    assert failure["sentence"].startswith("ends::leaves: the process ends in this check: exit 0")
    assert "ends::leaves FAILS: " in result.stdout and "FAIL" in (ends / "page.html").read_text()
    assert "said by samples" in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, sentence",
    [
        ("segfaults", "the process ends in this check: signal 11: Fatal Python error: Segmentation fault"),
        ("signals", "the process ends in this check: "),
        ("hangs", "the check does not end: no result after 3 s"),
    ],
)
def test_an_operator_that_ends_the_process_fails(checked, name, sentence):
    status, report, _ = checked(name, "--input=f32[3]", "--only=runs,determinism", "--timeout=3")
    assert status == 1 and [each["status"] for each in report["results"]] == ["pass", "fail"]
    assert report["results"][1]["sentence"].startswith(f"ends::{name}: {sentence}")


@pytest.mark.processes
@pytest.mark.parametrize(
    "before", ["", "torch.ones(1, requires_grad=True).sum().backward()"], ids=["", "after a backward"]
)
@pytest.mark.parametrize(
    "end, sentence",
    [
        ("ctypes.string_at(1)", "signal 11: Fatal Python error: Segmentation fault"),
        ("os._exit(0)", "exit 0"),
        ("time.sleep(1000)", "the check does not end: no result after 4 s"),
    ],
    ids=["crashes", "exits", "hangs"],
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
        print([(each.status, each.sentence) for each in report.results])
    """
    result = python("-c", textwrap.dedent(code), dynamo=True)
    statuses = ast.literal_eval(result.stdout)
    assert [status for status, _ in statuses] == ["pass", "fail", "pass"], result.stderr
    assert sentence in statuses[1][1]


@pytest.mark.processes
def test_an_operator_that_never_returns_skips_the_sample(checked):
    status, report, _ = checked("leaves_first", "--input=f32[3]", "--input=f32[4]", "--only=runs,determinism,copies")
    assert status == 1 and [each["status"] for each in report["results"]] == ["fail", "skip", "skip"] * 2
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
    status, report, _ = checked(name, *inputs, "--only=determinism", "--timeout=0.5")
    assert status == 1 and [each["status"] for each in report["results"]] == ["fail"] * most + ["skip"] * (22 - most)
    why = "did not end" if name == "hangs" else "ended the process"
    assert report["results"][-1]["sentence"] == f"earlier checks {why}, so this one was not run"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
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
    sentences = {each.check: each.sentence for each in report.of("fail")}
    assert report.of("pass", "runs") and name in sentences["determinism"], str(report)
    assert name in sentences["threads"], str(report)
    calls = 2
    report = check(op, [(torch.ones(3),)], only=["runs", "determinism"])
    assert [each.status for each in report.results] == ["fail", "skip"] and name in report.results[0].sentence


@pytest.mark.parametrize("swallow", [False, True], ids=["passes on", "swallows"])
def test_a_real_interrupt_ends_check(swallow):
    """Also if the operator catches KeyboardInterrupt. The handler is restored."""
    handler = signal.getsignal(signal.SIGINT)

    def kernel(x):
        with contextlib.suppress(KeyboardInterrupt if swallow else ()):
            signal.raise_signal(signal.SIGINT)
        return x.clone()

    op = define(f"pressed_{swallow}(Tensor x) -> Tensor", kernel, torch.empty_like)
    with pytest.raises(KeyboardInterrupt):
        check(op, [(torch.ones(3),)], only="runs")
    assert signal.getsignal(signal.SIGINT) is handler


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
        (["no_module:op"], "there is no module no_module in the current folder or on the path"),
        (["my_module:op"], "my_module has no attribute 'op'. Operators in it: my_op"),
        (["mine::thrice"], "there is no operator mine::thrice"),
        (["my_module:my_op", "--only", "all"], "unknown check 'all'; --help lists all"),
        (["my_module:my_op", "--input", "q[3]"], "'q[3]' is neither a tensor such as f32[3,4] nor a Python literal"),
        (["my_module:my_op", "--samples", "my_module"], "expected MODULE:NAME, but got 'my_module'"),
        (["my_module:my_op", "--samples", "sys:maxsize"], "function of (device, dtype) that returns them, but got int"),
        (["my_module:my_op", "--reference", "sys:maxsize"], "expected reference to be a function, but got int"),
        (["my_module:my_op", "--input", "f32[3]", "--device", "banana"], "unknown device 'banana'; available: cpu, "),
        (["my_module:my_op", "--input", "f32[3]", "--device", "openreg:9"], "cannot use device 'openreg:9': "),
        (["my_module:my_op", "--input", "f32[3]@openreg:9"], "available: cpu, meta, openreg"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_refuses(module, monkeypatch, arguments, sentence):
    monkeypatch.syspath_prepend(module)
    parser = argparse.ArgumentParser()
    checker_command.add_arguments(parser)
    with pytest.raises((Wrong, ValueError), match=re.escape(sentence)):
        checker_command.prepared(parser.parse_args(arguments))


def test_command_refuses_what_the_worker_refuses(module):
    result = command("my_module:op", cwd=module)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr == "check: my_module has no attribute 'op'. Operators in it: my_op\n"


# Each option of `check`, and how it shows in the report.
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
    checker_command.add_arguments(parser)
    only = [] if "--only" in words else ["--only", "runs"]
    checks = checker_command.prepared(parser.parse_args(["my_module:my_op", *words.split(), *only]))
    report = checks.report
    report.results = [checks.result(i, name) for i, name in report.planned()]
    assert OPTIONS[words](report.dict()), report.dict()


def test_options_reach_the_processes_of_generated_calls(module, monkeypatch):
    """They import the modules that the operator and its samples are in, and have the seed, the samples and the limits."""
    monkeypatch.syspath_prepend(module)
    found = types.SimpleNamespace(
        seconds=2.0, findings=[], passed=True, summary=lambda: "3 calls",
        operators=[types.SimpleNamespace(reached=3, never="", notes=collections.Counter(memory=2, unfit=1))],
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(search, "search", lambda *arguments: seen.append(arguments) or found)
    parser = argparse.ArgumentParser()
    checker_command.add_arguments(parser)
    words = ["my_module:my_op", "--samples=my_module:samples", "--import=json", "--generate=7", "--seed=5", "--quiet"]
    for limit, expected in ((9, 9.0), (600, 60)):
        asked = parser.parse_args([*words, f"--timeout={limit}"])
        report = checker_command.prepared(asked).report
        checker_command._generated(report, asked)
        options, names, has = seen.pop()
        assert vars(options) == {
            "device": "cpu", "generate": 7, "seed": 5, "jobs": 1, "threads": 1, "timeout": expected, "quiet": True,
            "modules": ["json", "my_module", "my_module"], "given": {"samples": "my_module:samples", "inputs": []},
        }  # fmt: skip
        assert names == ["mine::twice"] and has == {"mine::twice": "own"}
        assert [result.status for result in report.results] == ["pass"] and "generated" in report.about
        assert report.notes == ["3 calls", "Allowed in 2 generated calls: memory"] and report.seconds == 2.0


def test_every_option_of_check_is_tried():
    """Or belongs to the process that writes the report."""
    parser = argparse.ArgumentParser()
    checker_command.add_arguments(parser)
    options = {each for action in parser._actions for each in action.option_strings if each.startswith("--")}
    of_report = {"--json", "--html", "--verbose", "--quiet", "--timeout", "--generate", "--seed"}
    others = {"--help", "--abi", "--require-stable", "--explain", "--import"}
    tried = {word for words in OPTIONS for word in words.split() if word.startswith("--")}
    assert options == of_report | others | tried


def test_progress_is_one_line_on_a_terminal(module, monkeypatch):
    import openreg_ops.__main__

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(
        sys, "argv", ["openreg_ops", "check", "aten::sin", "--input", "f32[3]", "--only", "runs", "copies"]
    )
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert openreg_ops.__main__.main() == 0
    *lines, end = sys.stderr.getvalue().split("\r")[1:]
    assert [each.strip() for each in lines] == ["[1/2] sample 0: runs", "[2/2] sample 0: copies", ""] and not end
    assert {len(each) for each in lines} == {60}


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_command_refuses_a_file_before_it_runs(module, monkeypatch, capsys, option):
    import openreg_ops.__main__

    monkeypatch.setattr(sys, "argv", ["openreg_ops", "check", "aten::sin", option, str(module / "none" / "page")])
    with pytest.raises(SystemExit, match="2"):
        openreg_ops.__main__.main()
    said = capsys.readouterr().err
    assert f"there is no folder {module / 'none'} to write page to; make it first" in said and "checking" not in said
    monkeypatch.setattr(sys, "argv", ["openreg_ops", "check", "aten::sin", option, str(module)])
    with pytest.raises(SystemExit, match="2"):
        openreg_ops.__main__.main()
    assert f"{module} is a folder; name a file in it" in capsys.readouterr().err


def test_fixture(openreg_check, good):
    assert openreg_check(good, [(torch.randn(4, 6), torch.randn(6))], only=["runs"]).passed
    with pytest.raises(pytest.fail.Exception, match="FAIL runs"):
        openreg_check("aten::mm", [(torch.randn(4, 6), torch.randn(5))], only=["runs"])


def test_plugin_imports_nothing():
    code = "import sys, pytest_openreg_ops, openreg_tools.pytest_plugin; print('torch' in sys.modules, 'openreg_ops' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_outputs_that_were_not_asked_for_are_none():
    """As the gradients of ATen's backward operators are where their mask says no."""

    def of(gradient, x, mask):
        wanted = zip((gradient * x, gradient.sum(-1)), mask, strict=True)
        return tuple(value if asked else None for value, asked in wanted)

    op = define("masked_backward(Tensor gradient, Tensor x, bool[2] mask) -> (Tensor, Tensor)", of, of)
    x = torch.rand(3, 4)
    only = ["runs", "reference", "compile", "fake_layouts", "fake_dtypes", "fake_dynamic", "export", "layouts"]
    for mask, count in (([True, True], 2), ([False, True], 1), ([True, False], 1), ([False, False], 0)):
        sample = Sample(x, x, mask)
        report = check(op, [sample], only=only)
        assert report.passed and report.of("pass", "runs"), str(report)
        assert len(Case(op, sample, "cpu", None, derivative).expected) == count


READS_ON_THE_HOST = """
import ctypes
import torch
import openreg_ops

@torch.library.custom_op("reads::waits_first", mutates_args=(), device_types="openreg")
def waits_first(x: torch.Tensor) -> torch.Tensor:
    torch.openreg.synchronize()
    return x * ctypes.c_float.from_address(x.data_ptr()).value
"""


@pytest.mark.processes
def test_the_command_watches_the_accesses_of_the_host(tmp_path):
    """An operator that waits for the stream gives the right numbers here, and none on an accelerator."""
    (tmp_path / "reads.py").write_text(READS_ON_THE_HOST)
    words = ("reads:waits_first", "--input", "f32[4,6]", "--device", "openreg", "--only", "launch", "--quiet")
    result = python("-m", "openreg_ops", "check", *words, cwd=tmp_path)
    said = " ".join(result.stdout.split())
    assert result.returncode == 1 and "the host read device memory in a call" in said, said + result.stderr


def test_the_check_of_streams_has_no_race():
    """It copies the inputs on the default stream."""
    with torch.openreg._sanitizer.sanitize():
        report = check("openreg::swiglu", [Sample(*torch.rand(2, 3, 4, device="openreg"))], only=["stream"])
    assert report.of("pass", "stream"), str(report)
