"""The check of what a call writes to and shares memory with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import Case, attached, cotangents, pull
from openreg_tools.check.checks.common import only_verdicts, scaled
from openreg_tools.core.compare import has_numbers
from openreg_tools.core.move import bytes_of as view_of_bytes
from openreg_tools.core.move import is_plain
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import padded

_SCALES = (3, -3, 30, -30, 1e3, -1e3, 3e4, -3e4, 1e6, -1e6, 1e30, -1e30, 1e-6, 0, torch.inf, torch.nan)


def schema(case: Case) -> str | None:
    """It writes to, and shares memory with, only what its schema declares, for values of any magnitude."""
    _forward_writes(case, case.fresh(), "the sample's")
    if case.has_derivative:
        _backward_writes(case, case.fresh(grad=True), 1)
    for which, tensors in _variants(case):
        case.trying(f"inputs ({which.rstrip(',')})")
        with only_verdicts():
            _forward_writes(case, tensors, which)
    for scale in (3e4, -3e4, 1e-6, torch.nan) if case.has_derivative else ():
        with only_verdicts():
            _backward_writes(case, case.fresh(grad=True), scale)
        with only_verdicts():
            _backward_writes(case, case.leaf(_scaled(case.fresh(), scale)), 1)


def _scaled(tensors: list[Tensor], scale: float) -> list[Tensor]:
    """Floating-point tensors with values near `scale`, or with one of them, if it is not finite."""
    if math.isfinite(scale):
        return [scaled(x, scale, scale) for x in tensors]
    for x in tensors:
        if has_numbers(x) and x.numel():
            x[(0,) * x.dim()] = scale
    return tensors


def _variants(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    """Samples in padded memory, and with other values and dtypes, each with a few words about them."""
    yield "padded", [padded(x) for x in case.fresh()]
    if not any(map(has_numbers, case.leaves)):
        return
    few = sum(x.numel() for x in case.leaves) < 2**18
    for dtype in (None, torch.float16, torch.bfloat16) if few else (None,):
        least, kind = math.inf, "" if dtype is None else f"{dtype_name(dtype)} "
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
    before = [_bytes_of(x) for x in (*tensors, *given)]
    pull(outs, tensors, lambda outs: given)
    for i, (x, was) in enumerate(zip((*tensors, *given), before, strict=True)):
        if not torch.equal(_bytes_of(x), was):
            what = case.names[i] if i < len(tensors) else f"the gradient of output {i - len(tensors)}"
            case.fail(
                f"its backward writes to {what}, which others still use",
                "compute into fresh memory in the backward: clone the tensors to change",
            )


def _forward_writes(case: Case, tensors: list[Tensor], which: str) -> None:
    """Compare what a call writes, and what its outputs share, with the schema."""
    memory, versions = [_bytes_of(x) for x in tensors], [x._version for x in tensors]
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
            case.fail(
                f"it writes to {name}, as its schema says, but also to memory around the elements of {name} "
                f"({which} {list(x.shape)})",
                f"write only at {name}.data_ptr() plus multiples of {name}.stride()",
            )
        if strays[i].any():
            case.fail(
                f"the schema says that {name} is not written to, but the call changed the memory of {name} "
                f"({which} {list(x.shape)})",
                copy + ("; if it should not write there, check the range of indices" if "values" in which else ""),
            )
        if x._version != versions[i] and storages[i] not in allowed:
            case.fail(
                f"the schema says that {name} is not written to, but its version counter went from {versions[i]} to "
                f"{x._version}: it is written to and put back",
                copy,
            )
        if declared[i] and (changes[i] & owns[i]).any() and x._version == versions[i]:
            case.fail(
                f"it writes to {name}, as its schema says, but the version counter of {name} stays at {versions[i]}, so "
                f"autograd uses the changed {name} where it saved the old one, without an error",
                "register a kernel at ADInplaceOrView that calls torch.autograd.graph.increment_version (bump_version "
                "in C++) after the call; custom_op(mutates_args=…) does it by itself",
            )
    _shares(case, outs, storages, infos)


def _shares(case: Case, outs: Sequence[Tensor], storages: Sequence[int], infos: Sequence[Any]) -> None:
    """Compare the memory of the outputs with that of the arguments and of each other."""
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
            case.fail(
                f"output {i} shares the memory of {name}, and the schema does not say so",
                f"return a copy, or declare the view: Tensor(a) {name} and -> Tensor(a) in the schema",
            )
        if info is not None and not shared:
            (case.fail if info.is_write else case.warn)(
                f"the schema says that output {i} is an alias of an input, but it has its own memory",
                "return the input or its view, or remove the (a) from the schema's return",
            )
        for j in range(i):
            if storage_of(outs[j]) == mine and (info is None or returned[j] is None):
                case.fail(
                    f"outputs {j} and {i} share memory, and the schema does not say so",
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


def storage_of(x: Tensor) -> int | None:
    """A number that identifies the tensor's memory; None if the tensor has no memory."""
    return x.untyped_storage()._cdata if x.layout == torch.strided and x.numel() else None


def _bytes_of(x: Tensor) -> Tensor:
    """A copy of every byte of a tensor's storage, including the gaps between and around its elements."""
    return (view_of_bytes(x) if is_plain(x) else x.detach().to_dense().view(-1).view(torch.uint8)).cpu().clone()


def _own_bytes(x: Tensor) -> Tensor:
    """Which bytes of a tensor's storage belong to its elements."""
    if not is_plain(x):
        return torch.ones_like(_bytes_of(x), dtype=torch.bool)
    own, size = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.bool), x.element_size()
    shape = [n if stride else min(n, 1) for n, stride in zip(x.shape, x.stride(), strict=True)]
    own.as_strided((*shape, size), (*(size * n for n in x.stride()), 1), size * x.storage_offset()).fill_(True)
    return own


def _changed(x: Tensor, before: Tensor) -> Tensor:
    """Which bytes of a tensor's storage differ from `before`; all, if the storage was resized."""
    after = _bytes_of(x)
    return after != before if after.shape == before.shape else torch.ones_like(before, dtype=torch.bool)
