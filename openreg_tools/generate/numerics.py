"""Results that differ in values for a reason that is not the device's: infinities, NaN, and rounding."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance.calls import Call, Stays
from openreg_tools.generate import changes, tables

__all__ = [
    "NAN",
    "OVERFLOWS",
    "ROUNDS",
    "TRANSFORMS",
    "is_finite_equal",
    "is_infinite_on_both_sides",
    "is_undefined_for_nan",
    "overflows",
    "rounds",
    "transforms",
    "widened",
]

NAN = "PyTorch's kernel returns an uninitialized value for NaN"
TRANSFORMS = "the order of the sums of a transform depends on the layout"
ROUNDS = "terms of a half type that cancel are rounded at the size of the largest element"
OVERFLOWS = "an intermediate result overflows on one side"


def overflows(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is not finite, and a sum or product of arguments may have overflowed.

    A different order of operations, or a fused multiply-add, then gives inf or nan on one side and a finite number on
    the other.
    """

    def is_large(x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or not changes._is_plain(x) or not (x.is_floating_point() or x.is_complex()):
            return False
        x = widened(x.resolve_conj().resolve_neg()).abs()
        return bool((x.isfinite() & (x > torch.finfo(x.dtype).max ** 0.5)).any())

    return is_finite_equal(unequal) and any(map(is_large, tree_leaves((call.args, call.kwargs))))


def is_infinite_on_both_sides(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is NaN and the other is too or is infinite, and an argument is not finite:
    inf - inf depends on the formula.
    """
    given = [x for x in tree_leaves((call.args, call.kwargs)) if changes._is_plain(x)]
    return (
        bool(unequal)
        and any(not x.isfinite().all() for x in given)
        and all(
            not ((e.isfinite() | a.isfinite() | ~(e.isnan() | a.isnan())) & ~torch.isclose(e, a, equal_nan=True)).any()
            for e, a in ((widened(e), widened(a)) for e, a in unequal)
        )
    )


def is_undefined_for_nan(name: str, call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results of an operator in `tables.UNDEFINED_FOR_NAN` differ only where an argument is NaN, or becomes NaN on the
    way.
    """
    if not tables.UNDEFINED_FOR_NAN.match(name):
        return False
    leaves = [*call.args, *(value for key, value in call.kwargs.items() if key != "out")]
    leaves = [x.tensor if isinstance(x, Stays) else x for x in leaves]
    undefined = [~torch.as_tensor(x).isfinite() for x in leaves if isinstance(x, (torch.Tensor, int, float))]
    try:
        where = functools.reduce(torch.logical_or, undefined, torch.tensor(False))
        return all(not (~torch.isclose(e, a, equal_nan=True) & ~where.broadcast_to(e.shape)).any() for e, a in unequal)
    except RuntimeError:  # they do not broadcast
        return False


def is_finite_equal(unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results differ only where one is not finite. Others may differ as `torch.testing.assert_close` allows."""

    def differ(expected: torch.Tensor, actual: torch.Tensor) -> bool:
        atol = 1e-7 if expected.dtype in (torch.float64, torch.complex128) else 1e-5
        close = torch.isclose(expected, actual, atol=atol)
        return bool((expected.isfinite() & actual.isfinite() & ~close).any())

    return bool(unequal) and not any(differ(widened(e), widened(a)) for e, a in unequal)


def rounds(call: Call, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results of half types differ by at most one rounding of the largest element.

    Terms that cancel may have had that size. The largest element is taken from the result and the arguments, because a
    result in which every term cancels has no element of that size. If an argument is larger than 1e4, nothing is
    allowed, because any small result would be.
    """

    def largest(x: torch.Tensor) -> float:
        x = x.detach().resolve_conj().resolve_neg().float().nan_to_num(0.0, 0.0, 0.0)
        return float(x.abs().max()) if x.numel() else 0.0

    halves = (torch.float16, torch.bfloat16)
    leaves = tree_leaves((call.args, call.kwargs))
    given = max((largest(x) for x in leaves if changes._is_plain(x) and x.dtype in halves), default=0.0)
    return bool(unequal) and all(
        given < 1e4
        and expected.dtype in halves
        and (expected.float() - actual.float()).abs().max()
        <= torch.finfo(expected.dtype).eps * max(given, largest(expected))
        for expected, actual in unequal
    )


_TRANSFORM = re.compile(r"aten::(_?fft_|stft|istft)")


def transforms(name: str, unequal: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether results of a Fourier transform differ by a few roundings of the largest: each is a sum with terms of that size,
    and the order of the sum depends on the layout.
    """

    def differ(expected: torch.Tensor, actual: torch.Tensor) -> bool:
        expected, actual = (x.resolve_conj().resolve_neg() for x in (widened(expected), widened(actual)))
        if not (expected.is_floating_point() or expected.is_complex()) or not bool(expected.isfinite().all()):
            return True
        return not bool((expected - actual).abs().max() <= 4 * torch.finfo(expected.dtype).eps * expected.abs().max())

    return bool(_TRANSFORM.match(name) and unequal) and not any(differ(e, a) for e, a in unequal)


def widened(t: torch.Tensor) -> torch.Tensor:
    """The arguments in a dtype that every operator supports."""
    if t.dtype == torch.complex32:
        return t.to(torch.complex64)
    return t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t
