"""Device memory: usage, limits, history, and releasing free memory. Names and units (bytes) are ``torch.cuda``'s."""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import deprecated  # torch requires it

from openreg_ops import _C
from openreg_ops.device import faults
from openreg_ops.device.device_index import device_index
from openreg_ops.identity import identity

__all__ = [
    "MemPool",
    "OutOfMemoryError",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "empty_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "isolation_mode",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
]

OutOfMemoryError = torch.OutOfMemoryError
_summary = torch.cuda.memory.memory_summary


def isolation_mode() -> str:
    """How device memory is protected from the host: "keys", "strict" or "off". Set by OPENREG_ISOLATION.

    While it is "keys" or "strict", host code that dereferences device memory (ctypes, NumPy over ``data_ptr()``, C++)
    ends the process with a message that names the address, its allocation and the remedy. "keys" uses the processor's
    protection keys and costs tens of nanoseconds per operator; "strict" changes the pages' protection and costs
    microseconds.
    """
    return _C.isolation_mode()


def get_allocator_backend() -> str:
    """The name of the allocator: "native", like CUDA's caching allocator."""
    return "native"


def pool_id(function: str, pool: Any) -> tuple[int, int]:
    """`pool`, if it is the number of a pool."""
    if (
        isinstance(pool, tuple)
        and len(pool) == 2
        and all(isinstance(number, int) and 0 <= number < 2**64 for number in pool)
    ):
        return pool
    raise TypeError(
        f"{function}: expected the number of a memory pool, from graph_pool_handle(), Graph.pool() or MemPool.id, "
        f"but got {pool!r}"
    )


def empty_cache(mempool_id: tuple[int, int] | None = None) -> None:
    """Return the free memory of every device to the operating system.

    Args:
        mempool_id: a private pool; then only its memory is returned, unless a graph uses the pool. By default, pools in
            use keep their memory.

    Example:
        >>> x = torch.ones(256, device="openreg")
        >>> del x
        >>> torch.openreg.empty_cache()
    """
    if _C.forked():
        return
    if mempool_id is None:
        torch.accelerator.empty_cache()
    else:
        pool = pool_id("empty_cache", mempool_id)
        for index in range(_C.device_count()):
            _C.empty_pool(index, pool)


def memory_stats(device: torch.types.Device = None) -> dict[str, Any]:
    """The allocator's statistics for `device`, with the keys of ``torch.cuda.memory_stats``.

    "active" counts what is allocated, and what was freed while a stream that it was recorded on may still use it.
    "num_alloc_retries" and "num_sync_all_streams" count the allocations that waited for queued work. "inactive_split" and
    "oversize" stay 0: blocks are not split.
    """
    return torch.accelerator.memory_stats(device_index(device))


