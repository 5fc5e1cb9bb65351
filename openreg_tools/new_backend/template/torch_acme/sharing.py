"""Tensors for other processes and other libraries: torch.multiprocessing and DLPack. Rung 8.

Document: "Extending dispatcher for a new backend in C++", section "Known issues & additional notes", on serialization.
"""

import os
import select
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_acme import _C

# A receiver has one end of a pipe as long as it uses the memory. The sender has the other end, and keeps the storage.
_shared: dict[int, torch.UntypedStorage] = {}


def _reduce(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "acme":
        return reductions.reduce_storage(storage)
    for end in select.select(_shared, [], [], 0)[0]:  # those whose other end is closed
        os.close(end)
        del _shared[end]
    ours, theirs = os.pipe()
    _shared[ours] = storage
    handle, file = _C.share_memory(storage), reduction.DupFd(theirs)
    os.close(theirs)
    return _rebuild, (handle, storage.nbytes(), storage.device.index, file)


def _rebuild(handle: bytes, nbytes: int, device: int, file: Any) -> torch.UntypedStorage:
    return _C.open_memory(handle, nbytes, device, file.detach())


_dlpack_device = torch.Tensor.__dlpack_device__


def dlpack_device(self: torch.Tensor) -> Any:
    """PyTorch's method knows a list of devices, with PrivateUse1 only by its first name."""
    if self.device.type == "acme":
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index
    return _dlpack_device(self)


reduction.register(torch.UntypedStorage, _reduce)
torch.Tensor.__dlpack_device__ = dlpack_device
