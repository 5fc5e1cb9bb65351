"""Checks of sizes: those that leave a remainder behind the last full vector or block, and long sums in half precision."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Verdict, attached, pull, refuse, skip
from openreg_tools.check.checks.common import needs_order, needs_sizes, only_verdicts
from openreg_tools.check.checks.fakes import run_fake
from openreg_tools.check.checks.inputs import against
from openreg_tools.check.checks.results import garbage, needs_written
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers, same_bits
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import of_sizes, offset, sizes_of

# ---- sizes that are not multiples of the width of a vector or a block ----

_AROUND = (1, -1, 3, -3)
_SHORT = (33, 7, 3)
_MOST, _SECONDS = 2**18, 0.5  # elements, and time of the processor for each size
_TOO_LONG = "a call takes too long"
_REMAINDER = (
    "process what remains behind the last full vector or block: a size that is not a multiple of its width leaves some"
)


def sizes(case: Case) -> str | None:
    """Sizes around multiples of 2 to 64 give the results that other sizes lead to expect."""
    needs_order(case)
    needs_sizes(case)
    needs_written(case)
    reasons = []
    for size in sizes_of(case.leaves)[:3]:
        for call in (_Forward, _Backward) if case.has_derivative else (_Forward,):
            # Multiples of 2 to 64, or of wider blocks that the sample is for. An operator may take only even sizes.
            for factor, odd, aligned in itertools.product((1, 2), (True, False), (192 if size % 64 else size, 64)):
                reason = _around(call(case, size, factor, odd), aligned)
                if not reason or reason == _TOO_LONG:
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
        return self.case.outputs(inputs)


class _Backward(_Forward):
    """An operator's gradients, as a function of its inputs and the gradients of its outputs."""

    what = "gradient"

    def __init__(self, case: Case, size: int, factor: int, odd: bool) -> None:
        super().__init__(case, size, factor, odd)
        self.names = [*case.names, *(f"the gradient of output {i}" for i in range(len(case.expected)))]

    def inputs(self, n: int) -> list[Tensor]:
        tensors = super().inputs(n)
        return [*tensors, *map(by_position, attached(self.case.run(*self.case.leaf(tensors))))]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        count = len(self.case.leaves)
        tensors = self.case.leaf(inputs[:count])

        def given(outs: list[Tensor]) -> list[Tensor]:
            return [g.to(out.dtype) for g, out in zip(inputs[count:], outs, strict=True)]

        return [grad.detach() for grad in pull(self.case.run(*tensors), tensors, given) if grad is not None]


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
        large = x.abs().max() * 2 + 1 if has_numbers(x) else None
        for value in (x[near],) if large is None else (large, -large):
            other = x.clone()
            other[at] = value
            changes = self.changes([*self.inputs[:i], other, *self.inputs[i + 1 :]])
            seen = [a | b for a, b in zip(seen, changes, strict=True)]
        return seen

    def of_all(self) -> list[Tensor]:
        """Where the outputs differ if all inputs differ; integers, which may be indices, only where nothing else can."""
        floats = any(map(has_numbers, self.inputs))

        def other(x: Tensor, k: int) -> Tensor:
            if has_numbers(x):
                return (x * by_position(x), -x, x + 100 * by_position(x))[k]
            return x if floats else x.flatten().roll(k + 1).view(x.shape)

        seen = [torch.zeros(out.shape, dtype=torch.bool) for out in self.outs]
        for k in range(3):
            with contextlib.suppress(Exception):
                seen = [a | b for a, b in zip(seen, self.changes([other(x, k) for x in self.inputs]), strict=True)]
        return seen


def _in_proportion(aligned: _Result, longer: _Result, odd: _Result) -> bool:
    """Returns true if the shapes of the third result follow from those of the others."""
    shapes = [*zip(aligned.shapes, longer.shapes, odd.shapes, strict=False)]
    if not len(aligned.shapes) == len(longer.shapes) == len(odd.shapes):
        return False
    return all(len(a) == len(b) == len(c) for a, b, c in shapes) and all(
        (z - x) * aligned.n == (y - x) * (odd.n - aligned.n) for shape in shapes for x, y, z in zip(*shape, strict=True)
    )


