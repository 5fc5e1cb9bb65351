"""Checks of what a call gives and changes: schema, reference, and opcheck."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import Case, attached, cotangents, differentiable, gradients, last_line, small
from openreg_tools.check.checks.common import (
    differs,
    fail,
    limit,
    needs_literals,
    only_outcomes,
    padded,
    plain,
    reference_of,
    refused,
    scaled,
    skip,
    storage_of,
    tolerance,
    warn,
)


def runs(case: Case) -> str | None:
    """The operator accepts the sample."""
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except Exception as error:
        fail(f"{case.name}: the sample was refused: {last_line(error)}", "give samples that the operator accepts")


_SCALES = (3, -3, 30, -30, 1e3, -1e3, 3e4, -3e4, 1e6, -1e6, 1e30, -1e30, 1e-6, 0, torch.inf, torch.nan)


def schema(case: Case) -> str | None:
    """It writes to, and shares memory with, only what its schema declares, for values of any magnitude."""
    differentiable_too = case.derivative.status == "pass"
    _schema_of(case, case.fresh(), "the sample's")
    if differentiable_too:
        _backward_writes(case, case.fresh(grad=True), 1)
    for which, tensors in _variants(case):
        case.trying(f"inputs ({which.rstrip(',')})")
        with only_outcomes():
            _schema_of(case, tensors, which)
    if differentiable_too:
        for scale in (3e4, -3e4, 1e-6, torch.nan):
            with only_outcomes():
                _backward_writes(case, case.fresh(grad=True), scale)
            with only_outcomes():
                _backward_writes(case, case.leaf(_scaled(case.fresh(), scale)), 1)


def _scaled(tensors: list[Tensor], scale: float) -> list[Tensor]:
    """Floating-point tensors with values near `scale`, or with one of them, if it is not finite."""
    if math.isfinite(scale):
        return [scaled(x, scale, scale) for x in tensors]
    for x in tensors:
        if differentiable(x) and x.numel():
            x[(0,) * x.dim()] = scale
    return tensors


def _variants(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    """Samples in padded memory, and with other values and dtypes, each with a few words about them."""
    yield "padded", [padded(x) for x in case.fresh()]
    if not any(map(differentiable, case.leaves)):
        return
    few = sum(x.numel() for x in case.leaves) < 2**18
    for dtype in (None, torch.float16, torch.bfloat16) if few else (None,):
        least, kind = math.inf, "" if dtype is None else f"{str(dtype).removeprefix('torch.')} "
        for scale in _SCALES:
            which = f"of {kind}values near {scale:g},"
            begin = time.thread_time()
            yield which, _scaled(case.fresh(dtype=dtype), scale)
            took = time.thread_time() - begin
            least = min(least, took)
            if took > 20 * least + 0.01:  # it computes a size from the values: it may not end for larger ones
                return
            if dtype is None:
                yield f"padded, {which}", [padded(x) for x in _scaled(case.fresh(), scale)]
        for i, name in enumerate(case.names if len(case.leaves) > 1 else ()):
            for scale in (3e4, -3e4):
                tensors = case.fresh(dtype=dtype)
                tensors[i] = _scaled(tensors, scale)[i]
                yield f"{name} of {kind}values near {scale:g},", tensors


def _backward_writes(case: Case, tensors: list[Tensor], scale: float) -> None:
    outs = attached(case.run(*tensors))
    given = [x * scale for x in cotangents(outs)]
    before = [bytes_of(x) for x in (*tensors, *given)]
    torch.autograd.grad(outs, case.of(tensors), given, allow_unused=True)
    for i, (x, was) in enumerate(zip((*tensors, *given), before, strict=True)):
        if not torch.equal(bytes_of(x), was):
            what = case.names[i] if i < len(tensors) else f"the gradient of output {i - len(tensors)}"
            fail(
                f"{case.name}: its backward writes to {what}, which others still use",
                "compute into fresh memory in the backward: clone the tensors to change",
            )


def _schema_of(case: Case, tensors: list[Tensor], which: str) -> None:
    memory, versions = [bytes_of(x) for x in tensors], [x._version for x in tensors]
    owns, storages = [_own_bytes(x) for x in tensors], [storage_of(x) or -i for i, x in enumerate(tensors, 1)]
    with torch.no_grad():
        outs = list(case.function(raw=True)(*tensors))
    arguments = {argument.name: argument for argument in case.schema.arguments}
    infos = [arguments[name.partition("[")[0]].alias_info for name in case.names]
    declared = [info is not None and info.is_write for info in infos]
    allowed: dict[int, Tensor] = {}  # by storage, the bytes that the call may change
    for own, storage, write in zip(owns, storages, declared, strict=True):
        if write:
            allowed[storage] = allowed.get(storage, False) | own
    changes = [_changed(x, before) for x, before in zip(tensors, memory, strict=True)]
    strays = [
        change & ~allowed[storage] if storage in allowed else change
        for change, storage in zip(changes, storages, strict=True)
    ]
    # First an argument whose elements changed, then one whose surroundings did, which are those of its neighbors too.
    order = sorted(range(len(tensors)), key=lambda i: (not (strays[i] & owns[i]).any(), not declared[i]))
    for i in order:
        x, name = tensors[i], case.names[i]
        copy = (
            f"write to a copy ({name}.clone()), or declare the mutation: Tensor(a!) {name} in the schema, "
            f'mutates_args=("{name}",) in custom_op'
        )
        if strays[i].any() and declared[i]:
            fail(
                f"{case.name}: it writes to {name}, as its schema says, but also to memory around the elements of {name} "
                f"({which} {list(x.shape)})",
                f"write only at {name}.data_ptr() plus multiples of {name}.stride()",
            )
        if strays[i].any():
            fail(
                f"{case.name}: the schema says that {name} is not written to, but the call changed the memory "
                f"of {name} ({which} {list(x.shape)})",
                copy + ("; if it should not write there, check the range of indices" if "values" in which else ""),
            )
        if x._version != versions[i] and storages[i] not in allowed:
            fail(
                f"{case.name}: the schema says that {name} is not written to, but its version counter went from "
                f"{versions[i]} to {x._version}: it is written to and put back",
                copy,
            )
        if declared[i] and (changes[i] & owns[i]).any() and x._version == versions[i]:
            fail(
                f"{case.name}: it writes to {name}, as its schema says, but the version counter of {name} stays at "
                f"{versions[i]}, so autograd uses the changed {name} where it saved the old one, without an error",
                "register a kernel at ADInplaceOrView that calls torch.autograd.graph.increment_version (bump_version "
                "in C++) after the call; custom_op(mutates_args=…) does it by itself",
            )
    returned = _returned(case, outs)
    for i, (out, info) in enumerate(zip(outs, returned, strict=True)):
        mine = storage_of(out)
        if mine is None:
            continue
        # A list's annotation does not name a set: its tensors may alias any annotated argument.
        sharing = [k for k, storage in enumerate(storages) if storage == mine]
        shared = any(
            info is not None
            and infos[k] is not None
            and bool(not info.before_set or info.before_set & infos[k].before_set)
            for k in sharing
        )
        if sharing and not shared:
            name = case.names[sharing[0]]
            fail(
                f"{case.name}: output {i} shares the memory of {name}, and the schema does not say so",
                f"return a copy, or declare the view: Tensor(a) {name} and -> Tensor(a) in the schema",
            )
        if info is not None and not shared:
            said = f"{case.name}: the schema says that output {i} is an alias of an input, but it has its own memory"
            remedy = "return the input or its view, or remove the (a) from the schema's return"
            fail(said, remedy) if info.is_write else warn(said, remedy)
        for j in range(i):
            if storage_of(outs[j]) == mine and (info is None or returned[j] is None):
                fail(
                    f"{case.name}: outputs {j} and {i} share memory, and the schema does not say so",
                    "return a copy of one; two outputs must not share memory",
                )


def _returned(case: Case, outs: Sequence[Tensor]) -> list[Any]:
    """The alias annotation of each output."""
    kinds = [(r.alias_info, str(r.type)) for r in case.schema.returns if "Tensor" in str(r.type)]
    if any(kind.startswith("List") for _, kind in kinds):
        return [kinds[0][0] if len(kinds) == 1 else None] * len(outs)
    missing = len(kinds) - len(outs)  # optional outputs that are None, which have no annotation
    optional = [i for i, (info, kind) in enumerate(kinds) if info is None and kind.startswith("Optional")]
    return [info for i, (info, _) in enumerate(kinds) if i not in optional[:missing]]


def bytes_of(x: Tensor) -> Tensor:
    """Every byte of its storage, including the gaps between and around its elements."""
    if x.layout != torch.strided:
        return x.detach().to_dense().cpu().clone().view(-1).view(torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage()).cpu().clone()


def _own_bytes(x: Tensor) -> Tensor:
    """Which of `bytes_of` belong to its elements."""
    if x.layout != torch.strided:
        return torch.ones_like(bytes_of(x), dtype=torch.bool)
    own, size = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.bool), x.element_size()
    shape = [n if stride else min(n, 1) for n, stride in zip(x.shape, x.stride(), strict=True)]
    own.as_strided((*shape, size), (*(size * n for n in x.stride()), 1), size * x.storage_offset()).fill_(True)
    return own


def _changed(x: Tensor, before: Tensor) -> Tensor:
    """Which of its bytes differ from those before; all, if the storage was resized."""
    after = bytes_of(x)
    return after != before if after.shape == before.shape else torch.ones_like(before, dtype=torch.bool)


def reference(case: Case) -> str | None:
    """Outputs and gradients equal the results of the reference, or of its own CPU kernel."""
    function = reference_of(case)
    if not function:
        if case.seeded:
            skip("its numbers are random, and no reference was given")
        skip("no reference was given" + ("" if case.device.type == "cpu" else ", and the operator has no CPU kernel"))
    remedy = "one of the two is wrong; try the sample by hand, or give a reference in float64"
    kernel = "the reference" if case.reference else "its CPU kernel"
    expected = plain(case, case.fresh(device="cpu"), function)
    coarse = tolerance(*case.leaves)
    if wrong := differs(case.expected, expected, dtype=not case.reference, coarse=coarse):
        fail(f"{case.name}: {wrong}, which {kernel} gives", remedy)
    if case.derivative.status != "pass":
        return f"outputs only; against {kernel}"
    if case.reference and case.intended:
        return f"outputs only; against {kernel}. See gradcheck for intended_gradient"
    try:
        host = gradients(function, case.fresh(grad=True, device="cpu"), case.wanted)
    except RuntimeError as error:
        if refused(error):
            return f"outputs only, as {kernel} has no gradient"
        raise
    if not any(x is not None for x in host):
        return f"outputs only, as {kernel} has no gradient"
    if wrong := differs(case.gradients, host, "the gradient of differentiable argument", coarse=coarse * 4):
        fail(f"{case.name}: {wrong}, which {kernel} gives", remedy)
    return f"against {kernel}"


# ---- opcheck ----


_NO_OBJECT = re.compile("is not implemented for __torch__|__obj_flatten__|FakeScriptObject|register_fake_class")
_NO_ARITHMETIC = re.compile("not implemented for 'Float(8|4)|Promotion for Float(8|4)")
_ALLOCATES = "let the fake kernel give the shape, dtype, device, strides and numbers that the kernel gives"
_REMEDIES = {
    "test_schema": "declare in the schema every argument that the kernel writes (Tensor(a!) x, mutates_args=…), and return "
    "new memory (clone) where the schema declares no view",
    "test_autograd_registration": "register the derivative with torch.library.register_autograd, or an autograd function "
    "at the Autograd key, not at the device's",
    "test_faketensor": _ALLOCATES,
    "test_aot_dispatch_dynamic": _ALLOCATES,
    "gradients": "compute in the backward only with operators, which a compiler traces: no .item(), no numpy, no data_ptr, no "
    "attributes of ctx that the forward did not set; and give each operator that it calls a right fake kernel",
}


def _opcheck(case: Case, test: str) -> None:
    # A wrong derivative is reported by `backward`.
    wanted = ("pass", "fail") if test == "test_autograd_registration" else ("pass",)
    tensors = case.fresh(grad=case.derivative.status in wanted and test != "test_schema")
    for i in case.written:  # a leaf that requires a gradient cannot be written to
        tensors[i] = tensors[i].detach()
    args, kwargs = case.arguments(tensors)
    try:
        torch.library.opcheck(case.op, args, kwargs, test_utils=test)
    except Exception as error:
        if any(small(x) for x in (*case.leaves, *case.expected)) and _NO_ARITHMETIC.search(str(error)):
            limit(f"opcheck's {test} computes with float8, which has no arithmetic")
        if case.objects and _NO_OBJECT.search(str(error)):
            needs_literals(case)
        cause = "gradients" if "Gradients of the operator are different" in str(error) else test
        fail(f"{case.name}: opcheck's {test} says: {last_line(error)}", _REMEDIES[cause])


def opcheck_schema(case: Case) -> str | None:
    """torch.library.opcheck's test_schema."""
    _opcheck(case, "test_schema")


