"""Operators of PyTorch's OpInfo database through torch.compile against eager mode, both on the device.

Every sixteenth of about 720 in the order of their names, forward only. With OPENREG_COMPILED_OPS=all, all run, forward
and backward.

A graph of one operator would take a second of C++ compilation, so a graph holds a batch of them, and Inductor fuses
what it can. A batch that fails is halved until the operators that fail are alone; those are then also run with graph
breaks.
"""

import functools
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.exc import Unsupported, UserError
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.conformance import outcomes
from openreg_tools.core import opinfo

pytestmark = pytest.mark.compiles

ALL = os.environ.get("OPENREG_COMPILED_OPS") == "all"
STEP = 1 if ALL else 16
BATCH = 45
# Eager mode rounds each intermediate result, a fused kernel only the last.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Case:
    """An operator and the first of its sample inputs whose result has elements."""

    name: str
    function: Callable[..., Any]
    arguments: Any  # (args, kwargs)
    grad: bool


@dataclass
class Found:
    """What `check` found, by operator name."""

    different: dict[str, str] = field(default_factory=dict)  # that differ or fail, and how
    breaks: set[str] = field(default_factory=set)  # that compile only with a graph break
    invalid: set[str] = field(default_factory=set)  # whose sample raises in eager mode too

    def __or__(self, other):
        return Found(self.different | other.different, self.breaks | other.breaks, self.invalid | other.invalid)


def every_case(pattern="", grad=False, step=1):
    """One for every `step`-th operator whose full name matches, in float32 if possible, else in its first dtype."""
    names = [name for name, op in opinfo.database().items() if re.search(pattern, name) and opinfo.dtypes_of(op)]
    for name in names[::step]:
        op = opinfo.database()[name]
        dtypes = opinfo.dtypes_of(op)
        dtype = getattr(torch, "float32" if "float32" in dtypes else dtypes[0])
        wants = grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(opinfo.SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = sample_with_a_result(op, dtype, wants)
        if sample is None:
            continue
        arguments = ((sample.input, *sample.args), sample.kwargs)
        if any(isinstance(x, Tensor) and x.layout != torch.strided for x in tree_leaves(arguments)):
            continue  # torch.compile takes dense tensors
        yield Case(name, op.op, arguments, wants)


def sample_with_a_result(op, dtype, grad):
    """The first sample input whose result has elements, else the first, else None."""
    first = None
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        first = sample if first is None else first
        copy = sample.transform(lambda x: x.detach().clone() if isinstance(x, Tensor) else x)
        try:
            leaves = tree_leaves(op.op(copy.input, *copy.args, **copy.kwargs))
        except Exception:
            continue
        if any(x.numel() > 0 if isinstance(x, Tensor) else x is not None for x in leaves):
            return sample
    return first


def on_device(arguments, name):
    def move(x):
        if isinstance(x, torch.device):
            return torch.device("openreg")
        if not isinstance(x, Tensor) or name in outcomes.HOST_ARGUMENTS:
            return x
        return x.detach().to("openreg", copy=True).requires_grad_(x.requires_grad)

    return tree_map(move, arguments)


def compare(batch, fullgraph=True):
    """The differences, by operator, between one compiled graph of the batch and eager mode; raises if compiling
    raises."""

    def run(inputs):
        return [case.function(*args, **kwargs) for case, (args, kwargs) in zip(batch, inputs, strict=True)]

    torch._dynamo.reset()
    grad = any(case.grad for case in batch)
    runs = []
    for function in (run, torch.compile(run, fullgraph=fullgraph)):
        torch.manual_seed(opinfo.SEED)
        inputs = [on_device(case.arguments, case.name) for case in batch]
        with (
            # Eager mode's random numbers, so that random operators agree too.
            torch._inductor.config.patch(fallback_random=True),
            # The database's own wrapper for random operators saves and restores generators, which a graph cannot do.
            patch.object(
                common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)
            ),
            torch.set_grad_enabled(grad),
        ):
            results = function(inputs)
            gradients = gradients_of(results, inputs) if grad else [()] * len(batch)
            runs.append(list(zip(results, gradients, strict=True)))
    found = {}
    for case, expected, actual in zip(batch, *runs, strict=True):
        if case.name in outcomes.UNINITIALIZED:
            expected, actual = (
                tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x, values)
                for values in (expected, actual)
            )
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)
        except AssertionError as error:
            found[case.name] = " ".join(str(error).split())
    return found


