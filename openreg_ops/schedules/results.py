"""Reads the result of a program (explore.py), and says how two results differ."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import sys
import types
from typing import Any

import torch

__all__ = ["difference_of", "values_of"]

PLAIN = int | float | complex | str | bytes | bytearray | range | None | torch.dtype | torch.device | torch.layout
STATEFUL = torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
# Modules of Python and NumPy whose objects are values, if they compare: dates, fractions, paths, dtypes.
COMPARABLE = {"builtins", "datetime", "decimal", "fractions", "ipaddress", "numpy", "pathlib", "re", "uuid", "zoneinfo"}
# Types that the CPU cannot compare, and types that hold the same bits or values.
AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
WIDER = {torch.complex32: torch.complex64}


def values_of(result: Any) -> dict[str, Any]:
    """The values in a result, by their place in it. Read as a caller would: on the current stream, and by the host."""
    values: dict[str, Any] = {}
    _read("result", result, values, set())
    return values


def _read(name: str, value: Any, values: dict[str, Any], inside: set[int]) -> None:
    """Add the values in `value` to `values`; `inside` has the ids of the containers around it."""
    if id(value) in inside:
        values[name] = "a container around it"
        return
    inside.add(id(value))
    parts = _tensor(value) if isinstance(value, torch.Tensor) else _parts(value)
    if isinstance(parts, list):
        values[name] = type(value)
        for part, inner in parts:
            _read(name + part, inner, values, inside)
    else:
        values[name] = parts
    inside.discard(id(value))


def _tensor(x: torch.Tensor) -> Any:
    x = x.detach()
    if x.is_nested:
        return [(f"[{i}]", tensor) for i, tensor in enumerate(x.unbind())]
    if x.device.type == "meta":
        return (x.dtype, x.shape, x.stride())
    if x.is_quantized:
        return [(".scheme", str(x.qscheme())), (".values", x.dequantize())]
    return (x.to_dense() if x.layout != torch.strided else x).cpu().resolve_conj().resolve_neg().clone()


def _parts(value: Any) -> Any:
    """The parts of a value with their names. For a value without parts: what is compared instead."""
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    if isinstance(value, PLAIN):
        return value
    if module == "numpy" and hasattr(value, "dtype"):
        return _array(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, STATEFUL):
        return [(f".{key}", state) for key, state in value.state_dict().items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, collections.abc.Mapping):
        return [
            (f"[{key!r}]" if isinstance(key, PLAIN) else f"[{i}]", item) for i, (key, item) in enumerate(value.items())
        ]
    if isinstance(value, collections.abc.Set):
        return [(f"{{{i}}}", item) for i, item in enumerate(sorted(value, key=_by_value))]
    if isinstance(value, collections.abc.Sequence | collections.abc.ValuesView | memoryview):
        names = getattr(kind, "_fields", ())  # of a named tuple
        return [(f".{names[i]}" if names else f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, enum.Enum | type) or (module in COMPARABLE and kind.__eq__ is not object.__eq__):
        return str(value)
    if isinstance(value, types.SimpleNamespace) or module not in {*sys.stdlib_module_names, "torch", "openreg_ops"}:
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        return [(f".{name}", attribute) for name, attribute in attributes.items()]
    return kind


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _by_value(value: Any) -> str:
    return repr([part.tolist() if isinstance(part, torch.Tensor) else part for part in values_of(value).values()])


def _array(value: Any) -> Any:
    """A NumPy array or number."""
    try:
        return torch.as_tensor(value.copy())
    except (TypeError, RuntimeError, ValueError):  # a type that PyTorch lacks, such as text, dates and records
        if not value.shape:
            return f"{value.dtype} {value}"
        return [(".dtype", str(value.dtype)), (".shape", value.shape), (".values", value.tolist())]


def difference_of(values: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> str | None:
    """Where two results first differ."""
    for name in values:
        if name in expected and (said := _differs(values[name], expected[name], rtol, atol)):
            return f"{name}{said}"
    if values.keys() != expected.keys():
        here, there = ([*one.keys() - other.keys()] for one, other in ((values, expected), (expected, values)))
        here, there = (", ".join(sorted(names)[:3]) or "none" for names in (here, there))
        return f"the result has the extra parts {here}, and in the program's order it has the extra parts {there}"
    return None


def _differs(a: Any, b: Any, rtol: float, atol: float) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if isinstance(a, type) and isinstance(b, type):  # a class in the program's body is a new one each time
            a, b = (f"{kind.__module__}.{kind.__qualname__}" for kind in (a, b))
        same = type(a) is type(b) and (a == b or (a != a and b != b))
        return None if same else f" is {_said(a)}, but {_said(b)} in the program's order"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f" is {a.dtype} of {list(a.shape)}, but {b.dtype} of {list(b.shape)} in the program's order"
    x, y = _comparable(a), _comparable(b)
    if x.is_floating_point() or x.is_complex():
        wrong = ~torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    else:
        wrong = x != y
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f": {int(wrong.sum())} of {wrong.numel()} elements differ; at {list(at)} it is {a[at].item()}, "
        f"but {b[at].item()} in the program's order"
    )


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) < 200 else text[:200] + "..."


def _comparable(x: torch.Tensor) -> torch.Tensor:
    if x.dtype in AS_SIGNED:
        return x.view(AS_SIGNED[x.dtype])
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.float()
    return x.to(WIDER.get(x.dtype, x.dtype))
