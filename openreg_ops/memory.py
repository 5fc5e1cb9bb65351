"""Device memory: what is used, and giving free memory back; names and units are ``torch.cuda``'s (bytes)."""

from __future__ import annotations

from typing import Any

import torch

from openreg_ops.device import _index

__all__ = [
    "OutOfMemoryError",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
]

OutOfMemoryError = torch.OutOfMemoryError


def empty_cache() -> None:
    """Return the free memory of every device to the operating system."""
    torch.accelerator.empty_cache()


def memory_stats(device: torch.types.Device = None) -> dict[str, Any]:
    """The allocator's statistics for `device`, with the keys of ``torch.cuda.memory_stats``."""
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: torch.types.Device = None) -> int:
    """Bytes that tensors occupy on `device` now."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: torch.types.Device = None) -> int:
    """The most bytes that tensors occupied at once since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: torch.types.Device = None) -> int:
    """Bytes that the allocator holds on `device`, used or kept for reuse."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: torch.types.Device = None) -> int:
    """The most bytes that the allocator held at once since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_reserved(_index(device))


def mem_get_info(device: torch.types.Device = None) -> tuple[int, int]:
    """Free and total bytes of `device`."""
    return torch.accelerator.get_memory_info(_index(device))


def reset_peak_memory_stats(device: torch.types.Device = None) -> None:
    """Start the peaks afresh."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: torch.types.Device = None) -> None:
    """Start the counts afresh."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))
