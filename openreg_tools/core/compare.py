"""How far two results may be apart, and how far they are.

The rule: an element may differ by a number of units in the last place (ulps) of the expected number, or of the `scale` of
the computation where that is larger. `Error` says which element is the furthest apart, and by how much.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.core.samples import dtype_name

__all__ = [
    "Error",
    "apart",
    "dense",
    "differs",
    "equal",
    "has_numbers",
    "is_small",
    "largest",
    "measure",
    "same_bits",
    "tolerance",
]


@dataclasses.dataclass(frozen=True)
class Error:
    """The largest error of one result."""

    ulps: float  # math.inf where one is NaN or infinite and the other is not
    at: tuple[int, ...]
    got: Any
    expected: Any
    relative: float  # of the norms, of the error and the result
    count: int  # elements beyond the tolerance


def measure(got: Tensor, expected: Tensor, ulps: float = 0.0, scale: Tensor | float | None = None) -> Error | None:
    """Measures the error of a result; None if it has none. NaN equals NaN.

    Args:
        got, expected: tensors of one dtype and shape, on one device.
        ulps: the tolerance. `Error.count` says how many elements are beyond it.
        scale: ulps are those of this magnitude, or of an element's where that is larger: one for all, or one for each.
    """
    if equal(got, expected):
        return None
    if not (got.is_floating_point() or got.is_complex()):
        return _of_integers(got, expected)
    values = got, expected
    if got.is_complex():
        got, expected = torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected.resolve_conj())
        if isinstance(scale, Tensor):
            scale = torch.view_as_real(scale.resolve_conj()).abs().amax(-1, keepdim=True)
    dtype = got.dtype
    a, b = got.to(torch.float64), expected.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    finite = a.isfinite() & b.isfinite()
    difference = torch.where(same, 0.0, (a - b).abs())
    magnitude = b.abs()
    if isinstance(scale, Tensor):
        magnitude = torch.maximum(magnitude, scale.to(torch.float64).abs())
    elif scale is not None:
        magnitude = magnitude.clamp(min=scale)
    errors = difference / _ulp(torch.where(finite, magnitude, 1.0), dtype)
    errors = torch.where(same | finite, errors, math.inf)
    if values[0].is_complex():
        errors = errors.amax(-1)
    worst = int(errors.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape))
    norm = float(torch.where(finite, b, 0.0).norm())
    moved = float(torch.where(finite, difference, 0.0).norm())
    relative = math.inf if not bool((same | finite).all()) else moved / norm if norm else math.inf
    numbers = (x.flatten()[worst].item() for x in values)
    return Error(float(errors.flatten()[worst]), at, *numbers, relative, int((errors > ulps).sum()))


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighboring numbers of a dtype at this magnitude."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp(min=info.tiny))
    return torch.exp2((exponent - 1).to(torch.float64)) * info.eps


def _of_integers(got: Tensor, expected: Tensor) -> Error:
    wrong = got != expected
    worst = int(wrong.to(torch.uint8).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), wrong.shape))
    g, e = got.flatten()[worst].item(), expected.flatten()[worst].item()
    count = int(wrong.sum())
    return Error(float(abs(int(g) - int(e))), at, g, e, count / max(1, wrong.numel()), count)


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest finite absolute value in floating-point tensors."""
    out = 0.0
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and x.numel() and x.layout == torch.strided:
            size = x.abs().to(torch.float64)
            out = max(out, float(torch.where(size.isfinite(), size, 0.0).max()))
    return out


