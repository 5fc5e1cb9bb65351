"""How much two devices may differ in one operator, depending on its dtype and computation, and how much they do.

Errors are in units in the last place (ulps) of the result's dtype, at one of three magnitudes:

========= =========== ============================================================================================
kind      measured at allowed
========= =========== ============================================================================================
exact     the element 0: copies, selections, comparisons, integers
rounded   the element 2: one rounding, or a few: `mul`, `sqrt`
function  the element 8: a function of one number: `exp`, `tanh`
chain     the largest 16 + sqrt(n)/2: several of these, or anything unknown: `gelu`, `softmax`, an optimizer's step
sum       the terms   4 + sqrt(n)/2: a sum of n terms, as in a matrix product; of the terms' absolute values
========= =========== ============================================================================================

"The largest" is the largest absolute value among the result and the floating-point inputs. Sums of float16 and bfloat16
are expected in float32: sqrt(n)/2 is of its ulps.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from openreg_tools.compare.copies import facts, tensors_of
from openreg_tools.forms import Wrong

__all__ = ["Error", "Tolerance", "Tolerances", "matches", "measure", "ulp"]

EXACT = set(
    "copy _to_copy clone contiguous cat stack index index_select gather scatter masked_fill masked_select where fill zero "
    "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor eye tril triu flip roll repeat "
    "constant_pad_nd embedding eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_not sign sgn neg abs max min amax amin aminmax maximum minimum fmax fmin clamp clamp_min clamp_max "
    "relu threshold threshold_backward hardtanh max_pool2d_with_indices max_pool3d_with_indices sort topk argmax argmin "
    "argsort nonzero unique2 _unique2 slice_backward select_backward slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter index_copy isnan isinf isfinite floor ceil round trunc _local_scalar_dense lift_fresh_copy "
    "repeat_interleave one_hot bincount searchsorted bucketize permute_copy split_with_sizes_copy _copy_from real imag "
    "view_as_real view_as_complex complex set_data any all kthvalue cummax cummin mode median diag_embed pixel_shuffle "
    "_assert_async allgather broadcast scatter alltoall alltoall_base send recv _allgather_base gather".split()
)
ROUNDED = set("add sub rsub mul div sqrt square reciprocal rsqrt true_divide leaky_relu relu6 hardsigmoid".split())
FUNCTION = set(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf erfc "
    "pow hypot sinc softplus logit lgamma digamma".split()
)
# Linear in each argument: run on absolute values, they return the sum of the terms' absolute values.
SUM = set(
    "mm bmm addmm baddbmm addbmm addmv addr mv dot vdot sum nansum mean cumsum convolution convolution_overrideable "
    "convolution_backward convolution_backward_overrideable avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward index_add scatter_add index_put _index_put_impl embedding_dense_backward "
    "allreduce reduce reduce_scatter _reduce_scatter_base all_reduce reduce_scatter_tensor linear "
    "max_pool2d_with_indices_backward upsample_bilinear2d upsample_bilinear2d_backward grid_sampler_2d".split()
)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The tolerance: `ulps`, at the magnitude of the `kind`; `terms` is n."""

    kind: str
    ulps: float
    terms: int = 1

    def __str__(self) -> str:
        of = f" ({self.kind} of {self.terms})" if self.kind in ("sum", "chain") else f" ({self.kind})"
        return f"{self.ulps:.4g} ulps{of}"


@dataclasses.dataclass(frozen=True)
class Error:
    """The largest error of one result."""

    ulps: float  # math.inf where one is NaN or infinite and the other is not
    at: tuple[int, ...]
    got: Any
    expected: Any
    relative: float  # of the norms, of the error and the result
    count: int  # elements beyond the tolerance


