"""The race detector: which accesses to memory the program has put in order. `torch.openreg._sanitizer` turns it on.

It analyzes order, not time, so it finds the same races in every launch mode and on every run. Each stream and the host
have a clock, which says how far they are ordered behind each other stream. A dispatch mode sees the operators, and
their schemas say which tensors they read and write. The runtime's log (csrc/runtime/process/notices.h) reports memory, events
and waits of the host. The clocks, the meaning of the arguments and the base classes of the errors follow
``torch.cuda._sanitizer``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.cuda import _sanitizer as csan
from torch.cuda._sanitizer import AccessType, SynchronizationError

from openreg_ops import _C
from openreg_ops.device.memory import address_of
from openreg_ops.identity import identity
from openreg_ops.sanitizer.graph_report import GraphError
from openreg_ops.sanitizer.graphs import Captures
from openreg_ops.sanitizer.report import (
    READ,
    WRITE,
    Access,
    Collective,
    Memory,
    OpenregSanitizerErrors,
    Span,
    Stream,
    Trace,
    UnsynchronizedAccessError,
)

__all__ = [
    "CheckedCall",
    "GraphError",
    "OpenregSanitizerErrors",
    "Races",
    "SynchronizationError",
    "UnsynchronizedAccessError",
    "current_stream",
    "dense_parts",
    "traits_of",
]


def current_stream(index: int) -> Stream:
    return index, torch.accelerator.current_stream(index).stream_id


class _Arguments(csan.ArgumentHandler):
    """The tensors that an operator reads and writes, by its schema. A tensor that it only views does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, AccessType, str | None]] = []

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        if isinstance(value, torch.Tensor) and (is_write or not metadata_only):
            self.found += [(x, WRITE if is_write else READ, name) for x in dense_parts(value)]


def dense_parts(x: torch.Tensor) -> Iterable[torch.Tensor]:
    """The strided tensors with memory that hold the data of `x`, whatever its layout."""
    if x.layout == torch.sparse_coo:
        parts = (x._indices(), x._values())
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (x.crow_indices(), x.col_indices(), x.values())
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (x.ccol_indices(), x.row_indices(), x.values())
    elif x.is_nested:
        parts = (torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()),)
    else:
        parts = (x,) if x.layout == torch.strided else ()
    # Check the address first: a fake tensor has none, and numel() could add a guard on its sizes.
    return [part for part in parts if part.device.type in (identity.name, "cpu") and address_of(part) and part.numel()]


class _Traits(NamedTuple):
    """Facts that are the same in every call of an operator."""

    ignored: bool  # it reads and writes no memory
    reads: bool  # its arguments' values, not only their shapes
    allocates: bool  # without writing
    copies: bool  # has the argument non_blocking
    waits: bool  # the host, for a value or a size
    collective: bool  # of torch.distributed, with a work that may outlast the call
    calls: bool  # other operators in its kernel, which are checked too
    composite: bool  # its kernel does nothing but call other operators
    cloned: bool  # its inputs, before the collective begins


