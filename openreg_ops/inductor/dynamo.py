"""Dynamo's interface to the device: torch.openreg's functions under the names of its DeviceInterface."""

from __future__ import annotations

import torch
from torch._dynamo import device_interface

from openreg_ops import _C
from openreg_ops.device.device_index import maybe_exchange_device
from openreg_ops.identity import identity


class Interface(device_interface.DeviceInterface):
    """The device for Dynamo and Inductor. `is_gpu` stays false because the generated code is C++, not Triton."""

    device = torch.openreg.device
    Event = torch.openreg.Event
    Stream = torch.openreg.Stream

    class Worker:
        """Properties for Inductor's compile processes, which never use the device."""

        set_device = staticmethod(torch.openreg.set_device)
        current_device = staticmethod(torch.openreg.current_device)
        get_device_properties = staticmethod(torch.openreg.get_device_properties)

    current_device = staticmethod(torch.openreg.current_device)
    set_device = staticmethod(torch.openreg.set_device)
    device_count = staticmethod(torch.openreg.device_count)
    is_available = staticmethod(torch.openreg.is_available)
    stream = staticmethod(torch.openreg.stream)
    current_stream = staticmethod(torch.openreg.current_stream)
    set_stream = staticmethod(torch.openreg.set_stream)
    synchronize = staticmethod(torch.openreg.synchronize)
    memory_allocated = staticmethod(torch.openreg.memory_allocated)
    exchange_device = staticmethod(_C.exchange_device)
    maybe_exchange_device = staticmethod(maybe_exchange_device)

    @staticmethod
    def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        torch.openreg.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return torch.openreg.current_stream(device_idx).native_handle

    @staticmethod
    def get_compute_capability(device: torch.types.Device = None) -> int:
        return 0

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True


def register_interface() -> None:
    """Register the device with Dynamo."""
    # register_interface_for_device would import more of Dynamo in 2.15, and Dynamo is only half imported here.
    device_interface.device_interfaces[identity.name] = Interface


def register_context_manager() -> None:
    """Let `torch.openreg.device` be traced, as `torch.cuda.device` is."""
    if identity.name == "cuda":
        return
    from torch._dynamo.variables import ctx_manager

    class DeviceVariable(ctx_manager.AcceleratorDeviceIndexVariable):
        _get_device_index_fn = staticmethod(lambda device, optional: torch.openreg.device(device).idx)

        def module_name(self) -> str:
            return "torch.openreg"

        def fn_name(self) -> str:
            return "device"

        def python_type(self) -> type:
            return torch.openreg.device

    ctx_manager.register_device_context_manager(torch.openreg.device, DeviceVariable)
