"""``torch.openreg.FloatTensor``, ``FloatStorage`` and similar types, and ``torch.openreg.sparse``, as in
``torch.cuda``."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.storage import _LegacyStorage, _warn_typed_storage_removal

__all__: list[str] = []

_DTYPES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}
_STORAGE_DTYPES = {**_DTYPES, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}


class _TensorType(type):
    """The type of ``torch.openreg.FloatTensor``: creates tensors, and recognizes those with its dtype and layout on the
    device."""

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = False

    def __call__(cls, *args: Any, device: torch.types.Device = None, **kwargs: Any) -> torch.Tensor:
        device = torch.device(device or "openreg")
        if device.type != "openreg":
            raise TypeError(f"{cls.__name__}: expected an openreg device, but got {device}; use torch.tensor()")
        empty = torch.empty((0,), dtype=cls.dtype, layout=cls.layout, device=device)
        return empty.new(*args, **kwargs) if args or kwargs else empty

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == "openreg"
            and instance.dtype == cls.dtype
            and instance.layout == cls.layout
        )

    @property
    def is_sparse(cls) -> bool:
        return cls.layout == torch.sparse_coo

    def __repr__(cls) -> str:
        return f"<class '{cls.__name__}'>"


def _tensor_type(module: str, name: str, dtype: torch.dtype, layout: torch.layout) -> _TensorType:
    # The full name: Tensor.type() looks a class up by its name.
    attributes = {"dtype": dtype, "layout": layout, "__module__": module, "__qualname__": name}
    kind = _TensorType(f"{module}.{name}", (), attributes)
    kind.__doc__ = f"{dtype} tensors on the device. torch.tensor(..., dtype=, device='openreg') is the modern form."
    return kind


class _Dtype:
    """A storage class's dtype, with PyTorch's warning that typed storages are deprecated."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.value = dtype

    def __get__(self, instance: object, owner: type) -> torch.dtype:
        _warn_typed_storage_removal()
        return self.value


class _OpenregLegacyStorage(_LegacyStorage):
    @classmethod
    def from_buffer(cls, *args: Any, **kwargs: Any) -> Any:
        _warn_typed_storage_removal()
        raise RuntimeError("from_buffer: Not available for openreg storage")

    @classmethod
    def _new_with_weak_ptr(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("_new_with_weak_ptr: Not available for openreg storage")

    @classmethod
    def _new_shared_filename(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("_new_shared_filename: Not available for openreg storage")


def _storage_type(name: str, dtype: torch.dtype) -> type:
    # PyTorch takes the device of a storage class from the name of its module.
    words = f"Typed storage of {dtype} on the device, which PyTorch deprecates: use ``torch.UntypedStorage``."
    attributes = {"dtype": _Dtype(dtype), "_dtype": dtype, "__module__": "torch.openreg", "__qualname__": name}
    attributes["__doc__"] = words
    return type(name, (_OpenregLegacyStorage,), attributes)


sparse = types.ModuleType("torch.openreg.sparse", "The types of sparse tensors on the device.")
for _name, _dtype in _DTYPES.items():
    globals()[f"{_name}Tensor"] = _tensor_type("torch.openreg", f"{_name}Tensor", _dtype, torch.strided)
    __all__.append(f"{_name}Tensor")
    if _name != "Bool":  # as torch.cuda.sparse
        setattr(
            sparse,
            f"{_name}Tensor",
            _tensor_type("torch.openreg.sparse", f"{_name}Tensor", _dtype, torch.sparse_coo),
        )
for _name, _dtype in _STORAGE_DTYPES.items():
    globals()[f"{_name}Storage"] = _storage_type(f"{_name}Storage", _dtype)
    __all__.append(f"{_name}Storage")