class _Rules:
    """What holds for sizes that leave no remainder, and therefore for others."""

    def __init__(self, aligned: _Result, longer: _Result) -> None:
        self.longer, call, long = longer, aligned.call, aligned.n * aligned.call.factor
        pairs = zip(aligned.shapes, longer.shapes, strict=True)
        dims = [[d for d, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in pairs]
        self.inside, outside = dims[: len(aligned.inputs)], dims[len(aligned.inputs) :]
        # If an element affects outputs only at its own place, then a longer result begins with the shorter one. Equal bits,
        # because a mean differs by little where there are many elements, and by much where there are few.
        finite = all(not has_numbers(out) or bool(out.isfinite().all()) for out in longer.outs)
        self.local = finite and any(outside) and all(map(same_bits, aligned.outs, self.beginning(aligned)))
        self.matters: list[int] = []  # the inputs of which each element affects an output
        moved: dict[int, bool] = {}
        for i in (i for i, dims in enumerate(self.inside) if dims):
            try:
                changes = {place: aligned.of_one(i, self.inside[i], place) for place in _ends(long)}
            except Exception:
                self.local = False
                continue
            if all(any(map(torch.any, changed)) for changed in changes.values()):
                self.matters.append(i)
            for place, changed in changes.items():
                moved[place] = moved.get(place, False) or any(map(torch.any, changed))
                for where, dims in zip(changed, outside, strict=True):
                    for d in dims:
                        if where.shape[d] == long:
                            where = where.index_fill(d, torch.tensor([place]), False)
                    self.local = self.local and not where.any()
        self.local = self.local and all(moved.values())
        self.depends = [  # whether each element of an output depends on the inputs
            changed.numel() > 0
            and bool(changed.all())
            and (has_numbers(out) or not any(map(has_numbers, aligned.inputs)))
            for changed, out in zip(aligned.of_all(), aligned.outs, strict=True)
        ]
        self.inward = False  # whether the function reads only its inputs
        with contextlib.suppress(Exception):
            self.inward = not differs(call([offset(x) for x in aligned.inputs]), aligned.outs)

    def beginning(self, odd: _Result) -> list[Tensor]:
        """What the longer result begins with."""
        return [out[tuple(map(slice, x.shape))] for out, x in zip(self.longer.outs, odd.outs, strict=True)]

    def verify(self, odd: _Result, long: int, few: bool) -> None:
        """Fail if a rule does not hold; `few` elements may not matter each."""
        call, case = odd.call, odd.call.case
        inputs = f"given {odd.text()}" + (", in the backward" if call.what == "gradient" else "")
        if call.what == "output":
            against(case, odd.inputs, odd.text())

        def equal(got: list[Tensor], expected: list[Tensor], why: str) -> None:
            if wrong := differs(got, expected, call.what):
                case.fail(f"{inputs}, {wrong}{why}", _REMAINDER)

        for pattern in (0x5A, 0xFF):
            with garbage(case, pattern):
                outs = call(odd.inputs)
            why = f" if fresh memory is filled with 0x{pattern:02X} bytes: it does not write all of it"
            equal(outs, odd.outs, why)
        if self.inward:
            outs = call([offset(x) for x in odd.inputs])
            equal(outs, odd.outs, " if NaN surrounds them in memory: it reads past their ends")
        if self.local:
            equal(odd.outs, self.beginning(odd), ", with which the result for longer inputs begins")
        for i in () if few else self.matters:
            if not any(map(torch.any, odd.of_one(i, self.inside[i], odd.n * call.factor - 1))):
                case.fail(
                    f"{inputs}, the last element of {call.names[i]} has no effect on any {call.what}, but among {long} it has",
                    _REMAINDER,
                )
        for k, changed in enumerate([] if few else odd.of_all()):
            if self.depends[k] and not changed.flatten()[-1]:
                last = odd.outs[k].flatten()[-1].item()
                case.fail(
                    f"{inputs}, the last element of {call.what} {k} is {last:.6g} for any input, but not of {long}",
                    _REMAINDER,
                )


def _around(call: _Forward, full: int) -> str:
    """Compare results of sizes with and without a remainder; returns why that is impossible, or ""."""
    begin, results = time.thread_time(), []
    try:
        for n in (full, full + _AROUND[0], 2 * full):
            results.append(_Result(call, n))
            if time.thread_time() - begin > _SECONDS / 10:
                return _TOO_LONG
    except Exception as error:
        return all_lines(error)
    aligned, first, longer = results
    if not _in_proportion(aligned, longer, first):
        return "its outputs do not become longer in proportion to its inputs"
    rules = _Rules(aligned, longer)
    for n in (*(full + by for by in _AROUND), *(n for n in _SHORT if n >= call.size), full):
        if time.thread_time() - begin > _SECONDS:
            break
        with only_verdicts():
            odd = _Result(call, n)
            if _in_proportion(aligned, longer, odd):
                rules.verify(odd, full * call.factor, few=n in _SHORT)
    return ""


# ---- sums in half precision ----


def half_precision(case: Case) -> str | None:
    """Long sums in float16 and bfloat16 are those of float32, apart from the rounding of the results."""
    tensors = case.fresh()
    needs_order(case)
    needs_sizes(case)
    if not any(x.is_floating_point() for x in tensors):
        skip("no floating tensor argument")
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
            if sum(x.numel() for x in run_fake(case, of_sizes(tensors, {size: long}))[1]) > 2**21:
                continue
        for call in (_Forward, _Backward) if case.has_derivative else (_Forward,):
            for dtype in (torch.float16, torch.bfloat16):
                for change in (torch.abs, _alike):
                    try:
                        _in_half(call(case, size, 1, False), long, dtype, change)
                        tried.append(long)
                    except Verdict:
                        raise
                    except Exception as error:
                        reasons.append(all_lines(error))
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
            kind = dtype_name(dtype)
            case.fail(
                f"given {kind} {inputs}, {call.what} {k} differs from that of the same values in float32 by "
                f"{error / scale:.0%} of its largest element",
                "compute in float32 and round once at the end (a float accumulator, at::opmath_type, x.float()), also in the "
                "backward: sums in half precision, and differences of rounded numbers, lose digits",
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
        [(a.double() - b.double()).abs().cpu() for a, b in zip(result, expected, strict=True)] for result in results
    ]
    return [torch.stack(moved).amax(0) for moved in zip(*differences, strict=True)]