def opcheck_autograd_registration(case: Case) -> str | None:
    """torch.library.opcheck's test_autograd_registration, on every device."""
    if not any(case.wanted):
        skip("no floating tensor argument")
    if case.device.type in ("cpu", "cuda", "xpu"):
        return _opcheck(case, "test_autograd_registration")
    # PyTorch's own test supports three devices; this does the same for any.
    if case.has_kernel(f"Autograd{case.key}", "Autograd", "CompositeImplicitAutograd"):
        return None
    torch._C._set_autograd_fallback_mode("nothing")
    tensors = [x.detach() if i in case.written else x for i, x in enumerate(case.fresh(grad=True))]
    with contextlib.suppress(NotImplementedError):
        outs = case.function(raw=True)(*tensors)
        given = {id(x) for x in tensors}
        if case.derivative.status == "pass" and any(out.requires_grad and id(out) not in given for out in outs):
            fail(
                f"{case.name}: an output requires a gradient, but no kernel is registered at Autograd{case.key}",
                "register the autograd function at the Autograd key, not at the device's",
            )


def opcheck_faketensor(case: Case) -> str | None:
    """torch.library.opcheck's test_faketensor."""
    _opcheck(case, "test_faketensor")


def opcheck_aot_dispatch_dynamic(case: Case) -> str | None:
    """torch.library.opcheck's test_aot_dispatch_dynamic."""
    if case.generators:
        skip("its numbers are random, and opcheck does not restore the state of a generator")
    _opcheck(case, "test_aot_dispatch_dynamic")
