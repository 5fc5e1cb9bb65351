"""Checks of out=, vmap and autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import (
    Case,
    Results,
    Verdict,
    limit,
    name_of,
    pull,
    refuse,
    skip,
)
from openreg_tools.check.checks.common import needs_order, refuse_or_fail, scaled, unless_generated, zipped
from openreg_tools.check.checks.derivatives import weighted
from openreg_tools.check.checks.fakes import lost
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers, is_small, tolerance
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import permuted, stepped

# ---- out= ----


def out(case: Case) -> str | None:
    """Its out= overload writes into tensors of any layout, resizes empty ones, and returns them."""
    packet = getattr(getattr(torch.ops, case.op.namespace), case.schema.name.split("::")[1])
    inputs = _inputs(case.op)
    overloads = (getattr(packet, name) for name in packet.overloads())
    variant = next((overload for overload in overloads if _outs(overload) and _inputs(overload) == inputs), None)
    if variant is None:
        skip("it has no out= overload")
    if any("List" in str(a.type) for a in variant._schema.arguments if a.is_out):
        skip("its out= takes a list")
    if _outs(case.op):
        skip("it is an out= overload")
    remedy = "resize out (at::native::resize_output), copy the result into it, and return it"
    for what, make in (
        ("of the right size", lambda x: torch.full_like(x, 1)),
        ("with other strides", lambda x: stepped(x).fill_(1) if x.dim() < 2 else torch.full_like(permuted(x), 1)),
        ("of no elements", lambda x: x.new_empty(0)),
    ):
        outs = [make(x) for x in case.expected]
        strides = [x.stride() for x in outs]
        args, kwargs = case.arguments(case.fresh())
        if case.seeded:
            case.seed()
        with torch.no_grad():
            returned = variant(*args, **kwargs, **dict(zip(_outs(variant), outs, strict=True)))
        returned = [returned] if isinstance(returned, Tensor) else list(returned or outs)
        where = f"{name_of(variant)} with out= {what}"
        case.expect(outs, case.expected, f"{where}:", "the operator returns", remedy)
        if any(r is not o for r, o in zip(returned, outs, strict=True)):
            case.fail(f"{where} returns a tensor other than out", remedy)
        if what != "of no elements" and strides != [x.stride() for x in outs]:
            case.fail(f"{where} changed the strides of out, which has the right size", remedy)
    return None


def _outs(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _inputs(op: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


# ---- vmap ----

_RULES = (
    "fix the batching rules, of the operator and of those that its backward calls: a rule gets every argument, and for "
    "each the batched dimension, None for all but tensors"
)
_RULE = (
    "fix the batching rule: in_dims has the batched dimension of each argument, or None for an argument that is not "
    "batched, and any tensor may be the one that is (x.movedim(d, 0) if d is not None else x.unsqueeze(0))"
)
_SLOW = "register a batching rule: torch.library.register_vmap, or a kernel at FuncTorchBatched"
_MANY = 2**16  # elements; larger samples are batched in fewer ways


def _ways(case: Case) -> list[tuple[int | None, ...]]:
    """Which dimension of each tensor is batched: every subset of the tensors, then each dimension of each tensor."""
    count = len(case.leaves)
    ways: list[tuple[int | None, ...]] = [(0,) * count, *_alone(count)]
    if sum(x.numel() for x in case.leaves) > _MANY or count > 8:
        return list(dict.fromkeys(ways))[:9]
    if count <= 4:
        ways += itertools.product((0, None), repeat=count)
    else:
        ways += [tuple(None if i == j else 0 for j in range(count)) for i in range(count)]
    for i, x in enumerate(case.leaves):
        for d in dict.fromkeys((-1, x.dim() // 2)) if x.dim() else ():
            ways += [tuple(d if i == j else other for j in range(count)) for other in (0, None)]
    # A tensor that is written to cannot take a batch from another one.
    return [
        dims
        for dims in dict.fromkeys(ways)
        if any(d is not None for d in dims) and all(dims[i] is not None for i in case.written)
    ]


def _alone(count: int) -> list[tuple[int | None, ...]]:
    return [tuple(0 if i == j else None for j in range(count)) for i in range(count)]


class _Batch:
    """The arguments of three calls, of which some tensors differ: those are batched along a dimension."""

    def __init__(self, case: Case, dims: Sequence[int | None]) -> None:
        self.case, self.dims = case, dims
        first = case.fresh()
        self.rows = [
            [scaled(x, factor) if d is not None else x for x, d in zip(first, dims, strict=True)]
            for factor in (1.0, 0.875, 1.125)
        ]
        self.stacked = [
            torch.stack([row[i] for row in self.rows], d) if d is not None else first[i].clone()
            for i, d in enumerate(dims)
        ]
        named = [
            f"{name} batched" + {0: "", -1: " along its last dimension"}.get(d, f" along dimension {d}")
            for name, d in zip(case.names, dims, strict=True)
            if d is not None
        ]
        self.said = f"with {', '.join(named)}" + (", and no other tensor" if len(named) < len(dims) else "")

    def call(self, function: Callable[..., Any], remedy: str) -> tuple[Any, bool]:
        """The result of the function under vmap, and whether it needed PyTorch's loop over samples."""
        batched, functorch = torch.vmap(function, in_dims=tuple(self.dims)), torch._C._functorch
        functorch._set_vmap_fallback_warning_enabled(False)
        functorch._set_vmap_fallback_enabled(False)
        try:
            return batched(*self.stacked), False
        except Exception as error:
            if "vmap fallback" not in str(error):
                unless_generated(self.case, error)
                ruled = self.case.has_kernel("FuncTorchBatched")
                if "INTERNAL ASSERT" in str(error) and (not ruled or "functorch" in str(error)):
                    limit(f"torch.vmap ends in an internal error of PyTorch, {self.said}")
                refuse_or_fail(self.case, error, f"{self.said}, torch.vmap", remedy)
        finally:
            functorch._set_vmap_fallback_enabled(True)
        try:
            return batched(*self.stacked), True
        except Exception as error:
            refuse(f"PyTorch's loop over slices raises {all_lines(error)}")  # the kernel rejects a slice


