"""Where a program waits for a device outside operators, and how its streams wait for each other.

`trace` uses this beside the recorder, which sees operators only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import threading
from typing import Any

import torch

from openreg_tools import dynamo
from openreg_tools.core import place
from openreg_tools.recorder import Recorder

__all__ = ["Wait", "Waits"]


@dataclasses.dataclass(slots=True)
class Wait:
    """One wait of the host outside operators."""

    why: str  # "synchronize", "Stream.synchronize", "Event.synchronize", "print"
    where: str  # the program's line
    thread: int
    start: float  # seconds since the recording began
    seconds: float = 0.0
    stack: int = -1  # index into `Recorder.stacks`
    after: tuple[int, ...] = ()  # the numbers of the calls that it waited for


class Waits:
    """A context that records waits in `found`, and tells the recorder for which calls a stream waits.

    It replaces ``synchronize`` of torch.accelerator, of the device's module, and of its streams and events, the
    methods by which streams wait for events and streams, and the printing of tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.type = recorder, recorder.type
        self.found: list[Wait] = []
        self._events: dict[int, set[int]] = {}  # by event, the calls before its last record
        self._inside, self._undo = threading.local(), contextlib.ExitStack()
        module = getattr(torch, self.type, None)
        self._places = [(each, "synchronize", self._synchronize) for each in (torch.accelerator, module)]
        streams = {"synchronize": self._stream_synchronize, "record_event": self._record_event,
                   "wait_event": self._wait_event, "wait_stream": self._wait_stream}  # fmt: skip
        events = {"synchronize": self._event_synchronize, "record": self._record, "wait": self._event_wait}
        for name, methods in (("Stream", streams), ("Event", events)):
            general = getattr(torch, name)
            for owner in {general, getattr(module, name, general)}:
                self._places += [(owner, method, notice) for method, notice in methods.items()]
        if self.type != "cpu":
            self._places.append((torch.Tensor, "__repr__", self._print))

    def __enter__(self) -> Waits:
        for owner, name, notice in self._places:
            if name in getattr(owner, "__dict__", ()):
                before = vars(owner)[name]
                _set(owner, name, self._noting(before, notice))
                self._undo.callback(_set, owner, name, before)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        dynamo.forget_replaced()

    def _noting(self, function: Any, notice: Any) -> Any:
        """`function` with `notice` around it, a generator that yields once before the call and then gets the result."""

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(self._inside, "now", False):  # one calls the other
                return function(*args, **kwargs)
            try:
                noticing = notice(*args, **kwargs)
            except TypeError:  # wrong arguments, which the function reports
                return function(*args, **kwargs)
            next(noticing)
            self._inside.now = True
            try:
                out = function(*args, **kwargs)
            except BaseException:
                noticing.close()
                raise
            finally:
                self._inside.now = False
            with contextlib.suppress(StopIteration):
                noticing.send(out)
            return out

        return noted

    # ---- the host waits ----

    def _wait(self, why: str, after: Any) -> Any:
        recorder = self.recorder
        wait = Wait(why, place.line(), recorder.thread(), recorder.now(), 0.0, recorder._stack())
        wait.after = tuple(sorted(after))
        self.found.append(wait)
        try:
            yield
        finally:
            wait.seconds = recorder.now() - wait.start

    def _synchronize(self, device: Any = None, *args: Any) -> Any:
        yield from self._wait("synchronize", set(self.recorder.last.values()))

    def _stream_synchronize(self, stream: torch.Stream) -> Any:
        if _type(stream) != self.type:
            yield
        else:
            yield from self._wait("Stream.synchronize", self._before(stream))

    def _event_synchronize(self, event: torch.Event) -> Any:
        if _type(event) != self.type:
            yield
        else:
            yield from self._wait("Event.synchronize", self._events.get(id(event), ()))

    def _print(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _type(tensor) != self.type:
            yield
        else:
            yield from self._wait("print", ())

    # ---- a stream waits ----

    def _before(self, stream: torch.Stream | None) -> set[int]:
        """The last call on a stream (the current one if None), and those that its next call waits for."""
        key = self._key(stream)
        last = self.recorder.last.get(key)
        return self.recorder.pending.get(key, set()) | (set() if last is None else {last})

    def _key(self, stream: torch.Stream | None) -> tuple[int, int]:
        if stream is None:
            stream = getattr(torch, self.type).current_stream()
        return stream.device.index, stream.stream_id

    def _holds(self, stream: torch.Stream | None, after: set[int]) -> None:
        """Note that the next call on `stream` waits for these."""
        if self.type != "cpu" and after:
            self.recorder.pending.setdefault(self._key(stream), set()).update(after)

    def _record(self, event: torch.Event, stream: torch.Stream | None = None) -> Any:
        yield
        if _type(event) == self.type != "cpu":
            self._events[id(event)] = self._before(stream)

    def _record_event(self, stream: torch.Stream, event: torch.Event | None = None) -> Any:
        event = yield
        if event is not None and _type(stream) == self.type:
            self._events[id(event)] = self._before(stream)

    def _event_wait(self, event: torch.Event, stream: torch.Stream | None = None) -> Any:
        yield
        if _type(event) == self.type:
            self._holds(stream, self._events.get(id(event), set()))

    def _wait_event(self, stream: torch.Stream, event: torch.Event) -> Any:
        yield
        if _type(stream) == self.type:
            self._holds(stream, self._events.get(id(event), set()))

    def _wait_stream(self, stream: torch.Stream, other: torch.Stream) -> Any:
        yield
        if _type(stream) == self.type:
            self._holds(stream, self._before(other))


def _type(value: Any) -> str | None:
    """The type of the device of a tensor, a stream or an event; an event that was not recorded may have none."""
    return getattr(getattr(value, "device", None), "type", None)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of torch.Stream and torch.Event, which are static types and have no setattr."""
    try:
        setattr(owner, name, value)
    except TypeError:
        gc.get_referents(vars(owner))[0][name] = value  # the dict that vars() shows read-only
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
