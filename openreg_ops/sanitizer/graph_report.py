"""What the sanitizer knows about a captured graph (graphs.py), and the errors that describe mistakes with one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.cuda._sanitizer import AccessType, SynchronizationError
from torch.multiprocessing.reductions import StorageWeakRef

from openreg_ops import _C
from openreg_ops.sanitizer.report import Access, Memory, Span, Stream, Trace

__all__ = ["CapturedGraph", "GraphError", "HostTensor", "Hyperparameter", "Node", "Use"]


@dataclass(eq=False)
class Node:
    """An operator that was captured."""

    name: str
    line: str
    trace: Trace
    graph: str

    def __str__(self) -> str:
        return f"{self.name}, captured at {self.line}"


@dataclass(eq=False)
class Use:
    """A node's access to memory. The first access of each kind between two events represents all of them."""

    node: Node
    part: int  # how many events come before it
    kind: AccessType
    span: Span
    memory: Memory
    storage: StorageWeakRef
    argument: str | None


@dataclass(eq=False)
class HostTensor:
    """A 0-dim CPU tensor whose value a node holds as a constant."""

    node: Node
    storage: StorageWeakRef
    offset: int
    value: torch.Tensor

    def now(self) -> torch.Tensor | None:
        """The tensor's current value, or None if the tensor is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None or (self.offset + 1) * self.value.itemsize > storage.nbytes():
            return None
        return torch.empty(0, dtype=self.value.dtype, device="cpu").set_(storage, self.offset, ()).clone()


class Hyperparameter(NamedTuple):
    """A number in an optimizer's parameter groups, which its captured step holds as a constant."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    group: int
    name: str
    value: Any

    @classmethod
    def all_of(cls, optimizer: torch.optim.Optimizer) -> Iterator[Hyperparameter]:
        for index, group in enumerate(optimizer.param_groups):
            for name in optimizer.defaults:
                value = group.get(name)
                if all(type(number) in (int, float) for number in (value if type(value) is tuple else (value,))):
                    yield cls(weakref.ref(optimizer), index, name, value)

    def now(self) -> Any:
        """The current number; `value` if the optimizer is gone, or has a tensor there."""
        alive = self.optimizer()
        groups = [] if alive is None else alive.param_groups[self.group :]
        found = groups[0].get(self.name) if groups else None
        return found if type(found) in (int, float, tuple) else self.value

    def __str__(self) -> str:
        return f"param_groups[{self.group}][{self.name!r}] of {type(self.optimizer()).__name__}"


@dataclass(eq=False)
class CapturedGraph:
    """A graph: what its nodes use, and when it was replayed. `owner` is the program's graph object."""

    owner: weakref.ref[Any]
    line: str
    trace: Trace
    origin: Stream
    thread: int
    pool: tuple[int, int] = (0, 0)
    streams: set[Stream] = field(default_factory=set)
    uses: dict[tuple[Span, AccessType, int, int], Use] = field(default_factory=dict)
    events: list[tuple[int, bool]] = field(default_factory=list)  # external ones, and whether it records them
    made: list[Memory] = field(default_factory=list)  # in its pool
    pinned: list[Memory] = field(default_factory=list)  # host memory that its copies use
    tensors: list[HostTensor] = field(default_factory=list)
    numbers: dict[Any, tuple[Node, Hyperparameter]] = field(default_factory=dict)  # by optimizer, group and name
    varying: set[Any] = field(default_factory=set)  # those that had several values during the capture
    random: set[int] = field(default_factory=set)  # storages of CPU tensors that the capture drew
    kept: list[Any] = field(default_factory=list)  # keeps those storages alive, so that their addresses are not reused
    replays: int = 0
    last: Access | None = None
    drew: tuple[int, int, int] = (0, 0, 0)  # thread, autograd's sequence numbers at the first and last replay
    views: dict[Any, int] = field(
        default_factory=dict
    )  # of outputs, by line and bytes: the replay before the newest view
    meets: weakref.WeakKeyDictionary[CapturedGraph, bool] = field(default_factory=weakref.WeakKeyDictionary)

    def __str__(self) -> str:
        return f"the graph captured at {self.line}"

    def number(self, node: Node, number: Hyperparameter) -> None:
        """A node holds a number as a constant."""
        key = number[:3]
        if self.numbers.setdefault(key, (node, number))[1].value != number.value:
            self.varying.add(key)

    def pinned_memory(self, address: int) -> Memory:
        """The block of pinned memory at an address."""
        for block in self.pinned:
            if block.start <= address < block.end:
                return block
        self.pinned.append(Memory(*_C.pinned_block(address)))
        return self.pinned[-1]

    def shares_memory(self, other: CapturedGraph) -> bool:
        """Returns true if both captures allocated the same memory of their common pool."""
        if other not in self.meets:
            ends = sorted(
                (memory.start, memory.end, graph) for graph, owner in enumerate((self, other)) for memory in owner.made
            )
            reach, meets = [0, 0], False
            for start, end, graph in ends:
                meets = meets or start < reach[1 - graph]
                reach[graph] = max(reach[graph], end)
            self.meets[other] = meets
        return self.meets[other]


class GraphError(SynchronizationError):
    """A mistake with a captured graph.

    ``kind`` is one of "freed_input", "moved_input", "overwritten_output", "host_tensor", "host_number", "host_random" and
    "shared_pool". The text names the graph and the node, and contains the remedy and the stack traces of the capture and
    of the replay or access.
    """

    def __init__(self, kind: str, what: str, remedy: str, then: tuple[str, Trace], now: tuple[str, Trace]) -> None:
        super().__init__(kind, what)
        self.kind, self.what, self.remedy, self.then, self.now = kind, what, remedy, then, now

    def __str__(self) -> str:
        traces = "".join(
            f"{what} with stack trace:\n{''.join(trace.format())}\n" for what, trace in (self.now, self.then)
        )
        return (
            "============================\n"
            f"openreg's sanitizer found a mistake with a captured graph: {self.what}\n{traces}Remedy: {self.remedy}"
        )