def _judged(wrong: str, looped: bool) -> str:
    if wrong and looped:  # PyTorch's loop passes slices, which the kernel must read right
        skip(f"PyTorch's loop over slices gives another result ({wrong}): see layouts")
    return wrong


def vmap(case: Case) -> str | None:
    """Under torch.vmap over any of its tensors, it gives a loop's results, without PyTorch's slow loop."""
    needs_order(case)
    if not case.leaves or not case.expected:
        skip("it takes or returns no tensor")
    slow, refusal, ways = False, None, _ways(case)
    for dims in ways:
        batch = _Batch(case, dims)
        results = [case.outputs(row) for row in batch.rows]
        if any([x.shape for x in outs] != [x.shape for x in results[0]] for outs in results):
            skip("the shapes of its outputs depend on values, and vmap returns equal ones")
        try:
            outs, looped = batch.call(case.run, _RULE)
        except Verdict as verdict:
            if verdict.status != "refused":
                raise
            refusal = refusal or verdict
            continue
        slow = slow or looped
        if wrong := _judged(differs(outs, zipped(results), coarse=4 * tolerance(*case.leaves)), looped):
            case.fail(f"under torch.vmap {batch.said}, {wrong}, which a loop gives", _RULE)
    if refusal:
        raise refusal
    if slow:
        case.warn("torch.vmap is right but takes PyTorch's slow loop over the samples", _SLOW)
    return f"{len(ways)} ways"


def vmap_grad(case: Case) -> str | None:
    """torch.vmap of torch.func.grad, over any of its tensors, gives the results of a loop over backward."""
    needs_order(case)
    if case.derivative.status not in ("pass", "refused"):
        skip("there is no derivative to check: see backward")
    if not any(map(has_numbers, case.expected)) or any(x.is_complex() for x in (*case.expected, *case.leaves)):
        skip("torch.func.grad is for real numbers")

    def loss(*tensors: Tensor) -> Tensor:
        return weighted(filter(has_numbers, case.run(*tensors)))

    wanted, count, slow = tuple(case.of(range(len(case.leaves)))), len(case.leaves), False
    for dims in dict.fromkeys([(0,) * count, *(_alone(count)[:8] if not case.written else [])]):
        batch = _Batch(case, dims)
        got, looped = batch.call(torch.func.grad(loss, wanted), _RULES)
        slow = slow or looped
        if case.derivative.status == "refused":
            lost(case, "torch.func.grad")
        single = []
        for row in batch.rows:
            leaves = case.leaf(row)
            single.append(
                torch.autograd.grad(loss(*leaves), case.of(leaves), allow_unused=True, materialize_grads=True)
            )
        wrong = case.unlike(Results([], got), Results([], zipped(single)), coarse=tolerance(*case.leaves))
        if _judged(wrong, looped):
            case.fail(
                f"under torch.vmap of torch.func.grad {batch.said}, {wrong}, which a loop over backward gives", _RULES
            )
    if slow:
        case.warn("torch.vmap of torch.func.grad is right but takes PyTorch's slow loop", _SLOW)
    return None


