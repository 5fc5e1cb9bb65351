"""What the race detector (history.py) knows about an access to memory, and the errors that describe two racing ones."""

from __future__ import annotations

import copy
import os
import sys
import threading
import traceback
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.cuda import _sanitizer as csan
from torch.cuda._sanitizer import AccessType
from torch.utils._traceback import CapturedTraceback

from openreg_ops.device.memory import address_of
from openreg_ops.identity import identity

__all__ = [
    "READ",
    "WRITE",
    "Access",
    "Collective",
    "Memory",
    "OpenregSanitizerErrors",
    "Span",
    "Stream",
    "Trace",
    "UnsynchronizedAccessError",
]

READ, WRITE = AccessType.READ, AccessType.WRITE
Stream = tuple[int, int]  # device, id


@dataclass(eq=False)
class Collective:
    """A collective of `torch.distributed` in progress. It is its own stream: whatever waits for its work comes after it."""

    started_on: Stream
    seq_num: int


# Frames that a trace leaves out: the sanitizer's, and torch's way to a dispatch mode.
_OWN = os.path.dirname(__file__) + os.sep
_TO_A_MODE = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")


def _stream_name(stream: Stream | Collective | None) -> str:
    if stream is None:
        return "the host"
    if isinstance(stream, Collective):
        return f"a collective that {_stream_name(stream.started_on)} started"
    device, id = stream
    where = f"{identity.name}:{device}"
    return f"stream {id} of {where}" if id else f"the default stream of {where}"


class Trace:
    """Where the program stands: captured at each operator, formatted only for a report."""

    def __init__(self, caller: int) -> None:
        self.here = CapturedTraceback.extract()
        self.above: list[tuple[types.CodeType, int]] = []
        if node := torch._C._current_autograd_node():
            self.node = node.name()
            if caller != threading.get_ident() and (frame := sys._current_frames().get(caller)):
                self.above = [(outer.f_code, line) for outer, line in traceback.walk_stack(frame)]
            self.forward = node.metadata.get("traceback_", [])
        else:
            self.node, self.forward = None, []

    def format(self) -> list[str]:
        """The lines, the innermost last. In a backward pass, they begin with the call of backward()."""
        above = [traceback.FrameSummary(code.co_filename, line, code.co_name) for code, line in reversed(self.above)]
        frames = [
            frame
            for frame in (*above, *self.here.summary())
            if not frame.filename.startswith(_OWN) and not frame.filename.endswith(_TO_A_MODE)
        ]
        lines = traceback.format_list(frames)
        if self.node:
            lines.append(f"  in the backward of {self.node}\n")
        if self.forward:
            lines += ["  whose forward was called here:\n", *self.forward]
        return lines


class Span(NamedTuple):
    """The bytes of a tensor: an address range, and strides if the tensor does not use all of the range."""

    start: int
    end: int
    holes: tuple[tuple[int, ...], tuple[int, ...]] | None  # sizes and strides in bytes

    @classmethod
    def of(cls, x: torch.Tensor) -> Span:
        item = x.element_size()
        start = address_of(x) + item * x.storage_offset()
        end = start + item * (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))
        if x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x):
            return cls(start, end, None)
        return cls(start, end, ((*x.shape, item), (*(item * stride for stride in x.stride()), 1)))

    def meets(self, other: Span) -> bool:
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.holes is None and other.holes is None:
            return True
        # Columns of one matrix may be used at the same time: mark the bytes of one and look at the bytes of the other.
        low = min(self.start, other.start)
        with torch._C._DisableTorchDispatch():
            bytes_ = torch.zeros(max(self.end, other.end) - low, dtype=torch.bool)

            def part(span: Span) -> torch.Tensor:
                sizes, strides = span.holes or ((span.end - span.start,), (1,))
                return bytes_.as_strided(sizes, strides, span.start - low)

            part(self).fill_(True)
            return bool(part(other).any())

    def covers(self, other: Span) -> bool:
        return self == other or (self.holes is None and self.start <= other.start and other.end <= self.end)


