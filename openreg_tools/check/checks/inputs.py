"""Checks of unusual inputs: layouts, empty, zero-dimensional and large ones, and strides beyond 2**31."""

from __future__ import annotations

import contextlib
import mmap
import os
import re

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Results, refuse, skip
from openreg_tools.check.checks.common import CONTIGUOUS, layouts_of, needs_sizes, picks, refused
from openreg_tools.check.checks.fakes import run_fake, unlike_fake
from openreg_tools.check.checks.results import needs_written
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers, tolerance
from openreg_tools.core.variations import of_sizes, sizes_of


def clear(case: Case, error: BaseException, inputs: str) -> str:
    """A note that the operator refuses some inputs; fails if the error is an accident in the kernel."""
    if "INTERNAL ASSERT" in str(error) or isinstance(error, (ZeroDivisionError, SystemError)):
        case.fail(
            f"given {inputs} it ended in {all_lines(error)}",
            "accept such inputs, or reject them with a message that states the rule (TORCH_CHECK, torch._check)",
        )
    return f"{inputs}: {all_lines(error)}"


# An error that states a rule. A kernel that gives up on the way says something else, such as "misaligned address".
_RULE = re.compile(
    r"\b(must|should|expect(s|ed)?|requires?|needs?|only|supports?|has to|have to|multiple of|aligned (to|at|on))\b",
    re.IGNORECASE,
)


def _by_design(error: Exception) -> bool:
    """Returns true if an operator rejects what it could accept, such as memory that is not aligned, and says so."""
    return refused(error) or isinstance(error, (RuntimeError, TypeError, ValueError)) and bool(_RULE.search(str(error)))


# ---- layouts ----


def layouts(case: Case) -> str | None:
    """Offset, unaligned, permuted, padded, stepped, expanded or channels-last inputs give the results of contiguous ones."""
    if case.seeded:
        skip("its numbers are random, and drawn in the order of memory")
    refusals = []
    for name, tensors in layouts_of(case):
        straight = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        for i in case.written if name == "expanded" else ():  # nobody can write to it
            tensors[i] = straight[i].clone()
        case.trying(f"inputs in {name} layout")
        refusals.append(_as_contiguous(case, name, tensors, straight))
    if found := [text for text in dict.fromkeys(refusals) if text and "channels-last" not in text]:
        refuse("; ".join(found))
    return None


def _as_contiguous(case: Case, name: str, tensors: list[Tensor], straight: list[Tensor]) -> str:
    """Compare a layout with contiguous inputs; returns a note if the operator refuses one of them."""
    inputs = f"contiguous inputs {CONTIGUOUS[name]}" if name in CONTIGUOUS else f"inputs in {name} layout"
    if name not in CONTIGUOUS:
        remedy = "read elements by the tensor's strides, or start from x.contiguous()"
    elif name == "offset":
        remedy = "start from x.data_ptr(), which includes the offset: the storage's own pointer does not"
    else:
        remedy = (
            "load from any address (memcpy, loadu), or copy what is not aligned (x.clone()): contiguous() copies nothing; "
            "or reject it with a message that states the rule (torch._check(x.data_ptr() % 16 == 0, …))"
        )
    ties = name == "expanded" and picks(case)
    for what, run in (("", case.in_place), ("its backward ", case.gradients_of)):
        if what and (not case.has_derivative or ties or case.written):
            break
        try:
            expected = run(straight)
        except Exception as error:
            return clear(case, error, f"contiguous inputs as in {name} layout{what and ', backward of'}")
        try:
            got = run(tensors)
        except Exception as error:
            if (what or name in CONTIGUOUS) and not _by_design(error):
                case.fail(
                    f"for {inputs} {what or 'it '}raised {all_lines(error)}, which contiguous inputs do not", remedy
                )
            return clear(case, error, f"{inputs}{what and ', backward of'}")
        if ties:
            got, expected = (list(filter(has_numbers, found)) for found in (got, expected))
        results = (Results([], got), Results([], expected)) if what else (got, expected)
        case.expect(*results, f"for {inputs}", "contiguous inputs give", remedy)
    return ""