class Tolerances:
    """By operator; `given` maps patterns such as "aten::mm*" to ulps, `factor` multiplies every default."""

    def __init__(self, given: Mapping[str, float] | None = None, factor: float = 1.0) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise Wrong(f"expected the tolerances as a mapping of operators to ulps, but got {given!r}")
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise Wrong(f"expected the factor of the tolerances as a finite number above 0, but got {factor!r}")
        for pattern, ulps in (given or {}).items():
            if not isinstance(pattern, str) or not pattern:
                raise Wrong(
                    f"expected a tolerance for an operator or a pattern, such as 'aten::mm', but got {pattern!r}"
                )
            if not isinstance(ulps, (int, float)) or not ulps >= 0:
                raise Wrong(f"expected the tolerance of {pattern} as ulps, at least 0, but got {ulps!r}")
        self.given, self.factor = dict(given or {}), factor

    def __call__(self, func: OpOverload, args: Any, result: Tensor, extra_terms: int = 0) -> Tolerance:
        """Of one result of a call with these arguments."""
        of = facts(func)
        kind, terms = self.kind(func), 1
        if not (result.is_floating_point() or result.is_complex()):
            kind = "exact"
        for pattern, ulps in self.given.items():
            if matches(of.name, pattern):
                return Tolerance(kind, float(ulps), _terms(of.base, args, result) if kind in ("sum", "chain") else 1)
        if kind in ("sum", "chain"):
            terms = max(_terms(of.base, args, result), extra_terms)
            ratio = torch.finfo(torch.float32).eps / torch.finfo(result.dtype).eps
            ulps = (4 if kind == "sum" else 16) + math.sqrt(terms) / 2 * min(1.0, ratio)
        else:
            ulps = {"exact": 0, "rounded": 2, "function": 8}[kind]
        return Tolerance(kind, ulps * self.factor, terms)

    def of_name(self, name: str, terms: int) -> float:
        """Ulps for an operator in a trace, even if this torch does not have it."""
        plain = name.partition(".")[0]
        for pattern, ulps in self.given.items():
            if matches(name, pattern):
                return float(ulps)
        packet = getattr(getattr(torch.ops, name.partition("::")[0]), plain.partition("::")[2], None)
        func = getattr(packet, name.partition(".")[2] or "default", None)
        kind = _kind(func) if isinstance(func, OpOverload) else "chain"
        ulps = {"exact": 0.0, "rounded": 2.0, "function": 8.0, "sum": 4.0, "chain": 16.0}[kind]
        return (ulps + (math.sqrt(terms) / 2 if kind in ("sum", "chain") else 0.0)) * self.factor

    def kind(self, func: OpOverload) -> str:
        return _kind(func)


def matches(name: str, pattern: str) -> bool:
    """Whether an operator, with its overload or without, matches a pattern."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition(".")[0], pattern)


@functools.cache
def _kind(func: OpOverload) -> str:
    of = facts(func)
    if of.name.startswith("aten::_foreach_add") or of.base in ("add", "sub", "rsub"):
        return "chain" if any(a.name == "alpha" for a in func._schema.arguments) else "rounded"
    names = (("exact", EXACT), ("rounded", ROUNDED), ("function", FUNCTION), ("sum", SUM))
    if not of.name.startswith(("aten::", "c10d::", "_c10d_functional::")):
        return "chain"
    if of.name.partition(".")[0] in ("aten::index_put", "aten::index_put_"):
        return "sum"
    return next((kind for kind, all_of in names if of.base in all_of), "chain")


def _terms(base: str, args: Any, result: Tensor) -> int:
    """How many numbers are combined into one element of the result."""
    tensors = [t for t in tensors_of(args) if t.is_floating_point() or t.is_complex()]
    if not tensors:
        return 1
    if base in ("mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addbmm", "addmv"):
        factor = tensors[-2] if len(tensors) > 1 else tensors[0]
        return max(1, factor.shape[-1] if factor.dim() else 1)
    if base.startswith("convolution") and "backward" not in base and len(tensors) > 1:
        return max(1, tensors[1].numel() // max(1, tensors[1].shape[0]))
    largest = max(t.numel() for t in tensors)
    return max(1, largest // max(1, result.numel()))


# ---- measuring ----


def measure(got: Tensor, expected: Tensor, kind: str, scale: Tensor | float | None, ulps: float) -> Error | None:
    """The largest error of `got`, None if it has none; `scale` is the magnitude of the kind, if it has one."""
    if torch.equal(got, expected):
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
    errors = difference / ulp(torch.where(finite, magnitude, 1.0), dtype)
    errors = torch.where(same | finite, errors, math.inf)
    if values[0].is_complex():
        errors = errors.amax(-1)
    worst = int(errors.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape))
    norm = float(torch.where(finite, b, 0.0).norm())
    moved = float(torch.where(finite, difference, 0.0).norm())
    relative = math.inf if not bool((same | finite).all()) else moved / norm if norm else math.inf
    return Error(
        float(errors.flatten()[worst]), at, *(each.flatten()[worst].item() for each in values), relative,
        int((errors > ulps).sum()),
    )  # fmt: skip


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
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


def largest(tensors: Any) -> float:
    """The largest finite absolute value in floating-point tensors."""
    out = 0.0
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and x.numel() and x.layout == torch.strided:
            size = x.abs().to(torch.float64)
            out = max(out, float(torch.where(size.isfinite(), size, 0.0).max()))
    return out
