"""The check `graph` of `openreg-tools conformance`: what a replay computes must be what eager mode computes, to the bit.

`run` captures a call on memory of zeros, puts the values back, and replays twice; `compare` compares that with eager mode on
the same values and random seeds. It is for devices that ``torch.accelerator.Graph`` supports, and runs on no other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import unittest.mock
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.testing import _utils as testing_utils
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance.outcomes import UNINITIALIZED, Outcome, Tally, same, short
from openreg_tools.conformance.outcomes import run as run_once
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import first_line
from openreg_tools.core.move import Move

CHECK = "graph"
At = Callable[[str], None]

# What a device says of a call that cannot be captured.
REFUSED = "not permitted when stream is capturing"
# How a note of such a call begins. The operator that refused and its reason follow.
NOTE = "graph: "

# OpInfos whose result has a shape that depends on values. What CUDA's graphs cannot capture either.
DYNAMIC = {
    "argwhere", "bincount", "linalg.lstsq", "linalg.lstsq.grad_oriented", "masked_select", "nn.functional.one_hot",
    "nonzero", "repeat_interleave", "to_sparse", "unique", "unique_consecutive",
}  # fmt: skip


def _bytes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of strided tensors, once each."""
    seen: dict[int, torch.Tensor] = {}
    for x in tensors:
        if x.layout == torch.strided and not x.is_quantized and not x.is_nested and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            seen[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
    return list(seen.values())


def copies(leaves: Iterable[Any]) -> list[Any]:
    """Results as they are now: the next replay writes to the same memory."""
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]


def run(call: Callable[..., Any], arguments: Any, device: str, captured: bool) -> Outcome:
    """Call ``call(*args, **kwargs)`` twice in eager mode, or capture it and replay it twice.

    Args:
        arguments: ``(args, kwargs)``, tensors on the CPU.
        captured: whether to capture. The capture sees tensors of zeros; the replays see the values.
    Returns:
        The leaves of the result, and the operands, after each time.
    """
    move = Move(device)
    args, kwargs = move(arguments)
    operands = list(move.tensors.values())
    memory = _bytes(operands)
    before = [x.clone() for x in memory]
    index = torch.device(device).index or 0
    module = torch.get_device_module(device)
    geometry = [(x, x.size(), x.stride(), x.storage_offset()) for x in operands if x.layout == torch.strided]

    def make() -> Any:
        with torch.device(device) if not operands else contextlib.nullcontext():  # a factory
            return call(*args, **kwargs)

    def capture() -> tuple[Any, Any]:
        for x in memory:
            x.zero_()
        graph, stream = torch.accelerator.Graph(), torch.Stream(device=torch.device(move.device.type, index))
        stream.wait_stream(torch.accelerator.current_stream(index))
        with stream:
            graph.capture_begin()
            try:
                return graph, make()
            finally:
                try:
                    graph.capture_end()
                except torch.AcceleratorError as error:
                    if REFUSED not in str(error):
                        raise

    def both_times(_: Move) -> list[list[Any]]:
        graph, result = capture() if captured else (None, None)
        for x, value in zip(memory, before, strict=True):
            x.copy_(value)
        found = []
        for time in range(2):
            module.manual_seed(opinfo.SEED + time)
            if captured:
                graph.replay()
            else:
                for x, size, stride, offset in geometry:  # operators such as transpose_() change it with each call
                    if (x.size(), x.stride(), x.storage_offset()) != (size, stride, offset):
                        x.as_strided_(size, stride, offset)
                result = make()
            torch.accelerator.synchronize(index)
            found.append(copies(tree_leaves(result)) + (operands if time else []))
        return found

    # Some OpInfos seed their random operators themselves, which a replay cannot, and put the seed back.
    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(torch, "manual_seed", lambda seed: None),
        unittest.mock.patch.object(testing_utils, "freeze_rng_state", contextlib.nullcontext),
    ):
        warnings.simplefilter("ignore")
        return run_once(both_times, move)


def compare(tally: Tally, index: int, what: str, call: Callable[..., Any], arguments: Any, device: str) -> None:
    """Run eagerly and as a graph, and note each difference. A call that cannot be captured is a note, not a failure."""
    expected = run(call, arguments, device, captured=False)
    if expected.error is None and not any(isinstance(x, torch.Tensor) for x in expected.value[0]):
        return  # a value on the host, such as the result of item()
    judge(tally, index, what, expected, run(call, arguments, device, captured=True))


