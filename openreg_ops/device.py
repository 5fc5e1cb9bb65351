"""Devices: which exist, which is current, and `register`, which makes ``torch.openreg`` of this package."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from openreg_ops import _C

__all__ = [
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "set_device",
    "synchronize",
]

# torch.cuda's name for "made by fork() after the parent had used a device".
_is_in_bad_fork = _C.forked


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` while it traces; ``torch.compiler.assume_constant_result`` without importing Dynamo."""
    function._dynamo_marked_constant = True
    return function


@_constant
def _checked(index: int) -> int:
    return _C.checked_index(index)


def _index(device: torch.types.Device = None) -> int:
    """The checked index for a device given in any of PyTorch's forms; None or no index is the current one."""
    if device is None:
        return _checked(current_device())
    if isinstance(device, int):
        return current_device() if device == -1 else _checked(device)
    device = torch.device(device)
    if device.type != "openreg":
        raise ValueError(f"expected an openreg device, but got {device}; pass an index, 'openreg' or 'openreg:N'")
    return _checked(current_device() if device.index is None else device.index)


@_constant
def is_available() -> bool:
    """Whether there is at least one device."""
    return _C.device_count() > 0


@_constant
def device_count() -> int:
    """The number of devices; set by the environment variable OPENREG_DEVICE_COUNT, 2 by default."""
    return _C.device_count()


def current_device() -> int:
    """The index of the calling thread's current device."""
    return torch.accelerator.current_device_index()  # what a compiled graph is guarded on


def set_device(device: torch.types.Device) -> None:
    """Make `device` current for the calling thread; a negative index changes nothing."""
    if not (isinstance(device, int) and device < 0):
        _C.exchange_device(_index(device))


def synchronize(device: torch.types.Device = None) -> None:
    """Wait until all work on all streams of `device` has finished."""
    torch.accelerator.synchronize(_index(device))


def init() -> None:
    """Count the device as used, as everything does that needs it: a child made by ``fork()`` may not use it then.

    Raises:
        RuntimeError: this process is such a child.
    """
    _C.initialize()


_lazy_init = init


def is_initialized() -> bool:
    """Whether the process can use the device: false in a child made by ``fork()`` after its parent had used it."""
    return not _C.forked()


def get_device_name(device: torch.types.Device = None) -> str:
    """The name of `device`."""
    init()
    return f"openreg simulated accelerator {_index(device)}"


def get_device_capability(device: torch.types.Device = None) -> dict[str, Any]:
    """The dtypes that `device` computes in, as ``torch.accelerator.get_device_capability`` gives them."""
    init()
    return torch.accelerator.get_device_capability(_index(device))


@_constant
def get_device_properties(device: torch.types.Device = None) -> types.SimpleNamespace:
    """Name, total memory (bytes) and number of processors of `device`."""
    index = _index(device)
    return types.SimpleNamespace(
        name=get_device_name(index),
        index=index,
        total_memory=_C.device_memory(),
        multi_processor_count=os.cpu_count(),
    )


@_constant
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the device computes in bfloat16: where there is one, it does."""
    return is_available()


def can_device_access_peer(device: torch.types.Device, peer_device: torch.types.Device) -> bool:
    """Whether `device` can reach the memory of `peer_device`: of every other device."""
    return _index(device) != _index(peer_device)


def ipc_collect() -> None:
    """Nothing to do: memory sent to another process is freed as soon as the last process lets go of it."""


class device:
    """Context manager that makes a device current; ``None`` or a negative index changes nothing.

    Args:
        device: index, ``torch.device`` or string such as ``"openreg:1"``.
    """

    def __init__(self, device: torch.types.Device) -> None:
        none = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if none else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, *exception: object) -> bool:
        if self.idx >= 0:
            self.idx = _C.exchange_device(self.prev_idx)
        return False


class device_of(device):
    """Context manager that makes the device of a tensor or storage current; a CPU one changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "openreg" else -1)


def register() -> None:
    """Name the backend, make ``torch.openreg``, and generate ``x.openreg()``, ``x.is_openreg`` and their like."""
    from openreg_ops import _sanitizer, amp, faults, inductor, memory, profiler, random, streams

    module = types.ModuleType("torch.openreg", "The openreg device, as torch.cuda is CUDA's.")
    parts = {"amp": amp, "memory": memory, "random": random, "streams": streams}
    for part in (sys.modules[__name__], *parts.values()):
        for name in part.__all__:
            setattr(module, name, getattr(part, name))
    for name, part in parts.items():
        setattr(module, name, part)
        sys.modules[f"torch.openreg.{name}"] = part
    module.faults = sys.modules["torch.openreg.faults"] = faults
    module.profiler = sys.modules["torch.openreg.profiler"] = profiler
    module._sanitizer = sys.modules["torch.openreg._sanitizer"] = _sanitizer
    module.reset_device = faults.reset_device
    module._sleep = streams._sleep
    module.__path__ = []  # so that `import torch.openreg.random` works
    module.__all__ = [name for part in (sys.modules[__name__], *parts.values()) for name in part.__all__]
    module._is_in_bad_fork = _is_in_bad_fork
    module._initialized = True  # torch.utils.checkpoint saves random state only where this is true
    module._lazy_init = _lazy_init
    module._lazy_call = lambda call, **_: call()
    module._get_device_index = lambda device=None, optional=False, allow_cpu=False: _index(device)

    torch.utils.rename_privateuse1_backend("openreg")
    torch._register_device_module("openreg", module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True,
        for_module=True,
        for_packed_sequence=True,
        for_storage=True,
        # Typed storages of these cannot be made by PyTorch's generated methods on any device.
        unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8],
    )
    inductor.register()
    faults._from_environment()
    _sanitizer._from_environment()
