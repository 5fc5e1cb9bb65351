"""Checks of unusual inputs: layouts, empty, zero-dimensional and large ones."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from openreg_tools.checker.case import Case, differentiable, gradients, last_line
from openreg_tools.checker.checks.common import (
    by_reference,
    differs,
    fail,
    layouts_of,
    picks,
    plain,
    refuse,
    resized,
    sizes_of,
    skip,
    tolerance,
)
from openreg_tools.checker.checks.fakes import run_fake


def _clear(case: Case, error: BaseException, inputs: str) -> str:
    """A note that the operator refuses some inputs; fails if the error is an accident in the kernel."""
    if "INTERNAL ASSERT" in str(error) or isinstance(error, (AssertionError, ZeroDivisionError, SystemError)):
        fail(
            f"{case.name}: given {inputs} it ended in {last_line(error)}",
            "accept such inputs, or reject them with a message that states the rule (TORCH_CHECK, torch._check)",
        )
    return f"{inputs}: {last_line(error)}"


def layouts(case: Case) -> str | None:
    """Permuted, padded, stepped, expanded or channels-last inputs give the same results as contiguous ones."""
    if case.seeded:
        skip("its numbers are random, and drawn in the order of memory")
    remedy = "read elements by the tensor's strides, or start from x.contiguous()"
    refusals = []
    for name, tensors in layouts_of(case):
        try:
            outs = plain(case, tensors)
        except Exception as error:
            refusals.append(_clear(case, error, f"inputs in {name} layout"))
            continue
        straight = [x.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else x for x in tensors]
        expected = plain(case, straight)
        ties = name == "expanded" and picks(case)
        if ties:
            outs, expected = (list(filter(differentiable, each)) for each in (outs, expected))
        if wrong := differs(outs, expected):
            fail(f"{case.name}: for inputs in {name} layout {wrong}, which contiguous inputs give", remedy)
        if case.derivative.status == "pass" and not ties:
            got = gradients(case.run, case.leaf(tensors), case.wanted)
            expected = gradients(case.run, case.leaf(straight), case.wanted)
            if wrong := differs(got, expected, "the gradient of differentiable argument"):
                fail(f"{case.name}: for inputs in {name} layout {wrong}, which contiguous inputs give", remedy)
    refusals = [text for text in refusals if "channels-last" not in text]
    if refusals:
        refuse("; ".join(refusals))
    return None


def _against(case: Case, tensors: list[Tensor], inputs: str, terms: int = 1) -> str | None:
    """Run unusual inputs; compare with the reference, else with the fake kernel. Returns a note about a refusal.

    Args:
        terms: of a sum; the reference rounds each in its dtype, and in its own order.
    """
    try:
        outs = plain(case, tensors)
    except Exception as error:
        return _clear(case, error, inputs)
    try:
        expected = by_reference(case, tensors)
    except Exception:
        expected = None
    if expected is not None:
        coarse = 4 * tolerance(*case.leaves) * max(1, terms / 1024) ** 0.5
        wrong = differs(outs, expected, dtype=not case.reference, coarse=coarse)
    else:
        try:
            wrong = differs([x.to("meta") for x in outs], [x.to("meta") for x in run_fake(case, tensors)[1]])
        except Exception:  # fake_layouts and fake_errors say so
            wrong = ""
    if wrong:
        who = "the fake kernel" if expected is None else "the reference"
        fail(
            f"{case.name}: given {inputs}, {wrong}, which {who} gives",
            "handle such inputs, or reject them with an error",
        )
    if case.derivative.status == "pass" and not any(x.numel() > 4096 for x in tensors):
        try:
            gradients(case.run, case.leaf(tensors), case.wanted)
        except RuntimeError as error:
            if "invalid gradient" in str(error):
                fail(
                    f"{case.name}: given {inputs}, its backward raised {last_line(error)}",
                    "give each gradient the shape of its input: sum it over the broadcast dimensions",
                )
            return _clear(case, error, f"{inputs}, backward of")
    return None


def empty(case: Case) -> str | None:
    """Empty tensors are accepted, or rejected with a clear error."""
    tensors = case.fresh()
    sizes = sizes_of(tensors)
    if not sizes or any(x.layout != torch.strided for x in tensors):
        skip("no strided tensor of more than one element")
    refusals = [
        _against(case, resized(tensors, size, 0), f"inputs whose dimensions of size {size} are empty")
        for size in sizes[:3]
    ]
    if all(refusals):
        refuse(refusals[0])
    return "; ".join(text for text in refusals if text)


def zero_dim(case: Case) -> str | None:
    """Zero-dimensional tensors are accepted, or rejected with a clear error."""
    tensors = case.fresh()
    if not tensors or any(x.layout != torch.strided or not x.numel() for x in tensors):
        skip("no strided tensor with elements")
    if refusal := _against(case, [x.reshape(-1)[0].clone() for x in tensors], "zero-dimensional inputs"):
        refuse(refusal)
    return None


_LARGE = 2**19  # elements, enough for every kernel to use threads and vectors


def large(case: Case) -> str | None:
    """Large inputs give the results of the reference, or of a single thread."""
    tensors = case.fresh()
    if any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided tensor of more than one element")
    note = ""
    many = any("List" in str(r.type) for r in case.schema.returns)  # a size may be the number of outputs
    target = 2**12 if many else _LARGE
    for size in sizes_of(tensors)[:2]:
        most = max(tensors, key=lambda x: (x.shape.count(size) if size in x.shape else 0, x.numel()))
        power = max(1, list(most.shape).count(size))
        new = max(size, int(size * (target / max(most.numel(), 1)) ** (1 / power)))
        with contextlib.suppress(Exception):
            while new > size and sum(x.numel() for x in run_fake(case, resized(tensors, size, new))[1]) > 2**22:
                new //= 4
        big = resized(tensors, size, max(new, size))
        inputs = f"inputs whose dimensions of size {size} are {new} long"
        refusal = _against(case, big, inputs, terms=new)
        if refusal:
            note = note or refusal
            continue
        outs = plain(case, big)
        torch.set_num_threads(1)
        if wrong := differs(outs, plain(case, big), coarse=4 * tolerance(*case.leaves)):
            fail(
                f"{case.name}: given {inputs}, {wrong}, which one thread gives",
                "check how the work is divided among threads",
            )
        return f"{new} instead of {size}"
    refuse(note)