# ---- equality ----

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal` of tensors of one dtype and shape on one device, in the time of reading them."""
    plain = a.layout == b.layout == torch.strided and a.device.type == b.device.type == "cpu"
    lazy = any(x.is_conj() or x.is_neg() or x._is_zerotensor() for x in (a, b))
    if plain and a.stride() == b.stride() and not lazy:
        whole = a.is_contiguous() or (a.dim() > 1 and a.mT.is_contiguous())
        if whole and _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0:
            return True  # also where there are NaNs
    return torch.equal(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns true if tensors of one dtype and shape hold the same values; NaN equals NaN."""
    if equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return bool(((a == b) | ((a != a) & (b != b))).all())


def dense(x: Tensor) -> Tensor:
    """A tensor's numbers as a plain tensor."""
    return x if x.layout == torch.strided and not x.is_quantized else x.dequantize() if x.is_quantized else x.to_dense()


# ---- all results of a call ----

# What two ways to compute the same may differ by, relative to the largest number.
_RELATIVE = {
    torch.float64: 2e-9,
    torch.float32: 4e-5,
    torch.float16: 8e-3,
    torch.bfloat16: 6e-2,
    torch.complex128: 2e-9,
    torch.complex64: 4e-5,
    torch.complex32: 1.6e-2,
}
# These round to a neighbor in another order of additions; float4 cannot be converted, and is compared as bytes.
_FLOAT8 = {
    dtype: torch.finfo(dtype).eps
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and str(dtype).startswith("torch.float8")
}


def is_small(x: Tensor) -> bool:
    """Returns true for float8 and float4, which have no arithmetic, and no gradient."""
    return x.is_floating_point() and x.element_size() == 1


def has_numbers(x: Tensor) -> bool:
    """Returns true if results of this dtype round, and have a gradient."""
    return x.is_floating_point() and not is_small(x) or x.is_complex()


def tolerance(*tensors: Tensor) -> float:
    """The relative tolerance of the coarsest of the dtypes; 0 for integers."""
    return max((_RELATIVE.get(x.dtype, 0.1) for x in tensors if has_numbers(x)), default=0.0)


def differs(
    actual: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    what: str = "output",
    exact: bool = False,
    dtype: bool = True,
    coarse: float = 0.0,
) -> str:
    """The first difference between two lists of tensors, as "output 0 is …"; "" if there is none.

    Args:
        what: what the lists hold.
        exact: whether numbers must be equal. Otherwise they may differ by the `tolerance` of their dtypes, relative to the
            largest of them or 1.
        dtype: whether the dtypes must be equal.
        coarse: a larger relative tolerance.
    """
    if len(actual) != len(expected):
        return f"there are {len(actual)} {what}s instead of {len(expected)}"
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a is None or e is None:
            if any(x is not None and x.count_nonzero() for x in (a, e)):
                return f"{what} {i} is {'missing' if a is None else 'there'}, but should not be"
            continue
        if a.shape != e.shape:
            return f"{what} {i} has shape {list(a.shape)} instead of {list(e.shape)}"
        if dtype and a.dtype != e.dtype:
            return f"{what} {i} is {dtype_name(a.dtype)} instead of {dtype_name(e.dtype)}"
        if a.is_meta or e.is_meta or not a.numel():
            continue
        if wrong := apart(a, e, exact, coarse):
            return f"{what} {i} {wrong}"
    return ""


def apart(
    a: Tensor, e: Tensor, exact: bool = False, coarse: float = 0.0, factor: float = 1.0, scale: float = 1.0
) -> str:
    """How two results of one shape differ, as "differs in 2 of 3 elements: …"; "" if they are near enough.

    Args:
        exact: whether numbers must be equal. Otherwise they may differ by the `tolerance` of their dtypes, relative to the
            largest of `e` or `scale`.
        coarse: a larger relative tolerance.
        factor: multiplies the tolerance.
    """
    a, e = (dense(x.detach()).cpu() for x in (a, e))
    near, count = 0.0 if exact else max(tolerance(a, e), coarse), a.numel()
    if is_small(a) or is_small(e):
        eps, scale = _FLOAT8.get(a.dtype, _FLOAT8.get(e.dtype)), 2.0**-6
        a, e = (x.to(torch.float32) if eps else x.view(torch.uint8) for x in (a, e))
        near = near if exact or not eps else max(near, 2 * eps)
    else:
        scale = max(scale, largest([e]))
    common = torch.promote_types(a.dtype, e.dtype)
    if common == torch.complex32 or common in (torch.float16, torch.bfloat16) and a.dtype != e.dtype:
        common = torch.promote_types(common, torch.float32)
    a, e = a.to(common), e.to(common)
    if common.is_floating_point or common.is_complex:
        ulps = factor * near / torch.finfo(common).eps
        error = measure(a, e, ulps, scale)
    else:
        ulps, error = 0.0, measure(a, e)
    if error is None or error.ulps <= ulps:
        return ""
    got, was = (f"{x:.6g}" if isinstance(x, (float, complex)) else str(x) for x in (error.got, error.expected))
    if got == was:
        got, was = repr(error.got), repr(error.expected)
    return f"differs in {error.count} of {count} elements: {got} instead of {was} at {list(error.at)}"
