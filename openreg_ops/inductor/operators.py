"""Operators in Inductor. A custom one is a call, or its reference in meta/, which Inductor fuses with its neighbors.

Products whose result has a dtype of its own, which Inductor compiles only for CUDA and XPU, are decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import decomposition, lowering
from torch._library.utils import get_layout_constraint_tag

from openreg_ops import inductor
from openreg_ops.cuda_operators.products import DTYPE_PRODUCTS
from openreg_ops.identity import identity
from openreg_ops.meta import op

DECOMPOSABLE = ("rms_norm", "rotary_embedding", "swiglu")


def check_names() -> None:
    """Raise if `inductor.decompositions` names an operator that cannot be decomposed."""
    if unknown := sorted(set(inductor.decompositions) - set(DECOMPOSABLE)):
        raise ValueError(
            f"openreg: expected openreg_ops.inductor.decompositions to name some of {', '.join(DECOMPOSABLE)}, but got "
            f"{', '.join(map(repr, unknown))}; remove it"
        )


def _decomposition(name: str, overload: str) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if name not in inductor.decompositions:
            return NotImplemented
        return op.reference_of(overload)(*args, **kwargs)

    return decompose


def _product(target: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    others = decomposition.decompositions.get(target)

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == identity.name:
            return function(*args, **kwargs)
        return others(*args, **kwargs) if others else NotImplemented

    return decompose


def register() -> None:
    """Let Inductor ask, for each graph, whether to decompose an operator."""
    for name in DECOMPOSABLE:
        for overload in (name, f"{name}_backward"):
            target = getattr(torch.ops.openreg, overload).default
            decomposition.decompositions[target] = _decomposition(name, overload)
            # Inductor does this at the first call of an operator, but not for operators that may decompose.
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            lowering.make_fallback(target, constraint, warn=False, override_decomp=True)
    for overload, function in DTYPE_PRODUCTS.items():
        name, _, form = overload.partition(".")
        target = getattr(getattr(torch.ops.aten, name), form)
        decomposition.decompositions[target] = _product(target, function)
