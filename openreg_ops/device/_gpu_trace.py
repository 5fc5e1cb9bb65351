"""``torch.openreg._gpu_trace``: callbacks for events on the device, like ``torch.cuda._gpu_trace``.

PyTorch calls them once ``torch._C._activate_gpu_trace()`` has been called, and logs what they raise. They get events
and memory as addresses, and streams as their ``native_handle``, which is 0 for the default stream. A synchronizing
operator counts as a synchronization of its stream.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._utils import CallbackRegistry

EventCreationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg event creation")
EventDeletionCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg event deletion")
EventRecordCallbacks: CallbackRegistry[int, int] = CallbackRegistry("openreg event record")
EventWaitCallbacks: CallbackRegistry[int, int] = CallbackRegistry("openreg event wait")
MemoryAllocationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg memory allocation")
MemoryDeallocationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg memory deallocation")
StreamCreationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg stream creation")
DeviceSynchronizationCallbacks: CallbackRegistry[[]] = CallbackRegistry("openreg device synchronization")
StreamSynchronizationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg stream synchronization")
EventSynchronizationCallbacks: CallbackRegistry[int] = CallbackRegistry("openreg event synchronization")


def register_callback_for_event_creation(cb: Callable[[int], None]) -> None:
    """Call `cb(event)` when an event is created, which happens when it is first recorded."""
    EventCreationCallbacks.add_callback(cb)


def register_callback_for_event_deletion(cb: Callable[[int], None]) -> None:
    """Call `cb(event)` before an event is destroyed."""
    EventDeletionCallbacks.add_callback(cb)


def register_callback_for_event_record(cb: Callable[[int, int], None]) -> None:
    """Call `cb(event, stream)` before an event is recorded."""
    EventRecordCallbacks.add_callback(cb)


def register_callback_for_event_wait(cb: Callable[[int, int], None]) -> None:
    """Call `cb(event, stream)` before a stream is told to wait for an event."""
    EventWaitCallbacks.add_callback(cb)


def register_callback_for_memory_allocation(cb: Callable[[int], None]) -> None:
    """Call `cb(address)` when device memory has been allocated."""
    MemoryAllocationCallbacks.add_callback(cb)


def register_callback_for_memory_deallocation(cb: Callable[[int], None]) -> None:
    """Call `cb(address)` before device memory is freed."""
    MemoryDeallocationCallbacks.add_callback(cb)


def register_callback_for_stream_creation(cb: Callable[[int], None]) -> None:
    """Call `cb(stream)` when a stream of the pool is handed out for the first time."""
    StreamCreationCallbacks.add_callback(cb)


def register_callback_for_device_synchronization(cb: Callable[[], None]) -> None:
    """Call `cb()` before the host waits for a device."""
    DeviceSynchronizationCallbacks.add_callback(cb)


def register_callback_for_stream_synchronization(cb: Callable[[int], None]) -> None:
    """Call `cb(stream)` before the host waits for a stream."""
    StreamSynchronizationCallbacks.add_callback(cb)


def register_callback_for_event_synchronization(cb: Callable[[int], None]) -> None:
    """Call `cb(event)` before the host waits for an event."""
    EventSynchronizationCallbacks.add_callback(cb)
