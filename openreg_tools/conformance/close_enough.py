"""Differences between results of generated calls that say nothing about the device: overflow, memory, and roundings that
are larger than `outcomes.Comparison` accepts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.conformance.outcomes import Outcome
from openreg_tools.core.compare import apart, largest
from openreg_tools.core.move import Move, bytes_of, is_plain
from openreg_tools.core.samples import Sample
from openreg_tools.core.variations import is_strided, tensors_of

__all__ = ["MEMORY", "OVERLAP", "Plain", "as_exact", "beside", "overflows", "size_of"]

# Errors about memory, whose types and limits differ between devices.
MEMORY = re.compile(
    r"allocat|bad_alloc|(not enough|out of) memory|can be pinned|overflow|too large|Storage size calculation", re.I
)
# The error that refuses overlapping memory.
OVERLAP = re.compile(r"single memory location|overlap")

Pairs = list[tuple[Tensor, Tensor]]  # of results that differ: the expected one, and the device's


class Plain(Move):
    """Copies each tensor to contiguous memory of its own: what a kernel would receive if layouts did not matter."""

    def copy(self, tensor: Tensor) -> Tensor:
        if not is_plain(tensor):
            return super().copy(tensor)
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def widened(x: Tensor) -> Tensor:
    """Convert a tensor to a dtype that every operator supports."""
    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _has_fractions(x: Any) -> bool:
    return is_strided(x) and (x.is_floating_point() or x.is_complex())


def overflows(sample: Sample, unequal: Pairs) -> bool:
    """Returns true if results differ only where one is not finite, and an argument is not finite, or its square is not.

    A different order of operations, or a fused multiply-add, then gives inf or NaN on one side and another number on
    the other.
    """

    def is_large(x: Tensor) -> bool:
        x = widened(x.resolve_conj().resolve_neg()).abs()
        return bool((~x.isfinite() | (x > torch.finfo(x.dtype).max ** 0.5)).any())

    def differ(expected: Tensor, actual: Tensor) -> bool:
        atol = 1e-7 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
        close = torch.isclose(expected, actual, atol=atol)
        return bool((expected.isfinite() & actual.isfinite() & ~close).any())

    numbers = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, float)]
    is_near = not any(map(is_large, filter(_has_fractions, tensors_of(sample)))) and all(abs(x) < 1e18 for x in numbers)
    return bool(unequal) and not is_near and not any(differ(widened(e), widened(a)) for e, a in unequal)


def size_of(sample: Sample) -> float:
    """The largest element of the arguments: terms that cancel may have that size. 1 if it would excuse any result."""
    found = largest(
        widened(x.detach().resolve_conj().resolve_neg()) for x in filter(_has_fractions, tensors_of(sample))
    )
    return max(1.0, found) if found < 1e4 else 1.0


def as_exact(outcome_of: Callable[[Sample, Move], Outcome], sample: Sample, cpu: Outcome, unequal: Pairs) -> bool:
    """Returns true if the device's results are about as far from those of float64 as the CPU's."""
    wide = {torch.complex64: torch.complex128}

    def widest(x: Any) -> Any:
        return x.to(wide.get(x.dtype, torch.float64)) if _has_fractions(x) else x

    args, kwargs = tree_map(widest, (list(sample.args), sample.kwargs))
    again = outcome_of(Sample(*args, **kwargs), Plain("cpu"))
    if not unequal or again.error is not None:
        return False
    pairs = [
        (x, y)
        for x, y in zip(tree_leaves(cpu.value), tree_leaves(again.value), strict=True)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
    ]
    for expected, actual in unequal:
        exact = next((y for x, y in pairs if x.shape == expected.shape and torch.equal(x, expected)), None)
        if exact is None or not _has_fractions(exact) or expected.dtype == exact.dtype:
            return False
        error = (expected - exact).abs()
        near = torch.finfo(expected.dtype).eps * exact.abs().nan_to_num(0.0, 0.0, 0.0).max()
        close = torch.isclose(actual.to(exact.dtype), expected.to(exact.dtype), equal_nan=True)
        if bool((~close & ~((actual - exact).abs() <= 16 * error + near)).any()):
            return False
    return True


def beside(sample: Sample, cpu: Outcome, there: Outcome) -> list[tuple[str, str]]:
    """What the device wrote to the memory of arguments, also where no result views it, and the CPU did not."""
    for x in tensors_of(sample):
        e, a = cpu.mover.tensors.get(id(x)), there.mover.tensors.get(id(x))
        if not is_strided(x) or e is None or a is None or not (is_strided(e) and is_strided(a)):
            continue
        try:
            was, expected, actual = (bytes_of(y).cpu() for y in (x, e, a))
        except NotImplementedError:  # a device without aten::set_ does not show the memory
            continue
        size = x.element_size()
        if not len(was) == len(expected) == len(actual) or len(was) % size:
            continue  # the call resized it
        was, expected, actual = (widened(y.view(x.dtype)) for y in (was, expected, actual))
        left = torch.isclose(actual, was, rtol=0, atol=0, equal_nan=True)
        if wrong := apart(torch.where(left, expected, actual).to(x.dtype), expected.to(x.dtype), factor=0.25):
            return [("guard", f"memory of an argument {wrong}")]
    return []
