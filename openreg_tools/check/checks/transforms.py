"""Checks of functionalization, out=, vmap and autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Outcome, attached, cotangents, differentiable, last_line, name_of, small
from openreg_tools.check.checks.common import (
    differs,
    dtype_name,
    fail,
    limit,
    needs_literals,
    permuted,
    plain,
    refuse,
    refuse_or_fail,
    scaled,
    skip,
    stepped,
    tolerance,
    unless_generated,
    warn,
)
from openreg_tools.check.checks.fakes import compiled, lost, quiet


def functionalization(case: Case) -> str | None:
    """Functionalized, it gives the same results."""
    remedy = "declare in the schema what is written to and what is a view; functionalization relies on it"
    try:
        outs = torch.func.functionalize(case.function())(*case.fresh())
    except Exception as error:
        if not case.mutable or "alias annotations" not in str(error):
            refuse_or_fail(case, error, "torch.func.functionalize", remedy)
        needs_literals(case)
        # C++ functionalization does not support custom operators that write; the compiler's does, but not a seed.
        if case.seeded:
            skip("its numbers are random")
        with quiet():
            outs = compiled(case, False)(*case.fresh())
    if wrong := differs(outs, case.expected):
        fail(f"{case.name}: functionalized, {wrong}, which eager gives", remedy)
    return None


def out(case: Case) -> str | None:
    """Its out= overload writes into tensors of any layout, resizes empty ones, and returns them."""
    packet = getattr(getattr(torch.ops, case.op.namespace), case.schema.name.split("::")[1])
    variant = next(
        (o for o in (getattr(packet, n) for n in packet.overloads()) if _outs(o) and _same_inputs(case.op, o)), None
    )
    if variant is None:
        skip("it has no out= overload")
    if any("List" in str(a.type) for a in variant._schema.arguments if a.is_out):
        skip("its out= takes a list")
    if _outs(case.op):
        skip("it is an out= overload")
    names = _outs(variant)
    remedy = "resize out (at::native::resize_output), copy the result into it, and return it"

    def run(outs: list[Tensor]) -> Any:
        args, kwargs = case.arguments(case.fresh())
        if case.seeded:
            case.seed()
        with torch.no_grad():
            return variant(*args, **kwargs, **dict(zip(names, outs, strict=True)))

    for what, make in (
        ("of the right size", lambda x: torch.full_like(x, 1)),
        ("with other strides", lambda x: stepped(x).fill_(1) if x.dim() < 2 else torch.full_like(permuted(x), 1)),
        ("of no elements", lambda x: x.new_empty(0)),
    ):
        outs = [make(x) for x in case.expected]
        strides = [x.stride() for x in outs]
        returned = run(outs)
        returned = [returned] if isinstance(returned, Tensor) else list(returned or outs)
        where = f"{case.name}: {name_of(variant)} with out= {what}"
        if wrong := differs(outs, case.expected):
            fail(f"{where}: {wrong}, which the operator returns", remedy)
        if any(r is not o for r, o in zip(returned, outs, strict=True)):
            fail(f"{where} returns a tensor other than out", remedy)
        if what != "of no elements" and strides != [x.stride() for x in outs]:
            fail(f"{where} changed the strides of out, which has the right size", remedy)
    return None


def _outs(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _same_inputs(op: Any, other: Any) -> bool:
    given = [(a.name, str(a.type)) for a in op._schema.arguments]
    return given == [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Three times the arguments, floating values scaled differently."""
    return [[scaled(x, factor) for x in tensors] for factor in (1.0, 0.875, 1.125)]


def _loops(case: Case, call: Callable[[], Any], remedy: str, said: str) -> tuple[Any, bool]:
    """The result of the call under vmap, and whether it needed PyTorch's loop over samples."""
    functorch = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    functorch._set_vmap_fallback_enabled(False)
    try:
        return call(), False
    except Exception as error:
        if "vmap fallback" not in str(error):
            if "INTERNAL ASSERT" in str(error) and not case.has_kernel("FuncTorchBatched"):
                limit("torch.vmap without a batching rule ends in an internal error of PyTorch")
            unless_generated(case, error, "torch.func")
            if "INTERNAL ASSERT" in str(error) and "functorch" in str(error):
                limit(f"torch.vmap ends in an internal error of PyTorch, {said}")
            refuse_or_fail(case, error, f"{said}, torch.vmap", remedy)
    finally:
        functorch._set_vmap_fallback_enabled(True)
    try:
        return call(), True
    except Exception as error:
        refuse(f"PyTorch's loop over slices raises {last_line(error)}")  # the kernel rejects a slice


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


def _dims_of(case: Case) -> list[tuple[int | None, ...]]:
    """Which dimension of each tensor is batched: every subset of the tensors, then each dimension of each tensor."""
    count = len(case.leaves)
    alone = [tuple(0 if i == j else None for j in range(count)) for i in range(count)]
    ways: list[tuple[int | None, ...]] = [(0,) * count, *alone]
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


