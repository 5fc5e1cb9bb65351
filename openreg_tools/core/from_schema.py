"""Samples made from an operator's schema: calls that the CPU may accept, and damaged ones.

`call(op, k)` is the k-th call of an operator, and `garbage(op, sample, k)` damages a sample in the k-th way. Equal numbers
give equal arguments in every process. Everything is on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools import dispatch
from openreg_tools.core.move import Stays, StorageOf
from openreg_tools.core.samples import Sample
from openreg_tools.core.variations import SIZES

__all__ = ["arguments_of", "call", "garbage", "is_alone", "overload"]


def overload(name: str) -> Any:
    """``torch.ops.aten.add.Tensor`` for ``aten::add.Tensor``."""
    namespace, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), which or "default")


# ---- types ----


@dataclasses.dataclass(frozen=True)
class _Type:
    """The type of an argument: a kind of JIT type, whether it may be None, and the length of a list (-1: any)."""

    kind: str
    optional: bool = False
    length: int | None = None

    @classmethod
    def of(cls, argument: Any) -> _Type:
        type_, optional, length = argument.real_type, False, None
        if type_.kind() == "OptionalType":
            type_, optional = type_.getElementType(), True
        if type_.kind() == "ListType":
            type_, length = type_.getElementType(), argument.N if argument.N is not None else -1
            if type_.kind() == "OptionalType":
                type_ = type_.getElementType()
        return cls(type_.kind().removesuffix("Type").replace("SymInt", "Int"), optional, length)


# ---- calls that the CPU may accept ----

_SHAPES = (
    (3, 3), (2, 3), (4,), (2, 3, 4), (1, 2, 5, 5), (2, 2, 4, 4), (), (1, 2, 3, 4, 4), (2, 3, 3), (4, 4), (1, 4, 4, 4), (8,),
)  # fmt: skip
_DTYPES = (
    torch.float32, torch.float32, torch.float32, torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8,
    torch.float32, torch.int32, torch.bfloat16, torch.int8,
)  # fmt: skip
_WORDS = {
    "reduce": ("sum", "mean", "prod", "amax", "amin"),
    "rounding_mode": ("floor", "trunc"),
    "mode": ("reduced", "complete", "constant", "reflect"),
    "pad_mode": ("reflect", "constant"),
    "padding": ("valid", "same"),
    "UPLO": ("L", "U"),
    "ord": ("fro", "nuc"),
    "norm": ("backward", "forward", "ortho"),
    "approximate": ("none", "tanh"),
    "indexing": ("ij", "xy"),
    "side": ("left", "right"),
    "driver": ("gelsd", "gels", "gelsy"),
    "driver_name": ("gelsd", "gels"),
    "equation": ("ij,jk->ik", "i,i->i"),
}
_INDICES = ("index", "indices", "idx", "target", "labels", "offsets", "lengths", "batch_sizes", "pivots", "crow", "col_", "ccol", "row_", "repeats", "segment", "sorter")  # fmt: skip
_MASKS = ("mask", "condition", "bool")


class _Maker:
    """One call's choices: a shape and a dtype that most tensors share."""

    def __init__(self, name: str, k: int) -> None:
        self.random = random.Random(f"{name} {k}")
        self.k = k
        self.shape = _SHAPES[k % len(_SHAPES)] if k < 3 * len(_SHAPES) else self.random.choice(_SHAPES)
        self.dtype = _DTYPES[k // len(_SHAPES) % len(_DTYPES)] if k >= len(_SHAPES) else torch.float32
        self.uniform = 1.0 if k < len(_SHAPES) else self.random.choice((0.95, 0.7, 0.4))  # tensors of the shared shape
        self.count = 2 if k < len(_SHAPES) else self.random.randint(1, 3)
        self.defaults = k < 2 * len(_SHAPES) or self.random.random() < 0.6
        torch.manual_seed(k)

    def value(self, argument: Any) -> Any:
        type_ = _Type.of(argument)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.is_out:
            dtypes = (self.dtype, self.dtype, torch.int64, torch.float32)
            made = [torch.empty(0, dtype=self.random.choice(dtypes)) for _ in range(self.count)]
            return made[0] if type_.length is None else made
        if type_.kind == "DeviceObj":
            return torch.device("cpu")
        if argument.has_default_value() and (self.defaults or self.random.random() < 0.3):
            return argument.default_value
        if type_.optional and self.random.random() < 0.3:
            return None
        if type_.length is None:
            return self.one(type_.kind, argument.name)
        return self.list(type_, argument.name)

    def one(self, kind: str, name: str) -> Any:
        r = self.random
        match kind:
            case "Tensor":
                return self.tensor(name)
            case "Int":
                if name.startswith(("dim", "axis")):
                    return r.choice((0, -1, 1))
                if "size" in name or name in (
                    "n",
                    "m",
                    "steps",
                    "groups",
                    "num_classes",
                    "num_layers",
                    "N",
                    "C",
                    "HxW",
                ):
                    return r.choice((1, 2, 3, 4))
                return r.choice((0, 1, 1, 2, 3))
            case "Float":
                return r.choice((0.5, 1.0, 0.1, 1e-5, 2.0))
            case "Number":
                return r.choice((1, 2, 0.5, 1, True)) if self.dtype.is_floating_point else r.choice((1, 2, 3))
            case "Bool":
                return r.random() < 0.5
            case "String":
                return r.choice(_WORDS.get(name, ("sum",)))
            case "ScalarTypeType" | "ScalarType":
                return r.choice((self.dtype, torch.float32, torch.float64))
            case "Layout":
                return torch.strided
            case "MemoryFormat":
                return torch.contiguous_format
            case "Generator":
                return torch.Generator().manual_seed(1)
            case "Storage":
                return StorageOf(torch.zeros(16, dtype=self.dtype))
            case "DeviceObj":
                return torch.device("cpu")
        return None

    def list(self, type_: _Type, name: str) -> list[Any]:
        r, rank = self.random, len(self.shape)
        if type_.kind == "Int":
            if "stride" == name and type_.length == -1 and r.random() < 0.5:
                return list(torch.empty(self.shape, device="meta").stride())
            if name in SIZES or name in ("stride", "strides", "repeats"):
                if type_.length == -1 and r.random() < 0.8:
                    return list(self.shape)
            if name.startswith(("dim", "axis")):
                return r.sample(range(rank), r.randint(0, rank)) if r.random() < 0.5 else [0][:rank]
            length = type_.length if type_.length > 0 else r.choice((1, 2, 3, max(0, rank - 2), rank, 2 * rank))
            if name.startswith(("pad", "output_pad")):
                return [r.choice((0, 0, 1))] * length
            if name.startswith(("stride", "dilation")):
                return [r.choice((1, 1, 2))] * length
            return [r.choice((1, 2, 3)) for _ in range(length)] if r.random() < 0.3 else [r.choice((1, 2, 3))] * length
        count = type_.length if type_.length > 0 else self.count
        return [self.one(type_.kind, name) for _ in range(count)]

    def tensor(self, name: str) -> torch.Tensor:
        r, shape = self.random, self.shape
        if r.random() > self.uniform:
            last, first = shape[-1:], shape[:1]
            shape = r.choice(
                [last, shape[1:2], first, shape[:-1], (), last * 2, (*shape[:1], *shape[2:]), first + last, (*shape, 2),
                 (shape[1:2] or (2,)) * 2 + (2,) * max(0, len(shape) - 2), (1, *shape), r.choice(_SHAPES), (*shape[:-1], 1)]
            )  # fmt: skip
        dtype = self.dtype
        if any(word in name for word in _INDICES) and r.random() < 0.8:
            return torch.randint(0, max(1, min([2, *shape])), shape, dtype=torch.int64)
        if any(word in name for word in _MASKS) and r.random() < 0.8:
            dtype = torch.bool
        elif self.uniform < 1 and r.random() < 0.1:
            dtype = r.choice(_DTYPES)
        return _filled(shape, dtype)


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).to(dtype)
    return torch.randint(0, 3, shape).to(dtype)


