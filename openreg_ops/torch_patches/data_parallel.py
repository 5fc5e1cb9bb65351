"""What `torch.nn.DataParallel` and `torch.nn.parallel.comm` need from `torch._C`, which only a CUDA build of PyTorch has.

Each function does what torch/csrc/cuda/comm.cpp does, with copies between devices. Checks and results are the same.
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


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_device(index: int) -> torch.device:
    _check(index >= 0, f"Expected non-negative device index, but got {index}")
    return torch.device(identity.name, index)


def _check_outputs(outputs: Sequence[torch.Tensor]) -> None:
    for i, output in enumerate(outputs):
        _check(
            output.device.type == identity.name,
            f"Expected all output tensors to be openreg tensors, but output tensor at index {i} has device "
            f"'{output.device}'",
        )


def _on(streams: Sequence[torch.Stream | None] | None, i: int, device: int) -> contextlib.AbstractContextManager:
    """The stream at index `i`, if there is one, as the current stream of its device."""
    stream = streams[i] if streams is not None and i < len(streams) else None
    if stream is None:
        return contextlib.nullcontext()
    _check(
        stream.device_index == device,
        f"Expected the device associated with the stream at index {i} (was {stream.device_index}) to match the device "
        f"supplied at that index (expected {device})",
    )
    return stream


# ---- broadcast ----


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    targets = [_check_device(index) for index in devices]
    return [tensor if target.index == tensor.get_device() else _copied(tensor, target) for target in targets]


def _copied(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A contiguous copy."""
    if tensor.layout != torch.strided:
        return tensor.to(target, non_blocking=True, copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=target).copy_(tensor, non_blocking=True)


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    _check_outputs(out)
    for i, output in enumerate(out):
        _check(
            output.shape == tensor.shape,
            f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output tensor "
            f"at index {i} has shape {list(output.shape)}",
        )
    return [output.copy_(tensor, non_blocking=True) for output in out]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """The tensors themselves, then a copy of each on each of the other devices, without gradients.

    CUDA gathers small tensors in a buffer, because each of its copies has a cost. Here copies are function calls.
    """
    _check(
        all(tensor.get_device() == devices[0] for tensor in tensors),
        f"All tensors must be on devices[0]: {devices[0]}",
    )
    targets = [_check_device(index) for index in devices[1:]]
    return [list(tensors), *([_copied(tensor.detach(), target) for tensor in tensors] for target in targets)]


# ---- scatter ----


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[torch.Tensor]:
    _check(len(devices) > 0, "Expected at least one device to scatter to")
    if chunk_sizes is not None:
        _check(
            len(chunk_sizes) == len(devices),
            "Expected devices and chunk_sizes to be of same length, but got len(devices) = "
            f"{len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}",
        )
        chunks = list(tensor.split_with_sizes(list(chunk_sizes), dim))
    else:
        chunks = list(tensor.chunk(len(devices), dim))
    for i, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        if index != tensor.get_device():
            with _on(streams, i, index):
                chunks[i] = chunk.to(_check_device(index), non_blocking=True)
    return chunks


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[torch.Stream | None] | None
) -> list[torch.Tensor]:
    _check(len(out) > 0, "Expected at least one output tensor to scatter to")
    _check_outputs(out)
    size = tensor.size(dim)  # raises for a dimension that does not exist
    dim %= tensor.dim() or 1
    for i, output in enumerate(out):
        _check(
            output.dim() == tensor.dim() and _without(output, dim) == _without(tensor, dim),
            f"Output tensor at index {i} has incorrect shape: {list(output.shape)}. Expected same shape except for scatter "
            f"dim {dim} as the source tensor: {list(tensor.shape)}",
        )
    sizes = [output.size(dim) for output in out]
    _check(
        sum(sizes) == size,
        f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim {dim}. "
        f"Expected {size}, but got total size {sum(sizes)}",
    )
    for i, (output, chunk) in enumerate(zip(out, tensor.split_with_sizes(sizes, dim), strict=True)):
        with _on(streams, i, output.get_device()):
            output.copy_(chunk, non_blocking=True)
    return list(out)


def _without(tensor: torch.Tensor, dim: int) -> list[int]:
    """The sizes of all dimensions but one."""
    return [size for i, size in enumerate(tensor.shape) if i != dim]


# ---- gather ----


def _check_inputs(tensors: Sequence[torch.Tensor], dim: int) -> tuple[int, list[int]]:
    """The dimension counted from the front, and the shape of what is gathered."""
    _check(len(tensors) > 0, "Expected at least one tensor to gather from")
    first = tensors[0]
    first.size(dim)  # raises for a dimension that does not exist
    dim %= first.dim() or 1
    for i, tensor in enumerate(tensors):
        _check(
            tensor.device.type == identity.name,
            f"Expected all input tensors to be openreg tensors, but tensor at index {i} has device {tensor.device}",
        )
        _check(
            tensor.dim() == first.dim(),
            f"Expected all input tensors to have the same number of dimensions, but tensor at index {i} has "
            f"{tensor.dim()} dimensions, (expected {first.dim()})",
        )
        expected = [tensor.size(dim) if axis == dim else size for axis, size in enumerate(first.shape)]
        _check(
            list(tensor.shape) == expected,
            f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected {expected}",
        )
    total = sum(tensor.size(dim) for tensor in tensors)
    return dim, [total if axis == dim else size for axis, size in enumerate(first.shape)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination_index: int | None) -> torch.Tensor:
    dim, shape = _check_inputs(tensors, dim)
    device = "cpu" if destination_index == -1 else identity.name
    if destination_index is not None and destination_index != -1:
        device = _check_device(destination_index)
    channels_last = next(
        (
            memory_format
            for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d))
            if len(shape) == rank and all(_suggests(tensor, memory_format) for tensor in tensors)
        ),
        torch.contiguous_format,
    )
    result = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=channels_last)
    return _copy_into(result, tensors, dim)


def _suggests(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    dim, shape = _check_inputs(tensors, dim)
    _check(list(out.shape) == shape, f"Expected out tensor to have shape {shape}, but got {list(out.shape)}")
    return _copy_into(out, tensors, dim)


def _copy_into(out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    chunks = out.split_with_sizes([tensor.size(dim) for tensor in tensors], dim)
    for chunk, tensor in zip(chunks, tensors, strict=True):
        chunk.copy_(tensor, non_blocking=out.device.type != "cpu")
    return out


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
