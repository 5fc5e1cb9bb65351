"""Streams and events, under ``torch.cuda``'s names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.device.device_index import device_index
from openreg_ops.identity import identity

__all__ = [
    "Event",
    "ExternalStream",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "get_launch_mode",
    "get_stream_from_external",
    "launch_mode",
    "set_launch_mode",
    "set_stream",
    "stream",
]

_MODES = ("inline", "async", "sync")


class _OfDevice(type):
    """Makes ``isinstance(x, torch.openreg.Stream)`` true for any ``torch.Stream`` of the device.

    It does the same for ``torch.openreg.Event``.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._base) and instance.device.type == identity.name


class Stream(metaclass=_OfDevice):
    """A queue of work that runs in order on one device. Calling this creates a ``torch.Stream``.

    Args:
        device: the device; the current one unless given.
        priority: 0, or negative for a more urgent stream; a value outside `priority_range()` is clamped. The stream's
            attribute `priority` returns it. As on CUDA it is only a hint and does not change any order: every stream
            with queued work has its own thread, and the operating system shares the processor among them.

    Example:
        >>> side = torch.openreg.Stream()
        >>> with side:
        ...     x = torch.ones(3, device="openreg") * 2
        >>> torch.openreg.current_stream().wait_stream(side)  # before x is used here
        >>> x.tolist()
        [2.0, 2.0, 2.0]
    """

    _base = torch.Stream

    def __new__(cls, device: torch.types.Device = None, priority: int = 0, **kwargs: Any) -> torch.Stream:
        if kwargs:  # stream_id, device_index, device_type: an existing stream
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device(identity.name, device_index(device)), priority=priority)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -1


