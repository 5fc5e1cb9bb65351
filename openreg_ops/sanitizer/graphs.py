"""What the sanitizer records about graphs, and the mistakes it finds at a replay or when a result is read.

The race detector (history.py) passes captured operators to this module; they do not run. A replay performs the accesses of
its nodes on the stream it is launched on. docs/graphs.md lists the mistakes and what cannot be seen.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from openreg_ops import _C
from openreg_ops.device.memory import address_of
from openreg_ops.identity import identity
from openreg_ops.sanitizer.graph_report import CapturedGraph, GraphError, HostTensor, Hyperparameter, Node, Use
from openreg_ops.sanitizer.report import READ, WRITE, Access, Memory, Span, Stream, Trace
from openreg_tools.core.place import line, site

__all__ = ["Captures"]

_SET_DATA = torch.Tensor.data.__set__


def _stream_of(index: int) -> tuple[Stream, bool]:
    """The current stream of a device, and whether it is captured."""
    stream = torch.accelerator.current_stream(index)
    return (index, stream.stream_id), stream.is_capturing()


class Captures:
    """The graphs that were captured while the sanitizer is on."""

    def __init__(self, races: Any) -> None:
        self.races = races  # the history.Races that owns this
        self.active: list[CapturedGraph] = []  # under capture
        self.graphs: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self.moved: dict[Span, Trace] = {}  # parameters whose memory was replaced, by the old span
        self.views: dict[int, tuple[Any, CapturedGraph, int, Any, Trace]] = {}  # of outputs, by tensor
        self.passed = threading.local()  # .views: the stale views among the current function's arguments

    # ---- captures ----

    def begun(self, owner: Any) -> None:
        """A capture of the current stream began."""
        index = _C.current_device()
        stream, _ = _stream_of(index)
        trace = Trace(self.races.caller)
        graph = CapturedGraph(weakref.ref(owner), line(), trace, stream, threading.get_ident())
        graph.streams.add(stream)
        graph.pool = owner.pool()
        self.active.append(graph)

    def ended(self, owner: Any, ok: bool) -> None:
        """A capture ended or was invalidated."""
        for graph in [active for active in self.active if active.owner() is owner]:
            self.races.drain()
            self.active.remove(graph)
            graph.random.clear()
            graph.kept = [kept for kept in graph.kept if isinstance(kept, CapturedGraph)]
            if ok:
                owner._sanitized = graph  # lives with it
                self.graphs.add(graph)

    def of_thread(self) -> CapturedGraph | None:
        """The capture of the calling thread, or of the thread whose backward pass it runs."""
        if len(self.active) < 2:
            return self.active[0] if self.active else None
        mine = {threading.get_ident(), self.races.caller}
        return next((graph for graph in self.active if graph.thread in mine), None)

    def captured(self, found: Iterable[tuple[torch.Tensor, Any, Any]], args: Any, kwargs: Any) -> Stream | None:
        """The captured stream that an operator runs on, or None if it is not captured."""
        devices = dict.fromkeys(x.device.index for x, _, _ in found if x.device.type == identity.name)
        if not devices:
            like = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), "cpu")  # of a factory
            device = torch.device(kwargs.get("device") or like)
            if device.type != identity.name:
                return None
            devices = {_C.current_device() if device.index is None else device.index: None}
        streams = map(_stream_of, devices)  # of several: a copy to another device, whose stream joins the capture
        return next((stream for stream, captured in streams if captured), None)

    def allocated(self, memory: Memory) -> None:
        """Memory was allocated. Its stream shows whether a capture allocated it."""
        for graph in self.active:
            if memory.owner in graph.streams:
                memory.graph, memory.pool = weakref.ref(graph), graph.pool
                graph.made.append(memory)

    def node(self, func: torch._ops.OpOverload, trace: Trace) -> Node:
        """An operator is about to be captured."""
        graph = self.of_thread()
        assert graph is not None
        return Node(str(func), line(), trace, str(graph))

    def host_tensor(self, node: Node, x: torch.Tensor) -> None:
        """A captured operator takes a 0-dim CPU tensor as a number."""
        graph = self.of_thread()
        assert graph is not None
        storage = x.untyped_storage()
        if storage._cdata in graph.random:
            self.races.fail(
                [
                    GraphError(
                        "host_random",
                        f"{node.name} of {graph} takes a random number that was drawn on the host during the capture, "
                        "so every replay uses this one.",
                        f"Draw it on the device, with device='{identity.name}', from a generator that the graph knows.",
                        ("Captured", graph.trace),
                        ("Used", node.trace),
                    )
                ]
            )
        graph.tensors.append(HostTensor(node, StorageWeakRef(storage), x.storage_offset(), x.detach().clone()))

    def host_result(self, func: torch._ops.OpOverload, out: Any, read: Iterable[torch.Tensor] = ()) -> None:
        """An operator ran on the host during a capture. What it computes from random numbers is random."""
        graph = self.of_thread()
        if graph is None:
            return
        if torch.Tag.nondeterministic_seeded in func.tags or (
            graph.random and any(x.untyped_storage()._cdata in graph.random for x in read)
        ):
            for x in (x for x in _tensors(out) if x.layout == torch.strided and not x.is_nested):
                graph.random.add(x.untyped_storage()._cdata)
                graph.kept.append(x.untyped_storage())

    def use(self, node: Node, stream: Stream, found: Iterable[tuple[torch.Tensor, Any, Any]]) -> None:
        """A captured operator reads and writes these tensors."""
        graph = self.of_thread()
        assert graph is not None
        graph.streams.add(stream)
        for x, kind, name in found:
            if x.device.type == identity.name:
                memory = self.races._memory_of(x)
            else:
                memory = graph.pinned_memory(address_of(x)) if x.is_pinned() else None  # of a copy
            if memory is not None:
                self.races.note_use(memory)
                span = Span.of(x)
                part = len(graph.events)
                use = Use(node, part, kind, span, memory, StorageWeakRef(x.untyped_storage()), name)
                graph.uses.setdefault((span, kind, id(memory), part), use)

    def event(self, event: int, stream: Stream, *, records: bool) -> None:
        """An external event was captured: each replay records it, or waits for it."""
        graph = next((active for active in self.active if stream in active.streams), None) or self.of_thread()
        if graph is not None:
            graph.events.append((event, records))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Keep the hyperparameters of an optimizer whose step was captured."""
        graph = self.of_thread()
        if graph is None or not _C.is_current_stream_capturing():
            return
        trace = Trace(self.races.caller)
        node = Node(f"the step of {type(optimizer).__name__}", line(), trace, str(graph))
        for number in Hyperparameter.all_of(optimizer):
            graph.number(node, number)

    # ---- replays ----

    def replaying(self, owner: Any) -> tuple[CapturedGraph, list[tuple[Memory, Access]]] | None:
        """A replay is about to be launched: check it, and return the accesses that it makes."""
        graph = getattr(owner, "_sanitized", None)
        if graph is None or graph not in self.graphs:
            return None
        races = self.races
        races.drain()
        stream, captured = _stream_of(graph.origin[0])
        trace = Trace(races.caller)
        if captured:
            self._captured_replay(graph, stream)
            return None
        races.seq_num += 1
        races.syncs.update_seq_num(stream, races.seq_num)
        if graph.last is not None:  # replays of one graph never overlap
            races.syncs.stream_wait_for_event(stream, ("replay", id(graph)))
        replay = f"a replay of {graph}"
        errors: list[Exception] = [*self._inputs(graph, trace), *self._host(graph, trace)]
        accesses: list[tuple[Memory, Access]] = []
        part, begun = 0, False
        for use in sorted(graph.uses.values(), key=operator.attrgetter("part")):
            if part < use.part:
                self._events(graph.events[part : use.part], stream)
                part = use.part
            if not begun:  # after the events with which the graph begins
                errors += self._pool(graph, stream, trace)
                begun = True
            if (memory := self._memory(use)) is not None:
                name = f"{replay}, in its node {use.node}"
                aliases = [use.argument] if use.argument else []
                access = Access(
                    use.kind, races.seq_num, stream, name, aliases, use.argument is None, trace, use.span, node=use.node
                )
                accesses.append((memory, access))
                errors += races.raced(memory, access)
        races.fail(errors)
        graph.last = Access(WRITE, races.seq_num, stream, replay, [], False, trace, Span(0, 0, None))
        self._events(graph.events[part:], stream)
        return graph, accesses

    def _memory(self, use: Use) -> Memory | None:
        """The memory that a node uses in a replay, or None if the program no longer has it."""
        start = use.memory.start
        if use.memory.owner is not None:
            return use.memory if self.races.memory.get(start) is use.memory else None
        first, end = _C.pinned_block(start)
        return self.races.watch(start) if first < end else None  # the graph keeps what the program has freed

    def _events(self, events: list[tuple[int, bool]], stream: Stream) -> None:
        """A replay records external events, or waits for them. The nodes behind an event are not part of its record."""
        races = self.races
        for event, records in events:
            if records:
                races.event_recorded(event, stream)
            else:
                races.event_waited_for(event, stream)
        races.seq_num += 1
        races.syncs.update_seq_num(stream, races.seq_num)

    def _pool(self, graph: CapturedGraph, stream: Stream, trace: Trace) -> Iterator[GraphError]:
        for other in self.graphs:
            if other is graph or other.pool != graph.pool or other.last is None or self.races.after(stream, other.last):
                continue
            if graph.shares_memory(other):
                yield _pool_error(graph, other, trace)

    def replayed(self, graph: CapturedGraph, accesses: list[tuple[Memory, Access]]) -> None:
        """The replay was launched."""
        assert graph.last is not None
        for memory, access in accesses:
            self.races.keep(memory, access)
        self.races.syncs.record_state(("replay", id(graph)), graph.last.stream)
        graph.replays += 1
        thread, first, _ = graph.drew
        now = torch._C._autograd._get_sequence_nr()
        if graph.replays == 1:
            graph.drew = (threading.get_ident(), now, now)
        else:  # -1: replayed by several threads, whose numbers do not compare
            graph.drew = (thread if thread == threading.get_ident() else -1, first, now)

    def _captured_replay(self, graph: CapturedGraph, stream: Stream) -> None:
        """A replay became a node of another graph, which then uses everything that the replay uses."""
        outer = self.of_thread()
        if outer is not None:
            outer.streams.add(stream)
            for (span, kind, memory, part), use in graph.uses.items():
                part += len(outer.events)
                outer.uses.setdefault((span, kind, memory, part), dataclasses.replace(use, part=part))
            outer.events += graph.events
            outer.tensors += graph.tensors
            outer.numbers = {**graph.numbers, **outer.numbers}
            outer.kept.append(graph)

    def _alive(self, use: Use) -> str | None:
        """What happened to an input, or None if it is still where it was."""
        memory = use.memory
        if memory.owner is None:  # pinned memory
            storage = torch.UntypedStorage._new_with_weak_ptr(use.storage.cdata)
            return "moved" if storage is not None and not memory.start <= storage.data_ptr() < memory.end else None
        if memory.graph is not None and (maker := memory.graph()) is not None and maker in self.graphs:
            return None  # in a pool that a graph keeps
        if self.races.memory.get(memory.start) is memory:
            return "moved" if use.span in self.moved else None
        if memory.pool and any(graph.pool == memory.pool for graph in self.graphs):
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(use.storage.cdata)
        if storage is None:
            return "freed"
        return None if storage.data_ptr() == memory.start else "moved"

    def _inputs(self, graph: CapturedGraph, trace: Trace) -> Iterator[GraphError]:
        made, seen = {id(memory) for memory in graph.made}, set()
        for use in graph.uses.values():
            if id(use.memory) in made or id(use.memory) in seen or (what := self._alive(use)) is None:
                continue
            seen.add(id(use.memory))
            argument = f"argument {use.argument} of" if use.argument else "the output of"
            text = f"the memory of {argument} {use.node}, an input of {graph}, was freed since the capture"
            now = ("Replayed", trace)
            if what == "moved":
                text = f"{argument} {use.node}, an input of {graph}, was moved to other memory since the capture"
                if moved := self.moved.get(use.span):
                    now = ("Moved", moved)
            elif use.memory.start in self.races.memory:
                text += ", and another tensor has it now"
            yield GraphError(
                f"{what}_input",
                f"{text}. The replay would use the old address.",
                "Keep the tensor that was captured as long as the graph, and write new values into it with copy_(); "
                "or capture again.",
                ("Captured", use.node.trace),
                now,
            )

    def _host(self, graph: CapturedGraph, trace: Trace) -> Iterator[GraphError]:
        remedy = "Make it a tensor on the device and change it with copy_() or fill_(), or capture again."
        seen = set()
        for tensor in graph.tensors:
            now = tensor.now()
            if now is None or torch.equal(now, tensor.value) or (now.isnan() and tensor.value.isnan()):
                continue
            if tensor.storage.cdata not in seen:
                seen.add(tensor.storage.cdata)
                yield GraphError(
                    "host_tensor",
                    f"{tensor.node} of {graph} holds a CPU tensor as the constant {tensor.value.item()}, but its value "
                    f"is {now.item()} now. The replay would use the old one.",
                    remedy,
                    ("Captured", tensor.node.trace),
                    ("Replayed", trace),
                )
        for key, (node, number) in graph.numbers.items():
            others = (other.numbers.get(key) for other in self.graphs if other is not graph)
            if key in graph.varying or any(held and held[1].value != number.value for held in others):
                continue  # the program captures a step for each value
            if number.now() != number.value:
                yield GraphError(
                    "host_number",
                    f"{node} of {graph} holds {number} as the constant {number.value}, but it is {number.now()} now. The "
                    "replay would use the old one.",
                    remedy,
                    ("Captured", node.trace),
                    ("Replayed", trace),
                )

    # ---- results ----

    def read(self, memory: Memory, access: Access, written: Set[Span]) -> Iterator[GraphError]:
        """Yield an error if an operator reads a graph's memory that a later replay has overwritten.

        `written` is what the operator writes.
        """
        graph = memory.graph() if memory.graph else None
        if graph is None or access.type is not READ or not graph.replays:
            return
        for span, made, trace in getattr(self.passed, "views", ()):
            if span.meets(access.span):
                yield _overwritten(
                    f"{access.operator} reads a view of {_output(graph, access)} that was made after its replay "
                    f"{made}, but replay {graph.replays} has overwritten it",
                    ("View made", trace),
                    access.stack_trace,
                )
                return
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "torch::autograd::AccumulateGrad" and access.span in written:
            yield _overwritten(
                f"{access.operator} accumulates {_output(graph, access)} into a gradient that is the same output after an "
                f"earlier replay, but replay {graph.replays} has overwritten it",
                ("Captured", graph.trace),
                access.stack_trace,
            )
        thread, first, last = graph.drew
        if node is None or thread != self.races.caller or not first <= node._sequence_nr() < last:
            return
        if any(Span.of(saved).meets(access.span) for saved in _saved(node)):
            yield _overwritten(
                f"{access.operator} in the backward of {node.name()} reads {_output(graph, access)} that was saved for "
                f"backward, but replay {graph.replays} has overwritten it since",
                ("Captured", graph.trace),
                access.stack_trace,
            )

    def _view_of(self, x: torch.Tensor) -> tuple[Any, CapturedGraph, int, Any, Trace] | None:
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        known = self.views.get(x._cdata)
        return known if known is not None and not known[0].expired() else None

    def function(self, func: Any, args: Any, kwargs: Any, before: Callable[[], None]) -> Any:
        """Call `before` and a function of torch, tracking views of graph outputs among its arguments and results."""
        if func == _SET_DATA and isinstance(args[0], torch.nn.Parameter) and args[0].device.type == identity.name:
            with self.races.lock, torch._C._DisableTorchDispatch():
                old, new = Span.of(args[0]), Span.of(args[1])
                self.moved.pop(new, None)
                if old != new:
                    self.moved[old] = Trace(self.races.caller)
        given = [argument for value in (*args, *kwargs.values()) for argument in _tensors(value)]
        stale = []
        if self.views:
            for known in filter(None, map(self._view_of, given)):
                if known[1].views[known[3]] > known[2]:
                    stale.append(known)
        outer = getattr(self.passed, "views", ())
        self.passed.views = [(key[-1], made, trace) for _, _, made, key, trace in stale]
        try:
            before()
            out = func(*args, **kwargs)
        finally:
            self.passed.views = outer
        viewed = stale[:1] if stale and stale[0] is self._view_of(given[0]) else []  # others may only give a shape
        for x in _tensors(out):
            if x.device.type == identity.name and not any(x is argument for argument in given):
                self._made_view(x, viewed)
        return out

    def _made_view(self, x: torch.Tensor, stale: list[Any]) -> None:
        if x.layout != torch.strided or x.is_nested:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return
        with self.races.lock, torch._C._DisableTorchDispatch():
            base = address_of(x)
            memory = self.races.memory.get(base)
            graph = memory.graph() if memory is not None and memory.graph is not None else None
            if graph is None or not graph.replays or graph in self.active:
                return
            key = (site(), Span.of(x))
            graph.views[key] = graph.replays
            if len(self.views) > 1000:
                self.views = {view: known for view, known in self.views.items() if not known[0].expired()}
            known = (torch._C._WeakTensorRef(x), graph, graph.replays, key, Trace(self.races.caller))
            for _, of, made, old, trace in stale:  # a view of a stale view is as old
                if of is graph and old[-1].meets(key[-1]):
                    known = (known[0], graph, made, old, trace)
            self.views[x._cdata] = known


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in values if isinstance(item, torch.Tensor)]


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd saved and has not freed, without calling hooks that unpack them."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                raw = getattr(node, name)
            except RuntimeError:  # freed: what runs now adds the node's gradients to others
                return
            for saved in raw if isinstance(raw, (list, tuple)) else (raw,):
                if getattr(saved, "unpack_hook", None) is None and isinstance(
                    getattr(saved, "data", None), torch.Tensor
                ):
                    yield saved.data


def _output(graph: CapturedGraph, access: Access) -> str:
    """Describe what an access reads by the last node that writes it."""
    writers = [use.node for use in graph.uses.values() if use.kind is WRITE and use.span.meets(access.span)]
    return f"the output of {writers[-1]}, of {graph}," if writers else f"an output of {graph}"


def _overwritten(what: str, then: tuple[str, Trace], now: Trace) -> GraphError:
    return GraphError(
        "overwritten_output",
        f"{what}. All replays write to the same memory.",
        "Clone the output after the replay, before the next one, if it is needed later.",
        then,
        ("Read", now),
    )


def _pool_error(graph: CapturedGraph, other: CapturedGraph, trace: Trace) -> GraphError:
    assert other.last is not None
    return GraphError(
        "shared_pool",
        f"{graph} may run at the same time as {other}. They share the memory pool {graph.pool}, where one of them uses "
        "memory that the other freed.",
        "Make the stream of this replay wait for the other replay first, or capture each graph with its own pool.",
        ("The other graph was replayed", other.last.stack_trace),
        ("Replayed", trace),
    )