def _said(case: Case, dims: Sequence[int | None]) -> str:
    where = {0: "", -1: " along its last dimension"}
    named = [
        f"{name} batched{where.get(d, f' along dimension {d}')}"
        for name, d in zip(case.names, dims, strict=True)
        if d is not None
    ]
    return ", ".join(named) + (", and no other tensor" if len(named) < len(dims) else "")


def _rows(batch: list[list[Tensor]], dims: Sequence[int | None]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The arguments of each call of a loop, and the arguments of the one call under vmap."""
    rows = [[x if d is not None else first for x, first, d in zip(r, batch[0], dims, strict=True)] for r in batch]
    stacked = [
        torch.stack([r[i] for r in rows], d) if d is not None else rows[0][i].clone() for i, d in enumerate(dims)
    ]
    return rows, stacked


def vmap(case: Case) -> str | None:
    """Under torch.vmap over any of its tensors, it gives a loop's results, without PyTorch's slow loop."""
    if case.seeded:
        skip("its numbers are random")
    if not case.leaves:
        skip("no tensor argument")
    if not case.expected:
        skip("no output")
    batch = _batches(case.fresh())
    slow, refusal, ways = False, None, _dims_of(case)
    for dims in ways:
        rows, stacked = _rows(batch, dims)
        results = [plain(case, r) for r in rows]
        if any([x.shape for x in each] != [x.shape for x in results[0]] for each in results):
            skip("the shapes of its outputs depend on values, and vmap returns equal ones")
        expected = [torch.stack(outs) for outs in zip(*results, strict=True)]
        call = torch.vmap(case.run, in_dims=dims)
        said = f"with {_said(case, dims)}"
        try:
            outs, looped = _loops(case, lambda call=call, stacked=stacked: call(*stacked), _RULE, said)
        except Outcome as outcome:
            if outcome.status != "refused":
                raise
            refusal = refusal or outcome
            continue
        slow = slow or looped
        if wrong := differs(outs, expected, coarse=4 * tolerance(*case.leaves)):
            if looped:  # PyTorch's loop passes slices, which the kernel must read right
                skip(f"PyTorch's loop over slices gives another result ({wrong}): see layouts")
            fail(f"{case.name}: under torch.vmap {said}, {wrong}, which a loop gives", _RULE)
    if refusal:
        raise refusal
    if slow:
        warn(f"{case.name}: torch.vmap is right but takes PyTorch's slow loop over the samples", _SLOW)
    _nested(case, batch)
    return f"{len(ways)} ways"


def _nested(case: Case, batch: list[list[Tensor]]) -> None:
    """Warn if two vmaps inside each other give other results than two loops."""
    rows = [[scaled(x, factor) for x in r] for factor in (1.0, 0.75) for r in batch]
    stacked = [torch.stack(each).unflatten(0, (2, len(batch))) for each in zip(*rows, strict=True)]
    try:
        outs = torch.vmap(torch.vmap(case.run))(*stacked)
    except Exception:  # PyTorch supports less of this
        return
    expected = [
        torch.stack(each).unflatten(0, (2, len(batch))) for each in zip(*(plain(case, r) for r in rows), strict=True)
    ]
    if wrong := differs(outs, expected, coarse=4 * tolerance(*case.leaves)):
        warn(f"{case.name}: under one torch.vmap inside another, {wrong}, which two loops give", _RULE)


def vmap_grad(case: Case) -> str | None:
    """torch.vmap of torch.func.grad, over any of its tensors, gives the results of a loop over backward."""
    if case.seeded:
        skip("its numbers are random")
    if case.derivative.status not in ("pass", "refused"):
        skip("there is no derivative to check: see backward")
    wanted = tuple(i for i, flag in enumerate(case.wanted) if flag)

    def loss(*tensors: Tensor) -> Tensor:
        outs = [out for out in case.run(*tensors) if differentiable(out)]
        return sum((out * c).sum() for out, c in zip(outs, weights, strict=True))

    weights = cotangents([out for out in case.expected if differentiable(out)])
    if not weights or any(w.is_complex() for w in weights) or any(x.is_complex() for x in case.leaves):
        skip("torch.func.grad is for real numbers")
    batch = _batches(case.fresh())
    alone = [tuple(0 if i == j else None for j in range(len(case.leaves))) for i in range(len(case.leaves))]
    slow = False
    for dims in dict.fromkeys([(0,) * len(case.leaves), *(alone[:8] if not case.written else [])]):
        rows, stacked = _rows(batch, dims)
        call = torch.vmap(torch.func.grad(loss, wanted), in_dims=dims)
        said = f"with {_said(case, dims)}"
        got, looped = _loops(case, lambda call=call, stacked=stacked: call(*stacked), _RULES, said)
        slow = slow or looped
        if case.derivative.status == "refused":
            lost(case, "torch.func.grad")
        single = []
        for r in rows:
            leaves = case.leaf(r)
            grads = torch.autograd.grad(loss(*leaves), case.of(leaves), allow_unused=True, materialize_grads=True)
            single.append(grads)
        expected = [torch.stack(each) for each in zip(*single, strict=True)]
        coarse = 4 * tolerance(*case.leaves)
        if wrong := differs(got, expected, "the gradient of differentiable argument", coarse=coarse):
            if looped:
                skip(f"PyTorch's loop over slices gives another result ({wrong}): see layouts")
            fail(
                f"{case.name}: under torch.vmap of torch.func.grad {said}, {wrong}, which a loop over backward gives",
                _RULES,
            )
    if slow:
        warn(f"{case.name}: torch.vmap of torch.func.grad is right but takes PyTorch's slow loop", _SLOW)
    return None


def _takes_half(case: Case, floats: list[int]) -> bool:
    """Whether it accepts bfloat16 for every floating-point tensor."""
    try:
        plain(case, [x.bfloat16() if i in floats else x for i, x in enumerate(case.fresh())])
    except Exception:
        return False
    return True


def autocast(case: Case) -> str | None:
    """Under autocast it accepts the dtypes that a preceding linear produces, with its own policy."""
    kind = case.device.type
    if not torch.amp.is_autocast_available(kind):
        skip(f"{kind} has no autocast")
    floats = [i for i, x in enumerate(case.leaves) if x.is_floating_point() and not small(x)]
    if not floats:
        skip("no floating tensor argument")
    if any(case.leaves[i].dtype == torch.float64 for i in floats):
        skip("autocast leaves float64 alone")
    if case.schema.name.endswith("_backward"):
        skip("autograd calls a backward operator in the dtypes that its forward saw, with autocast off")
    policy = case.has_kernel(f"Autocast{case.key}")
    # A linear layer returns the half type; parameters and the results of other operators stay float32.
    mixes = [{i: torch.bfloat16 if i == floats[0] else torch.float32 for i in floats}]
    if len(floats) > 1:
        mixes.append({i: torch.float32 if i == floats[0] else torch.bfloat16 for i in floats})
    mixed = len(floats) > 1
    dtypes = set()
    for mix in mixes:
        said = ", ".join(f"{case.names[i]} {str(d).removeprefix('torch.')}" for i, d in mix.items())
        tensors = case.fresh()
        tensors = [x.to(mix[i]) if i in mix else x for i, x in enumerate(tensors)]
        try:
            with torch.autocast(kind, dtype=torch.bfloat16):
                outs = plain(case, tensors)
        except Exception as error:
            if "do not support kwargs" in str(error):
                limit("torch.library.register_autocast does not support keyword-only arguments")
            elsewhere = case.has_kernel("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastPrivateUse1")
            needed = (
                not case.mutable and not elsewhere and (case.derivative.status == "pass" or _takes_half(case, floats))
            )
            (fail if policy or needed else warn)(
                f"{case.name}: under autocast, given what a linear returns ({said}), it raised {last_line(error)}; "
                + ("its autocast kernel does not cast" if policy else f"it has no kernel at Autocast{case.key}"),
                "register an autocast policy: torch.library.register_autocast(op, device_type, dtype), or a kernel at the "
                "Autocast key that casts and calls the operator again",
            )
        # The same values in float32; integers, such as indices, may depend on the rounding.
        wide = plain(case, [x.to(case.leaves[i].dtype) if i in mix else x for i, x in enumerate(tensors)])
        if wrong := differs(*(list(filter(differentiable, each)) for each in (outs, wide)), dtype=False, coarse=8e-2):
            fail(
                f"{case.name}: under autocast, given {said}, {wrong}, which float32 gives",
                "compute in float32 where bfloat16 is not enough",
            )
        dtypes.add(", ".join(dtype_name(x) for x in outs))
        if case.derivative.status == "pass":
            leaves = case.leaf(tensors)
            with torch.autocast(kind, dtype=torch.bfloat16):
                outs = case.run(*leaves)
            outs = attached(outs)
            try:
                grads = torch.autograd.grad(outs, case.of(leaves), cotangents(outs), allow_unused=True)
            except Exception as error:
                fail(
                    f"{case.name}: the backward of a call under autocast ({said}) raised {last_line(error)}",
                    "give the backward the dtypes that the forward computed in; an autocast kernel that casts before "
                    "autograd does so",
                )
            if wrong := differs(
                grads, case.gradients, "the gradient of differentiable argument", dtype=False, coarse=0.15
            ):
                fail(
                    f"{case.name}: under autocast ({said}) {wrong}, which float32 gives",
                    "compute the backward in float32 where bfloat16 is not enough",
                )
    result = f"mixed inputs give {' or '.join(sorted(dtypes))}"
    if mixed and not policy and not case.composite:
        warn(
            f"{case.name}: it has no autocast policy (no kernel at Autocast{case.key}) and computes with whatever dtypes "
            f"arrive: {result}",
            "call register_autocast with the half type if that is fast and safe, and with float32 for sums, "
            "exponentials and norms",
        )
    return result if mixed else f"a bfloat16 input gives {' or '.join(sorted(dtypes))}"
