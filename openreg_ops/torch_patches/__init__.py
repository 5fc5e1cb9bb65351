"""What we patch in PyTorch: places where it has a list of devices. docs/pytorch-internals.md has a row for each patch.

autocast.py          autocast without a device's name
backward.py          the thread that runs backward
checkpoint.py        which device's random numbers activation checkpointing restores
data_parallel.py     torch.nn.DataParallel and torch.nn.parallel.comm
deepcopy.py          copy.deepcopy of a tensor's metadata
dlpack.py            DLPack
import_hooks.py      runs a patch when PyTorch imports a module later
jagged_attention.py  attention of jagged nested tensors
multiprocessing.py   tensors sent to other processes
"""

from openreg_ops.torch_patches import (
    autocast,
    backward,
    checkpoint,
    data_parallel,
    deepcopy,
    dlpack,
    jagged_attention,
    multiprocessing,
)


def register() -> None:
    """Install all patches."""
    autocast.register()
    backward.register()
    checkpoint.register()
    dlpack.register()
    multiprocessing.register()
    deepcopy.register()
    jagged_attention.register()
    data_parallel.register()