def memory_stats_as_nested_dict(device: torch.types.Device = None) -> dict[str, Any]:
    """`memory_stats` of `device` as a nested dictionary; counts and bytes."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """`host_memory_stats` as a nested dictionary; counts, bytes and microseconds."""
    return {} if _C.forked() else _C.host_memory_stats()


def host_memory_stats() -> dict[str, Any]:
    """The statistics of pinned host memory, with the keys of ``torch.cuda.host_memory_stats``; bytes, microseconds."""
    flat = {}
    for name, value in host_memory_stats_as_nested_dict().items():
        flat.update({f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value})
    return dict(sorted(flat.items()))


def reset_peak_host_memory_stats() -> None:
    """Reset the peaks of `host_memory_stats`."""
    _C.reset_peak_host_memory_stats()


def reset_accumulated_host_memory_stats() -> None:
    """Reset the accumulated counts of `host_memory_stats`: all of its "allocated" and "freed"."""
    _C.reset_accumulated_host_memory_stats()


def memory_allocated(device: torch.types.Device = None) -> int:
    """Bytes that tensors occupy on `device` now.

    Example:
        >>> before = torch.openreg.memory_allocated()
        >>> x = torch.ones(256, device="openreg")
        >>> torch.openreg.memory_allocated() - before
        1024
    """
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device: torch.types.Device = None) -> int:
    """The peak number of bytes that tensors occupied on `device` since `reset_peak_memory_stats`.

    Example:
        >>> torch.openreg.reset_peak_memory_stats()
        >>> before = torch.openreg.memory_allocated()
        >>> x = torch.ones(256, device="openreg") + 1  # both tensors live for a moment
        >>> torch.openreg.max_memory_allocated() - before >= 2048
        True
    """
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device: torch.types.Device = None) -> int:
    """Bytes that the allocator holds on `device`, in use or kept for reuse."""
    return torch.accelerator.memory_reserved(device_index(device))


def max_memory_reserved(device: torch.types.Device = None) -> int:
    """The peak number of bytes that the allocator held on `device` since `reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_reserved(device_index(device))


@deprecated("torch.openreg.memory_cached is torch.openreg.memory_reserved", category=FutureWarning)
def memory_cached(device: torch.types.Device = None) -> int:
    """The old name of `memory_reserved`; bytes of `device`."""
    return memory_reserved(device)


@deprecated("torch.openreg.max_memory_cached is torch.openreg.max_memory_reserved", category=FutureWarning)
def max_memory_cached(device: torch.types.Device = None) -> int:
    """The old name of `max_memory_reserved`; bytes of `device`."""
    return max_memory_reserved(device)


def mem_get_info(device: torch.types.Device = None) -> tuple[int, int]:
    """Bytes of `device` that are neither used nor kept for reuse (`empty_cache` frees the latter), and its total
    bytes."""
    return torch.accelerator.get_memory_info(device_index(device))


def reset_peak_memory_stats(device: torch.types.Device = None) -> None:
    """Reset the peaks of `memory_stats` for `device`."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


_RESETS = "torch.openreg.{} is torch.openreg.reset_peak_memory_stats, which resets all peaks"


@deprecated(_RESETS.format("reset_max_memory_allocated"), category=FutureWarning)
def reset_max_memory_allocated(device: torch.types.Device = None) -> None:
    """An old name of `reset_peak_memory_stats`, for `device`."""
    reset_peak_memory_stats(device)


@deprecated(_RESETS.format("reset_max_memory_cached"), category=FutureWarning)
def reset_max_memory_cached(device: torch.types.Device = None) -> None:
    """An old name of `reset_peak_memory_stats`, for `device`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: torch.types.Device = None) -> None:
    """Reset the accumulated counts of `memory_stats` for `device`: all of its "allocated" and "freed"."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


def memory_summary(device: torch.types.Device = None, abbreviated: bool = False) -> str:
    """The statistics of `device` as a human-readable table, like ``torch.cuda.memory_summary``.

    `abbreviated` leaves out the rows for small and large allocations.
    """
    # torch.cuda's code, with our statistics instead of CUDA's.
    names = {
        **_summary.__globals__,
        "memory_stats": memory_stats,
        "_get_device_index": lambda device, **_: device_index(device),
    }
    text = types.FunctionType(_summary.__code__, names)(device_index(device), abbreviated)
    return (
        text
        if identity.name == "cuda"
        else text.replace("PyTorch CUDA memory", "openreg memory     ").replace(
            "cudaMalloc retries", "allocation retries"
        )
    )


def memory_snapshot(
    mempool_id: tuple[int, int] | None = None, include_traces: bool = True, *, device: torch.types.Device = None
) -> list[dict[str, Any]]:
    """The memory segments of every device and their blocks, by address.

    "segment_pool_id" is the number of the private pool that a segment belongs to, (0, 0) for none.

    Args:
        mempool_id: a private pool; then only its segments are returned.
        include_traces: as in ``torch.cuda.memory_snapshot``, which never returns traces.
        device: only the segments of this device.

    The format is the same as in ``torch.cuda.memory_snapshot``, which PyTorch's memory visualizer
    (pytorch.org/memory_viz) reads; `_dump_snapshot` writes a file for it. The frames of a block show the code that
    allocated it, if `_record_memory_history` was called before. A block's state is "active_allocated",
    "active_pending_free" (freed, but a stream's queued work may still use it) or "inactive".
    """
    wanted = None if mempool_id is None else pool_id("memory_snapshot", mempool_id)
    out = []
    for index in range(_C.device_count()) if device is None else [device_index(device)]:
        for address, size, stream, small, pool, blocks in _C.memory_snapshot(index):
            if wanted not in (None, pool):
                continue
            frames = _C.allocation_tracebacks([block["address"] for block in blocks])
            of = [{**block, "frames": known or []} for block, known in zip(blocks, frames, strict=True)]
            if rest := size - sum(block["size"] for block in of):  # the rest of a page that its blocks do not fill
                end = {"address": address + size - rest, "size": rest, "requested_size": rest}
                of.append({**end, "state": "inactive", "frames": []})
            active = sum(block["size"] for block in of if block["state"] != "inactive")
            allocated = sum(block["size"] for block in of if block["state"] == "active_allocated")
            out.append(
                {
                    "device": index,
                    "address": address,
                    "total_size": size,
                    "allocated_size": allocated,
                    "active_size": active,
                    "requested_size": sum(
                        block["requested_size"] for block in of if block["state"] == "active_allocated"
                    ),
                    "stream": stream,
                    "segment_type": "small" if small else "large",
                    "segment_pool_id": pool,
                    "is_expandable": False,
                    "frames": [],
                    "blocks": of,
                }
            )
    return out


_ACTIONS = ("alloc", "free_requested", "free_completed", "oom")
_history: dict[str, Any] = {"skip_actions": ()}


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    *,
    clear_history: bool = False,
    skip_actions: Sequence[str] | None = None,
) -> None:
    """Record device memory events and their stack traces from now on, like
    ``torch.cuda.memory._record_memory_history``.

    Args:
        enabled: "all" records every allocation and free, "state" only the allocations in use, None stops recording and
            clears the history.
        context: What gets a stack trace: "all", "alloc" (allocations), "state" (what is in use), None (nothing).
        stacks: "python", or "all" for the frames of C++ as well, which cost more.
        max_entries: The maximum number of entries in a device's history; the latest are kept.
        clear_history: Forget what was recorded before.
        skip_actions: Actions to leave out of `_snapshot`: "alloc", "free_requested", "free_completed", "oom".
    Raises:
        ValueError: An argument is none of these.
    """
    for name, value, allowed in (
        ("enabled", enabled, (None, "state", "all")),
        ("context", context, (None, "state", "alloc", "all")),
        ("stacks", stacks, ("python", "all")),
        *(("an action to skip", action, _ACTIONS) for action in skip_actions or ()),
    ):
        if value not in allowed:
            raise ValueError(f"_record_memory_history: expected {name} among {allowed}, but got {value!r}")
    if not isinstance(max_entries, int) or not 0 <= max_entries <= sys.maxsize:
        raise ValueError(
            f"_record_memory_history: expected max_entries, an integer from 0 to sys.maxsize, but got {max_entries!r}"
        )
    _history["skip_actions"] = tuple(skip_actions or ())
    if clear_history:
        _C.clear_memory_history()
    on = enabled is not None
    _C.record_memory_history(on, enabled == "all", context or "none", stacks == "all", max_entries)


def _snapshot(device: torch.types.Device = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """The state of device memory and its recorded history, in the format of ``torch.cuda.memory._snapshot``.

    Args:
        augment_with_fx_traces: adds the lines of FX graphs to the frames of their generated code.
    """
    traces: list[list[dict[str, Any]]] = []
    for index in range(_C.device_count()):
        trace = []
        if device is None or index == device_index(device):
            for action, address, size, free, stream, time_us, frames in _C.memory_history(index):
                entry = {"action": action, "size": size, "stream": stream, "time_us": time_us}
                entry |= {"device_free": free} if action == "oom" else {"addr": address}
                if entry["action"] not in _history["skip_actions"]:
                    trace.append(entry | {"frames": frames or [], "segment_pool_id": (0, 0)})
        traces.append(trace)
    snapshot = {
        "segments": memory_snapshot(device=device),
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    return torch._utils._augment_memory_snapshot_stack_traces(snapshot) if augment_with_fx_traces else snapshot


def _dump_snapshot(filename: str = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
    """Write `_snapshot` to a file for pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(augment_with_fx_traces=augment_with_fx_traces), file)


def set_per_process_memory_fraction(fraction: float, device: torch.types.Device = None) -> None:
    """Limit tensors to this fraction of the memory of `device`; an allocation beyond it raises OutOfMemoryError.

    Args:
        fraction: 0.0 to 1.0.
    Raises:
        TypeError: fraction is not a float.
        ValueError: it is not in [0, 1].
    """
    if not isinstance(fraction, float):
        raise TypeError(f"set_per_process_memory_fraction: expected fraction as a float, but got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"set_per_process_memory_fraction: expected a fraction from 0 to 1, but got {fraction}")
    faults._set_memory_limit(device_index(device), int(fraction * _C.device_memory()))


def get_per_process_memory_fraction(device: torch.types.Device = None) -> float:
    """The fraction of `device` that tensors may occupy."""
    return _C.memory_limit(device_index(device)) / _C.device_memory()


class MemPool(_C.MemPool):
    """A private memory pool: memory allocated from it under `use_mem_pool` is not shared with other allocations.

    The pool belongs to the current device. Its memory returns to the general pool once the pool and the tensors in it
    are gone.

    Args:
        allocator, use_on_oom, no_split: as in ``torch.cuda.MemPool``; only the defaults are supported.
    Raises:
        ValueError: one of these is not the default.
    """

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        for name, value, default in (
            ("allocator", allocator, None),
            ("use_on_oom", use_on_oom, False),
            ("no_split", no_split, False),
        ):
            if value is not default:
                raise ValueError(
                    f"MemPool: expected {name}={default}, the only one that openreg supports, but got {value!r}"
                )
        super().__init__(-1)

    @property
    def id(self) -> tuple[int, int]:
        """The pool's id, for graphs and snapshots."""
        return super().id

    @property
    def allocator(self) -> None:
        """Always None, because there is one allocator."""
        return None

    def use_count(self) -> int:
        """How many objects use the pool: this one, graphs, and active `use_mem_pool` contexts."""
        return super().use_count()

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The segments of the pool, as `memory_snapshot` gives them; `include_traces` is its argument."""
        return memory_snapshot(self.id, include_traces)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: torch.types.Device = None) -> Iterator[None]:
    """``with torch.openreg.use_mem_pool(pool):`` makes the calling thread allocate from `pool`.

    Args:
        pool: the pool.
        device: the device whose allocations use the pool; the current one unless given.
    """
    if not isinstance(pool, _C.MemPool):
        raise TypeError(f"use_mem_pool: expected a torch.openreg.MemPool, but got {pool!r}")
    index = device_index(device)
    _C.retain_pool(index, pool.id)
    before = _C.use_pool(index, pool.id)
    try:
        yield
    finally:
        _C.use_pool(index, before)
        _C.release_pool(index, pool.id)


def caching_allocator_alloc(
    size: int, device: torch.types.Device = None, stream: torch.Stream | int | None = None
) -> int:
    """Allocate device memory for another library and return its address.

    Args:
        size: bytes.
        device: the device; the current one unless given.
        stream: the stream that uses the memory, or its native handle; the current one unless given.
    Raises:
        TypeError: stream is neither.
        torch.OutOfMemoryError: the device does not have enough memory.
    """
    index = device_index(device)
    if stream is None:
        stream = torch.accelerator.current_stream(index)
    handle = stream.stream_id if isinstance(stream, torch.Stream) else stream
    if not isinstance(handle, int):
        raise TypeError(
            f"caching_allocator_alloc: expected stream as a torch.Stream or its native handle, but got {stream!r}"
        )
    return _C.caching_allocator_alloc(size, index, handle)


def caching_allocator_delete(mem_ptr: int) -> None:
    """Free memory from `caching_allocator_alloc`, at the address `mem_ptr`.

    Raises:
        RuntimeError: the address is not from `caching_allocator_alloc`.
    """
    _C.caching_allocator_delete(mem_ptr)


def address_of(x: torch.Tensor) -> int:
    """The address of a tensor's storage; unlike data_ptr(), asking for it copies no memory that is copied on write."""
    return 0 if x._is_zerotensor() else torch._C._data_address(x)
