"""Compares launch modes: a call must raise and return in async mode what it raises and returns inline.

Two checks of `openreg-tools conformance` for devices with launch modes (``torch.DEVICE.launch_mode``, as
openreg has). On other devices they compare nothing.

    async         valid samples: values, and the operands that the call writes to
    async_errors  samples that an operator rejects: OpInfo's error inputs, and valid samples with one dtype, shape or
                  argument made wrong. The call must raise what the inline call raises, before it returns. Nothing may
                  appear at the next synchronization, and the operands must hold what they hold inline

An operator may raise at the synchronization where CUDA reports a device-side assert: see `ASSERTS`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools.conformance.outcomes import (
    HOST_ARGUMENTS,
    UNINITIALIZED,
    Outcome,
    Tally,
    run,
    same,
    short,
)
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import first_line
from openreg_tools.core.move import Move
from openreg_tools.core.variations import SHAPES, is_strided

CHECKS = ("async", "async_errors")

# The dtypes that wrong samples convert tensors to. The CPU has kernels for few of these.
DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float32", "float16", "complex64", "complex32", "int64", "uint8", "bool", "uint16", "uint32", "float8_e4m3fn",
        "float8_e5m2", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)  # fmt: skip
# Wrong dtypes for all tensors of a sample; one of these follows for each tensor alone.
MIXED = (torch.float64, torch.int64, torch.float8_e4m3fn)

# Errors that depend on values in device memory: CUDA's kernels assert them on the device, or do not check them.
ASSERTS = re.compile(r"out of (bounds|range)|expected targets in")

# Operators whose values are compared for valid samples only, by cause.
GARBAGE = {
    "resize_": "memory that it adds holds whatever was there",
    "resize_as_": "as resize_",
    "grid_sampler_3d": "an unknown mode leaves its result as it was allocated",
    "nn.functional.embedding_bag": "offsets past the end are read from other memory",
    "_segment_reduce.offsets": "as nn.functional.embedding_bag",
}


def has_modes(device: str) -> bool:
    """Returns true if the device has launch modes."""
    module = getattr(torch, torch.device(device).type, None)
    return hasattr(module, "launch_mode")


@dataclasses.dataclass
class Seen:
    """What a program can observe of a call: its result or error, the error of synchronizing, and the operands."""

    outcome: Outcome
    late: Exception | None
    operands: list[torch.Tensor]


def observe(call: Callable[[Move], Any], device: str, mode: str) -> Seen:
    """Call in a launch mode, then synchronize."""
    module = getattr(torch, torch.device(device).type)
    late = None
    with module.launch_mode(mode), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = run(call, device)
        try:
            module.synchronize()
        except Exception as error:
            late = error
    return Seen(outcome, late, list(outcome.mover.tensors.values()))


def compare(tally: Tally, check: str, index: int, what: str, call: Callable, device: str, values: bool = True) -> None:
    """Call in both modes and record each difference, including values if they are meaningful."""
    expected, actual = observe(call, device, "inline"), observe(call, device, "async")
    tally.ran[check] += 1

    def fail(kind: str, message: str) -> None:
        tally.fail(check, kind, index, f"{what}: {message}")

    error = expected.outcome.error
    theirs, ours = (each and _said(each) for each in (error, actual.outcome.error))
    if actual.late is not None:
        if error is None or not (ASSERTS.search(str(error)) and str(error).splitlines()[0] in str(actual.late)):
            fail("late", f"the synchronization raised {first_line(actual.late)}; inline: {theirs}")
        return
    if theirs != ours:
        return fail(
            "error" if error is None else "error type" if ours else "no error", f"inline: {theirs}; async: {ours}"
        )
    pairs = list(zip(expected.operands, actual.operands, strict=False))  # an error may occur before all of them exist
    leaves = [tree_leaves(each.outcome.value) for each in (expected, actual)] if error is None else ([], [])
    if len(expected.operands) != len(actual.operands) or len(leaves[0]) != len(leaves[1]):
        return fail("structure", "a different number of results")
    pairs += zip(*leaves, strict=True)
    for e, a in pairs if values else ():
        if isinstance(e, torch.Tensor) and not same(e, a):
            fail("value", f"async gave {short(a)}, inline {short(e)}")


def _said(error: Exception) -> str:
    """The first line of an error; of one that ran out of memory, without how much is in use at that moment."""
    line = first_line(error)
    return line.partition(" Device ")[0] if isinstance(error, torch.OutOfMemoryError) else line


# ---- wrong samples ----

Arguments = tuple[Any, tuple, dict]

# Numbers stay small: the CPU would allocate a large size, or compute for minutes.
WRONG_VALUES: dict[type, tuple] = {int: (-1, -7, 7), float: (-1.5, 300.0, 1e6), str: ("no such",)}
WRONG_SHAPES = ("last longer", "one dimension less", "one dimension more", "empty", "transposed")


def wrong(arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yields the arguments of a valid call with one change that makes them wrong, or only different, and that change."""
    leaves, spec = tree_flatten(arguments)
    tensors = [i for i, x in enumerate(leaves) if is_strided(x)]
    floats = [i for i in tensors if leaves[i].dtype.is_floating_point or leaves[i].dtype.is_complex]

    def change(which: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        return tree_unflatten([change(x) if i in which else x for i, x in enumerate(leaves)], spec)

    for name, group in (("floating", floats), ("integral", [i for i in tensors if i not in floats])):
        for dtype in DTYPES if group else ():
            yield f"{name} tensors to {dtype}", change(group, lambda x, dtype=dtype: _to(x, dtype))
    for i in tensors[:4]:
        for dtype in MIXED if len(tensors) > 1 else ():
            yield f"tensor {i} to {dtype}", change([i], lambda x, dtype=dtype: _to(x, dtype))
        for shape in WRONG_SHAPES:
            if leaves[i].numel():
                yield f"tensor {i}, {shape}", change([i], SHAPES[shape])
    for i, x in enumerate(leaves):
        for value in WRONG_VALUES.get(type(x), ()):
            yield f"argument {x!r} as {value!r}", tree_unflatten([*leaves[:i], value, *leaves[i + 1 :]], spec)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype, with the values 0 and 1 so that every dtype holds them and most indices are in range."""
    x = x.detach()
    return (x.abs() > 1 if x.dtype != torch.bool else x).to(torch.float32).to(dtype)


def _call(op: Any, function: Callable, arguments: Arguments, **more: Any) -> Callable[[Move], Any]:
    def call(move: Move) -> Any:
        rest = Move("cpu") if op.name in HOST_ARGUMENTS else move
        input_, args, kwargs = arguments
        return function(move(input_), *rest(args), **rest({**kwargs, **more}))

    return call


def check(
    op: Any,
    dtype: torch.dtype,
    device: str,
    samples: int,
    checks: tuple[str, ...],
    tally: Tally,
    at: Callable[[str], None],
) -> None:
    """Run the `CHECKS` that are in `checks` for one operator and dtype, into `tally`."""
    if not has_modes(device) or op.name in UNINITIALIZED:
        return
    values = op.full_name not in GARBAGE
    errors = "async_errors" in checks and dtype == opinfo.first_dtype(op)
    for i, sample in enumerate(opinfo.samples(op, dtype, False, samples)):
        arguments = (sample.input, tuple(sample.args), sample.kwargs)
        if not any(map(is_strided, tree_leaves(arguments))):
            continue  # a factory, for which Move cannot tell the device
        forms = {"": op.op, " in place": None if sample.broadcasts_input else op.get_inplace()}
        for form, function in forms.items():
            if function is None:
                continue
            at(f"async, sample {i}")
            if "async" in checks:
                compare(tally, "async", i, f"valid{form}", _call(op, function, arguments), device)
            for what, changed in wrong(arguments) if errors else ():
                at(f"async_errors, sample {i}")
                compare(tally, "async_errors", i, what + form, _call(op, function, changed), device, values)
        if errors and op.supports_out:
            _outs(op, arguments, i, device, tally)
    if errors and op.error_inputs_func:
        torch.manual_seed(opinfo.SEED)
        for i, each in enumerate(itertools.islice(op.error_inputs("cpu"), 8 * samples)):
            at(f"async_errors, sample {i}")
            sample = each.sample_input
            call = _call(op, op.op, (sample.input, tuple(sample.args), sample.kwargs))
            compare(tally, "async_errors", i, "error input", call, device)


def _outs(op: Any, arguments: Arguments, index: int, device: str, tally: Tally) -> None:
    """Call with results of another dtype, shape and layout."""
    expected = run(_call(op, op.op, arguments), "cpu").value
    single = isinstance(expected, torch.Tensor)
    flat = [expected] if single else expected
    if not isinstance(flat, (list, tuple)) or not all(map(is_strided, flat)) or "out" in arguments[2]:
        return
    for what, make in {
        **{f"out of {dtype}": lambda t, dtype=dtype: torch.zeros_like(t, dtype=dtype) for dtype in DTYPES},
        "out of another shape": lambda t: t.new_ones(3, *t.shape),
        "out that overlaps itself": lambda t: t.new_ones(()).expand(t.shape),
    }.items():
        outs = [make(t.detach().resolve_conj().resolve_neg()) for t in flat]
        call = _call(op, op.op, arguments, out=outs[0] if single else tuple(outs))
        compare(tally, "async_errors", index, what, call, device)


def _call_with(function: Callable, args: tuple, kwargs: dict[str, Any], move: Move) -> Any:
    return function(*move(args), **move(kwargs))


def check_operator(function: Callable, samples: Iterable[Any], device: str) -> Tally:
    """The check async_errors for any function, such as ``torch.ops.mylib.foo``.

    Args:
        samples: objects with ``args`` and ``kwargs``, tensors on the CPU (`openreg_tools.core.samples.Sample`).
    """
    tally = Tally()
    for i, sample in enumerate(samples):
        valid = (None, tuple(sample.args), dict(sample.kwargs))
        for what, (_, args, kwargs) in itertools.chain([("valid", valid)], wrong(valid)):
            call = functools.partial(_call_with, function, args, kwargs)
            compare(tally, "async_errors", i, what, call, device)
    return tally
