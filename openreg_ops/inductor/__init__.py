"""torch.compile for the device: Dynamo's device interface, and Inductor's C++ kernels run on device memory.

Users need nothing of it but `decompositions`. Importing this package loads neither Dynamo nor Inductor (two seconds):
the parts register themselves when PyTorch loads those.

    dynamo.py    what Dynamo asks a device: streams, events, current device
    operators.py what becomes of custom operators
    codegen.py   what Inductor generates for the device: kernels that go through launch(), and the wrappers
    adapt.py     where Inductor's own code must be adapted, one function each, pinned to versions of torch
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from openreg_ops import _C

# The operators that Inductor takes apart and fuses with what stands around them; of the others, and in eager mode,
# the device's own kernel runs. May be changed at any time, for the graphs compiled from then on.
decompositions: set[str] = {"rms_norm", "rotary_embedding", "swiglu"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported by whoever needs it."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self.call()

        spec.loader.exec_module = exec_module
        return spec


def _register_interface() -> None:
    from openreg_ops.inductor import dynamo

    dynamo.register_interface()


def _register_context_manager() -> None:
    from openreg_ops.inductor import dynamo

    dynamo.register_context_manager()


def _register_random_state() -> None:
    """Let graphs save and restore the device's random state, as checkpointing does: PyTorch knows its own devices only."""
    rng_prims = sys.modules["torch._prims.rng_prims"]
    save, restore = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
    key = torch._C.DispatchKey.BackendSelect
    save_elsewhere, restore_elsewhere = save.py_kernels[key], restore.py_kernels[key]

    def device_of(args: Any, kwargs: Any) -> torch.device | None:
        devices = [getattr(x, "device", x) for x in (kwargs.get("device"), *args)]
        return next((x for x in devices if isinstance(x, torch.device) and x.type == "openreg"), None)

    def save_state(op: Any, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(args, kwargs)) is None:
            return save_elsewhere(op, *args, **kwargs)
        return torch.openreg.get_rng_state(device), op(*args, **kwargs)

    def with_state(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(args, kwargs)) is None:
            return restore_elsewhere(state, op, *args, **kwargs)
        now = torch.openreg.get_rng_state(device)
        torch.openreg.set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            torch.openreg.set_rng_state(now, device)

    save.py_kernels[key], restore.py_kernels[key] = save_state, with_state
    # The other implementations of `save` call the one replaced as a variable of the function around them.
    for traced in save.python_key_table.values():
        names = getattr(getattr(traced, "__code__", None), "co_freevars", ())
        if save_elsewhere.__name__ in names:
            traced.__closure__[names.index(save_elsewhere.__name__)].cell_contents = save_state


def _register_inductor() -> None:
    from openreg_ops.inductor import codegen, operators

    codegen.register()
    operators.register()


def register() -> None:
    """Arrange that the device is known to Dynamo and Inductor as soon as they are there."""
    for name, call in (
        ("torch._dynamo.device_interface", _register_interface),
        ("torch._dynamo.variables.ctx_manager", _register_context_manager),
        ("torch._prims.rng_prims", _register_random_state),
        ("torch._inductor.compile_fx", _register_inductor),
    ):
        if name in sys.modules:
            call()
        else:
            sys.meta_path.insert(0, _AfterImport(name, call))
    # Generated code calls openreg_launch; csrc/backend/inductor.h.
    ctypes.CDLL(_C.__file__, ctypes.RTLD_GLOBAL)
