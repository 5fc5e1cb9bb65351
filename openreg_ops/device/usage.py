"""What ``nvidia-smi`` reports about a device, under ``torch.cuda``'s names: how busy it is, and who uses its memory."""

from __future__ import annotations

import os

import torch

from openreg_ops import _C
from openreg_ops.device import memory
from openreg_ops.device.device_index import device_index

__all__ = [
    "device_memory_used",
    "list_gpu_processes",
    "memory_usage",
    "utilization",
]


def utilization(device: torch.types.Device = None) -> int:
    """The percentage of the last second in which `device` ran work: kernels, copies, ``_sleep()``.

    From the first call on, the device is sampled every millisecond, until ten seconds pass without a call. During the
    first second, the percentage covers the time since the first call, which waits for a sixth of a second.
    """
    return _C.utilization(device_index(device))[0]


def memory_usage(device: torch.types.Device = None) -> int:
    """The percentage of the last second in which kernels or copies used the memory of `device`; see `utilization`."""
    return _C.utilization(device_index(device))[1]


def device_memory_used(device: torch.types.Device = None) -> int:
    """Bytes of `device` that this process uses or keeps for reuse. No other process shares the device."""
    free, total = memory.mem_get_info(device)
    return total - free


def list_gpu_processes(device: torch.types.Device = None) -> str:
    """The processes that use `device` and the memory of each, as text. Only this process uses the device."""
    index = device_index(device)
    used = device_memory_used(index)
    processes = f"process {os.getpid():>10d} uses {used / 2**20:>12.3f} MB GPU memory"
    return f"GPU:{index}\n{processes if used else 'no processes are running'}"
