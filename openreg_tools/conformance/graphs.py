"""The check `graph` of `openreg-tools conformance`: what a replay computes must be what eager mode computes, to the bit.

`run` captures a call on memory of zeros, puts the values back, and replays; `compare` does so twice, against eager mode on
the same values and random seeds. It is for devices that ``torch.accelerator.Graph`` supports, and runs on no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest.mock
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.testing import _utils as testing_utils
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance import asynchronous, opinfo

CHECK = "graph"
At = Callable[[str], None]

# What a device says of a call that cannot be captured.
REFUSED = "not permitted when stream is capturing"


@dataclasses.dataclass
class Replayed:
    """What a program could see of a call, eager or replayed twice."""

    values: list[Any]  # the leaves of the result, after each time
    operands: list[torch.Tensor]  # after the last time
    error: Exception | None = None


def _bytes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of strided tensors, once each."""
    seen: dict[int, torch.Tensor] = {}
    for x in tensors:
        if x.layout == torch.strided and not x.is_quantized and not x.is_nested and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            seen[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
    return list(seen.values())


def _copies(leaves: list[Any]) -> list[Any]:
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]


def run(call: Callable[..., Any], arguments: Any, device: str, captured: bool) -> Replayed:
    """Call ``call(*args, **kwargs)`` twice in eager mode, or capture it and replay it twice.

    Args:
        arguments: ``(args, kwargs)``, tensors on the CPU.
        captured: whether to capture. The capture sees tensors of zeros; the replays see the values.
    """
    move = opinfo.Mover(device)
    args, kwargs = move(arguments)
    memory = _bytes(move.tensors.values())
    before = [x.clone() for x in memory]
    index = torch.device(device).index or 0
    out = Replayed([], list(move.tensors.values()))
    module = getattr(torch, torch.device(device).type)

    def restore() -> None:
        for x, value in zip(memory, before, strict=True):
            x.copy_(value)

    # Some OpInfos seed their random operators themselves, which a replay cannot, and put the seed back.
    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(torch, "manual_seed", lambda seed: None),
        unittest.mock.patch.object(testing_utils, "freeze_rng_state", contextlib.nullcontext),
    ):
        warnings.simplefilter("ignore")
        try:
            if captured:
                for x in memory:
                    x.zero_()
                graph, stream = torch.accelerator.Graph(), torch.Stream(device=torch.device(module.__name__[6:], index))
                stream.wait_stream(torch.accelerator.current_stream(index))
                with stream:
                    graph.capture_begin()
                    try:
                        result = call(*args, **kwargs)
                    finally:
                        try:
                            graph.capture_end()
                        except torch.AcceleratorError as error:
                            if REFUSED not in str(error):
                                raise
            restore()
            for time in range(2):
                module.manual_seed(opinfo.SEED + time)
                if captured:
                    graph.replay()
                else:
                    result = call(*args, **kwargs)
                torch.accelerator.synchronize(index)
                out.values.append(_copies(tree_leaves(result)))
        except Exception as error:
            out.error = error
    return out


def compare(
    report: opinfo.Report, index: int, what: str, call: Callable[..., Any], arguments: Any, device: str
) -> None:
    """Run eagerly and as a graph, and note each difference. A call that cannot be captured is a note, not a failure."""

    def fail(kind: str, message: str) -> None:
        report.failures.append(opinfo.Failure("graph", kind, index, f"{what}: {message}"))

    expected, actual = (run(call, arguments, device, captured) for captured in (False, True))
    report.ran["graph"] += 1
    theirs, ours = (each and opinfo.first_line(each) for each in (expected.error, actual.error))
    if actual.error is not None and REFUSED in str(actual.error):
        report.notes[f"refused: {str(actual.error).partition(': ')[2].partition(': ')[2].split(' at ')[0]}"] += 1
        return
    if expected.error is not None or actual.error is not None:
        if type(expected.error) is not type(actual.error):
            fail(
                "error" if theirs is None else "no error" if ours is None else "error type",
                f"eager: {theirs}; graph: {ours}",
            )
        return
    pairs = list(zip(expected.operands, actual.operands, strict=True))
    for time, (e, a) in enumerate(zip(expected.values, actual.values, strict=True)):
        if len(e) != len(a):
            return fail("structure", "results of another number")
        pairs += zip(e, a, strict=True)
        for x, y in pairs:
            if isinstance(x, torch.Tensor) and not asynchronous.same(x, y):
                return fail("value", f"replay {time} gave {asynchronous._short(y)}, eager {asynchronous._short(x)}")


@functools.cache
def supported(device: str) -> bool:
    """Whether ``torch.accelerator.Graph`` captures on this device."""
    kind = torch.device(device).type
    if not hasattr(torch.accelerator, "Graph") or kind != getattr(
        torch.accelerator.current_accelerator(), "type", None
    ):
        return False
    try:
        torch.accelerator.Graph()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check(
    op: Any, dtype: torch.dtype, device: str, samples: int, report: opinfo.Report, at: At = lambda _: None
) -> None:
    """`compare` for the samples of an OpInfo, functional and in place."""
    if op.name in opinfo.UNINITIALIZED:
        return
    for i, sample in enumerate(opinfo._samples(op, dtype, False, samples)):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        if not any(isinstance(x, torch.Tensor) for x in tree_leaves(arguments)):
            continue  # a factory, whose device Mover cannot tell
        forms = {"valid": op.op, "in place": None if sample.broadcasts_input else op.get_inplace()}
        for what, function in forms.items():
            if function is not None:
                at(f"{CHECK}, sample {i}, {what}")
                compare(report, i, what, function, arguments, device)


def check_module(info: Any, dtype: torch.dtype, device: str, report: opinfo.Report, at: At = lambda _: None) -> None:
    """`compare` for forward and backward of a module in training mode, with its parameters and buffers as arguments."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=True)
    for i, sample in enumerate(inputs):
        if sample.forward_input is None:
            continue
        at(f"{CHECK}, sample {i}")
        torch.manual_seed(0)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            continue  # it has no parameters before its first call
        module.flatten_parameters = lambda: None  # a recurrent one's, which asks for addresses of its own parameters
        parameters = {name: x.detach() for name, x in module.named_parameters()}
        buffers = {name: x.detach() for name, x in module.named_buffers()}

        def step(parameters: Any, buffers: Any, args: Any, kwargs: Any, module: Any = module) -> list[Any]:
            leaves = {name: x.requires_grad_() for name, x in parameters.items()}
            out = torch.func.functional_call(module, {**leaves, **buffers}, args, kwargs)
            wanted = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            found = [x.detach() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            if not wanted or not leaves:
                return found
            total = sum(x.sum() if not x.is_complex() else x.abs().sum() for x in wanted)
            return [*found, *torch.autograd.grad(total, list(leaves.values()), allow_unused=True)]

        arguments = (parameters, buffers, sample.forward_input.args, sample.forward_input.kwargs)
        compare(report, i, "forward and backward", step, (arguments, {}), device)
