"""``torch.acme.memory``: the history of device memory, in the format of torch.cuda.memory. Rung 9.

pytorch.org/memory_viz draws the pickle of what `_snapshot` returns.
"""

from typing import Any

from torch_acme import _C

ACTIONS = {0: "alloc", 2: "free_completed", 8: "oom"}  # c10::CachingDeviceAllocator::TraceEntry::Action


def _record_memory_history(enabled: str | None = "all", **_options: Any) -> None:
    """Record every allocation with its Python stack, until it is called with None. Forgets what was recorded before."""
    _C.record_history(enabled is not None)


def _snapshot(device: Any = None) -> dict[str, Any]:
    """The events since `_record_memory_history`, and the memory that they left in use."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(_C.device_count())]
    segments: dict[int, dict[str, Any]] = {}
    for action, address, size, index, stream, frames in _C.history():
        event = {"action": ACTIONS[action], "addr": address, "size": size, "stream": stream, "frames": frames}
        traces[index].append(event)
        if event["action"] == "alloc":
            block = {"address": address, "size": size, "requested_size": size, "frames": frames}
            sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
            place = {"device": index, "address": address, "stream": stream, "segment_type": "large", "frames": []}
            segments[address] = place | sizes | {"blocks": [block | {"state": "active_allocated"}]}
        else:
            segments.pop(address, None)
    return {"segments": list(segments.values()), "device_traces": traces, "allocator_settings": {}}