def call(name: str, k: int) -> Sample:
    """The k-th call of an operator. The first ones give every tensor one shape, later ones try more."""
    maker = _Maker(name, k)
    made = [(argument, maker.value(argument)) for argument in dispatch.schema(name).arguments]
    return Sample(
        *(value for argument, value in made if not argument.kwarg_only),
        **{argument.name: value for argument, value in made if argument.kwarg_only},
    )


def arguments_of(name: str, sample: Sample) -> list[tuple[Any, Any]]:
    """The arguments of the schema that a sample gives, and their values."""
    arguments = {argument.name: argument for argument in dispatch.schema(name).arguments}
    positional = (argument for argument in arguments.values() if not argument.kwarg_only)
    return [
        *zip(positional, sample.args, strict=False), *((arguments[key], value) for key, value in sample.kwargs.items())
    ]  # fmt: skip


# ---- garbage ----

_HUGE = (2**31, 2**62, -(2**63), 2**63 - 1)


def _bad_tensor(r: random.Random, good: Any) -> Any:
    shape = tuple(good.shape) if isinstance(good, torch.Tensor) and not good.is_nested else (2, 3)
    dtype = good.dtype if isinstance(good, torch.Tensor) else torch.float32
    if not (dtype.is_floating_point or dtype.is_complex) and dtype not in _DTYPES:
        dtype = torch.float32

    def resized() -> torch.Tensor:
        tensor = torch.ones(2, 3)
        tensor.untyped_storage().resize_(0)
        return tensor

    dense = lambda shape, dtype=dtype: _filled(shape, dtype)  # noqa: E731
    return r.choice(
        [
            lambda: None,
            lambda: dense((0,)),
            lambda: dense(()),
            lambda: dense((*shape, 1)),
            lambda: dense(shape[:-1]),
            lambda: dense(tuple(size + 1 for size in shape)),
            lambda: dense(tuple(reversed(shape))),
            lambda: dense((*shape[:-1], 0)),
            lambda: dense((1,) * 7),
            lambda: dense(shape, r.choice(_DTYPES)),
            lambda: dense(shape, r.choice((torch.float16, torch.int16, torch.complex128))),
            lambda: dense(shape, torch.float32).to(torch.float8_e4m3fn),
            lambda: torch.empty(shape, dtype=dtype, device="meta"),
            lambda: Stays(dense(shape)),
            lambda: dense((1,) * len(shape)).expand(shape),
            lambda: dense((*shape, 2))[..., 0],
            lambda: dense(shape, torch.float32).to_sparse() if shape else dense(shape),
            lambda: torch.quantize_per_tensor(dense(shape, torch.float32), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
            lambda: dense(shape, torch.complex64).conj(),
            lambda: torch._neg_view(dense(shape, torch.float32)),
            resized,
            lambda: dense(shape, torch.int64) * 10**12,
            lambda: dense(shape, torch.int64) - 10,
            lambda: dense(shape, torch.float32) * math.nan,
        ]
    )()


def _bad_number(r: random.Random, kind: str) -> Any:
    match kind:
        case "Float":
            return r.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324))
        case "Number":
            return r.choice((math.nan, math.inf, -1, 0, 2**62, 1e308, 1j, True, -(2**63)))
        case "Bool":
            return r.random() < 0.5
        case "ScalarTypeType" | "ScalarType":
            return r.choice((99, -1, 45, 2**40, torch.qint8, torch.complex64, torch.bool, torch.bits8, torch.float16))
        case "Layout":
            return r.choice((99, -1, torch.sparse_coo, torch.sparse_csr))
        case "MemoryFormat":
            return r.choice((99, -1, torch.channels_last, torch.channels_last_3d, torch.preserve_format))
    return r.choice((-1, 0, 1, 2, 3, -2, 99, 1000, *_HUGE))


