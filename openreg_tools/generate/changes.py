"""Changes to the arguments of a call: sizes, dtypes, values, layouts, aliases, out= tensors, and wrong arguments.

A change is a list: its name, the position of the argument among the leaves of the call, and details. `profile` describes
a call to the process that draws the changes, and `changed` applies them. Everything is on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools import dispatch
from openreg_tools.conformance import generated, layouts
from openreg_tools.conformance.calls import Call, Stays
from openreg_tools.conformance.generated import SIZES

__all__ = ["Change", "changed", "given_to", "profile", "wrong"]

Change = list[Any]

_PAD = 5  # elements of the storage behind a view


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    if value.is_nested or value.is_quantized:
        return False
    return not (value.numel() and not value.untyped_storage().nbytes())


def _names(name: str, call: Call) -> list[tuple[str, Any]]:
    """The schema's argument for each leaf of the call's arguments."""
    arguments = {argument.name: argument for argument in dispatch.schema(name).arguments}
    positional = [argument for argument in arguments.values() if not argument.kwarg_only]
    found = []
    for argument, value in zip(positional, call.args, strict=False):
        found += [(argument.name, argument)] * len(tree_leaves(value))
    for key, value in call.kwargs.items():
        found += [(key, arguments.get(key))] * len(tree_leaves(value))
    return found


def profile(name: str, call: Call) -> list[dict[str, Any]]:
    """Describes the leaves of a call: tensors that can be changed, numbers, and others."""
    leaves = tree_leaves((call.args, call.kwargs))
    described = []
    for i, (leaf, (_, argument)) in enumerate(zip(leaves, _names(name, call), strict=True)):
        written = bool(argument and argument.alias_info is not None and argument.alias_info.is_write)
        if _is_plain(leaf):
            described.append(
                {
                    "at": i, "kind": "tensor", "shape": list(leaf.shape),
                    "dtype": str(leaf.dtype).removeprefix("torch."),
                    "out": bool(argument and argument.is_out), "written": written,
                }
            )  # fmt: skip
        elif isinstance(leaf, (bool, int, float, str)):
            described.append({"at": i, "kind": type(leaf).__name__})
    return described


def changed(name: str, call: Call, changes: list[Change]) -> Call:
    """The call with the changes applied in order. The arguments of `call` are not modified."""
    names = [each for each, _ in _names(name, call)]
    leaves, spec = tree_flatten((call.args, call.kwargs))
    alone, garbage = call.alone, []
    for kind, *rest in changes:
        if kind == "garbage":
            garbage.append(rest[0])
        elif kind == "sizes":
            old, new = rest
            for i, leaf in enumerate(leaves):
                if _is_plain(leaf):
                    leaves[i] = _resized(leaf, old, new)
                elif type(leaf) is int and leaf == old and names[i] in SIZES:
                    leaves[i] = new
        elif kind == "dtypes":
            old, new = (getattr(torch, each) for each in rest)
            for i, leaf in enumerate(leaves):
                if _is_plain(leaf) and leaf.dtype == old:
                    leaves[i] = _cast(leaf, new)
        elif kind == "number":
            if isinstance(leaves[rest[0]], torch.Tensor):
                raise TypeError(f"argument {rest[0]} is a tensor, and not a number")
            leaves[rest[0]] = complex(*rest[1]["complex"]) if isinstance(rest[1], dict) else rest[1]
        elif kind == "alias":
            i, j, how = rest
            if _is_plain(leaves[i]) and _is_plain(leaves[j]):
                leaves[j], leaves[i] = _aliased(leaves[j], leaves[i], how)
        elif kind == "host":
            if _is_plain(leaves[rest[0]]):
                leaves[rest[0]] = Stays(_scalar(leaves[rest[0]]))
        elif _is_plain(leaves[rest[0]]):
            leaves[rest[0]] = _ONE[kind](leaves[rest[0]], *rest[1:])
    args, kwargs = tree_unflatten(leaves, spec)
    made = Call(args, kwargs, alone)
    for k in garbage:
        made = generated.garbage(name, made, k)
    return made


# ---- sizes and dtypes ----


def _picked(t: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The tensor with dimension `dim` repeated or cut to `size`; an empty dimension is filled with ones."""
    if size and not t.shape[dim]:
        return torch.ones((*t.shape[:dim], size, *t.shape[dim + 1 :])).to(t.dtype)
    return t.index_select(dim, torch.arange(size) % max(1, t.shape[dim]))


