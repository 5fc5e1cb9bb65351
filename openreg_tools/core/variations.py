"""Variations of the arguments of a call: other layouts, sizes, dtypes, values, shapes, offsets and aliases.

A variation of a tensor is a new tensor; the one that it starts from is not modified. `changed` applies a list of
variations, which JSON can hold, to a whole sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools.core.compare import is_small
from openreg_tools.core.move import Stays
from openreg_tools.core.samples import Sample

__all__ = [
    "ALIASES",
    "BITS",
    "DTYPES",
    "LAYOUTS",
    "SHAPES",
    "VALUES",
    "aliased",
    "cast",
    "changed",
    "is_strided",
    "of_sizes",
    "offset",
    "padded",
    "permuted",
    "reversed_in",
    "sizes_of",
    "slices",
    "stepped",
    "strides_of",
    "tensors_of",
    "unaligned",
    "with_values",
]


def is_strided(value: Any) -> bool:
    """Returns true if a value is a tensor with strides and its own memory: not sparse, nested, quantized or freed."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.is_quantized:
        return False
    return value.is_meta or not value.numel() or bool(value.untyped_storage().nbytes())


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# ---- layouts: the same values with other strides ----


def reversed_in(x: Tensor) -> Tensor:
    """A copy with the elements in the opposite order along each dimension."""
    raw = x.view(torch.uint8) if is_small(x) else x  # PyTorch cannot flip float8
    return raw.flip(tuple(range(x.dim()))).view(x.dtype)


def permuted(x: Tensor) -> Tensor:
    """The last dimension is the slowest in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x.clone()


def batch_swapped(x: Tensor) -> Tensor:
    """The first two of three or more dimensions are swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else x