# ---- empty, zero-dimensional and large inputs ----


def against(case: Case, tensors: list[Tensor], inputs: str, terms: int = 1) -> str | None:
    """Run unusual inputs; compare with the reference, else with the fake kernel. Returns a note about a refusal.

    Args:
        terms: of a sum; the reference rounds each in its dtype, and in its own order.
    """
    case.trying(inputs)
    try:
        outs = case.outputs(tensors)
    except Exception as error:
        return clear(case, error, inputs)
    function, expected = case.reference_function, None
    if function:
        with contextlib.suppress(Exception):
            expected = case.outputs([x.detach().cpu() for x in tensors], function)
    remedy = "handle such inputs, or reject them with an error"
    if expected is not None:
        coarse = 4 * tolerance(*case.leaves) * max(1, terms / 1024) ** 0.5
        case.expect(
            outs, expected, f"given {inputs},", "the reference gives", remedy, dtype=not case.reference, coarse=coarse
        )
    else:
        wrong = ""
        with contextlib.suppress(Exception):  # fake_layouts and fake_errors report its errors
            wrong = unlike_fake(outs, run_fake(case, tensors)[1])
            wrong = "" if unlike_fake(case.expected, run_fake(case, case.fresh())[1]) else wrong
        if wrong:
            case.fail(f"given {inputs}, {wrong}", remedy)
    if case.has_derivative and not any(x.numel() > 4096 for x in tensors):
        try:
            case.gradients_of(tensors)
        except RuntimeError as error:
            if "invalid gradient" in str(error):
                case.fail(
                    f"given {inputs}, its backward raised {all_lines(error)}",
                    "give each gradient the shape of its input: sum it over the broadcast dimensions",
                )
            return clear(case, error, f"{inputs}, backward of")
    return None


def empty(case: Case) -> str | None:
    """Empty tensors are accepted, or rejected with a clear error."""
    needs_sizes(case)
    refusals = [
        against(case, of_sizes(case.fresh(), {size: 0}), f"inputs whose dimensions of size {size} are empty")
        for size in sizes_of(case.leaves)[:3]
    ]
    if all(refusals):
        refuse(refusals[0])
    return "; ".join(text for text in refusals if text)


def zero_dim(case: Case) -> str | None:
    """Zero-dimensional tensors are accepted, or rejected with a clear error."""
    tensors = case.fresh()
    if not tensors or not all(x.numel() for x in tensors):
        skip("no strided tensor with elements")
    if refusal := against(case, [x.reshape(-1)[0].clone() for x in tensors], "zero-dimensional inputs"):
        refuse(refusal)
    return None


_LARGE = 2**19  # elements, enough for every kernel to use threads and vectors


def large(case: Case) -> str | None:
    """Large inputs give the results of the reference, or of a single thread."""
    needs_sizes(case)
    tensors, note = case.fresh(), ""
    many = any("List" in str(r.type) for r in case.schema.returns)  # a size may be the number of outputs
    target = 2**12 if many else _LARGE
    for size in sizes_of(tensors)[:2]:
        most = max(tensors, key=lambda x: (x.shape.count(size) if size in x.shape else 0, x.numel()))
        power = max(1, list(most.shape).count(size))
        new = max(size, int(size * (target / max(most.numel(), 1)) ** (1 / power)))
        with contextlib.suppress(Exception):
            while new > size and sum(x.numel() for x in run_fake(case, of_sizes(tensors, {size: new}))[1]) > 2**22:
                new //= 4
        new = max(new, size)
        big = of_sizes(tensors, {size: new})
        inputs = f"inputs whose dimensions of size {size} are {new} long"
        if refusal := against(case, big, inputs, terms=new):
            note = note or refusal
            continue
        outs = case.outputs(big)
        torch.set_num_threads(1)
        case.expect(
            outs, case.outputs(big), f"given {inputs},", "one thread gives",
            "check how the work is divided among threads", coarse=4 * tolerance(*case.leaves),
        )  # fmt: skip
        return f"{new} instead of {size}"
    refuse(note)