# ---- autocast ----


def _takes_half(case: Case, floats: list[int]) -> bool:
    """Returns true if it accepts bfloat16 for every floating-point tensor."""
    try:
        case.outputs([x.bfloat16() if i in floats else x for i, x in enumerate(case.fresh())])
    except Exception:
        return False
    return True


def autocast(case: Case) -> str | None:
    """Under autocast it accepts the dtypes that a preceding linear produces, with its own policy."""
    kind = case.device.type
    if not torch.amp.is_autocast_available(kind):
        skip(f"{kind} has no autocast")
    floats = [i for i, x in enumerate(case.leaves) if x.is_floating_point() and not is_small(x)]
    if not floats:
        skip("no floating tensor argument")
    if any(case.leaves[i].dtype == torch.float64 for i in floats):
        skip("autocast leaves float64 alone")
    if case.schema.name.endswith("_backward"):
        skip("autograd calls a backward operator in the dtypes that its forward saw, with autocast off")
    policy, mixed = case.has_kernel(f"Autocast{case.key}"), len(floats) > 1
    dtypes = set()
    # A linear layer returns the half type; parameters and the results of other operators stay float32.
    for halves in (floats[:1], floats[1:]) if mixed else (floats,):
        mix = {i: torch.bfloat16 if i in halves else torch.float32 for i in floats}
        said = ", ".join(f"{case.names[i]} {dtype_name(dtype)}" for i, dtype in mix.items())
        tensors = [x.to(mix[i]) if i in mix else x for i, x in enumerate(case.fresh())]
        try:
            with torch.autocast(kind, dtype=torch.bfloat16):
                outs = case.outputs(tensors)
        except Exception as error:
            if "do not support kwargs" in str(error):
                limit("torch.library.register_autocast does not support keyword-only arguments")
            elsewhere = case.has_kernel("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastPrivateUse1")
            needed = not case.mutable and not elsewhere and (case.has_derivative or _takes_half(case, floats))
            (case.fail if policy or needed else case.warn)(
                f"under autocast, given what a linear returns ({said}), it raised {all_lines(error)}; "
                + ("its autocast kernel does not cast" if policy else f"it has no kernel at Autocast{case.key}"),
                "register an autocast policy: torch.library.register_autocast(op, device_type, dtype), or a kernel at the "
                "Autocast key that casts and calls the operator again",
            )
        grads: list[Tensor | None] = []
        if case.has_derivative:
            leaves = case.leaf(tensors)
            with torch.autocast(kind, dtype=torch.bfloat16):
                results = case.run(*leaves)
            try:
                grads = pull(results, leaves)
            except Exception as error:
                case.fail(
                    f"the backward of a call under autocast ({said}) raised {all_lines(error)}",
                    "give the backward the dtypes that the forward computed in; an autocast kernel that casts before "
                    "autograd does so",
                )
        # Call with the same values in float32. Skip integers, such as indices, which may depend on the rounding.
        wide = case.outputs([x.to(case.leaves[i].dtype) if i in mix else x for i, x in enumerate(tensors)])
        got, expected = (list(filter(has_numbers, found)) for found in (outs, wide))
        case.expect(
            Results(got, grads), Results(expected, case.gradients), f"under autocast, given {said},", "float32 gives",
            "compute in float32 where bfloat16 is not enough, also in the backward", dtype=False, coarse=0.16, grads=2,
        )  # fmt: skip
        dtypes.add(", ".join(dtype_name(x.dtype) for x in outs))
    result = f"mixed inputs give {' or '.join(sorted(dtypes))}"
    if mixed and not policy and not case.composite:
        case.warn(
            f"it has no autocast policy (no kernel at Autocast{case.key}) and computes with whatever dtypes arrive: {result}",
            "call register_autocast with the half type if that is fast and safe, and with float32 for sums, "
            "exponentials and norms",
        )
    return result if mixed else f"a bfloat16 input gives {' or '.join(sorted(dtypes))}"
