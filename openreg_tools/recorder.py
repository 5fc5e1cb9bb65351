"""The calls that a program makes through the dispatcher: which keys each passes, and a mode that records them."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from openreg_tools import dispatch
from openreg_tools.backends import Kernel
from openreg_tools.core import place, waits
from openreg_tools.core.blocks import first_line
from openreg_tools.core.device import Target

__all__ = ["Call", "Recorder", "DispatchStep", "keyset", "path"]


# ---- the keys of one call ----


@dataclasses.dataclass(frozen=True)
class DispatchStep:
    """What one key does in a call."""

    key: str
    does: str
    where: str
    last: bool = False  # this operator itself reaches nothing below this key


# What kernels at these keys do, by the key's name without a device.
DOES = {
    "Autograd": "records the derivative",
    "ADInplaceOrView": "counts versions, relates views",
    "Autocast": "casts, by autocast's policy",
    "Functionalize": "replaces writes and views by copies",
    "BackendSelect": "takes the backend from the device argument",
    "Conjugate": "resolves a lazy conjugation",
    "Negative": "resolves a lazy negation",
    "ZeroTensor": "materialises an efficient zero",
    "Python": "calls a tensor subclass or a mode in Python",
    "FuncTorch": "applies a transform of torch.func",
    "Batched": "applies vmap",
    "Tracer": "records for torch.jit.trace",
}


def about(key: str) -> str:
    """What a key is for; empty for a backend's."""
    return next((does for name, does in DOES.items() if key.startswith(name)), "")


def step(op: str, key: str, kernel: Kernel | None) -> DispatchStep:
    """What `key` does with an operator whose table has `kernel` there."""
    if kernel is None or not about(key):
        here = dispatch.has(op, key)
        return DispatchStep(key, f"{here.kind}: {here.why}" if here.kind != "own" else here.why, here.where, last=True)
    if kernel.fallthrough:
        return DispatchStep(key, "falls through", kernel.where)
    if kernel.source == "math kernel":
        return DispatchStep(key, "decomposes (CompositeImplicitAutograd)", kernel.where, last=True)
    if key.startswith("Autograd") and kernel.source == "backend fallback":
        return DispatchStep(key, "has no derivative: the fallback's rule holds", kernel.where)
    return DispatchStep(key, about(key), kernel.where)


def keyset(values: Any, exclude: torch._C.DispatchKeySet | None = None) -> torch._C.DispatchKeySet:
    """The keys of a call with these arguments, under the calling thread's modes."""
    if exclude is None:
        exclude = torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C._dispatch_tls_local_include_set()
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor):
            keys = keys | torch._C._dispatch_keys(value)
    return keys - exclude


def listed(keys: torch._C.DispatchKeySet) -> list[str]:
    """The names of the keys, the first to be called first."""
    out = []
    while (first := keys.highestPriorityTypeId()) != torch._C.DispatchKey.Undefined:
        out.append(first.name)
        keys = keys.remove(first)
    return out


def path(op: str, keys: list[str], backend: str) -> list[DispatchStep]:
    """The kernels that a call passes, in order, without those that fall through.

    `backend` is the key that a factory's device argument selects; a tensor's backend key takes precedence.
    """
    table = dispatch.kernels(op)
    if not any(not about(key) for key in keys):
        chosen = table.get("BackendSelect")
        keys = [*keys, backend if chosen and not chosen.fallthrough else "Undefined"]
    steps = []
    for key in keys:
        found = step(op, key, table.get(key))
        if found.does != "falls through":
            steps.append(found)
        if found.last:
            break
    return steps


# ---- calls ----


@dataclasses.dataclass(slots=True)
class Call:
    """One call that reached the device: below autograd, or inside a composite."""

    name: str
    has: str  # one of dispatch.HAS
    keys: list[str]
    depth: int
    seconds: float = 0.0  # with the calls inside
    own: float = 0.0  # without
    part: float = 0.0  # of the longest call inside that is not itself a composite
    bytes: int = 0  # of the tensors that it reads and writes
    wait: str = ""  # why the host waits for the device
    where: str = ""  # the program's line, if it waits or falls back
    error: str = ""
    first: bool = False  # the first call of the operator with these dtypes, or it has such a call inside


_COMPOSITES = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


@dataclasses.dataclass(slots=True)
class _Frame:
    """A call that has not returned."""

    name: str
    entered: bool  # it is a composite whose parts are recorded
    seconds: float = 0.0  # spent in its parts, and in recording them
    parts: list[Call] = dataclasses.field(default_factory=list)
    waited: bool = False  # one of its parts did