# ---- strides beyond 2**31 ----

_MEMORY = re.compile(r"alloc|memory", re.IGNORECASE)


def large_strides(case: Case) -> str | None:
    """Inputs with more than 2**31 elements of unused memory between their own give the same results as near ones."""
    if case.device.type != "cpu":
        skip(f"this needs memory that is not used until it is touched, which {case.device.type} may not have")
    if case.seeded:
        skip("its numbers are random, and drawn in the order of memory")
    needs_written(case)
    reasons = []
    for columns in (False, True):
        able = [i for i, x in enumerate(case.fresh()) if _apart(x, columns, 0) is not None]
        reason = _apart_and_near(case, able, columns) if able else None
        if reason and len(able) > 1:  # it may copy one argument, and reject another
            reason = all([_apart_and_near(case, [i], columns) for i in able]) and reason
        reasons.append(reason)
    if all(reason is None for reason in reasons):
        skip("no strided tensor of more than one element, or too many elements")
    if all(reasons):
        refuse(reasons[0])
    return None


def _apart_and_near(case: Case, some: list[int], columns: bool) -> str:
    """Compare large strides of some arguments with small ones; returns why it refuses both, or ""."""
    remedy = "compute offsets in 64 bits (int64_t; .to(tl.int64) in Triton), or copy first (x.contiguous())"
    near, far = (
        [_apart(x, columns, step) if i in some else x for i, x in enumerate(case.fresh())] for step in (0, 2**32)
    )
    names = ", ".join(case.names[i] for i in some)
    inputs = f"{names} with {'columns' if columns else 'rows'} {2**32} elements apart"
    case.trying(inputs)
    try:
        expected = case.in_place(near)
    except Exception as error:
        return clear(case, error, "rows with unused memory between them")
    if differs(expected, case.in_place(case.fresh())):
        return "it ignores strides: see layouts"
    what = "it"
    try:
        wrong = differs(case.in_place(far), expected)
        if not wrong and case.has_derivative and not case.written:
            what = "its backward"
            wrong = case.unlike(*(Results([], case.gradients_of(tensors)) for tensors in (far, near)))
    except Exception as error:
        if not (_by_design(error) or isinstance(error, MemoryError) or _MEMORY.search(str(error))):
            case.fail(f"given {inputs}, {what} raised {all_lines(error)}", remedy)
        return f"{inputs}: {all_lines(error)}"
    if wrong:
        case.fail(f"given {inputs}, {wrong}, which near ones give", remedy)
    return ""


def _apart(x: Tensor, columns: bool, step: int) -> Tensor | None:
    """The same values with `step` and a few more elements of unused memory between rows or columns, if that is possible."""
    last = x.dim() - 1
    able = [d for d in ([last] if columns == (last > 0) else range(last)) if x.dim() and x.shape[d] > 1]
    if not able or not x.numel():
        return None
    far, size = able[0], x.element_size()
    block = x.numel() // x.shape[far]
    strides = list(torch.empty((*x.shape[:far], 1, *x.shape[far + 1 :]), device="meta").stride())
    strides[far] = step + 2 * block + 1
    if x.shape[far] * (block * size // 4096 + 1) > 2**13 or x.shape[far] * size > 2**13:
        return None
    if not step:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
    before = step // 2
    count = (before + strides[far] * x.shape[far]) * size
    try:
        file = os.memfd_create("large strides")
        try:
            os.ftruncate(file, count)
            memory = mmap.mmap(file, count)  # shared: it counts when it is touched
        finally:
            os.close(file)
    except (AttributeError, OSError, OverflowError) as error:
        skip(f"no virtual memory of {count} bytes: {all_lines(error)}")
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides, before).copy_(x)
