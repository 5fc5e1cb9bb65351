"""Checks that the inputs of a graph still exist at a replay: ``check_input_liveness`` of `torch.openreg.graph`."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openreg_ops.openreg import memory

__all__ = ["InputLiveness"]


class InputLiveness(TorchDispatchMode):
    """Remembers the storages that the operators of a capture take, without keeping them alive."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # and bytes, by address
        self._inputs: list[tuple[StorageWeakRef, int, str]] = []  # address, and the node that uses it
        self._entered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if (
                type(x) in (torch.Tensor, torch.nn.Parameter)
                and x.device.type == "openreg"
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
        self._entered = True

    def end(self) -> None:
        """Stop recording."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)

    def keep_inputs(self, graph: Any) -> None:
        """Keep the storages that the graph uses and that do not belong to its memory pool."""
        segments = [
            (each["address"], each["address"] + each["total_size"])
            for each in memory.memory_snapshot(mempool_id=graph.pool())
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
            if storage is None or (storage.nbytes() and storage.data_ptr() != address):
                dead.append(f"the input of {node} at address {address:#x} was {'moved' if storage else 'freed'}")
        if dead:
            raise RuntimeError(
                f"replay: found {len(dead)} dead tensor(s): {'; '.join(dead)} since the capture, and the replay would "
                "use its old memory. Keep captured tensors alive as long as the graph and write new values into them with "
                "copy_(), or capture again."
            )
