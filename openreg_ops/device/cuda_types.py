"""``torch.cuda.FloatTensor`` and the other tensor types, which a PyTorch without CUDA has only as names."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["register"]

_DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}
_SPARSE = [name for name in _DTYPES if name != "Bool"]
_has_default: list[TensorType] = []  # the type that set_default_tensor_type has chosen, if it is one of these
_set_default_tensor_type = torch.set_default_tensor_type


def _is_number(value: object) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, torch.Tensor)


class TensorType(type):
    """Metaclass of the legacy tensor types. Calling one creates a tensor, from sizes, from data, or empty."""

    dtype: torch.dtype
    is_cuda = True
    layout = torch.strided

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.type() == cls.__name__

    def __call__(cls, *args: Any, device: torch.types.Device = None) -> torch.Tensor:
        options = {"dtype": cls.dtype, "device": torch.device("cuda" if device is None else device)}
        if not args or isinstance(args[0], torch.Size) or _is_number(args[0]):
            return torch.empty(*(args or (0,)), **options)
        if len(args) > 1:
            raise TypeError(f"{cls.__name__}() takes sizes, or one sequence or tensor, but got {len(args)} arguments")
        data = args[0]
        return data.to(**options) if isinstance(data, torch.Tensor) else torch.tensor(data, **options)


class SparseTensorType(TensorType):
    """Metaclass of the legacy types of sparse tensors. Calling one takes indices, values and a size."""

    layout = torch.sparse_coo

    def __call__(cls, *args: Any, device: torch.types.Device = None) -> torch.Tensor:
        options = {"dtype": cls.dtype, "device": torch.device("cuda" if device is None else device)}
        if args and not isinstance(args[0], torch.Tensor):
            return torch.sparse_coo_tensor(size=args[0] if isinstance(args[0], torch.Size) else args, **options)
        return torch.sparse_coo_tensor(*(args or ([[]], [])), **options)


def _set_default(t: Any) -> None:
    """Do what `torch.set_default_tensor_type` does, for these types too."""
    kind = getattr(torch.cuda, t.rpartition(".")[2], t) if isinstance(t, str) and t.startswith("torch.cuda.") else t
    if isinstance(kind, TensorType):
        torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")
    else:
        _set_default_tensor_type(t)
        if _has_default:
            torch.set_default_device(None)
    _has_default[:] = [kind] if isinstance(kind, TensorType) else []


def register() -> None:
    """Replace the types in ``torch.cuda``."""
    for name, dtype in _DTYPES.items():
        # PyTorch reads the type's name, as in tensor.type(torch.cuda.FloatTensor).
        kind = TensorType(f"torch.cuda.{name}Tensor", (), {"dtype": dtype})
        setattr(torch.cuda, f"{name}Tensor", kind)
    for name in _SPARSE:
        kind = SparseTensorType(f"torch.cuda.sparse.{name}Tensor", (), {"dtype": _DTYPES[name]})
        setattr(torch.cuda.sparse, f"{name}Tensor", kind)
    torch.set_default_tensor_type = _set_default
