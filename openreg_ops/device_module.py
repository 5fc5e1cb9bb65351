"""Assembles ``torch.openreg``, the device's module, like ``torch.cuda``."""

from __future__ import annotations

import importlib.util
import sys
import types

import torch

from openreg_ops import sanitizer
from openreg_ops.device import (
    amp,
    cuda,
    devices,
    faults,
    graphs,
    memory,
    nvtx,
    random,
    streams,
    sync_debug,
    usage,
)
from openreg_ops.device.device_index import device_index
from openreg_ops.identity import identity
from openreg_ops.schedules import schedules


def register() -> None:
    """Name the backend, create ``torch.openreg``, and generate ``x.openreg()``, ``x.is_openreg`` and similar
    methods. If the device is called cuda, ``torch.openreg`` is ``torch.cuda``, where PyTorch has the methods."""
    is_cuda = identity.name == "cuda"
    module = (
        torch.cuda if is_cuda else types.ModuleType("torch.openreg", "The openreg device, as torch.cuda is CUDA's.")
    )
    # The public names of these modules are also names of torch.openreg.
    flat = {"amp": amp, "graphs": graphs, "memory": memory, "random": random, "streams": streams}
    public = (devices, *flat.values(), usage, sync_debug)
    for part in public:
        for name in part.__all__:
            setattr(module, name, getattr(part, name))
    others = {"faults": faults, "nvtx": nvtx, "_sanitizer": sanitizer}
    for name, part in {**flat, **others}.items():
        if is_cuda and importlib.util.find_spec(f"torch.cuda.{name}"):
            ours = {key: value for key, value in vars(part).items() if not key.startswith("__")}
            part = importlib.import_module(f"torch.cuda.{name}")  # noqa: PLW2901
            vars(part).update(ours)
        setattr(module, name, part)
        for parent in {"openreg", identity.module}:
            sys.modules[f"torch.{parent}.{name}"] = part
    module.reset_device = faults.reset_device
    module.schedules = schedules
    module.AcceleratorError = torch.AcceleratorError
    module.has_half, module.has_magma = True, False
    module._sleep = streams._sleep
    if not is_cuda:
        module.__path__ = []  # so that `import torch.openreg.random` works
    module.__all__ = sorted({*getattr(module, "__all__", ()), *(name for part in public for name in part.__all__)})
    module._is_in_bad_fork = devices._is_in_bad_fork
    module._initialized = True  # torch.utils.checkpoint saves random state only where this is true
    module._lazy_init = devices.init
    module._lazy_call = lambda call, **_: call()
    module._get_device_index = lambda device=None, optional=False, allow_cpu=False: device_index(device)

    torch.accelerator.memory._snapshot = memory._snapshot
    if is_cuda:
        torch.openreg = sys.modules["torch.openreg"] = module
        cuda.register(module)
    else:
        _register_backend(module)
    faults._from_environment()
    sanitizer._from_environment()


def _register_backend(module: types.ModuleType) -> None:
    torch.utils.rename_privateuse1_backend(identity.name)
    torch._register_device_module(identity.module, module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True,
        for_module=True,
        for_packed_sequence=True,
        for_storage=True,
        # PyTorch's generated methods cannot create typed storages of these on any device.
        unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8],
    )
