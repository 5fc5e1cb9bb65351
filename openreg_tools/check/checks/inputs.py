"""Checks of unusual inputs: layouts, sizes, and half types."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import re
import time
from collections.abc import Callable

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Outcome, attached, differentiable, gradients, last_line
from openreg_tools.check.checks.common import (
    CONTIGUOUS,
    by_reference,
    differs,
    fail,
    in_place,
    layouts_of,
    of_sizes,
    offset,
    only_outcomes,
    picks,
    plain,
    refuse,
    refused,
    resized,
    sizes_of,
    skip,
    tolerance,
)
from openreg_tools.check.checks.fakes import run_fake, unlike_fake
from openreg_tools.check.checks.machine import garbage


def _clear(case: Case, error: BaseException, inputs: str) -> str:
    """A note that the operator refuses some inputs; fails if the error is an accident in the kernel."""
    if "INTERNAL ASSERT" in str(error) or isinstance(error, (ZeroDivisionError, SystemError)):
        fail(
            f"{case.name}: given {inputs} it ended in {last_line(error)}",
            "accept such inputs, or reject them with a message that states the rule (TORCH_CHECK, torch._check)",
        )
    return f"{inputs}: {last_line(error)}"


# An error that states a rule. A kernel that gives up on the way says something else, such as "misaligned address".
_RULE = re.compile(
    r"\b(must|should|expect(s|ed)?|requires?|needs?|only|supports?|has to|have to|multiple of|aligned (to|at|on))\b",
    re.IGNORECASE,
)


def _by_design(error: Exception) -> bool:
    """Whether an operator rejects what it could accept, such as memory that is not aligned, and says so."""
    return refused(error) or isinstance(error, (RuntimeError, TypeError, ValueError)) and bool(_RULE.search(str(error)))


def layouts(case: Case) -> str | None:
    """Offset, unaligned, permuted, padded, stepped, expanded or channels-last inputs give the results of contiguous ones."""
    if case.seeded:
        skip("its numbers are random, and drawn in the order of memory")
    refusals = []
    for name, tensors in layouts_of(case):
        straight = [x.clone(memory_format=torch.contiguous_format) if x.layout == torch.strided else x for x in tensors]
        for i in case.written if name == "expanded" else ():  # nobody can write to it
            tensors[i] = straight[i].clone()
        case.trying(f"inputs in {name} layout")
        try:
            expected = plain(case, straight)
        except Exception as error:
            refusals.append(_clear(case, error, f"contiguous inputs as in {name} layout"))
            continue
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
        try:
            outs = in_place(case, tensors)
        except Exception as error:
            if name in CONTIGUOUS and not _by_design(error):
                fail(
                    f"{case.name}: for {inputs} it raised {last_line(error)}, which other contiguous inputs do not",
                    remedy,
                )
            refusals.append(_clear(case, error, inputs))
            continue
        ties = name == "expanded" and picks(case)
        if ties:
            outs, expected = (list(filter(differentiable, each)) for each in (outs, expected))
        if wrong := differs(outs, expected):
            fail(f"{case.name}: for {inputs} {wrong}, which contiguous inputs give", remedy)
        if case.derivative.status == "pass" and not ties and not case.written:
            try:
                expected = gradients(case.run, case.leaf(straight), case.wanted)
            except Exception as error:
                refusals.append(_clear(case, error, f"contiguous inputs as in {name} layout, backward of"))
                continue
            try:
                got = gradients(case.run, case.leaf(tensors), case.wanted)
            except Exception as error:
                if not _by_design(error):
                    fail(f"{case.name}: for {inputs} its backward raised {last_line(error)}", remedy)
                refusals.append(_clear(case, error, f"{inputs}, backward of"))
                continue
            if wrong := differs(got, expected, "the gradient of differentiable argument"):
                fail(f"{case.name}: for {inputs} {wrong}, which contiguous inputs give", remedy)
    refusals = [text for text in refusals if "channels-last" not in text]
    if refusals:
        refuse("; ".join(dict.fromkeys(refusals)))
    return None


def _against(case: Case, tensors: list[Tensor], inputs: str, terms: int = 1) -> str | None:
    """Run unusual inputs; compare with the reference, else with the fake kernel. Returns a note about a refusal.

    Args:
        terms: of a sum; the reference rounds each in its dtype, and in its own order.
    """
    case.trying(inputs)
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
            wrong = unlike_fake(case, tensors, outs)
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


def needs_written(case: Case) -> None:
    if any(out.layout != torch.strided for out in case.expected):
        skip("its outputs have no strides")
    with garbage(case, 0xFF):
        outs = plain(case, case.fresh())
    if differs(outs, case.expected):
        skip("it reads memory that was never written: see poison")


# ---- sizes that are not multiples of the width of a vector or a block ----

_AROUND = (1, -1, 3, -3)
_SHORT = (33, 7, 3)
_MOST, _SECONDS = 2**18, 0.5  # elements, and time of the processor for each size
_REMAINDER = (
    "process what remains behind the last full vector or block: a size that is not a multiple of its width leaves some"
)


def sizes(case: Case) -> str | None:
    """Sizes around multiples of 2 to 64 give the results that other sizes lead to expect."""
    tensors = case.fresh()
    if case.seeded:
        skip("its numbers are random")
    if any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided tensor of more than one element")
    needs_written(case)
    reasons = []
    for size in sizes_of(tensors)[:3]:
        for call in (_Forward, _Backward) if case.derivative.status == "pass" else (_Forward,):
            # Multiples of 2 to 64, or of wider blocks that the sample is for. An operator may take only even sizes.
            for factor, odd, aligned in itertools.product((1, 2), (True, False), (192 if size % 64 else size, 64)):
                reason = _around(call(case, size, factor, odd), aligned)
                if not reason:
                    break
            reasons.append(reason)
    if all(reasons):
        refuse(reasons[0])
    return None


class _Forward:
    """The operator, on samples of which every dimension of one size is `n * factor` long."""

    what = "output"

    def __init__(self, case: Case, size: int, factor: int, odd: bool) -> None:
        self.case, self.size, self.factor = case, size, factor
        others = {other: other + 1 for other in sizes_of(case.leaves) if other % 2 == 0} if odd else {}
        self.sizes = lambda n: {**others, size: n * factor}
        self.names = case.names

    def inputs(self, n: int) -> list[Tensor]:
        sizes = self.sizes(n)
        for x in self.case.leaves:
            if math.prod(sizes.get(size, size) for size in x.shape) > _MOST:
                raise ValueError(f"inputs whose dimensions of size {self.size} are {n} long have too many elements")
        return of_sizes(self.case.fresh(), sizes)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        return plain(self.case, inputs)


class _Backward(_Forward):
    """Its gradients, as a function of its inputs and the gradients of its outputs."""

    what = "gradient"

    def __init__(self, case: Case, size: int, factor: int, odd: bool) -> None:
        super().__init__(case, size, factor, odd)
        count = len(case.expected)
        self.names = [*case.names, *(f"the gradient of output {i}" for i in range(count))]

    def inputs(self, n: int) -> list[Tensor]:
        tensors = super().inputs(n)
        return [*tensors, *map(by_position, attached(self.case.run(*self.case.leaf(tensors))))]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        tensors = self.case.leaf(inputs[: len(self.case.leaves)])
        outs = attached(self.case.run(*tensors))
        given = [g.to(out.dtype) for g, out in zip(inputs[len(self.case.leaves) :], outs, strict=True)]
        grads = torch.autograd.grad(outs, self.case.of(tensors), given, allow_unused=True)
        return [grad.detach() for grad in grads if grad is not None]


def by_position(x: Tensor) -> Tensor:
    """Positive numbers, each a function of its indices: those of a longer tensor begin with those of a shorter one."""
    phase = torch.full(x.shape, 0.7, dtype=torch.float64)
    for d, n in enumerate(x.shape):
        phase += ((1.3 + d) * torch.arange(n)).view(-1, *[1] * (x.dim() - d - 1))
    return (phase.sin() + 1.25).to(x.dtype).to(x.device)


def _ends(length: int) -> tuple[int, ...]:
    return 0, 1, length // 2, length - 2, length - 1


class _Result:
    """Inputs of one size, and what a call on them gives."""

    def __init__(self, call: _Forward, n: int) -> None:
        self.call, self.n = call, n
        self.inputs = call.inputs(n)
        call.case.trying(self.text())
        self.outs = call(self.inputs)
        self.shapes = [list(x.shape) for x in (*self.inputs, *self.outs)]

    def text(self) -> str:
        return ", ".join(f"{name} {list(x.shape)}" for name, x in zip(self.call.names, self.inputs, strict=False))

    def changes(self, inputs: list[Tensor]) -> list[Tensor]:
        """Where the outputs for other inputs differ."""
        outs = self.call(inputs)
        return [((a != b) & ~((a != a) & (b != b))).cpu() for a, b in zip(outs, self.outs, strict=True)]

    def of_one(self, i: int, dims: list[int], place: int) -> list[Tensor]:
        """Where the outputs differ if the elements of an input at one place differ."""
        x, seen = self.inputs[i], [torch.zeros(out.shape, dtype=torch.bool) for out in self.outs]
        at, near = ([p if d in dims else slice(None) for d in range(x.dim())] for p in (place, abs(place - 1)))
        large = x.abs().max() * 2 + 1 if differentiable(x) else None
        for value in (x[near],) if large is None else (large, -large):
            other = x.clone()
            other[at] = value
            changes = self.changes([*self.inputs[:i], other, *self.inputs[i + 1 :]])
            seen = [a | b for a, b in zip(seen, changes, strict=True)]
        return seen

    def of_all(self) -> list[Tensor]:
        """Where the outputs differ if all inputs differ; integers, which may be indices, only where nothing else can."""
        seen = [torch.zeros(out.shape, dtype=torch.bool) for out in self.outs]
        floats = any(map(differentiable, self.inputs))
        for k in range(3):
            with contextlib.suppress(Exception):
                others = [
                    (x * by_position(x), -x, x + 100 * by_position(x))[k]
                    if differentiable(x)
                    else x
                    if floats
                    else x.flatten().roll(k + 1).view(x.shape)
                    for x in self.inputs
                ]
                seen = [a | b for a, b in zip(seen, self.changes(others), strict=True)]
        return seen


def _around(call: _Forward, full: int) -> str:
    """Compare results of sizes with and without a remainder; returns why that is impossible, or ""."""
    case, begin, long = call.case, time.thread_time(), full * call.factor
    results = []
    try:
        for n in (full, full + _AROUND[0], 2 * full):
            results.append(_Result(call, n))
            if time.thread_time() - begin > _SECONDS / 10:
                return "a call takes too long"
    except Exception as error:
        return last_line(error)
    aligned, first, longer = results
    each = range(len(aligned.shapes))
    if len(longer.shapes) != len(each) or any(len(aligned.shapes[k]) != len(longer.shapes[k]) for k in each):
        return "the number of its outputs depends on their size"
    slopes = [[(b - a) // full for a, b in zip(aligned.shapes[k], longer.shapes[k], strict=True)] for k in each]

    def expected(n: int) -> list[list[int]]:
        """The shapes of inputs and outputs for another size."""
        pairs = zip(aligned.shapes, slopes, strict=True)
        return [[a + b * (n - full) for a, b in zip(*pair, strict=True)] for pair in pairs]

    def start(n: int) -> list[Tensor]:
        """What the longer result begins with."""
        shapes = expected(n)[len(aligned.inputs) :]
        return [out[tuple(map(slice, shape))] for out, shape in zip(longer.outs, shapes, strict=True)]

    if any(result.shapes != expected(result.n) for result in (longer, first)):
        return "its outputs do not become longer in proportion to its inputs"
    dims = [[d for d, slope in enumerate(slopes[k]) if slope] for k in each]
    inside, outside = dims[: len(aligned.inputs)], dims[len(aligned.inputs) :]

    # What holds where no remainder is left: each element affects an output, and each output depends on the inputs.
    # If an element affects outputs only at its own place, then a longer result begins with the shorter one.
    finite = all(not differentiable(out) or bool(out.isfinite().all()) for out in longer.outs)
    matters, local = [], finite and any(outside) and not differs(aligned.outs, start(full))
    moved: dict[int, bool] = {}
    for i in (i for i, dims in enumerate(inside) if dims):
        try:
            changes = {place: aligned.of_one(i, inside[i], place) for place in _ends(long)}
        except Exception:
            local = False
            continue
        if all(any(map(torch.any, changed)) for changed in changes.values()):
            matters.append(i)
        for place, changed in changes.items():
            moved[place] = moved.get(place, False) or any(map(torch.any, changed))
            for where, dims in zip(changed, outside, strict=True):
                for d in dims:
                    if where.shape[d] == long:
                        where = where.index_fill(d, torch.tensor([place]), False)
                local = local and not where.any()
    local = local and all(moved.values())
    depends = [
        changed.numel() > 0
        and bool(changed.all())
        and (differentiable(out) or not any(map(differentiable, aligned.inputs)))
        for changed, out in zip(aligned.of_all(), aligned.outs, strict=True)
    ]

    inward = False  # whether it reads only its inputs, if nothing remains
    with contextlib.suppress(Exception):
        inward = not differs(call([offset(x) for x in aligned.inputs]), aligned.outs)

    for n in (*(full + by for by in _AROUND), *(n for n in _SHORT if n >= call.size), full):
        if time.thread_time() - begin > _SECONDS:
            break
        with only_outcomes():
            odd = _Result(call, n)
            if odd.shapes != expected(n):
                continue
            inputs = f"given {odd.text()}" + (", in the backward" if call.what == "gradient" else "")
            if call.what == "output":
                _against(case, odd.inputs, odd.text())
            for pattern in (0x5A, 0xFF):
                with garbage(case, pattern):
                    outs = call(odd.inputs)
                if wrong := differs(outs, odd.outs, call.what):
                    fail(
                        f"{case.name}: {inputs}, {wrong} if fresh memory is filled with 0x{pattern:02X} bytes: it does not "
                        "write all of it",
                        _REMAINDER,
                    )
            if inward and (wrong := differs(call([offset(x) for x in odd.inputs]), odd.outs, call.what)):
                fail(
                    f"{case.name}: {inputs}, {wrong} if NaN surrounds them in memory: it reads past their ends",
                    _REMAINDER,
                )
            if local and (wrong := differs(odd.outs, start(n), call.what)):
                fail(f"{case.name}: {inputs}, {wrong}, with which the result for longer inputs begins", _REMAINDER)
            if n in _SHORT:  # too few to say that each matters
                continue
            for i in matters:
                if not any(map(torch.any, odd.of_one(i, inside[i], n * call.factor - 1))):
                    fail(
                        f"{case.name}: {inputs}, the last element of {call.names[i]} has no effect on any {call.what}, but "
                        f"among {long} it has",
                        _REMAINDER,
                    )
            for k, changed in enumerate(odd.of_all()):
                if depends[k] and not changed.flatten()[-1]:
                    last = odd.outs[k].flatten()[-1].item()
                    fail(
                        f"{case.name}: {inputs}, the last element of {call.what} {k} is {last:.6g} for any input, but "
                        f"not of {long}",
                        _REMAINDER,
                    )
    return ""


# ---- strides beyond 2**31 ----

_MEMORY = re.compile(r"alloc|memory", re.IGNORECASE)


def large_strides(case: Case) -> str | None:
    """Inputs with more than 2**31 elements of unused memory between their own give the same results as near ones."""
    if case.device.type != "cpu":
        skip(f"this needs memory that is not used until it is touched, which {case.device.type} may not have")
    if case.seeded:
        skip("its numbers are random, and drawn in the order of memory")
    needs_written(case)
    tensors = case.fresh()
    reasons = []
    for columns in (False, True):
        able = [i for i, x in enumerate(tensors) if _apart(x, columns, 0) is not None]
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
    reason = ""
    for step in (2**32, 2**31 - 2**20):
        near, far = (
            [_apart(x, columns, by) if i in some else x for i, x in enumerate(case.fresh())] for by in (0, step)
        )
        inputs = (
            f"{', '.join(case.names[i] for i in some)} with {'columns' if columns else 'rows'} {step} elements apart"
        )
        case.trying(inputs)
        try:
            expected = in_place(case, near)
        except Exception as error:
            return _clear(case, error, "rows with unused memory between them")
        if differs(expected, in_place(case, case.fresh())):
            return "it ignores strides: see layouts"
        what = "it"
        try:
            wrong = differs(in_place(case, far), expected)
            if not wrong and case.derivative.status == "pass" and not case.written:
                what = "its backward"
                got, expected = (gradients(case.run, case.leaf(x), case.wanted) for x in (far, near))
                wrong = differs(got, expected, "the gradient of differentiable argument")
        except Exception as error:
            if not (_by_design(error) or isinstance(error, MemoryError) or _MEMORY.search(str(error))):
                fail(f"{case.name}: given {inputs}, {what} raised {last_line(error)}", remedy)
            reason = f"{inputs}: {last_line(error)}"
            continue
        if wrong:
            fail(f"{case.name}: given {inputs}, {wrong}, which near ones give", remedy)
        return ""
    return reason


def _apart(x: Tensor, columns: bool, step: int) -> Tensor | None:
    """The same values with `step` and a few more elements of unused memory between rows or columns, if that is possible."""
    last = x.dim() - 1
    outer = [d for d in range(x.dim()) if (d == last) == columns or last == 0]
    if x.layout != torch.strided or not any(x.shape[d] > 1 for d in outer) or columns and last == 0:
        return None
    strides, block = [0] * x.dim(), 1
    for d in reversed(range(x.dim())):
        if d not in outer:
            strides[d], block = block, block * max(x.shape[d], 1)
    pages, stride = block * x.element_size() // 4096 + 1, step + 2 * block + 1
    for d in reversed(outer):
        strides[d], stride, pages = stride, stride * max(x.shape[d], 1), pages * x.shape[d]
    before = step // 2
    size = (before + stride) * x.element_size()
    if not x.numel() or pages > 2**13 or (2**33 // step if step else 1) * size > 2**46:
        return None
    if not step:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
    try:
        file = os.memfd_create("large strides")
        try:
            os.ftruncate(file, size)
            memory = mmap.mmap(file, size)  # shared: it counts when it is touched
        finally:
            os.close(file)
    except (AttributeError, OSError, OverflowError) as error:
        skip(f"no virtual memory of {size} bytes: {last_line(error)}")
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides, before).copy_(x)


# ---- sums in half precision ----


def half_precision(case: Case) -> str | None:
    """Long sums in float16 and bfloat16 are those of float32, apart from the rounding of the results."""
    tensors = case.fresh()
    floats = [x.is_floating_point() for x in tensors]
    if case.seeded:
        skip("its numbers are random")
    if not any(floats) or any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided floating-point tensor of more than one element")
    needs_written(case)
    tried, reasons, begin = [], [], time.thread_time()
    for size in sizes_of(tensors)[:3]:
        long = max(size, 4096)
        if (
            any(x.numel() * (long / size) ** x.shape.count(size) > 2**19 for x in tensors)
            or time.thread_time() - begin > 2
        ):
            continue
        with contextlib.suppress(Exception):
            if sum(x.numel() for x in run_fake(case, resized(tensors, size, long))[1]) > 2**21:
                continue
        for call in (_Forward, _Backward) if case.derivative.status == "pass" else (_Forward,):
            for dtype in (torch.float16, torch.bfloat16):
                for change in (torch.abs, _alike):
                    try:
                        _in_half(call(case, size, 1, False), long, dtype, change)
                        tried.append(long)
                    except Outcome:
                        raise
                    except Exception as error:
                        reasons.append(last_line(error))
    if not tried:
        refuse(reasons[0]) if reasons else skip("its inputs become too large")
    return None


def _alike(x: Tensor) -> Tensor:
    """Numbers that vanish in a sum of half precision soon, as each is a little less than half of a power of two."""
    return 0.4 + 0.09 * x.abs() / x.abs().max().clamp(min=1e-30)


def _in_half(call: _Forward, long: int, dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    case, eps = call.case, torch.finfo(dtype).eps
    given = [change(x).to(dtype) if x.is_floating_point() else x for x in call.inputs(long)]
    wide = [x.float() if x.is_floating_point() else x for x in given]
    case.trying(f"inputs whose dimensions of size {call.size} are {long} long")
    got, expected = call(given), call(wide)
    moved: list[Tensor] | None = None
    for k, (a, e) in enumerate(zip(got, expected, strict=True)):
        if a.shape != e.shape or not (a.is_floating_point() and e.is_floating_point()) or a.element_size() == 1:
            continue
        a, e = a.double().cpu(), e.double().cpu()
        inside = e.abs() < torch.finfo(dtype).max
        if not inside.any():
            continue
        scale = e[inside].abs().max().item()
        error = (a - e)[inside].abs().nan_to_num(torch.inf).max().item()
        if error <= 8 * eps * (scale + torch.finfo(dtype).tiny):
            continue
        if moved is None:
            moved = _moved(call, wide, expected, dtype)
        if not error <= 8 * (eps * scale + moved[k][inside].nan_to_num(torch.inf).max().item()):
            inputs = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(call.names, given, strict=False))
            kind = str(dtype).removeprefix("torch.")
            fail(
                f"{case.name}: given {kind} {inputs}, {call.what} {k} differs from that of the same values in float32 by "
                f"{error / scale:.0%} of its largest element",
                "add in float32 and round the sum once (a float accumulator, at::opmath_type, x.float().sum()), also in the "
                "backward",
            )


def _moved(call: _Forward, inputs: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """How far rounding moves the results: of inputs in one direction or in both, or of what the backward needs."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype) if x.is_floating_point() else x

    results = []
    for signs in (1, -1):
        scales = [signs ** torch.arange(x.numel(), device=x.device).view(x.shape) for x in inputs]
        others = zip(inputs, scales, strict=True)
        results.append(
            call([x * (1 + torch.finfo(dtype).eps * by) if x.is_floating_point() else x for x, by in others])
        )
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda x: x):
        results.append(call(inputs))
    differences = [
        [(a.double() - b.double()).abs().cpu() for a, b in zip(each, expected, strict=True)] for each in results
    ]
    return [torch.stack(each).amax(0) for each in zip(*differences, strict=True)]