def padded(x: Tensor) -> Tensor:
    """Other values stand before and after each row."""
    if x.dim() == 0:
        return torch.stack([x, x, x])[1]
    other = reversed_in(x)  # so that reading the wrong elements shows
    return torch.cat([other, x, other], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def stepped(x: Tensor) -> Tensor:
    """Every second element of the last dimension, and of the first."""
    x = torch.stack([x, x], -1)
    if x.dim() < 3:
        return x[..., 1]
    return torch.stack([x, x], 1).flatten(0, 1)[1::2][..., 1]


def expanded(x: Tensor) -> Tensor:
    """The elements of the first dimension that has several are the first one, and share its memory."""
    d = next((d for d, size in enumerate(x.shape) if size > 1), None)
    return x if d is None else x.narrow(d, 0, 1).expand_as(x)


def channels_last(x: Tensor) -> Tensor:
    """The tensor in channels last; one of two or three dimensions gets more dimensions for that."""
    if x.dim() < 2:
        return x
    x = x if x.dim() >= 4 else x.expand(*(2, 3)[: 4 - x.dim()], *x.shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def _inside(x: Tensor, before: int) -> Tensor:
    """Contiguous, `before` elements into its storage. What surrounds it is NaN, or an integer that it has itself."""
    if not x.numel():
        return x
    flat = x.reshape(-1)
    around = flat.new_full((before,), torch.nan) if _has_fractions(x) else flat[:1].repeat(before)
    return torch.cat([around, flat, around])[before:-before].view(x.shape)


def offset(x: Tensor) -> Tensor:
    """Contiguous, 16 bytes into its storage."""
    return _inside(x, max(1, 16 // x.element_size()))


def unaligned(x: Tensor) -> Tensor:
    """Contiguous, one element into its storage."""
    return _inside(x, 1)


# What makes a tensor of each layout.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": offset,
    "unaligned": unaligned,
    "permuted": permuted,
    "batch-swapped": batch_swapped,
    "padded": padded,
    "stepped": stepped,
    "expanded": expanded,
    "channels-last": channels_last,
}


def strides_of(layout: str, sizes: Sequence[int]) -> list[int] | None:
    """The strides of a tensor in a layout; None if it changes nothing for these sizes, or the sizes."""
    x = LAYOUTS[layout](torch.empty(tuple(sizes), device="meta"))
    same = x.is_contiguous() and layout != "stepped"  # which leaves a gap also after a single element
    return None if x.shape != tuple(sizes) or same else list(x.stride())


def slices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous slices of one buffer, as q, k and v of one projection are; the first starts it, the others are unaligned."""
    out = list(tensors)
    for dtype in {x.dtype for x in tensors}:
        mine = [i for i, x in enumerate(tensors) if x.dtype == dtype and x.layout == torch.strided and x.numel()]
        if len(mine) > 1:
            flat = [tensors[i].reshape(-1) for i in mine]
            parts = torch.cat([piece for x in flat for piece in (x, x[:1])]).split(
                [n for x in flat for n in (len(x), 1)]
            )
            for i, part in zip(mine, parts[::2], strict=True):
                out[i] = part.view(tensors[i].shape)
    return out


BITS = ("conj", "neg")


def _lazy(x: Tensor, bit: str) -> Tensor:
    """The same elements, stored conjugated or negated, in a view that undoes it."""
    if bit == "conj":
        return x.conj().resolve_conj().conj() if x.is_complex() else x
    return torch._neg_view(x.neg()) if _has_fractions(x) else x


# ---- sizes and shapes ----


def sizes_of(tensors: Iterable[Tensor]) -> list[int]:
    """The distinct sizes above one, starting with the largest tensor's."""
    ordered = sorted(tensors, key=lambda x: -x.dim())
    return list(dict.fromkeys(size for x in ordered for size in x.shape if size > 1))


def of_sizes(tensors: Iterable[Tensor], sizes: Mapping[int, int]) -> list[Tensor]:
    """Every dimension whose size is a key becomes as long as its value, by repeating or dropping elements."""
    out = []
    for x in tensors:
        for d, old in enumerate(x.shape):
            if old in sizes:
                x = _of_size(x, d, sizes[old])
        out.append(x)
    return out


def _of_size(x: Tensor, dim: int, size: int) -> Tensor:
    """Make one dimension longer or shorter; an empty one is filled with ones.

    Integers stay in order, with the first and the last one, because they may be the offsets of rows.
    """
    old = x.shape[dim]
    if size and not old:
        return torch.ones((*x.shape[:dim], size, *x.shape[dim + 1 :]), device=x.device).to(x.dtype)
    new = torch.arange(size, device=x.device)
    return x.index_select(dim, new % max(old, 1) if _has_fractions(x) else new * (old - 1) // max(size - 1, 1))


def _scalar(x: Tensor) -> Tensor:
    return x.flatten()[0].clone() if x.numel() else torch.ones((), dtype=x.dtype)


# Shapes that one tensor may have in place of its own, which the others then do not fit, or broadcast with.
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "first of size 1": lambda x: _of_size(x, 0, 1) if x.dim() else x,
    "last of size 1": lambda x: _of_size(x, x.dim() - 1, 1) if x.dim() else x,
    "one dimension less": lambda x: _of_size(x, 0, 1)[0] if x.dim() else x,
    "one dimension more": lambda x: x[None],
    "0-dim": _scalar,
    "empty": lambda x: x.flatten()[:0],
    "last longer": lambda x: _of_size(x, x.dim() - 1, x.shape[-1] + 1) if x.dim() else x,
    "first longer": lambda x: _of_size(x, 0, x.shape[0] + 1) if x.dim() else x,
    "transposed": lambda x: x.mT if x.dim() > 1 else x,
}

# ---- dtypes and values ----

DTYPES = (
    "float32", "float64", "bfloat16", "float16", "complex64", "complex128", "int64", "int32", "int16", "int8", "uint8",
    "bool",
)  # fmt: skip


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another dtype; fractions become different integers."""
    if x.is_complex() and not dtype.is_complex:
        x = x.real
    if x.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        x = (x * 4).nan_to_num(0.0, 3.0, 0.0)
    return x.to(dtype)


VALUES = ("nan", "inf", "-0.", "denormal", "extremes", "mixed")


def _special(dtype: torch.dtype, which: str) -> list[Any]:
    if dtype == torch.bool:
        return [True, False] if which == "mixed" else [True]
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return {"extremes": [high, low], "mixed": [high, 0, low, 1], "-0.": [0]}.get(which, [low])
    info = torch.finfo(dtype)
    return {
        "nan": [math.nan], "inf": [math.inf, -math.inf], "-0.": [-0.0], "denormal": [info.smallest_normal / 4],
        "extremes": [info.max, info.min],
        "mixed": [math.nan, 1.5, -0.0, math.inf, info.smallest_normal / 4, -math.inf, info.max, info.min, -2.0, 0.0],
    }[which]  # fmt: skip


def with_values(x: Tensor, which: str) -> Tensor:
    """Every second element is special, or every one for "mixed"."""
    special = _special(x.dtype, which)
    out = x.contiguous().clone()
    chosen = out.view(-1)[:: 1 if which == "mixed" else 2]
    chosen.copy_(torch.tensor([special[i % len(special)] for i in range(chosen.numel())], dtype=x.dtype))
    return out


# ---- aliases ----

ALIASES = ("same", "shifted", "transposed")


def aliased(first: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Two arguments on one storage: the same tensor twice, views that overlap in all but one element, or a transpose."""
    if how == "transposed" and first.dim() > 1:
        return first, first.transpose(0, 1)
    if how == "shifted" and first.numel():
        flat = first.reshape(-1)
        storage = torch.cat([flat, flat[:1]])
        return storage[:-1].view(first.shape), storage[1:].view(first.shape)
    return first, first


# ---- a whole sample ----

# Names of arguments that hold the sizes of tensors.
SIZES = {
    "size", "sizes", "shape", "self_sizes", "input_sizes", "input_size", "output_size", "sym_size", "normalized_shape"
}  # fmt: skip

Change = list[Any]  # the kind, the argument's position among the leaves of the sample, and which variation

_ONE: dict[str, Callable[[Tensor, str], Tensor]] = {
    "shape": lambda x, how: SHAPES[how](x),
    "dtype": lambda x, name: cast(x, getattr(torch, name)),
    "values": with_values,
    "layout": lambda x, how: LAYOUTS[how](x),
    "bit": _lazy,
    "out": lambda x, how: torch.empty(0, dtype=x.dtype),
}


def changed(sample: Sample, names: Sequence[str], changes: Iterable[Change]) -> Sample:
    """The sample with changes applied in order.

    Args:
        names: of the argument that each leaf of the sample belongs to.
    Raises:
        LookupError, RuntimeError, TypeError, ValueError: a change does not fit the sample.
    """
    leaves, spec = tree_flatten((list(sample.args), sample.kwargs))
    for kind, at, *how in changes:
        if kind == "sizes":
            leaves = [_of_other_size(x, name, {at: how[0]}) for x, name in zip(leaves, names, strict=True)]
        elif kind == "dtypes":
            old, new = getattr(torch, at), getattr(torch, how[0])
            leaves = [cast(_plain(x), new) if is_strided(x) and x.dtype == old else x for x in leaves]
        elif kind == "number":
            if isinstance(leaves[at], Tensor):
                raise TypeError(f"argument {at} is a tensor and not a number")
            leaves[at] = complex(*how[0]["complex"]) if isinstance(how[0], dict) else how[0]
        elif not is_strided(leaves[at]):
            raise TypeError(f"argument {at} is not a tensor with strides")
        elif kind == "alias":
            other, which = how
            leaves[other], leaves[at] = aliased(leaves[other], which)
        elif kind == "host":
            leaves[at] = Stays(_scalar(_plain(leaves[at])))
        else:
            leaves[at] = _ONE[kind](_plain(leaves[at]), *how)
    args, kwargs = tree_unflatten(leaves, spec)
    return Sample(*args, **kwargs)


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg()


def _of_other_size(leaf: Any, name: str, sizes: dict[int, int]) -> Any:
    if is_strided(leaf):
        return of_sizes([_plain(leaf)], sizes)[0]
    return sizes.get(leaf, leaf) if type(leaf) is int and name in SIZES else leaf


def tensors_of(sample: Sample) -> list[Tensor]:
    """The tensors among the arguments, also those in lists."""
    return [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