def _of_collective(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, AccessType, str]]:
    """The tensors that a `c10d` operator reads and writes, by argument name, because its schema does not say."""
    name = func._schema.name.removeprefix("c10d::")
    given = {argument.name: value for argument, value in csan.zip_arguments(func._schema, args, kwargs)}
    only_reads = name == "send" or (
        name == "broadcast_"
        and given["root_rank"] == torch.distributed.ProcessGroup.unbox(given["process_group"]).rank()
    )
    found = []
    for argument, value in given.items():
        if argument.startswith(("tensors", "output", "input")):
            kind = READ if only_reads or argument.startswith("input") else WRITE
            tensors = [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
            found += [(part, kind, argument) for x in tensors for part in dense_parts(x)]
    return found


# A collective's output is waited for by a wait, which the runtime tells, or by the wrapper when the output is used.
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
# Operators of these say in their schemas what they access. The kernels of others may do what any program does.
_CALL_NONE = ("aten", "prim", "prims", "openreg", "c10d", "_c10d_functional")


@functools.cache
def traits_of(func: torch._ops.OpOverload) -> _Traits:
    schema, tags = func._schema, func.tags
    namespace, _, name = schema.name.partition("::")
    collective = namespace == "c10d" and any(argument.name == "process_group" for argument in schema.arguments)
    waits = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    returns = any("Tensor" in str(result.type) for result in schema.returns)
    calls = not collective and namespace not in _CALL_NONE
    query = not returns and not waits and not schema.is_mutable and not calls  # is_pinned, is_same_size
    return _Traits(
        ignored=not collective
        and (
            func is torch.ops.aten.record_stream.default
            or torch.Tag.inplace_view in tags
            or query
            or schema.name in _WAITS
        ),
        reads=not csan.FACTORY_FUNCTION_REGEX.match(name),
        allocates=bool(re.match("_?(new_)?empty", name)),
        copies=any(argument.name == "non_blocking" for argument in schema.arguments),
        waits=waits and name != "index",
        collective=collective,
        calls=calls,
        composite=torch._C._dispatch_has_kernel(func.name())  # TorchScript has operators that the dispatcher lacks
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        cloned=namespace == "_c10d_functional" and name in ("all_reduce", "all_reduce_coalesced", "broadcast"),
    )


class Races:
    """What the program has done so far, and the check of its next access.

    `report` gets the errors of an access; without it they are raised.
    """

    def __init__(self, report: Callable[[list[UnsynchronizedAccessError]], None] | None = None) -> None:
        self.report = report
        self.syncs = csan.StreamSynchronizations()
        self.memory: dict[int, Memory] = {}  # of devices, by address
        self.left: list[Memory] = []  # freed, but a stream for which the owner did not wait may still use it
        self.host: list[Memory] = []  # pinned, used by copies for which the host did not wait
        self.works: dict[int, Collective] = {}  # that exist, by address
        self.started: dict[int, Collective] = {}  # by each thread's last call
        self.asked: set[int | Stream] = set()  # events and streams whose last query was not told that the work is done
        self.seq_num = 0
        self.caller = threading.get_ident()  # the thread that last called an operator outside a backward
        self.lock = threading.RLock()
        self.inside = threading.local()  # .used: the memory that operators in the current kernel use, by identity
        self.captures = Captures(self)
        self.on = True

    # ---- order ----

    def after(self, stream: Stream | None, access: Access) -> bool:
        """Returns true if everything that `stream`, or the host, does from now on comes after an access."""
        if stream is None:
            return access.seq_num <= self.syncs.host_sync_state.get(access.stream, -1)
        return self.syncs.is_ordered_after(stream, access.seq_num, access.stream)

    def wait(self, stream: Stream | Collective, other: Stream | Collective) -> None:
        """`stream` waits for `other`, as in a copy between their devices."""
        states = self.syncs.current_sync_states
        self.syncs._ensure_stream_exists(stream)
        self.syncs._ensure_stream_exists(other)
        self.syncs._state_wait_for_other(states[stream], states[other])

    def _unsettled(self, memory: Memory) -> list[Access]:
        """The accesses to freed memory for which neither its owner, nor the allocator, nor the host has waited."""
        return [
            access
            for access in memory.accesses
            if access.stream not in memory.recorded
            and not isinstance(access.stream, Collective)  # its work keeps the memory
            and not self.after(memory.owner, access)
            and not self.after(None, access)
        ]

    # ---- the runtime's notices ----

    def drain(self, trace: Trace | None = None) -> None:
        """Process the notices. `trace` is where this thread allocated the memory in them."""
        errors: list[SynchronizationError] = []
        for what, thread, address, stream, size in _C.take_notices():
            if what == "allocated":
                self.allocated(address, size, stream, trace if thread == threading.get_ident() else None)
            elif what == "collective_started":
                self.collective_started(address, stream, thread)
            elif what == "host_freed":
                self.host = [memory for memory in self.host if memory.end <= address or address + size <= memory.start]
            elif what == "resized":
                errors += self.resized(address, stream)
            else:
                getattr(self, what)(address, stream)
        for memory in self.host:
            memory.accesses = [access for access in memory.accesses if not self.after(None, access)]
        self.host = [memory for memory in self.host if memory.accesses]
        self.fail(errors)

    def allocated(self, address: int, size: int, stream: Stream, trace: Trace | None) -> None:
        self.memory[address] = memory = Memory(address, address + size, stream, trace)
        for old in self.left:
            old.accesses = self._unsettled(old)
            if old.start < memory.end and memory.start < old.end:
                memory.accesses += old.accesses
        self.left = [old for old in self.left if old.accesses]
        self.captures.allocated(memory)

    def freed(self, address: int, _stream: Stream) -> None:
        if (memory := self.memory.pop(address, None)) is None or memory.pool:
            return  # a graph's pool gives its memory to others in the order of streams
        memory.accesses = self._unsettled(memory)
        for access in memory.accesses:
            access.freed = memory
        if memory.accesses:
            self.left.append(memory)

    def resized(self, address: int, stream: Stream) -> list[UnsynchronizedAccessError]:
        """A storage is about to get other memory, and so loses what a collective in progress writes."""
        if (memory := self.memory.get(address)) is None:
            return []
        span = Span(memory.start, memory.end, None)
        trace = Trace(self.caller)  # of the operator that follows
        access = Access(WRITE, self.seq_num, stream, "UntypedStorage.resize_, before this line", [], False, trace, span)
        return [error for error in self.raced(memory, access) if isinstance(error.previous_access.stream, Collective)]

    def stream_recorded(self, address: int, stream: Stream) -> None:
        if address in self.memory:
            self.memory[address].recorded.add(stream)

    def collective_started(self, work: int, stream: Stream, thread: int) -> None:
        if thread not in self.started:  # the works of one call are one
            self.seq_num += 1
            self.started[thread] = Collective(stream, self.seq_num)
            self.syncs.update_seq_num(self.started[thread], self.seq_num)
            if self.seq_num % 64 == 0 or len(self.syncs.current_sync_states) > 256:
                self._forget_collectives()
        self.works[work] = self.started[thread]
        self.wait(self.works[work], stream)

    def collective_waited_for(self, work: int, stream: Stream) -> None:
        if work in self.works:
            self.wait(stream, self.works[work])

    def collective_destroyed(self, work: int, _stream: Stream) -> None:
        self.works.pop(work, None)

    def _forget_collectives(self) -> None:
        """Drop from the clocks the collectives that no later access could race with."""
        syncs = self.syncs
        accesses = [access for memory in (*self.memory.values(), *self.left) for access in memory.accesses]
        kept = {access.stream for access in accesses} | {*self.works.values()} | {*self.started.values()}
        gone = [
            stream_state
            for stream_state in syncs.current_sync_states
            if isinstance(stream_state, Collective) and stream_state not in kept
        ]
        for collective in gone:
            del syncs.current_sync_states[collective]
        for state in (*syncs.current_sync_states.values(), *syncs.recorded_sync_states.values(), syncs.host_sync_state):
            for collective in gone:
                state.pop(collective, None)

    def event_recorded(self, event: int, stream: Stream) -> None:
        self.syncs.record_state(event, stream)

    def event_waited_for(self, event: int, stream: Stream) -> None:
        self.syncs.stream_wait_for_event(stream, event)

    def event_synchronized(self, event: int, _stream: Stream) -> None:
        self.syncs.all_streams_wait_for_event(event)

    def record_captured(self, event: int, stream: Stream) -> None:
        self.captures.event(event, stream, records=True)

    def wait_captured(self, event: int, stream: Stream) -> None:
        self.captures.event(event, stream, records=False)

    def event_destroyed(self, event: int, _stream: Stream) -> None:
        self.syncs.recorded_sync_states.pop(event, None)
        self.asked.discard(event)

    def stream_synchronized(self, _object: int, stream: Stream) -> None:
        self.syncs.all_streams_wait_for_stream(stream)

    def device_synchronized(self, _object: int, stream: Stream) -> None:
        for stream_state in list(self.syncs.current_sync_states):
            if isinstance(stream_state, tuple) and stream_state[0] == stream[0]:
                self.syncs.all_streams_wait_for_stream(stream_state)

    def answers(self, event: int, stream: Stream) -> bool:
        """Returns true if a query of an event, or of a stream if `event` is 0, may answer that the work is done.

        The first query does not tell it of work that the host has not waited for. On hardware that work may still run,
        so the program must be right with this answer too, in every launch mode.
        """
        with self.lock, torch._C._DisableTorchDispatch():
            self.drain()
            asked = event or stream
            if asked in self.asked:
                self.asked.remove(asked)
                return True
            syncs = self.syncs
            state = syncs.recorded_sync_states.get(event) if event else syncs.current_sync_states.get(stream)
            if not self.on or all(seq <= syncs.host_sync_state.get(other, -1) for other, seq in (state or {}).items()):
                return True
            self.asked.add(asked)
            return False

    # ---- accesses ----

    def _memory_of(self, x: torch.Tensor) -> Memory | None:
        """What is known about the memory of a tensor; None for host memory that no copy in flight uses."""
        base = address_of(x)
        if x.device.type == "cpu":  # by address, because storages share memory through NumPy and DLPack
            end = base + x.untyped_storage().nbytes()
            return next((memory for memory in self.host if memory.start < end and base < memory.end), None)
        if base not in self.memory:  # allocated before the sanitizer was on
            self.memory[base] = Memory(base, base + x.untyped_storage().nbytes(), (x.device.index, 0))
        return self.memory[base]

    def watch(self, address: int) -> Memory:
        """Track the block of pinned memory at an address while a copy uses it, until it is freed."""
        for memory in self.host:
            if memory.start <= address < memory.end:
                return memory
        self.host.append(Memory(*_C.pinned_block(address)))
        return self.host[-1]

    def check(
        self, accesses: Iterable[tuple[torch.Tensor, Access]], made_only: bool = False
    ) -> list[tuple[Memory, Access]]:
        """Raise if one of these simultaneous accesses is out of order; return the ones to keep."""
        errors: list[SynchronizationError] = []
        found = []
        accesses = list(accesses)
        written = {access.span for _, access in accesses if access.type is WRITE}
        for x, access in accesses:
            if (memory := self._memory_of(x)) is None:
                continue
            found.append((memory, access))
            self.note_use(memory)
            if not made_only:
                errors += self.raced(memory, access)
                errors += self.captures.read(memory, access, written)
        self.fail(errors)
        return [pair for pair in found if pair[1].stream is not None]

    def note_use(self, memory: Memory) -> None:
        """Note that an operator uses this memory, if a kernel has called it."""
        if (used := getattr(self.inside, "used", None)) is not None:
            used[id(memory)] = memory

    @contextlib.contextmanager
    def kernel(self) -> Iterator[dict[int, Memory]]:
        """While a kernel runs that calls operators: the memory that these use."""
        outer, used = getattr(self.inside, "used", None), {}
        self.inside.used = used
        try:
            yield used
        finally:
            self.inside.used = outer
            if outer is not None:
                outer.update(used)

    def raced(self, memory: Memory, access: Access) -> list[UnsynchronizedAccessError]:
        """The accesses so far that nothing orders before this one."""
        return [
            UnsynchronizedAccessError(memory, access, previous)
            for previous in memory.accesses
            if WRITE in (access.type, previous.type)
            and not self.after(access.stream, previous)
            and access.span.meets(previous.span)
        ]

    def fail(self, errors: list[Any]) -> None:
        """Report errors, if there are any, or raise them."""
        if errors and self.report:
            self.report(errors)
        elif errors:
            raise OpenregSanitizerErrors(errors)

    def keep(self, memory: Memory, access: Access) -> None:
        """Add an access and drop the earlier ones that it covers: waiting for it includes waiting for them."""
        if memory.owner is None:
            memory = self.watch(memory.start)  # another thread may have dropped it since the check
        memory.accesses = [
            earlier
            for earlier in memory.accesses
            if not self.after(None, earlier)
            and not (
                (access.type is WRITE or earlier.type is READ)
                and access.span.covers(earlier.span)
                and self.after(access.stream, earlier)
            )
        ]
        memory.accesses.append(access)


class CheckedCall:
    """A call of an operator that the sanitizer checks: where it runs, what it accesses, and what the host waits for in it."""

    def __init__(
        self,
        races: Races,
        func: torch._ops.OpOverload,
        traits: _Traits,
        args: Any,
        kwargs: Any,
        kernel: Callable[..., Any] | None = None,
    ) -> None:
        self.races, self.func, self.traits, self.args, self.kwargs = races, func, traits, args, kwargs
        self.kernel = kernel  # of an operator that calls others, so that these are checked
        self.streams: list[Stream] = []  # where it runs, and the streams of other devices that wait for it
        self.non_blocking = False
        if traits.copies:
            given = {argument.name: value for argument, value in csan.zip_arguments(func._schema, args, kwargs)}
            self.non_blocking = bool(given.get("non_blocking"))

    def run(self) -> Any:
        arguments = _Arguments()
        if self.traits.collective:
            inputs = arguments.found = _of_collective(self.func, self.args, self.kwargs)
        else:
            arguments.parse_inputs(self.func._schema, self.args, self.kwargs, is_factory=not self.traits.reads)
            inputs = arguments.found
        if self.kernel:
            return self.run_kernel(arguments)
        on_host = [argument for argument in inputs if argument[0].device.type == "cpu"]
        captures = self.races.captures
        if captures.active and (stream := captures.captured(inputs, self.args, self.kwargs)):
            return self.capture(stream, arguments)
        if on_host and len(on_host) == len(inputs) and not self.traits.copies and not self.races.host:
            out = self.func(*self.args, **self.kwargs)
            if captures.active:
                captures.host_result(self.func, out, [x for x, _, _ in inputs] if self.traits.reads else [])
            return out
        in_flight = on_host if self.non_blocking else []  # checked when the outputs tell whether the copy waits
        with self.races.lock:
            self.trace = Trace(self.races.caller)
            if self.trace.node is None:
                self.races.caller = threading.get_ident()
            self.races.drain()
            self.races.started.pop(threading.get_ident(), None)
            self.races.seq_num += 1
            self.seq_num = self.races.seq_num
            # A copy between devices runs on its source's stream, as on CUDA.
            self.runs_on(sorted(inputs, key=lambda argument: argument[1] is WRITE))
            accesses = self.check(
                [argument for argument in inputs if argument[0].device.type != "cpu" or not in_flight]
            )
            written = {access.span for _, access in accesses if access.type is WRITE}
        out = self.func(*self.args, **self.kwargs)
        with self.races.lock:
            self.races.drain(self.trace)
            arguments.found = []
            if not self.traits.collective:
                arguments.parse_outputs(self.func._schema, out, is_factory=False)
            outputs = [output for output in arguments.found if Span.of(output[0]) not in written]
            self.runs_on(outputs)
            accesses += self.check(in_flight)
            accesses += self.check(outputs, is_output=True)
            collective = self.races.started.pop(threading.get_ident(), None)
            for memory, access in accesses:
                if collective and not (self.traits.cloned and access.type is READ):
                    access = dataclasses.replace(access, stream=collective, seq_num=collective.seq_num)
                self.races.keep(memory, access)
            host = on_host + [output for output in outputs if output[0].device.type == "cpu"]
            if self.waits(inputs) or (self.traits.copies and host and self.copy_waits(host)):
                for stream in self.streams:
                    self.races.syncs.all_streams_wait_for_stream(stream)
            for other in self.streams[1:]:
                self.races.wait(other, self.streams[0])
        if captures.active:
            captures.host_result(self.func, out)
        return out

    def run_kernel(self, arguments: _Arguments) -> Any:
        """Run the kernel and check the operators that it calls. Memory that these do not use, the kernel may use itself."""
        assert self.kernel is not None
        inputs, captures = arguments.found, self.races.captures
        stream = captures.captured(inputs, self.args, self.kwargs) if captures.active and captures.of_thread() else None
        with self.races.lock, torch._C._DisableTorchDispatch():
            self.trace = Trace(self.races.caller)
            if self.trace.node is None:
                self.races.caller = threading.get_ident()
            node = captures.node(self.func, self.trace) if stream else None
        with self.races.kernel() as used:
            out = self.kernel(*self.args, **self.kwargs)
        with self.races.lock, torch._C._DisableTorchDispatch():
            self.races.drain(self.trace)
            arguments.found = []
            arguments.parse_outputs(self.func._schema, out, is_factory=False)

            def unseen(found: list[Any]) -> list[Any]:
                memories = [(argument, self.races._memory_of(argument[0])) for argument in found]
                return [argument for argument, memory in memories if memory is not None and id(memory) not in used]

            inputs, outputs = unseen(inputs), unseen(arguments.found)
            if stream and node:
                captures.use(node, stream, inputs + outputs)
                return out
            self.races.seq_num += 1
            self.seq_num = self.races.seq_num
            self.runs_on(inputs + outputs)
            for memory, access in self.check(inputs) + self.check(outputs, is_output=True):
                self.races.keep(memory, access)
            if self.waits(inputs):
                for running in self.streams:
                    self.races.syncs.all_streams_wait_for_stream(running)
        return out

    def capture(self, stream: Stream, arguments: _Arguments) -> Any:
        """Note what the operator uses; it runs in the replays."""
        captures, inputs = self.races.captures, arguments.found
        if captures.of_thread() is None:
            return self.func(*self.args, **self.kwargs)
        with self.races.lock, torch._C._DisableTorchDispatch():
            trace = Trace(self.races.caller)
            self.races.drain()
            on_device = any(x.device.type == identity.name for x, _, _ in inputs)
            node = captures.node(self.func, trace)
            if on_device and not self.traits.copies:
                for x, _, _ in inputs:
                    if x.device.type == "cpu" and not x.dim():
                        captures.host_tensor(node, x)
            captures.use(node, stream, inputs)
        out = self.func(*self.args, **self.kwargs)
        with self.races.lock, torch._C._DisableTorchDispatch():
            self.races.drain(trace)
            arguments.found = []
            if not self.traits.collective:
                arguments.parse_outputs(self.func._schema, out, is_factory=False)
            captures.use(node, stream, arguments.found if not self.traits.allocates else [])
            captures.host_result(self.func, out)
        return out

    def runs_on(self, found: list[tuple[torch.Tensor, AccessType, str | None]]) -> None:
        """The operator runs on the current stream of the first tensor's device; it waits for the streams of the others."""
        for index in dict.fromkeys(x.device.index for x, _, _ in found if x.device.type == identity.name):
            stream = current_stream(index)
            if not self.streams:
                self.races.syncs.update_seq_num(stream, self.seq_num)
                self.streams.append(stream)
            elif stream not in self.streams:
                self.races.wait(self.streams[0], stream)
                self.streams.append(stream)

    def check(
        self, found: list[tuple[torch.Tensor, AccessType, str | None]], is_output: bool = False
    ) -> list[tuple[Memory, Access]]:
        accesses: dict[tuple[Span, AccessType, bool], tuple[torch.Tensor, Access]] = {}
        for x, kind, name in found:
            stream = self.streams[0] if self.streams else None
            if x.device.type == "cpu":
                # A copy has read or written pageable memory when it returns, as CUDA documents.
                if self.non_blocking and stream and x.is_pinned():
                    self.races.watch(address_of(x))
                elif is_output or not self.races.host:
                    continue
                else:
                    stream = None
            elif kind is WRITE and torch._C._is_cow_tensor(x):
                kind = READ  # of the memory that it shares; it writes its own
            key = (Span.of(x), kind, stream is None)
            if key not in accesses:
                new = Access(kind, self.seq_num, stream, self.func._schema, [], is_output, self.trace, key[0])
                accesses[key] = (x, new)
            if name is not None:
                accesses[key][1].aliases.append(name)
        # A tensor made without values is checked when it gets some.
        return self.races.check(accesses.values(), made_only=is_output and self.traits.allocates)

    def copy_waits(self, host: list[tuple[torch.Tensor, AccessType, str | None]]) -> bool:
        """Returns true if the host waits for a copy: not for a non_blocking one that reads host or writes pinned memory."""
        written = [x for x, kind, _ in host if kind is WRITE]
        return not self.non_blocking or (
            bool(written) and not written[-1].is_pinned()
        )  # in lists, the last one comes last

    def waits(self, found: list[tuple[torch.Tensor, AccessType, str | None]]) -> bool:
        """Returns true if the host waits for the result: for a value, or for a size that depends on values."""
        masks = (torch.bool, torch.uint8)
        is_index = self.func is torch.ops.aten.index.Tensor
        return self.traits.waits or (is_index and any(x.dtype in masks for x, _, _ in found[1:]))
