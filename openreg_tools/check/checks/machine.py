"""Checks of the machine's side: memory, number of threads, time."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from openreg_tools import backends
from openreg_tools.check.case import Case, gradients
from openreg_tools.check.checks.common import differs, fail, plain, resized, sizes_of, warn


@contextlib.contextmanager
def garbage(case: Case, pattern: int) -> Iterator[None]:
    """Fill memory allocated in this context with the byte `pattern`, if this device and C library support it."""
    kind = case.device.type
    if filled := backends.of_device(kind).filled(pattern):
        with filled:
            yield
        return
    # Leave garbage in freed blocks of the sizes that the call will request.
    blocks = []
    for x in (*case.leaves, *case.expected):
        for _ in range(4):
            blocks.append(torch.full((x.numel() * x.element_size(),), pattern, dtype=torch.uint8, device=case.device))
    del blocks
    with perturbed(pattern) if kind == "cpu" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def perturbed(pattern: int) -> Iterator[None]:
    """Let malloc fill memory with the byte `pattern`, if the C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt:
        yield
        return
    perturb = -6  # glibc's M_PERTURB: malloc fills memory with the complement; 0 is off
    mallopt(perturb, pattern ^ 0xFF or 0x100)
    try:
        yield
    finally:
        mallopt(perturb, 0)


def poison(case: Case) -> str | None:
    """Its results do not depend on old memory contents."""
    remedy = (
        "write every element of torch.empty's result before you read it, or use torch.zeros where sums start from it"
    )

    def run(what: str) -> list[Tensor | None]:
        tensors = case.fresh(grad=what == "gradient")
        seen = gradients(case.run, tensors, case.wanted) if what == "gradient" else plain(case, tensors)
        return [x if x is None else x.detach().clone() for x in seen]

    for what in ("output", "gradient"):
        if what == "gradient" and case.derivative.status != "pass":
            continue
        expected = None
        for pattern in (0x5A, 0xFF, 0x00):
            with garbage(case, pattern):
                got = run(what)
            expected = expected or got
            if wrong := differs(got, expected, what):
                fail(
                    f"{case.name}: it reads memory that was never written: with fresh memory filled with 0x{pattern:02X} "
                    f"bytes instead of 0x5A, {wrong}",
                    remedy,
                )
    return None


def determinism(case: Case) -> str | None:
    """Three calls give the same bits, with any number of threads."""
    remedy = "add in a fixed order: one partial sum a block, combined by index, not by arrival"
    function = gradients if case.derivative.status == "pass" else None

    def everything() -> list[Tensor | None]:
        outs: list[Tensor | None] = list(plain(case, case.fresh()))
        return outs + (function(case.run, case.fresh(grad=True), case.wanted) if function else [])

    first = everything()
    for what, threads in (("the same call again", None), ("one thread", 1), ("three threads", 3)):
        if threads:
            torch.set_num_threads(threads)
        for _ in range(2):
            again = everything()
            if wrong := differs(again, first, "result"):
                fail(f"{case.name}: {what} gives a different result: {wrong}", remedy)
            if wrong := differs(again, first, "result", exact=True):
                warn(f"{case.name}: {what} rounds differently: {wrong}", remedy)
    return None


def overhead(case: Case) -> str | None:
    """The overhead of a call, in nanoseconds."""
    tensors = case.fresh()
    for size in sizes_of(tensors)[:2]:
        with contextlib.suppress(Exception):
            nothing = resized(tensors, size, 0)
            plain(case, nothing)
            tensors = nothing
            break
    inputs = "empty inputs" if any(not x.numel() for x in tensors) else "the sample"
    args, kwargs = case.arguments(tensors)
    with torch.no_grad():
        call = _nanoseconds(lambda: case.op(*args, **kwargs))
        small = torch.ones(1, device=case.device)
        base = _nanoseconds(lambda: torch.ops.aten.neg.default(small))
    text = f"{call:,.0f} ns a call on {inputs}"
    if case.derivative.status == "pass" and not case.mutable:
        args, kwargs = case.arguments(case.leaf(tensors))
        text += f", {_nanoseconds(lambda: case.op(*args, **kwargs)):,.0f} ns if a gradient is required"
    return f"{text}; aten::neg takes {base:,.0f} ns"


def _nanoseconds(call: Callable[[], Any]) -> float:
    """The fastest of several batches, 10 ms in total."""
    call()
    best, count = float("inf"), 1
    end = time.perf_counter_ns() + 10_000_000
    while (begin := time.perf_counter_ns()) < end:
        for _ in range(count):
            call()
        took = time.perf_counter_ns() - begin
        best = min(best, took / count)
        if took < 500_000:
            count *= 2
    return best
