"""The arguments of one call: as an object, as text on a command line, and for display.

Other samples come from PyTorch's OpInfo (`core.opinfo`) or are made from a schema (`core.from_schema`);
`core.variations` changes them.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import torch
from torch import Tensor

from openreg_tools.core import device as devices
from openreg_tools.core.move import RequiresGrad, Stays, StorageOf
from openreg_tools.core.options import Wrong

__all__ = [
    "Sample",
    "dtype_name",
    "dtype_of",
    "parse",
    "sample_of",
    "shape_of",
    "shown",
]


class Sample:
    """The arguments of one call: ``Sample(x, weight, eps=1e-6)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        words = [shown(value) for value in self.args]
        return ", ".join([*words, *(f"{name}={shown(value)}" for name, value in self.kwargs.items())])


# ---- for display ----


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def shape_of(x: Tensor) -> list[int]:
    """The shape, with -1 for what may differ among the parts of a nested tensor."""
    return [x.size(0)] + [-1] * (x.dim() - 1) if x.is_nested else list(x.shape)


def shown(value: Any) -> str:
    """A value as in a report: ``float32[3, 4]``."""
    match value:
        case Tensor():
            layout = "" if value.layout == torch.strided else f" {value.layout}"
            if not layout and not value.is_nested and not value.is_contiguous():
                layout = f" strides {list(value.stride())}"
            return f"{dtype_name(value.dtype)}{shape_of(value)}{layout}"
        case list() | tuple():
            return f"[{', '.join(map(shown, value))}]"
        case StorageOf():
            return f"storage of {shown(value.tensor)}"
        case Stays():
            return f"{shown(value.tensor)} on the CPU"
        case RequiresGrad():
            return f"{shown(value.tensor)} that requires a gradient"
    return repr(value)


def sample_of(value: Any) -> Sample:
    """A `Sample` from a caller's value: a `Sample`, an argument tuple, or an OpInfo SampleInput."""
    if isinstance(value, Sample):
        return value
    if hasattr(value, "input") and hasattr(value, "args") and hasattr(value, "kwargs"):
        return Sample(value.input, *value.args, **value.kwargs)
    if hasattr(value, "args") and hasattr(value, "kwargs"):
        return Sample(*value.args, **value.kwargs)
    if isinstance(value, (tuple, list)):
        return Sample(*value)
    if isinstance(value, Tensor):
        return Sample(value)
    raise ValueError(f"expected a sample to be a tuple of arguments or a Sample, but got {type(value).__name__}")


# ---- samples as text ----

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "c64": torch.complex64, "c128": torch.complex128, "b8": torch.bool, "u8": torch.uint8,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
}  # fmt: skip


def dtype_of(text: str) -> torch.dtype:
    """The dtype with a name such as float32 or f32."""
    dtype = DTYPES.get(text) or getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise Wrong(f"there is no dtype {text!r}; short names are {', '.join(DTYPES)}")
    return dtype


_TENSOR = re.compile(r"([a-z]+\d\w*|bool)\[([\d, ]*)\](?:@\(([\d, ]*)\))?(?:@([a-z_\d]+(?::\d+)?))?$")


def parse(text: str, device: str = "cpu") -> Sample:
    """A sample from ``f32[3,4]@openreg, bf16[4]@(2), [f32[2], f32[2]], 1e-5, dim=-1``.

    A tensor is its dtype and shape, with ``@(strides)`` if they matter and ``@device`` if it is not on `device`;
    everything else is a Python literal.
    """
    numbers = torch.Generator().manual_seed(0)
    args, kwargs = [], {}
    for piece in _split(text):
        name, equals, value = piece.partition("=")
        if equals and name.strip().isidentifier():
            kwargs[name.strip()] = _value(value.strip(), numbers, device)
        else:
            args.append(_value(piece, numbers, device))
    return Sample(*args, **kwargs)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and strings."""
    pieces, depth, quote, current = [], 0, "", ""
    for character in text:
        quote = "" if character == quote else character if not quote and character in "'\"" else quote
        depth += 0 if quote else (character in "[(") - (character in "])")
        if character == "," and not depth and not quote:
            pieces.append(current.strip())
            current = ""
        else:
            current += character
    return [piece for piece in [*pieces, current.strip()] if piece]


def _tensor(match: re.Match[str], numbers: torch.Generator, device: str) -> torch.Tensor:
    devices.usable(match[4] or device)
    place = torch.device(match[4] or device)
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    dtype = dtype_of(match[1])
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)
    else:
        x = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=numbers).to(dtype)
    if match[3] is None:
        return x.to(place)
    strides = [int(stride) for stride in match[3].split(",") if stride.strip()]
    if len(strides) != len(shape):
        raise Wrong(f"{match[0]}: there are {len(strides)} strides for {len(shape)} dimensions")
    return torch.empty_strided(shape, strides, dtype=dtype, device=place).copy_(x)


def _value(text: str, numbers: torch.Generator, device: str) -> Any:
    if match := _TENSOR.match(text):
        try:
            return _tensor(match, numbers, device)
        except RuntimeError as error:  # no such device, no memory
            raise Wrong(f"{text}: {str(error).splitlines()[0]}") from None
    if text.startswith("[") and text.endswith("]") and any(_TENSOR.match(piece) for piece in _split(text[1:-1])):
        return [_value(piece, numbers, device) for piece in _split(text[1:-1])]
    if text.startswith("torch.") and hasattr(torch, text.removeprefix("torch.")):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError) as error:
        raise Wrong(f"{text!r} is neither a tensor such as f32[3,4] nor a Python literal") from error
