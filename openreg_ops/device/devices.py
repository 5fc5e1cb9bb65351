"""Devices: which exist and which is current, under ``torch.cuda``'s names."""

from __future__ import annotations

import dataclasses
import os
import uuid
from typing import Any

import torch

from openreg_ops import _C, _build, environment, kernel_library
from openreg_ops.device.device_index import constant, current_device, device_index
from openreg_ops.identity import identity

__all__ = [
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "set_device",
    "synchronize",
]

_NO_FIELDS = {
    "major": "compute capability; get_arch_list() returns what its kernels were compiled for",
    "minor": "compute capability; get_arch_list() returns what its kernels were compiled for",
    "warp_size": "warps",
    "max_threads_per_block": "thread blocks",
    "regs_per_multiprocessor": "registers of its own",
    "shared_memory_per_block": "shared memory",
    "shared_memory_per_block_optin": "shared memory",
    "shared_memory_per_multiprocessor": "shared memory",
    "clock_rate": "clock",
    "memory_clock_rate": "clock",
    "memory_bus_width": "memory bus",
    "pci_bus_id": "PCI bus",
    "pci_device_id": "PCI bus",
    "pci_domain_id": "PCI bus",
}


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """The result of `get_device_properties`; a CUDA field without a meaning here raises an AttributeError that says
    so."""

    name: str
    index: int
    total_memory: int  #: bytes
    multi_processor_count: int  #: the number of processor cores, which run the kernels
    max_threads_per_multi_processor: int  #: a core runs one thread of a kernel
    L2_cache_size: int  #: bytes, per core; 0 where the system does not report it
    is_integrated: bool  #: its memory is its own
    is_multi_gpu_board: bool
    uuid: uuid.UUID  #: the same in every process, until the machine restarts
    gcnArchName: str  #: what this process's kernels were compiled for, as get_arch_list() names it

    def __getattr__(self, name: str) -> Any:
        if name in ("major", "minor") and identity.name == "cuda":
            return (environment.compute_capability() or (0, 0))[name == "minor"]
        if name == "warp_size" and identity.name == "cuda":
            return 32  # as every GPU of NVIDIA
        if name in _NO_FIELDS:
            raise AttributeError(
                f"{name}: {identity.name}:{self.index} is a simulated device, which has no {_NO_FIELDS[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _cache_size() -> int:
    try:
        return max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 0)
    except (OSError, ValueError):
        return 0


def _uuid(index: int) -> uuid.UUID:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = uuid.UUID(file.read().strip())
    except (OSError, ValueError):
        machine = uuid.NAMESPACE_OID
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "") if identity.name == "cuda" else ""
    return uuid.uuid5(machine, f"openreg:{listed.split(',')[index] if listed else index}")


# torch.cuda's name for "created by fork() after the parent had used a device".
_is_in_bad_fork = _C.forked


@constant
def is_available() -> bool:
    """Returns true if there is at least one device.

    Example:
        >>> torch.openreg.is_available()
        True
    """
    return _C.device_count() > 0


@constant
def device_count() -> int:
    """The number of devices; set by the environment variable OPENREG_DEVICE_COUNT, 2 by default.

    Example:
        >>> torch.openreg.device_count()
        2
    """
    return _C.device_count()


def set_device(device: torch.types.Device) -> None:
    """Make `device` current for the calling thread; a negative index has no effect.

    Example:
        >>> torch.openreg.set_device(0)
        >>> torch.openreg.current_device()
        0
    """
    if not (isinstance(device, int) and device < 0):
        _C.exchange_device(device_index(device))


def synchronize(device: torch.types.Device = None) -> None:
    """Wait until all work on all streams of `device` has finished.

    Example:
        >>> x = torch.ones(3, device="openreg") * 2
        >>> torch.openreg.synchronize()  # x is computed
    """
    torch.accelerator.synchronize(device_index(device))


def init() -> None:
    """Mark the device as used. Everything that needs the device does this; a child created by ``fork()`` afterwards
    cannot use it.

    Raises:
        RuntimeError: this process is such a child.
    """
    _C.initialize()


def is_initialized() -> bool:
    """Returns true if the process can use the device: a child forked after its parent had used it cannot."""
    return not _C.forked()


def get_device_name(device: torch.types.Device = None) -> str:
    """The name of `device`."""
    init()
    return f"openreg simulated accelerator {device_index(device)}"


def get_device_capability(device: torch.types.Device = None) -> dict[str, Any] | tuple[int, int]:
    """The dtypes that `device` computes in, as ``torch.accelerator.get_device_capability`` returns them.

    Under the name cuda, the compute capability that OPENREG_DEVICE=cuda:sm_90 pretends, (9, 0), or (0, 0).
    """
    init()
    if identity.name == "cuda":
        device_index(device)
        return environment.compute_capability() or (0, 0)
    return torch.accelerator.get_device_capability(device_index(device))


@constant
def get_device_properties(device: torch.types.Device = None) -> DeviceProperties:
    """The properties of `device`: CUDA's fields that have a meaning here."""
    index = device_index(device)
    return DeviceProperties(
        name=get_device_name(index),
        index=index,
        total_memory=_C.device_memory(),
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=1,
        L2_cache_size=_cache_size(),
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid=_uuid(index),
        gcnArchName=kernel_library.capability(),
    )


def get_arch_list() -> list[str]:
    """The vector instructions that the operators' kernels were compiled for: "DEFAULT", "AVX2", "AVX512"."""
    if pretended := environment.compute_capability():
        return ["sm_{}{}".format(*pretended)]
    return [] if identity.name == "cuda" else list(_build.CPU_CAPABILITIES)


@constant
def is_tf32_supported() -> bool:
    """Returns true if float32 matrix products may round to TF32: always false."""
    return False


@constant
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Returns true if the device computes in bfloat16: true if there is a device, whatever `including_emulation` is."""
    return is_available()


def can_device_access_peer(device: torch.types.Device, peer_device: torch.types.Device) -> bool:
    """Returns true if `device` can access the memory of `peer_device`: true for every other device."""
    return device_index(device) != device_index(peer_device)


def ipc_collect() -> None:
    """Does nothing: memory sent to another process is freed as soon as the last process releases it."""


class device:
    """Context manager that makes a device current; ``None`` or a negative index has no effect.

    Args:
        device: index, ``torch.device`` or string such as ``"openreg:1"``.

    Example:
        >>> with torch.openreg.device(1):
        ...     x = torch.ones(3, device="openreg")
        >>> x.device
        device(type='openreg', index=1)
    """

    def __init__(self, device: torch.types.Device) -> None:
        none = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if none else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, *exception: object) -> bool:
        if self.idx >= 0:
            self.idx = _C.exchange_device(self.prev_idx)
        return False


class device_of(device):
    """Context manager that makes the device of `obj`, a tensor or storage, current; a CPU object has no effect."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == identity.name else -1)
