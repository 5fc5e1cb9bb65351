"""Where the host waits for a device: why an operator makes it wait, and a context that notices waits outside operators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["Copy", "copy_of", "noticed", "why"]

# Copies, and which arguments are the source and the target.
_COPIES = {
    "aten::copy_": (1, 0), "aten::_copy_from": (0, 1), "aten::_copy_from_and_resize": (0, 1), "aten::_to_copy": (0, None)
}  # fmt: skip
Copy = tuple[
    Tensor, torch.device, bool, bool
]  # the source, the target's device, non_blocking, and if the target is pinned


# ---- operators ----


def copy_of(func: OpOverload, args: tuple, kwargs: dict) -> Copy | None:
    """What a call copies; None if it is not a copy. A new target is pinned if the copy is non_blocking."""
    source, target = _COPIES.get(func.name(), (None, None))
    if source is None or not isinstance(args[source], Tensor):  # torch.func copies numbers too
        return None
    asynchronous = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    if target is not None:
        to = args[target].device
        return args[source], to, asynchronous, asynchronous and to.type == "cpu" and args[target].is_pinned()
    return args[source], torch.device(kwargs.get("device") or args[source].device), asynchronous, True


def why(func: OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor], types: Collection[str]) -> str:
    """Why the host waits for a device of these types in a call with these tensors; "" if it does not."""
    if not any(x.device.type in types for x in tensors):
        return ""
    if func is torch.ops.aten._local_scalar_dense.default:
        return "item"
    if copy := copy_of(func, args, kwargs):
        source, to, asynchronous, pinned = copy
        if source.device.type not in types or to.type != "cpu" or asynchronous and pinned:
            return ""
        return "non_blocking copy to unpinned memory" if asynchronous else "copy to the host"
    if func is torch.ops.aten.index.Tensor and not any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:]):
        return ""  # only a mask among the indices makes the size depend on data
    depends = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return "data-dependent size or value" if depends else ""


# ---- outside operators ----


@contextlib.contextmanager
def noticed(types: Collection[str], notice: Callable[[str], None], printing: bool = False) -> Iterator[None]:
    """Call ``notice(why)`` before the host waits for devices of these types, streams or events.

    Replaces ``synchronize`` of torch.accelerator, of the devices' modules, and of their streams and events.

    Args:
        printing: also notice that a tensor is printed, which no mode sees.
    """
    modules = [getattr(torch, kind, None) for kind in types]
    places: list[tuple[Any, str, str]] = [
        (module, "synchronize", "synchronize") for module in (torch.accelerator, *modules)
    ]
    for name in ("Stream", "Event"):
        general = getattr(torch, name)
        owners = {general, *(getattr(module, name, general) for module in modules)}
        places += [(owner, "synchronize", f"{name}.synchronize") for owner in owners]
    if printing:
        places.append((torch.Tensor, "__repr__", "print"))
    inside = threading.local()  # one of these calls another

    def noticing(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            elsewhere = reason != "synchronize" and getattr(args[0].device, "type", None) not in types
            if elsewhere or torch.compiler.is_compiling() or getattr(inside, "now", False):
                return function(*args, **kwargs)
            notice(reason)
            inside.now = True
            try:
                return function(*args, **kwargs)
            finally:
                inside.now = False

        return waiting

    with contextlib.ExitStack() as undo:
        for owner, name, reason in places:
            if name in getattr(owner, "__dict__", ()):
                before = vars(owner)[name]
                _set(owner, name, noticing(before, reason))
                undo.callback(_set, owner, name, before)
        yield


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of torch.Stream and torch.Event, which are static types and have no setattr."""
    try:
        setattr(owner, name, value)
    except TypeError:
        gc.get_referents(vars(owner))[0][name] = value  # the dict that vars() shows read-only
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