class Event(metaclass=_OfDevice):
    """A point in a stream's order. Calling this creates a ``torch.Event`` on the current device.

    The result is a plain ``torch.Event``, because ``torch.Event.elapsed_time`` does not accept subclasses; with
    `interprocess` it is a subclass.

    Args:
        enable_timing: whether the event supports `elapsed_time`.
        blocking: has no effect, because a waiting thread always sleeps.
        interprocess: whether other processes may use it, through `ipc_handle()` and `from_ipc_handle()`, or by sending
            it through ``torch.multiprocessing``. Keep the event alive until they have opened it.
        external: whether `record` and `wait` on a captured stream become nodes of the graph, so that each replay records
            the event, or waits for what was recorded last when it is launched. The event belongs to the device that is
            current now.
    Raises:
        ValueError: an interprocess event that is external or has timing, which CUDA does not support either.

    Example:
        >>> host = torch.zeros(3, pin_memory=True)
        >>> _ = host.copy_(torch.ones(3, device="openreg"), non_blocking=True)
        >>> done = torch.openreg.current_stream().record_event()
        >>> done.synchronize()  # before the host reads
        >>> host.tolist()
        [1.0, 1.0, 1.0]
    """

    _base = torch.Event

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> torch.Event:
        if external:
            if interprocess:
                raise ValueError("Event: expected external=False with interprocess=True, but both are True")
            event = torch.Event(identity.name, enable_timing=enable_timing, blocking=blocking)
            _C.make_external(event)
            return event
        if interprocess:
            if enable_timing:
                raise ValueError("Event: expected enable_timing=False with interprocess=True, but both are True")
            return InterprocessEvent()
        return torch.Event(identity.name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @staticmethod
    def from_ipc_handle(device: torch.types.Device, handle: bytes) -> torch.Event:
        """Open another process's event on `device`, from the bytes that its `ipc_handle()` returned.

        Raises:
            ValueError: `handle` is not such a handle, or its process no longer has the event.
        """
        event = InterprocessEvent()
        _C.open_event(event, device_index(device), handle)
        return event


class InterprocessEvent(torch.Event):
    """An event shared by several processes: ``torch.openreg.Event(interprocess=True)``.

    All processes wait for the point that any of them recorded last. If that process ends before its stream reaches the
    point, waits for it raise RuntimeError.
    """

    def __new__(cls) -> InterprocessEvent:
        event = super().__new__(cls, identity.name, interprocess=True)
        _C.make_interprocess(event)
        return event

    def ipc_handle(self) -> bytes:
        """The handle for `Event.from_ipc_handle` in another process; creates the event if it has not been recorded yet.

        The event belongs to the device that it is first recorded on, otherwise to the device that is current now.
        """
        return _C.event_handle(self)

    @classmethod
    def from_ipc_handle(cls, device: torch.types.Device, handle: bytes) -> torch.Event:
        """`Event.from_ipc_handle`."""
        return Event.from_ipc_handle(device, handle)


def current_stream(device: torch.types.Device = None) -> torch.Stream:
    """The calling thread's current stream on `device`.

    Example:
        >>> torch.openreg.current_stream() == torch.openreg.default_stream()
        True
    """
    return torch.accelerator.current_stream(device_index(device))


def default_stream(device: torch.types.Device = None) -> torch.Stream:
    """The default stream of `device`, which every thread starts with."""
    return torch.Stream(stream_id=0, device_index=device_index(device), device_type=identity.type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make `stream` current on its device, and its device current; ``None`` has no effect."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream current; ``None`` has no effect."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        return self.stream.__enter__() if self.stream is not None else None

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager:
    """``with torch.openreg.stream(s):`` runs the work in its body on `s`."""
    return contextlib.nullcontext() if stream is None else stream  # a stream is a context manager that Dynamo knows


def get_stream_from_external(data_ptr: int, device: torch.types.Device = None) -> torch.Stream:
    """The stream of `device` with a native handle from another library.

    Args:
        data_ptr: ``stream.native_handle`` of a stream of `device`.
        device: the current device unless given.
    Raises:
        ValueError: `device` has no such stream.
    """
    index = device_index(device)
    if not isinstance(data_ptr, int) or not 0 <= data_ptr < 2**63 or not _C.is_stream(index, data_ptr):
        raise ValueError(
            f"get_stream_from_external: {data_ptr!r} is not a stream of {identity.name}:{index}; pass a stream's native_handle"
        )
    return torch.Stream(stream_id=data_ptr, device_index=index, device_type=identity.type)


class ExternalStream(Stream):
    """A stream that another library created, from its native handle. Calling this creates a ``torch.Stream``.

    Args:
        stream_ptr: the handle, ``stream.native_handle``.
        device: the device; the current one unless given.
    """

    def __new__(cls, stream_ptr: int, device: torch.types.Device = None, **_kwargs: Any) -> torch.Stream:
        return get_stream_from_external(stream_ptr, device)


def get_launch_mode() -> str:
    """Where work runs: "inline", "async" or "sync"; see `set_launch_mode`."""
    return _C.launch_mode()


def set_launch_mode(mode: str) -> None:
    """Choose where work runs, for the whole process. Work on a stream runs in the stream's order in every mode.

    Args:
        mode: "inline" (the default) runs work immediately on the calling thread while its stream is idle. Otherwise it
            queues the work behind the stream's queued work or, for most of PyTorch's operators, waits for that. "async"
            queues copies, and kernels whose results are allocated before they run, for the stream's thread, and the
            host runs ahead. Wrong arguments raise at the call; an error that depends on values in device memory
            surfaces at the next synchronization. "sync" waits after each launch, so an error appears at the line that
            caused it, as with CUDA_LAUNCH_BLOCKING. The environment variable OPENREG_LAUNCH_MODE sets the mode at
            startup.
    Raises:
        ValueError: an unknown mode.
        RuntimeError: another mode than "async" in a program whose orders `torch.openreg.schedules` tries.

    Example:
        >>> torch.openreg.set_launch_mode("async")  # a missing wait can now give wrong numbers
        >>> torch.openreg.get_launch_mode()
        'async'
        >>> torch.openreg.set_launch_mode("inline")
    """
    if mode not in _MODES:
        raise ValueError(f"set_launch_mode: expected 'inline', 'async' or 'sync', but got {mode!r}")
    if _C.order_on() and mode != get_launch_mode():
        raise RuntimeError(
            f"set_launch_mode: torch.openreg.schedules needs mode {get_launch_mode()!r} while it tries the orders of a "
            f"program, but got {mode!r}; choose the mode outside the program"
        )
    _C.set_launch_mode(mode)


@contextlib.contextmanager
def launch_mode(mode: str) -> Iterator[None]:
    """``with torch.openreg.launch_mode("async"):`` runs the work in its body in that mode; see `set_launch_mode`."""
    before = get_launch_mode()
    set_launch_mode(mode)
    try:
        yield
    finally:
        set_launch_mode(before)


def _sleep(cycles: int) -> None:
    """Keep the current stream busy for `cycles` nanoseconds, like CUDA's, to reproduce races."""
    _C.sleep(device_index(), int(cycles))