def _resized(t: torch.Tensor, old: int, new: int) -> torch.Tensor:
    for dim, size in enumerate(t.shape):
        if size == old:
            t = _picked(t, dim, new)
    return t


def _scalar(t: torch.Tensor) -> torch.Tensor:
    return t.resolve_conj().resolve_neg().flatten()[0].clone() if t.numel() else torch.ones((), dtype=t.dtype)


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first of size 1": lambda t: _picked(t, 0, 1) if t.dim() else t,
    "last of size 1": lambda t: _picked(t, t.dim() - 1, 1) if t.dim() else t,
    "one dimension less": lambda t: _picked(t, 0, 1)[0] if t.dim() else t,
    "one dimension more": lambda t: t[None],
    "0-dim": _scalar,
    "first of size 0": lambda t: _picked(t, 0, 0) if t.dim() else t,
    "last of size 0": lambda t: _picked(t, t.dim() - 1, 0) if t.dim() else t,
    "last longer": lambda t: _picked(t, t.dim() - 1, t.shape[-1] + 1) if t.dim() else t,
    "first longer": lambda t: _picked(t, 0, t.shape[0] + 1) if t.dim() else t,
}

DTYPES = (
    "float64", "bfloat16", "float16", "complex64", "complex128", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float32",
)  # fmt: skip


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    t = t.resolve_conj().resolve_neg()
    if t.is_complex() and not dtype.is_complex:
        t = t.real
    if t.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        t = (t * 4).nan_to_num(0.0, 3.0, 0.0)  # fractions become different integers
    return t.to(dtype)


# ---- values ----


def _special(dtype: torch.dtype, which: str) -> list[Any]:
    if dtype == torch.bool:
        return [True, False] if which == "mixed" else [True]
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return {"extremes": [info.max, info.min], "mixed": [info.max, 0, info.min, 1], "-0.": [0]}.get(
            which, [info.min]
        )
    info = torch.finfo(dtype)
    named = {
        "nan": [math.nan], "inf": [math.inf, -math.inf], "-0.": [-0.0], "denormal": [info.smallest_normal / 4],
        "extremes": [info.max, info.min],
        "mixed": [math.nan, 1.5, -0.0, math.inf, info.smallest_normal / 4, -math.inf, info.max, info.min, -2.0, 0.0],
    }  # fmt: skip
    return named[which]


VALUES = ("nan", "inf", "-0.", "denormal", "extremes", "mixed")


def _values(t: torch.Tensor, which: str) -> torch.Tensor:
    """The tensor with every second element special, or all elements for "mixed"."""
    special = _special(t.dtype, which)
    out = t.resolve_conj().resolve_neg().contiguous().clone()
    flat = out.view(-1)
    chosen = flat[:: 1 if which == "mixed" else 2]
    chosen.copy_(torch.tensor([special[i % len(special)] for i in range(chosen.numel())], dtype=t.dtype))
    return out


# ---- layouts ----


def _padded(sizes: list[int]) -> list[int] | None:
    """The tensor with a gap after each row."""
    return layouts._contiguous([*sizes[:-1], sizes[-1] + 3]) if len(sizes) > 1 else None


def _channels_last(sizes: list[int]) -> list[int] | None:
    if len(sizes) not in (4, 5):
        return None
    strides = layouts._contiguous([sizes[0], *sizes[2:], sizes[1]])
    return [strides[0], 1, *strides[1:-1]]


def _overlapping(sizes: list[int]) -> list[int] | None:
    """A sliding window: all strides are 1, so neighbors in different dimensions share memory."""
    return [1] * len(sizes) if len(sizes) > 1 else None


LAYOUTS: dict[str, Callable[[list[int]], list[int] | None]] = {
    **layouts.LAYOUTS, "padded": _padded, "channels last": _channels_last, "overlapping": _overlapping,
}  # fmt: skip


def _laid_out(t: torch.Tensor, how: str, offset: int = 0) -> torch.Tensor:
    """The tensor in a different layout. Where elements share memory, the last one written remains."""
    t = t.resolve_conj().resolve_neg()
    strides = LAYOUTS[how](list(t.shape)) if how in LAYOUTS else layouts._contiguous(list(t.shape))
    if strides is None or not t.numel():
        return t
    span = sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True)) + 1
    storage = _filler(offset + span + _PAD, t.dtype)
    where = torch.arange(storage.numel()).as_strided(t.shape, strides, offset)
    storage[where.reshape(-1)] = t.reshape(-1)
    return storage.as_strided(t.shape, strides, offset)