def judge(tally: Tally, index: int, what: str, expected: Outcome, actual: Outcome) -> None:
    """Note each difference between eager mode and a graph: lists of what they gave each time."""

    def fail(kind: str, message: str) -> None:
        tally.fail(CHECK, kind, index, f"{what}: {message}")

    tally.ran[CHECK] += 1
    theirs, ours = (outcome.error and first_line(outcome.error) for outcome in (expected, actual))
    if actual.error is not None and REFUSED in str(actual.error):
        tally.notes[f"{NOTE}{_cause(str(actual.error))}"] += 1
    elif type(expected.error) is not type(actual.error):
        kind = "error" if theirs is None else "no error" if ours is None else "error type"
        fail(kind, f"eager: {theirs}; graph: {ours}")
    elif expected.error is None:
        for time, (e, a) in enumerate(zip(expected.value, actual.value, strict=True)):
            if len(e) != len(a):
                return fail("structure", "a different number of results")
            for x, y in zip(e, a, strict=True):
                if isinstance(x, torch.Tensor) and not same(x, y):
                    return fail("value", f"replay {time} gave {short(y)}, eager {short(x)}")


def _cause(message: str) -> str:
    """The operator that refused and its reason: ``aten::nonzero: the shape of its result depends on values ...``."""
    said = message[message.index(REFUSED) + len(REFUSED) :].strip(" :.\n")
    return re.sub(r"^(\S+) at [^:]+:\d+: ", r"\1: ", said).partition(". ")[0]


@functools.cache
def supported(device: str) -> bool:
    """Returns true if ``torch.accelerator.Graph`` captures on this device."""
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


def check(op: Any, dtype: torch.dtype, device: str, samples: int, tally: Tally, at: At = lambda _: None) -> None:
    """`compare` for the samples of an OpInfo, functional and in place, and `check_numbers`.

    `tally` counts only the samples: not each number can be captured.
    """
    if op.name in UNINITIALIZED:
        return
    for i, sample in enumerate(opinfo.samples(op, dtype, False, samples)):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        forms = {"valid": op.op, "in place": None if sample.broadcasts_input else op.get_inplace()}
        for what, function in forms.items():
            if function is not None:
                at(f"{CHECK}, sample {i}, {what}")
                compare(tally, i, what, function, arguments, device)
    numbers = Tally()
    check_numbers(op, dtype, device, numbers, at)
    tally.failures += numbers.failures


NUMBERS = (3, -1.5, 0.5 + 2j)


def with_number(value: Any, number: complex) -> Any:
    """`number` in place of a tensor or a number, or of each in a list; the value itself where there is none.

    An integer stays if `number` is one: it may be a dimension or a mode.
    """
    match value:
        case bool():
            return value
        case int():
            return value if isinstance(number, int) else number
        case float() | complex() | torch.Tensor() | [torch.Tensor(), *_]:
            return number
        case [*items] if items and all(type(x) in (int, float, complex) for x in items):
            return [with_number(x, number) for x in items]
    return value


def check_numbers(op: Any, dtype: torch.dtype, device: str, tally: Tally, at: At = lambda _: None) -> None:
    """`compare` with an integer, a float and a complex number beside the tensors: a number may promote their dtype.

    Each number takes the place of each argument after the first, and of all of them, in the functional, the in-place and
    the out= form. The samples are the first one and the first one with numbers.
    """
    made = [sample for sample in opinfo.samples(op, dtype, False, 6) if isinstance(sample.input, (torch.Tensor, list))]
    numeric = [s for s in made if any(type(x) in (int, float, complex) for x in (*s.args, *s.kwargs.values()))]
    for i, sample in enumerate({id(sample): sample for sample in (*made[:1], *numeric[:1])}.values()):
        given = dict(enumerate(sample.args)) | sample.kwargs
        choices = [*([place] for place in given), *([list(given)] if len(given) > 1 else [])]
        for places, number in itertools.product(choices, NUMBERS):
            changed = dict(given)
            for k, place in enumerate(places):
                changed[place] = with_number(given[place], number + 4 * k)  # a range, for clamp
            if all(changed[place] is given[place] for place in places):
                continue
            args = [sample.input, *(changed[k] for k in range(len(sample.args)))]
            kwargs = {name: changed[name] for name in sample.kwargs}
            what = f"{number} as argument {', '.join(map(str, places))}"
            forms = {what: (op.op, {}), f"{what}, in place": (op.get_inplace(), {})}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = run_once(lambda _, args=args, kwargs=kwargs: op.op(*args, **kwargs), "cpu").value
            if op.supports_out and isinstance(result, torch.Tensor) and "out" not in kwargs:
                forms[f"{what}, out="] = op.op, {"out": torch.zeros_like(result)}
            for form, (function, more) in forms.items():
                if function is not None:
                    at(f"{CHECK}, {form}")
                    compare(tally, i, form, function, (args, kwargs | more), device)
