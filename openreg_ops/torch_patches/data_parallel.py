"""What `torch.nn.DataParallel` and `torch.nn.parallel.comm` need from `torch._C`, which only a CUDA build of PyTorch has.

Each function does what torch/csrc/cuda/comm.cpp does, with copies between devices.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda import nccl
from torch.utils._pytree import tree_leaves

from openreg_ops.identity import identity

__all__ = ["register"]


def _device(index: int) -> torch.device:
    return torch.device(identity.name, index)


def _check_devices(tensors: Sequence[torch.Tensor], what: str) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.device.type != identity.name:
            raise RuntimeError(
                f"Expected all {what} tensors to be {identity.name} tensors, but tensor at index {i} has device "
                f"{tensor.device}"
            )


def _fill(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy `value` to `out`, without broadcasting."""
    if out.shape != value.shape:
        raise RuntimeError(f"Expected out tensor to have shape {list(value.shape)}, but got {list(out.shape)}")
    return out.copy_(value, non_blocking=out.device.type != "cpu")


def _on(streams: Sequence[torch.Stream | None] | None, i: int) -> contextlib.AbstractContextManager:
    """The stream at index `i`, if there is one, as the current stream of its device."""
    return (streams[i] if streams is not None and i < len(streams) else None) or contextlib.nullcontext()


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.to(_device(index), non_blocking=True) for index in devices]


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    _check_devices(out, "output")
    return [_fill(output, tensor) for output in out]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """The tensors themselves, then a copy of each on each of the other devices, without gradients.

    CUDA gathers small tensors in a buffer, because each of its copies has a cost. Here copies are function calls.
    """
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    copies = [
        [tensor.detach().to(_device(index), non_blocking=True, copy=True) for tensor in tensors]
        for index in devices[1:]
    ]
    return [list(tensors), *copies]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[torch.Tensor]:
    if chunk_sizes is None:
        chunks = list(tensor.chunk(len(devices), dim))
    elif len(chunk_sizes) == len(devices):
        chunks = list(tensor.split_with_sizes(list(chunk_sizes), dim))
    else:
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got len(devices) = "
            f"{len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    for i, chunk in enumerate(chunks):
        with _on(streams, i):
            chunks[i] = chunk.to(_device(devices[i]), non_blocking=True)
    return chunks


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[torch.Stream | None] | None
) -> list[torch.Tensor]:
    _check_devices(out, "output")
    chunks = tensor.split_with_sizes([output.size(dim) for output in out], dim)
    for i, (output, chunk) in enumerate(zip(out, chunks, strict=True)):
        with _on(streams, i):
            _fill(output, chunk)
    return list(out)


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int) -> torch.Tensor:
    _check_devices(tensors, "input")
    device = torch.device("cpu") if destination == -1 else _device(destination)
    return torch.cat([tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors], dim)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    return _fill(out, _gather(tensors, dim, out.get_device()))


# ---- registration ----

_nccl_is_available = nccl.is_available


@functools.wraps(_nccl_is_available)
def is_available(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns false for the device's tensors, without the warning of a PyTorch that has no NCCL."""
    return not any(tensor.device.type == identity.name for tensor in tensors) and _nccl_is_available(tensors)


def _for_the_device(ours: Callable[..., Any], cudas: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA's function for CUDA's tensors, and for tensors on the CPU if there is a GPU, as `DataParallel` chooses."""

    @functools.wraps(ours)
    def chosen(*arguments: Any) -> Any:
        types = {leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        is_cudas = identity.name not in types and ("cuda" in types or torch.cuda.is_available())
        return (cudas if is_cudas else ours)(*arguments)

    return chosen


def register() -> None:
    """Define the functions in `torch._C`. Those of a CUDA build stay, for CUDA."""
    ours = _broadcast, _broadcast_coalesced, _broadcast_out, _gather, _gather_out, _scatter, _scatter_out
    for function in ours:
        cudas = getattr(torch._C, function.__name__, None)
        setattr(torch._C, function.__name__, function if cudas is None else _for_the_device(function, cudas))
    nccl.is_available = is_available
