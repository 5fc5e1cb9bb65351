"""What we patch in PyTorch: places where it has a list of devices. docs/pytorch-internals.md has a row for each patch.

autocast.py          autocast without a device's name
backward.py          the thread that runs backward
checkpoint.py        which device's random numbers activation checkpointing restores
chunked_loss.py      linear_cross_entropy in chunks
cuda_profiler.py     the profiler's activity CUDA, under the name cuda
cuda_storage.py      storages, under the name cuda
cuda_tools.py        Triton, nvcc and cuDNN, under the name cuda
data_parallel.py     torch.nn.DataParallel and torch.nn.parallel.comm
dlpack.py            DLPack
import_hooks.py      runs a patch when PyTorch imports a module later
jagged_attention.py  attention of jagged nested tensors
metadata.py          the metadata of deep copies and of fake tensors
multiprocessing.py   tensors sent to other processes
"""

from openreg_ops.identity import identity
from openreg_ops.torch_patches import (
    autocast,
    backward,
    checkpoint,
    chunked_loss,
    cuda_profiler,
    cuda_storage,
    cuda_tools,
    data_parallel,
    dlpack,
    jagged_attention,
    metadata,
    multiprocessing,
)


def register() -> None:
    """Install all patches."""
    if identity.name == "cuda":
        cuda_profiler.register()
        cuda_storage.register()
        cuda_tools.register()
    else:  # PyTorch's lists have cuda
        autocast.register()
        chunked_loss.register()
        checkpoint.register()
        dlpack.register()
    backward.register()
    multiprocessing.register()
    metadata.register()
    jagged_attention.register()
    data_parallel.register()