def _filler(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) % 2).bool() if dtype == torch.bool else torch.full((count,), 7).to(dtype)


def _moved(t: torch.Tensor, offset: int) -> torch.Tensor:
    """The same layout at a different storage offset."""
    t = t.resolve_conj().resolve_neg()
    if not t.numel():
        return _filler(offset, t.dtype)[offset:].as_strided(t.shape, t.stride())
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
    flat = t.as_strided((span,), (1,), t.storage_offset())
    storage = torch.cat([_filler(offset, t.dtype), flat, _filler(_PAD, t.dtype)])
    return storage.as_strided(t.shape, t.stride(), offset)


def _bit(t: torch.Tensor, how: str) -> torch.Tensor:
    """The same elements, stored lazily conjugated or negated."""
    t = t.resolve_conj().resolve_neg()
    if how == "conj":
        return t.conj().resolve_conj().conj() if t.is_complex() else t
    return torch._neg_view(t.neg()) if t.is_floating_point() or t.is_complex() else t


def _emptied(t: torch.Tensor, how: str) -> torch.Tensor:
    return torch.empty(0, dtype=t.dtype)


_ONE: dict[str, Callable[..., torch.Tensor]] = {
    "shape": lambda t, how: SHAPES[how](t),
    "dtype": lambda t, new: _cast(t, getattr(torch, new)),
    "values": _values,
    "layout": _laid_out,
    "offset": _moved,
    "bit": _bit,
    "out": _emptied,
}


# ---- aliases ----

ALIASES = ("same", "shifted", "transposed")


def _aliased(first: torch.Tensor, second: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arguments on one storage: the same tensor twice, views that overlap in all but one element, or a transpose."""
    if how == "transposed" and first.dim() > 1:
        return first, first.transpose(0, 1)
    if how == "shifted" and first.numel():
        plain = first.resolve_conj().resolve_neg().contiguous()
        storage = torch.cat([plain.reshape(-1), plain.reshape(-1)[:1]])
        shape = plain.shape
        return storage[:-1].view(shape), storage[1:].view(shape)
    return first, first


# ---- what a change may be ----

_NUMBER = (bool, int, float, str, dict)
_FORMS: dict[str, tuple[Any, ...]] = {  # of what follows the kind: a type, or the values
    "shape": (int, SHAPES), "dtype": (int, DTYPES), "values": (int, VALUES), "layout": (int, LAYOUTS),
    "offset": (int, int), "bit": (int, ("neg", "conj")), "out": (int, ("empty",)), "garbage": (int,), "sizes": (int, int),
    "dtypes": (DTYPES, DTYPES), "number": (int, _NUMBER), "alias": (int, int, ALIASES), "host": (int,),
}  # fmt: skip


def wrong(change: Any) -> str:
    """What is wrong with a change that somebody wrote; "" if nothing is. Whether it fits a call is not checked."""
    if not isinstance(change, list) or not change or not isinstance(change[0], str) or change[0] not in _FORMS:
        return f"the changes are lists that begin with {', '.join(sorted(_FORMS))}, not {change}"
    kind, *rest = change
    form = _FORMS[kind]
    if len(rest) != len(form):
        return f"{change} is not {kind!r} and {len(form)} more"
    for value, one_of in zip(rest, form, strict=True):
        if one_of is _NUMBER:
            if not isinstance(value, _NUMBER) or isinstance(value, dict) and [*value] != ["complex"]:
                return f'{change} ends in {value!r}, and not in a number, a text, or {{"complex": [REAL, IMAGINARY]}}'
        elif one_of is int:
            if type(value) is not int or value < 0:
                return f"{change} has {value!r} where a number from 0 on is expected"
        elif not isinstance(value, str) or value not in one_of:
            return f"{change} has {value!r} where one of {', '.join(one_of)} is expected"
    return ""


def given_to(name: str, call: Call) -> list[tuple[Any, Any]]:
    """Arguments of the schema, and their values."""
    arguments = {argument.name: argument for argument in dispatch.schema(name).arguments}
    return [*zip(arguments.values(), call.args, strict=False), *((arguments[k], v) for k, v in call.kwargs.items())]