def gradients_of(results, inputs):
    """The gradients of each operator's arguments, from one backward: a compiled graph allows no second one."""

    def wanted(values):
        return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]

    outs, groups = wanted(results), [wanted(arguments) for arguments in inputs]
    leaves = [x for group in groups for x in group]
    if not outs or not leaves:
        return [()] * len(inputs)
    found = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], allow_unused=True)
    gradients = iter(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return [tuple(next(gradients) for _ in group) for group in groups]


def check(batch):
    """Compare a batch; one that fails is halved."""
    try:
        return Found(compare(batch))
    except Exception as error:
        if half := len(batch) // 2:
            return check(batch[:half]) | check(batch[half:])
        case = batch[0]
        try:  # a CUDA-only operator, or a gradient that does not exist
            args, kwargs = on_device(case.arguments, case.name)
            with torch.set_grad_enabled(case.grad):
                gradients_of([case.function(*args, **kwargs)], [(args, kwargs)])
        except Exception:
            return Found(invalid={case.name})
        if isinstance(error, (Unsupported, UserError)):
            try:
                return Found(compare(batch, fullgraph=False), breaks={case.name})
            except Exception as second:
                error = second
        return Found({case.name: f"{type(error).__name__}: {' '.join(str(error).split())}"})


@pytest.fixture(scope="module")
def cases():
    return list(every_case(grad=ALL, step=STEP))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 700 // STEP, BATCH))
def test_compiled_operators_agree_with_eager_mode(cases, first):
    batch = cases[first : first + BATCH]
    assert len(batch) > 30
    found = check(batch)
    assert not found.different, "\n".join(f"{name}: {message[:300]}" for name, message in found.different.items())
    assert ALL or all(name.startswith("jiterator_") for name in found.invalid)  # CUDA's


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs are captured, and not compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_a_wrong_operator_is_found(uncompiled):
    """Finds it among correct operators, and distinguishes it from one that needs a graph break and from an invalid
    call."""

    def wrong(x):
        return x + torch.compiler.is_compiling()

    def breaks_graph(x):
        return x + 1 if x.sum() > 0 else x

    def invalid(x):
        return x.reshape(2)

    cases = [
        Case(function.__name__, function, ((torch.ones(3),), {}), False)
        for function in (torch.sin, wrong, torch.cos, breaks_graph, invalid)
    ]
    found = check(cases)
    assert set(found.different) == {"wrong"}
    assert (found.breaks, found.invalid) == ({"breaks_graph"}, {"invalid"})


def test_samples_have_a_result():
    """Operators whose first sample is empty are tested with another one."""
    cases = list(every_case(r"^(cholesky_solve|linalg\.svd|nn\.functional\.unfold|nonzero)$"))
    assert len(cases) == 4
    for case in cases:
        args, kwargs = case.arguments
        assert any(x.numel() for x in tree_leaves(case.function(*args, **kwargs))), case.name


def test_a_wrong_gradient_is_found(uncompiled):
    """Finds it among correct ones, of which one takes an argument that its result does not depend on."""

    def wrong(x):
        return x + (x - x.detach() if torch.compiler.is_compiling() else 0)

    def first(x, y):
        return x * 2

    def integer(x):
        return x + 1

    def ones():
        return torch.ones(3, requires_grad=True)

    cases = [
        Case("sin", torch.sin, ((ones(),), {}), True),
        Case("wrong", wrong, ((ones(),), {}), True),
        Case("first", first, ((ones(), ones()), {}), True),
        Case("integer", integer, ((torch.ones(3, dtype=torch.int64),), {}), False),
    ]
    assert set(compare(cases)) == {"wrong"}
    assert not compare(cases[3:])
