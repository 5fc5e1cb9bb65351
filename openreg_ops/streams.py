"""Streams and events, with ``torch.cuda``'s names."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import DeviceType

from openreg_ops.device import _index

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


class _OfDevice(type):
    """Makes ``isinstance(x, torch.openreg.Stream)`` true for any ``torch.Stream`` of the device, and so for events."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._base) and instance.device.type == "openreg"


class Stream(metaclass=_OfDevice):
    """A queue of work on one device, run in order: makes a ``torch.Stream``.

    Args:
        device: the device; the current one unless given.
        priority: 0, or negative for a more urgent stream.
    """

    _base = torch.Stream

    def __new__(cls, device: torch.types.Device = None, priority: int = 0, **kwargs: Any) -> torch.Stream:
        if kwargs:  # stream_id, device_index, device_type: an existing stream
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("openreg", _index(device)), priority=priority)


class Event(metaclass=_OfDevice):
    """A point in a stream's order: makes a ``torch.Event`` on the current device.

    It is a ``torch.Event`` itself and no subclass, because ``torch.Event.elapsed_time`` takes no subclass.

    Args:
        enable_timing: whether `elapsed_time` may be asked of it.
        blocking, interprocess: as in ``torch.cuda.Event``.
    """

    _base = torch.Event

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("openreg", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: torch.types.Device = None) -> torch.Stream:
    """The calling thread's current stream on `device`."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.types.Device = None) -> torch.Stream:
    """The default stream of `device`, which every thread starts with."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(DeviceType.PrivateUse1))


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` current on its device, and its device current."""
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream current; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        return self.stream.__enter__() if self.stream is not None else None

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


def stream(stream: torch.Stream | None) -> StreamContext:
    """``with torch.openreg.stream(s):`` runs its body's work on `s`."""
    return StreamContext(stream)
