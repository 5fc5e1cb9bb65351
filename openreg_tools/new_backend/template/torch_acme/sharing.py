"""Tensors for other processes and other libraries: torch.multiprocessing and DLPack. Rung 8.

Document: "Extending dispatcher for a new backend in C++", section "Known issues & additional notes", on serialization.
"""

import functools
import os
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_acme import _C

# A receiver has one end of a pipe as long as it uses the memory. The sender has the other end, and keeps the storage.
_shared: dict[int, torch.UntypedStorage] = {}


def _forget_unused() -> None:
    for end in list(_shared):
        if not _is_used(end):
            os.close(end)
            del _shared[end]


def _is_used(end: int) -> bool:
    try:
        return os.read(end, 1) != b""
    except BlockingIOError:
        return True


def _reduce(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "acme" or not storage.nbytes():
        return (
            reductions.reduce_storage(storage) if storage.device.type != "acme" else (_empty, (storage.device.index,))
        )
    _forget_unused()
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    _shared[ours] = storage
    handle, file = _C.share_memory(storage), reduction.DupFd(theirs)
    os.close(theirs)
    return _rebuild, (handle, storage.nbytes(), storage.device.index, file)


def _rebuild(handle: bytes, nbytes: int, device: int, file: Any) -> torch.UntypedStorage:
    return _C.open_memory(handle, nbytes, device, file.detach())


def _empty(device: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=f"acme:{device}")


def register() -> None:
    reduction.register(torch.UntypedStorage, _reduce)
    # Tensor.__dlpack_device__ knows a list of devices, with PrivateUse1 only by its first name.
    known = torch.Tensor.__dlpack_device__

    @functools.wraps(known)
    def dlpack_device(self: torch.Tensor) -> Any:
        if self.device.type == "acme":
            return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index
        return known(self)

    torch.Tensor.__dlpack_device__ = dlpack_device
