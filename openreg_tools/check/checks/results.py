"""Checks of results: whether they are right, and whether they depend on old memory or on the number of threads."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from openreg_tools import backends
from openreg_tools.check.case import Case, Results, skip
from openreg_tools.check.checks.common import refused
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import tolerance


def runs(case: Case) -> str | None:
    """The operator accepts the sample."""
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except Exception as error:
        case.fail(f"the sample was refused: {all_lines(error)}", "give samples that the operator accepts")


# ---- reference ----


def reference(case: Case) -> str | None:
    """Outputs and gradients equal the results of the reference, or of its own CPU kernel."""
    function = case.reference_function
    if not function:
        if case.seeded:
            skip("its numbers are random, and no reference was given")
        skip("no reference was given" + ("" if case.device.type == "cpu" else ", and the operator has no CPU kernel"))
    kernel = "the reference" if case.reference else "its CPU kernel"
    grads: list[Tensor | None] = []
    note = "" if case.has_derivative else "outputs only; "
    if case.reference and case.intended:
        note = "outputs only (see gradcheck for intended_gradient); "
    elif not note:
        try:
            grads = case.gradients_of(case.fresh(device="cpu"), function)
        except RuntimeError as error:
            if not refused(error):
                raise
        if not any(x is not None for x in grads):
            grads, note = [], f"outputs only, as {kernel} has no gradient; "
    case.expect(
        case.eager, Results(case.outputs(case.fresh(device="cpu"), function), grads), "", f"{kernel} gives",
        "one of the two is wrong; try the sample by hand, or give a reference in float64",
        dtype=not case.reference, coarse=tolerance(*case.leaves),
    )  # fmt: skip
    return f"{note}against {kernel}"


# ---- memory and threads ----


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


def needs_written(case: Case) -> None:
    """Skip if the outputs depend on old memory contents, about which `poison` fails."""
    if any(out.layout != torch.strided for out in case.expected):
        skip("its outputs have no strides")
    with garbage(case, 0xFF):
        outs = case.outputs(case.fresh())
    if case.unlike(Results(outs, []), Results(case.expected, [])):
        skip("it reads memory that was never written: see poison")


def poison(case: Case) -> str | None:
    """Its results do not depend on old memory contents."""
    expected = None
    for pattern in (0x5A, 0xFF, 0x00):
        with garbage(case, pattern):
            got = case.results()
        expected = expected or got
        if wrong := case.unlike(got, expected):
            case.fail(
                f"it reads memory that was never written: with fresh memory filled with 0x{pattern:02X} bytes instead of "
                f"0x5A, {wrong}",
                "write every element of torch.empty's result before you read it, or use torch.zeros where sums start from it",
            )
    return None


def determinism(case: Case) -> str | None:
    """Three calls give the same bits, with any number of threads."""
    remedy = "add in a fixed order: one partial sum a block, combined by index, not by arrival"
    first = case.results()
    for what, threads in (("the same call again", None), ("one thread", 1), ("three threads", 3)):
        if threads:
            torch.set_num_threads(threads)
        for _ in range(2):
            again = case.results()
            if wrong := case.unlike(again, first):
                case.fail(f"{what} gives a different result: {wrong}", remedy)
            if wrong := case.unlike(again, first, exact=True):
                case.warn(f"{what} rounds differently: {wrong}", remedy)
    return None