def _bad_value(r: random.Random, type_: _Type, good: Any) -> Any:
    if r.random() < (0.1 if type_.optional else 0.03):
        return None
    if type_.length is not None:
        first = (good[0] if isinstance(good, (list, tuple)) and good else None) if type_.kind == "Tensor" else good
        one = dataclasses.replace(type_, optional=False, length=None)
        if r.random() < 0.2:
            return []
        if isinstance(good, (list, tuple)) and good and r.random() < 0.5:
            damaged = list(good)
            damaged[r.randrange(len(good))] = _bad_value(r, one, first)
            return damaged
        if isinstance(good, (list, tuple)) and r.random() < 0.5:
            return [*good, *good[:1]] if r.random() < 0.5 else list(good[:-1])
        return [_bad_value(r, one, first) for _ in range(r.randint(0, 4))]
    match type_.kind:
        case "Tensor":
            return _bad_tensor(r, good)
        case "String":
            return r.choice(("", "garbage", "x" * 1000, "\0", "sum"))
        case "Generator":
            return torch.Generator()
        case "DeviceObj":
            return r.choice((torch.device("cpu"), torch.device("cpu"), torch.device("meta")))
        case "Storage":
            return StorageOf(torch.zeros(r.choice((0, 1, 100))))
    return _bad_number(r, type_.kind)


def garbage(name: str, good: Sample, k: int) -> Sample:
    """`good` with the k-th damage: one to three arguments are wrong."""
    r = random.Random(f"garbage {name} {k}")
    torch.manual_seed(k)
    args, kwargs = list(good.args), dict(good.kwargs)
    arguments = [argument for argument in dispatch.schema(name).arguments]
    positional = [argument for argument in arguments if not argument.kwarg_only]
    for argument in r.sample(arguments, min(len(arguments), r.choice((1, 1, 1, 2, 3)))):
        where: Any = kwargs if argument.kwarg_only else args
        key = argument.name if argument.kwarg_only else positional.index(argument)
        if key in where if argument.kwarg_only else key < len(where):
            where[key] = _bad_value(r, _Type.of(argument), where[key])
    return Sample(*args, **kwargs)


def is_alone(sample: Sample) -> bool:
    """Returns true if the CPU cannot make this call: an argument is on another device, or has no memory."""

    def stands_alone(value: Any) -> bool:
        if isinstance(value, Stays):
            return True
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        return value.is_nested or value.is_meta or (value.numel() > 0 and not value.untyped_storage().nbytes())

    return any(map(stands_alone, tree_leaves((sample.args, sample.kwargs))))
