"""``torch.openreg``, the device's module, like ``torch.cuda``: `register` assembles it from the files here.

index.py       the index of a device given in any form; imports none of the other files; they all import it
devices.py     which devices exist, and which is current
streams.py     streams, events and launch modes
memory.py      statistics, snapshots, limits and pools of device memory
graphs.py      work that is captured once and replayed
usage.py       how busy a device is
sync_debug.py  set_sync_debug_mode
tensor_types.py FloatTensor, FloatStorage and similar classes
random.py      the generators' states and seeds
amp.py         what torch.autocast needs
faults.py      torch.openreg.faults
schedules.py   torch.openreg.schedules; schedule_results.py reads results, schedule_report.py says what is missing,
               schedule_threads.py controls threads, schedule_state.py has what every order starts from
profiler.py    torch.openreg.profiler
nvtx.py        torch.openreg.nvtx
_gpu_trace.py  torch.openreg._gpu_trace
_sanitizer.py  torch.openreg._sanitizer, which turns on races.py; race_modes.py shows it operators, race_report.py reports
               what it found. captures.py finds mistakes with graphs; capture_hooks.py, capture_report.py and
               host_values.py are its parts
"""

from __future__ import annotations

import sys
import types

import torch

from openreg_ops.identity import identity
from openreg_ops.openreg import (
    _gpu_trace,
    _sanitizer,
    amp,
    devices,
    faults,
    graphs,
    memory,
    nvtx,
    profiler,
    random,
    schedules,
    streams,
    sync_debug,
    tensor_types,
    usage,
)
from openreg_ops.openreg.index import device_index


def register() -> None:
    """Name the backend, create ``torch.openreg``, and generate ``x.openreg()``, ``x.is_openreg`` and similar
    methods."""
    module = types.ModuleType(f"torch.{identity.module}", "The openreg device, as torch.cuda is CUDA's.")
    # The public names of these modules are also names of torch.openreg.
    flat = {"amp": amp, "graphs": graphs, "memory": memory, "random": random, "streams": streams}
    public = (devices, *flat.values(), usage, sync_debug, tensor_types)
    for part in public:
        for name in part.__all__:
            setattr(module, name, getattr(part, name))
    others = {"faults": faults, "nvtx": nvtx, "profiler": profiler, "sparse": tensor_types.sparse}
    private = {"_gpu_trace": _gpu_trace, "_sanitizer": _sanitizer}
    for name, part in {**flat, **others, **private}.items():
        setattr(module, name, part)
        sys.modules[f"torch.{identity.module}.{name}"] = part
    module.reset_device = faults.reset_device
    module.schedules = schedules.schedules
    module.AcceleratorError = torch.AcceleratorError
    module.has_half, module.has_magma = True, False
    module._sleep = streams._sleep
    module.__path__ = []  # so that `import torch.openreg.random` works
    module.__all__ = [name for part in public for name in part.__all__]
    module._is_in_bad_fork = devices._is_in_bad_fork
    module._initialized = True  # torch.utils.checkpoint saves random state only where this is true
    module._lazy_init = devices.init
    module._lazy_call = lambda call, **_: call()
    module._get_device_index = lambda device=None, optional=False, allow_cpu=False: device_index(device)

    torch.utils.rename_privateuse1_backend(identity.name)
    torch._register_device_module(identity.module, module)
    torch.accelerator.memory._snapshot = memory._snapshot
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True,
        for_module=True,
        for_packed_sequence=True,
        for_storage=True,
        # PyTorch's generated methods cannot create typed storages of these on any device.
        unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8],
    )
    faults._from_environment()
    _sanitizer._from_environment()
