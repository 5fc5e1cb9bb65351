"""DLPack for device tensors, because PyTorch supports only a fixed list of devices. Other tensors go to its code.

tests/backend/test_dlpack.py says what happens without the two patches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

__all__ = ["register"]

_TENSOR_METHODS = {"__dlpack__": torch.Tensor.__dlpack__, "__dlpack_device__": torch.Tensor.__dlpack_device__}


def _is_ours(tensor: torch.Tensor) -> bool:
    return not has_torch_function_unary(tensor) and tensor.device.type == "openreg"


@functools.wraps(torch.Tensor.__dlpack_device__)
def _dlpack_device(self: torch.Tensor) -> tuple[Any, int]:
    # torch/_tensor.py compares the device's type with "privateuse1", but the device is called "openreg".
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


def register() -> None:
    """Install both patches."""
    torch.Tensor.__dlpack_device__ = _dlpack_device
    torch.Tensor.__dlpack__ = _dlpack
