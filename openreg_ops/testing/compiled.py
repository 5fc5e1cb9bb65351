"""Operators of PyTorch's OpInfo database through torch.compile against eager mode, both on the device.

    python -m openreg_ops compiled                      # all of them, forward and backward
    python -m openreg_ops compiled --ops '^linalg' --batch 1

A graph of one operator would take a second of C++ compilation, so a graph holds a batch of them, and Inductor fuses
what it can. A batch that fails is halved until the operators that fail are alone; those are then also run with graph breaks.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import forms
from openreg_tools.conformance import outcomes
from openreg_tools.core import opinfo

# Eager mode rounds each intermediate result, a fused kernel only the last.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@dataclasses.dataclass
class Case:
    """An operator and the first of its sample inputs whose result has elements."""

    name: str
    function: Callable[..., Any]
    arguments: Any  # (args, kwargs)
    grad: bool


def cases(pattern: str = "", device: str = "openreg", grad: bool = False) -> Iterator[Case]:
    """One for each operator whose full name matches, in float32 if possible, else in its first dtype."""
    for name, op in opinfo.database().items():
        dtypes = opinfo.dtypes_of(op)
        if not re.search(pattern, name) or not dtypes:
            continue
        dtype = getattr(torch, "float32" if "float32" in dtypes else dtypes[0])
        wants = grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(opinfo.SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = _sample(op, dtype, wants)
        if sample is None:
            continue
        arguments = ((sample.input, *sample.args), sample.kwargs)
        if any(isinstance(x, Tensor) and x.layout != torch.strided for x in tree_leaves(arguments)):
            continue  # torch.compile takes dense tensors
        yield Case(name, op.op, arguments, wants)


def _sample(op: Any, dtype: torch.dtype, grad: bool) -> Any:
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


def _move(arguments: Any, device: str, name: str) -> Any:
    def move(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device(device)
        if not isinstance(x, Tensor) or name in outcomes.HOST_ARGUMENTS:
            return x
        return x.detach().to(device).requires_grad_(x.requires_grad)

    return tree_map(move, arguments)


def compare(batch: Sequence[Case], device: str = "openreg", fullgraph: bool = True) -> dict[str, str]:
    """The differences, by operator, between one compiled graph of the batch and eager mode; raises if compiling
    raises."""
    import torch._inductor.config
    from torch.testing._internal import common_methods_invocations

    inputs = [_move(case.arguments, device, case.name) for case in batch]

    def run(inputs: list[Any]) -> list[Any]:
        return [case.function(*args, **kwargs) for case, (args, kwargs) in zip(batch, inputs, strict=True)]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=fullgraph)
    grad = any(case.grad for case in batch)
    runs = []
    for function in (run, compiled):
        torch.manual_seed(opinfo.SEED)
        fresh = [_move(each, device, case.name) for each, case in zip(inputs, batch, strict=True)]
        with (
            # Eager mode's random numbers, so that random operators agree too.
            torch._inductor.config.patch(fallback_random=True),
            # The database's own wrapper for random operators saves and restores generators, which a graph cannot do.
            patch.object(
                common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)
            ),
            torch.set_grad_enabled(grad),
        ):
            results = function(fresh)
            gradients = _gradients(results, fresh) if grad else [()] * len(batch)
            runs.append(list(zip(results, gradients, strict=True)))
    found = {}
    for case, expected, actual in zip(batch, *runs, strict=True):
        if case.name in outcomes.UNINITIALIZED:
            expected, actual = (tree_map(_shape, each) for each in (expected, actual))
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)
        except AssertionError as error:
            found[case.name] = " ".join(str(error).split())
    return found


def _shape(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x


def _gradients(results: list[Any], inputs: list[Any]) -> list[tuple[Tensor, ...]]:
    """The gradients of each operator's arguments, from one backward: a compiled graph allows no second one."""

    def wanted(values: Any) -> list[Tensor]:
        return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]

    outs, groups = wanted(results), [wanted(each) for each in inputs]
    leaves = [x for group in groups for x in group]
    if not outs or not leaves:
        return [()] * len(inputs)
    found = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], allow_unused=True)
    gradients = iter(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return [tuple(next(gradients) for _ in group) for group in groups]


@dataclasses.dataclass
class Found:
    """What `check` found, by operator name."""

    different: dict[str, str] = dataclasses.field(default_factory=dict)  # that differ or fail, and how
    breaks: set[str] = dataclasses.field(default_factory=set)  # that compile only with a graph break
    invalid: set[str] = dataclasses.field(default_factory=set)  # whose sample raises in eager mode too

    def __or__(self, other: Found) -> Found:
        return Found(self.different | other.different, self.breaks | other.breaks, self.invalid | other.invalid)


def check(batch: Sequence[Case], device: str = "openreg") -> Found:
    """Compare a batch; one that fails is halved."""
    try:
        return Found(compare(batch, device))
    except Exception as error:
        if half := len(batch) // 2:
            return check(batch[:half], device) | check(batch[half:], device)
        from torch._dynamo.exc import Unsupported, UserError

        name = batch[0].name
        if _eager_fails(batch[0], device):
            return Found(invalid={name})
        if isinstance(error, (Unsupported, UserError)):
            try:
                return Found(compare(batch, device, fullgraph=False), breaks={name})
            except Exception as second:
                error = second
        return Found({name: f"{type(error).__name__}: {' '.join(str(error).split())}"})


def _eager_fails(case: Case, device: str) -> bool:
    """Whether the sample raises in eager mode too: a CUDA-only operator, a gradient that does not exist."""
    arguments = _move(case.arguments, device, case.name)
    try:
        with torch.set_grad_enabled(case.grad):
            args, kwargs = arguments
            _gradients([case.function(*args, **kwargs)], [arguments])
    except Exception:
        return True
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--ops", type=forms.regex, default="", metavar="REGEX", help="only operators whose full name matches"
    )
    parser.add_argument("--batch", type=forms.count, default=10, help="operators in one graph (default %(default)s)")
    parser.add_argument("--forward", action="store_true", help="check forward only")
    parser.add_argument("--device", default="openreg", help="device under test (default %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Run and print what differs; 1 if anything does."""
    started, chosen = time.perf_counter(), list(cases(options.ops, options.device, not options.forward))
    found = Found()
    for i in range(0, len(chosen), options.batch):
        here = check(chosen[i : i + options.batch], options.device)
        found |= here
        for name, message in here.different.items():
            print(f"{name}: {message[:300]}", flush=True)
        print(f"{min(i + options.batch, len(chosen))} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
    agree = len(chosen) - len(found.different) - len(found.invalid)
    print(
        f"{len(chosen)} operators: {agree} agree with eager mode, {len(found.breaks)} of them with a graph break; "
        f"{len(found.different)} differ or fail; {len(found.invalid)} fail in eager mode too: "
        f"{', '.join(sorted(found.invalid)) or 'none'}. {time.perf_counter() - started:.0f} s"
    )
    return 1 if found.different else 0
