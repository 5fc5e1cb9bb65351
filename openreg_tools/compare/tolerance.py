"""How much two devices may differ in one operator, depending on its dtype and computation.

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

from openreg_tools.compare.facts import facts
from openreg_tools.core.move import tensors_of
from openreg_tools.core.options import Wrong

__all__ = ["SUM", "Tolerance", "Tolerances", "matches"]

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


class Tolerances:
    """The tolerance of each operator: `given` maps patterns such as "aten::mm*" to ulps, `factor` multiplies every default."""

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

    def __call__(self, func: OpOverload, args: Any, result: Tensor) -> Tolerance:
        """The tolerance of one result of a call with these arguments."""
        of = facts(func)
        kind, terms = _kind(func), 1
        if not (result.is_floating_point() or result.is_complex()):
            kind = "exact"
        for pattern, ulps in self.given.items():
            if matches(of.name, pattern):
                return Tolerance(kind, float(ulps), _terms(of.base, args, result) if kind in ("sum", "chain") else 1)
        if kind in ("sum", "chain"):
            terms = _terms(of.base, args, result)
            ratio = torch.finfo(torch.float32).eps / torch.finfo(result.dtype).eps
            ulps = (4 if kind == "sum" else 16) + math.sqrt(terms) / 2 * min(1.0, ratio)
        else:
            ulps = {"exact": 0, "rounded": 2, "function": 8}[kind]
        return Tolerance(kind, ulps * self.factor, terms)


def matches(name: str, pattern: str) -> bool:
    """Returns true if an operator, with its overload or without, matches a pattern."""
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
