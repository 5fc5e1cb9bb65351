"""Checks that the inputs of a graph still exist at a replay: ``check_input_liveness`` of `torch.openreg.graph`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from openreg_ops.device import memory
from openreg_ops.identity import identity

__all__ = ["InputLiveness", "is_plain"]


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Returns true if a tensor class does not override dispatch."""
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


class InputLiveness(TorchDispatchMode):
    """Remembers the storages that the operators of a capture take, without keeping them alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # and bytes, by address
        self._inputs: list[tuple[StorageWeakRef, int, str]] = []  # address, and the node that uses it
        self._watching = False
        self._thread = threading.local()  # .begun: on the thread that called `begin`, which has the mode on its stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # it calls again with its inner tensors
            return NotImplemented
        for x in tree_leaves((args, kwargs)):
            if (
                isinstance(x, torch.Tensor)
                and is_plain(type(x))
                and x.device.type == identity.name
                and x.layout == torch.strided
            ):
                address = memory.address_of(x)
                if address and address not in self._storages:
                    storage = x.untyped_storage()
                    self._storages[address] = StorageWeakRef(storage), storage.nbytes()
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """Start recording, at the beginning of the capture."""
        self.__enter__()
        self._watching = self._thread.begun = True

    def end(self) -> bool:
        """Leave the mode unless it was left before. Returns False on a thread other than the one that called `begin`."""
        if not self._watching:
            return True
        if not getattr(self._thread, "begun", False):
            return False
        self._watching = False
        above: list[TorchDispatchMode] = []  # modes of the program, without their own __exit__ and __enter__
        while True:
            stack = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
            if self not in stack or stack[-1] is self:
                break
            TorchDispatchMode.__exit__(stack[-1], None, None, None)
            above.append(stack[-1])
        if self in stack:
            self.__exit__(None, None, None)
        for mode in reversed(above):
            TorchDispatchMode.__enter__(mode)
        return True

    def keep_inputs(self, graph: Any) -> None:
        """Keep the storages that the graph uses and that do not belong to its memory pool."""
        segments = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in memory.memory_snapshot(mempool_id=graph.pool())
        ]
        nodes = graph._nodes()
        for address, (storage, size) in self._storages.items():
            if any(start <= address < end for start, end in segments):
                continue
            for name, where, _, _, uses in nodes:
                if uses is None or any(at < address + size and address < at + n for at, n, _ in uses):
                    self._inputs.append((storage, address, f"{name} at {where}" if uses and where else name or "work"))
                    break
        self._storages.clear()

    def check(self) -> None:
        """Raise RuntimeError if an input was freed or moved."""
        dead = []
        for ref, address, node in self._inputs:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None or storage.data_ptr() != address:
                what = "freed" if storage is None else "moved" if storage.nbytes() else "resized to 0 bytes"
                dead.append(f"the input of {node} at address {address:#x} was {what}")
        if dead:
            raise RuntimeError(
                f"replay: found {len(dead)} dead tensor(s): {'; '.join(dead)} since the capture, and the replay would "
                "use its old memory. Keep captured tensors alive as long as the graph and write new values into them with "
                "copy_(), or capture again."
            )
