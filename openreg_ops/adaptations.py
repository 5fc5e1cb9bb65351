"""Places where PyTorch knows devices by a list that a ``PrivateUse1`` backend is not on, each mended from outside.

A mend lets every other device's tensors through to PyTorch's code. It goes when PyTorch's goes: the regression tests
(tests/test_adaptations.py) say for each what happens without it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import has_torch_function_unary

__all__ = ["register"]

_TENSOR_METHODS = {"__dlpack__": torch.Tensor.__dlpack__, "__dlpack_device__": torch.Tensor.__dlpack_device__}
_module_apply = torch.nn.Module._apply


def _is_ours(tensor: torch.Tensor) -> bool:
    return not has_torch_function_unary(tensor) and tensor.device.type == "openreg"


@functools.wraps(torch.Tensor.__dlpack_device__)
def _dlpack_device(self: torch.Tensor) -> tuple[Any, int]:
    # torch/_tensor.py compares the device's type with "privateuse1", which is its name no more.
    if not _is_ours(self):
        return _TENSOR_METHODS["__dlpack_device__"](self)
    from torch.utils.dlpack import DLDeviceType

    return DLDeviceType.kDLExtDev, self.device.index


@functools.wraps(torch.Tensor.__dlpack__)
def _dlpack(self: torch.Tensor, *, stream: int | None = -1, **options: Any) -> Any:
    # torch/_tensor.py lets only CUDA's streams wait.
    capsule = _TENSOR_METHODS["__dlpack__"](self, stream=stream, **options)
    if stream != -1 and _is_ours(self):
        streams = torch.openreg
        index = self.device.index
        current = streams.current_stream(index)
        consumer = streams.default_stream(index) if stream is None else streams.ExternalStream(stream, index)
        if consumer != current:
            consumer.wait_event(current.record_event())
    return capsule


@functools.wraps(torch.nn.Module._apply)
def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    # Between the kinds of devices in a list of c10/core/TensorImpl.h (has_compatible_shallow_copy_type) a parameter
    # keeps its identity, and with it its ties and its optimizer; for others Module._apply makes a new one.
    before = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
    _module_apply(self, fn, recurse)
    for name, old in before.items():
        new = self._parameters[name]
        if new is old or old.is_meta or (old.device.type == "openreg") == (new.device.type == "openreg"):
            continue
        kind = type(old)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # a weak reference, for example: as PyTorch has it
            continue
        if issubclass(kind, UninitializedTensorMixin):
            old.__class__ = kind
        self._parameters[name] = old
    return self


def register() -> None:
    """Put the mends in their places."""
    torch.Tensor.__dlpack_device__ = _dlpack_device
    torch.Tensor.__dlpack__ = _dlpack
    torch.nn.Module._apply = _apply