@dataclass
class Access(csan.Access):
    """One operator's access to one tensor. A stream of None is the host."""

    span: Span
    freed: Memory | None = None  # what the memory was then, if it was freed after the access
    node: Any = None  # of the graph whose replay makes the access: a graph_report.Node


@dataclass
class Memory:
    """An allocation and the accesses to it that others may still have to wait for."""

    start: int
    end: int
    owner: Stream | None = None
    trace: Trace | None = None
    recorded: set[Stream] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    graph: weakref.ref[Any] | None = None  # whose capture allocated it: a graph_report.CapturedGraph
    pool: tuple[int, int] | None = None  # of that graph


class UnsynchronizedAccessError(csan.UnsynchronizedAccessError):
    """Two accesses to one tensor, at least one of which writes, that nothing orders.

    ``current_access`` and ``previous_access`` are the two, and the text has both stack traces and the remedy.
    """

    def __init__(self, memory: Memory, current: Access, previous: Access) -> None:
        # Copy the earlier access as it is now: its memory may be freed before the report is read.
        super().__init__(current.span.start, memory.trace, current, copy.copy(previous))

    def _remedy(self) -> str:
        now, then = _stream_name(self.current_access.stream), _stream_name(self.previous_access.stream)
        if self.previous_access.freed:
            return (
                f"The tensor that had this memory before was freed while {then} might still use it. Call its "
                f"record_stream() with {then}, or have {_stream_name(self.previous_access.freed.owner)}, where it was allocated, wait_stream() "
                f"for {then} before its last reference is dropped."
            )
        if isinstance(self.previous_access.stream, Collective):
            return (
                "Before this access, call wait() on the Work that the collective returned with async_op=True, or "
                f"wait_tensor() on the tensor that a functional collective returned, while {now} is current."
            )
        if self.current_access.stream is None:
            replayed = self.previous_access.node is not None
            return (
                f"Before the host uses the tensor, call synchronize() on {then} or on an event recorded there after "
                + ("the replay." if replayed else "the copy; or copy with non_blocking=False.")
            )
        this = "replay" if self.current_access.node else "access"
        return (
            f"Before this {this}, have {now} wait: call its wait_stream() with {then}, or its wait_event() with an event "
            "recorded there after the previous access."
        )

    def __str__(self) -> str:
        def describe(access: Access) -> str:
            what = f"{access.operator}\n{access.type}"
            if access.aliases:
                what += " argument(s) " + ", ".join(access.aliases) + ", and to" * access.is_output
            what += " the output" * access.is_output
            if access.node:
                what += f"\nCaptured with stack trace:\n{''.join(access.node.trace.format())}"
            return f"{what}\nWith stack trace:\n{''.join(access.stack_trace.format())}"

        def allocation(what: str, trace: Trace | None) -> str:
            return f"{what} was allocated with stack trace:\n{''.join(trace.format())}\n" if trace else ""

        now, then = self.current_access, self.previous_access
        return (
            "============================\n"
            f"openreg's sanitizer found a possible data race on the tensor with data pointer {self.data_ptr:#x}\n"
            f"Access by {_stream_name(now.stream)} during:\n{describe(now)}\n"
            f"Previous access by {_stream_name(then.stream)}{', before the memory was freed,' if then.freed else ''} "
            f"during:\n{describe(then)}\n"
            + (allocation("The tensor that was freed", then.freed.trace) if then.freed else "")
            + allocation("Tensor", self.allocation_stack_trace)
            + f"Remedy: {self._remedy()}"
        )


class OpenregSanitizerErrors(csan.CUDASanitizerErrors):
    """Raised at an access that races. `errors` has one error for each earlier access that it races with."""

    def __str__(self) -> str:
        return "\n".join(["", *map(str, self.errors)])
