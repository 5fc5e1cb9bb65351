"""Device tensors sent to other processes by torch.multiprocessing: both see the same memory, as with CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from openreg_ops import _C
from openreg_ops.device.streams import Event, InterprocessEvent
from openreg_ops.identity import identity


def _rebuild(handle: Any, nbytes: int, device: int) -> torch.UntypedStorage:
    """The storage that another process sent; the same memory always gives the same storage."""
    file = handle.detach()
    try:
        key = reductions.fd_id(file)
        storage = reductions.storage_from_cache(torch.UntypedStorage, key)
        if storage is None:
            storage = _C.open_storage(file, nbytes, device)
            reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
        return storage
    finally:
        os.close(file)


def _rebuild_empty(device: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=f"{identity.name}:{device}")


def _reduce(storage: torch.UntypedStorage) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if storage.device.type != identity.name:
        return reductions.reduce_storage(storage)
    if not storage.nbytes():
        return _rebuild_empty, (storage.device.index,)
    file = _C.share_storage(storage)
    reductions.shared_cache[reductions.fd_id(file)] = reductions.StorageWeakRef(storage)
    return _rebuild, (reduction.DupFd(file), storage.nbytes(), storage.device.index)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What PyTorch does for tensors of other devices than CUDA, whose storages it shares by CUDA's handles."""
    if tensor.device.type != "cuda" or tensor.is_nested or tensor.layout != torch.strided:
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries. If you just want to transfer the data, call detach() on the tensor before "
            "serializing (e.g., putting it on the queue)."
        )
    torch.utils.hooks.warn_if_has_hooks(tensor)
    metadata = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad)
    return reductions.rebuild_tensor, (type(tensor), tensor._typed_storage(), metadata)


def _reduce_event(event: InterprocessEvent) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    handle = event.ipc_handle()  # which gives it a device
    return Event.from_ipc_handle, (event.device.index, handle)


def register() -> None:
    """Pickle storages and events for other processes; torch.multiprocessing pickles a tensor through its storage."""
    reduction.register(torch.UntypedStorage, _reduce)
    reduction.register(InterprocessEvent, _reduce_event)
    if identity.name == "cuda":
        for kind in (torch.Tensor, torch.nn.Parameter):
            reduction.register(kind, _reduce_tensor)
