"""Arguments that share memory, and calls that write beyond it or make it grow."""

from __future__ import annotations

import collections
import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import dispatch
from openreg_tools.conformance import opinfo, schemas, survey
from openreg_tools.conformance.calls import Call, StorageOf, writes_beyond
from openreg_tools.generate import changes, tables

__all__ = [
    "READ_AND_WRITTEN",
    "RETURNS_ANOTHER",
    "damages",
    "grows",
    "has_shared_memory",
    "is_memory_separate",
    "is_read_and_written",
    "overlaps_itself",
    "returns_another",
    "writes_an_input",
]

READ_AND_WRITTEN = "memory is written to that is also read or written in other places, which PyTorch does not detect"
RETURNS_ANOTHER = "the CPU's kernel returns another tensor than the one to write to"


def grows(outcome: opinfo.Outcome, call: Call) -> bool:
    """Whether the call made the memory of its source larger, as `set_` does, which leaves the new part uninitialized."""
    leaves = tree_leaves((call.args, {key: value for key, value in call.kwargs.items() if key != "out"}))
    sources = [x.tensor if isinstance(x, StorageOf) else x for x in leaves[1:] if _has_storage(x)]
    moved = outcome.mover.tensors
    return any(moved[id(x)].untyped_storage().nbytes() > x.untyped_storage().nbytes() for x in sources)


def returns_another(name: str, value: tuple[Any, Any]) -> bool:
    """Whether the call, which gave these results and written arguments, returned another tensor than it had to write to."""
    out, written = value
    returns = dispatch.schema(name).returns
    results = out if isinstance(out, tuple | list) and len(returns) > 1 else [out]
    return bool(written) and any(
        isinstance(x, torch.Tensor)
        and each.alias_info is not None
        and each.alias_info.is_write
        and all(x is not other for other in tree_leaves(written))
        for x, each in zip(results, returns, strict=False)
    )


def has_shared_memory(name: str, call: Call) -> bool:
    """Whether an argument that is written shares memory with another argument, or has elements that share memory."""
    leaves = tree_leaves((call.args, call.kwargs))
    written = [leaves[each["at"]] for each in changes.profile(name, call) if each.get("written")]
    return not is_memory_separate(name, call) or any(map(overlaps_itself, written))


def _has_storage(x: Any) -> bool:
    return isinstance(x, StorageOf) or isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested


def is_memory_separate(name: str, call: Call) -> bool:
    """Whether every tensor argument is plain, and no written argument shares its storage with another argument."""
    written = {each["at"] for each in changes.profile(name, call) if each.get("written")}
    tensors = {
        id(leaf): (leaf, i in written)
        for i, leaf in enumerate(tree_leaves((call.args, call.kwargs)))
        if isinstance(leaf, torch.Tensor)
    }
    if not all(changes._is_plain(leaf) for leaf, _ in tensors.values()):
        return False
    storages = collections.Counter(leaf.untyped_storage()._cdata for leaf, _ in tensors.values())
    return all(storages[leaf.untyped_storage()._cdata] == 1 for leaf, is_written in tensors.values() if is_written)


def writes_an_input(name: str, call: Call) -> bool:
    """Whether one tensor is both an input and written."""
    leaves = tree_leaves((call.args, call.kwargs))
    written = [each["at"] for each in changes.profile(name, call) if each.get("written")]
    return any(leaves[i] is other for i in written for j, other in enumerate(leaves) if i != j)


def is_read_and_written(name: str, call: Call) -> bool:
    """Whether an argument that is written shares memory with another that is a different view of it, or that has elements
    that share memory.

    PyTorch refuses such calls, but only if both arguments are dense, and not in every kernel. The results depend on the
    order of the elements, except where each element gets the same number.
    """
    if tables.FILLS.match(name):
        return False
    leaves = tree_leaves((call.args, call.kwargs))
    written = {each["at"] for each in changes.profile(name, call) if each.get("written")}

    def view(t: torch.Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.storage_offset(), t.dtype

    return any(
        changes._is_plain(other)
        and other.untyped_storage()._cdata == leaves[i].untyped_storage()._cdata
        and (view(other) != view(leaves[i]) or overlaps_itself(other))
        for i in written
        for other in leaves
    )


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements share memory."""
    if not changes._is_plain(t) or not t.numel():
        return False
    where = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return where.as_strided(t.shape, t.stride(), t.storage_offset()).unique().numel() < t.numel()


def damages(name: str, call: Call) -> bool:
    """Whether the CPU's kernel writes beyond its arguments, or ends the process."""

    def check(_: int) -> None:
        if writes_beyond(functools.partial(schemas._call, name, call)):
            raise ValueError

    (_, outcome), *_ = survey.survey(1, check) or [(0, survey.Outcome("crashed"))]
    return outcome.kind != "returned"