class Recorder(TorchDispatchMode):
    """Records every operator that runs on a device, including those on the autograd engine's threads.

    Times are host times around the call, without waiting for the device: the kernel's time if it ran on the calling
    thread. With `events`, the device's own events are recorded around each call instead, which is correct for queued
    work. Composites are entered, so `own` of a call excludes the calls inside. `overhead` is subtracted from host
    times: the seconds that recording adds to a call, and those that each part adds to a composite.
    """

    supports_higher_order_operators = True

    def __init__(self, target: Target, events: bool = False, overhead: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.target, self.events, self.overhead = target, events, overhead
        self.type = torch.device(target.device).type
        self.active = True  # a thread that the program started may outlive the recording
        self.calls: list[Call] = []
        self.elsewhere = 0  # calls that touched no tensor of the device
        self.outer = torch._C._dispatch_tls_local_exclude_set()
        self._local = threading.local()
        self._seen: set[tuple[Any, ...]] = set()
        self._module = None if self.type in ("cpu", "meta") else getattr(torch, self.type, None)
        self._uncompiled: Any = None  # `_call`, which torch.compile does not enter
        self._pairs: list[tuple[Call, torch.Event, torch.Event, list[Call]]] = []
        self._has = functools.cache(lambda op, key, policies: dispatch.has(op, key).kind)
        self._backend = functools.cache(lambda raw: next((k for k in listed(_keys(raw)) if not about(k)), ""))
        self._names = functools.cache(lambda raw: listed(_keys(raw)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "torch._dynamo" in sys.modules:  # which would compile this function inside compiled ones
            if self._uncompiled is None:
                self._uncompiled = torch.compiler.disable(self._call)
            return self._uncompiled(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        entered = time.perf_counter()
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        device = kwargs.get("device")
        here = device is not None and torch.device(device).type == self.type
        if not here and not any(t.device.type == self.type for t in tensors):
            self.elsewhere += 1
            return func(*args, **kwargs)

        stack: list[_Frame] = self._local.__dict__.setdefault("stack", [])
        call = self._described(func, args, kwargs, tensors, stack)
        enter = call.has == "composite" and not _view(func) and not any(t.is_nested for t in tensors)
        enter = enter and all(frame.name != call.name for frame in stack)  # under a mode, detach() calls itself
        on = self._stream(tensors, device)
        frame = _Frame(call.name, enter)
        stack.append(frame)
        self.calls.append(call)
        function = functools.partial(func._op_dk, _composite_key(call.name)) if enter else func
        begin = self._event(on)
        if enter:
            self.__enter__()
        started = time.perf_counter()
        try:
            out = function(*args, **kwargs)
        except Exception as error:
            call.error = first_line(error)
            raise
        finally:
            ended = time.perf_counter()
            if enter:
                self.__exit__(None, None, None)
            end = self._event(on)
            stack.pop()
            call.first |= any(part.first for part in frame.parts)
            per_call, per_part = self.overhead
            call.own = max(0.0, ended - started - frame.seconds - per_call - per_part * len(frame.parts))
            call.seconds = call.own + sum(part.seconds for part in frame.parts)
            call.part = _longest(frame.parts)
            if frame.waited:  # a part has reported it
                call.wait = call.where = ""
            if stack:
                stack[-1].waited |= frame.waited or bool(call.wait)
            if begin is not None and end is not None:
                self._pairs.append((call, begin, end, frame.parts))
        if not _view(func):
            written = [value for value in tree_iter(out) if isinstance(value, torch.Tensor)]
            unique = {id(t): t for t in (*tensors, *written)}
            call.bytes = sum(_nbytes(t) for t in unique.values())
        if stack:
            stack[-1].seconds += time.perf_counter() - entered
            stack[-1].parts.append(call)
        return out

    def _described(
        self, func: OpOverload, args: tuple, kwargs: dict, tensors: list[torch.Tensor], stack: list[_Frame]
    ) -> Call:
        """The call, before it is made."""
        name = func.name()
        raw = keyset(tensors, self.outer).raw_repr() if tensors else 0
        key = self._backend(raw) or self.target.key
        names = self._names(raw)
        if any(frame.entered for frame in stack):  # below autograd
            names = [passed for passed in names if not passed.startswith(("Auto", "AD"))]
        elif not torch.is_autocast_enabled(self.type):
            names = [passed for passed in names if not passed.startswith("Autocast")]
        call = Call(name, self._has(name, key, dispatch.policies()), names, len(stack))
        kind = (name, call.has, frozenset((t.dtype, t.device.type) for t in tensors))
        call.first = kind not in self._seen
        self._seen.add(kind)
        types = {self.type} - {"cpu"}
        call.wait = "fallback" if call.has == "fallback" else waits.why(func, args, kwargs, tensors, types)
        if call.wait:
            call.where = place.line()
        return call

    # ---- the device's events ----

    def _stream(self, tensors: list[torch.Tensor], device: Any) -> torch.Stream | None:
        """The current stream of the device of a call; None if its events are not asked for."""
        if not self.events:
            return None
        index = next((t.device.index for t in tensors if t.device.type == self.type), None)
        if index is None and device is not None:
            index = torch.device(device).index
        return self._module.current_stream(index)

    def _event(self, on: torch.Stream | None) -> torch.Event | None:
        if on is None:
            return None
        event = torch.Event(on.device, enable_timing=True)
        event.record(on)
        return event

    def finish(self) -> None:
        """Read the events' times."""
        for call, begin, end, parts in self._pairs:  # parts before the composites that they are in
            end.synchronize()
            call.seconds = begin.elapsed_time(end) / 1e3
            call.own = max(0.0, call.seconds - sum(part.seconds for part in parts))
            call.part = _longest(parts)
        self._pairs.clear()


def _longest(parts: list[Call]) -> float:
    return max((part.part if part.has == "composite" else part.seconds for part in parts), default=0.0)


def _keys(raw: int) -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet.from_raw_repr(raw)


def _composite_key(op: str) -> torch._C.DispatchKey:
    key = next(key for key in _COMPOSITES if torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    return getattr(torch._C.DispatchKey, key)


def _view(func: OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0
