"""The calls that a program makes through the dispatcher: which keys each passes, and a mode that records them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from openreg_tools.core import place
from openreg_tools.core.device import Target
from openreg_tools.core.samples import dtype_name

__all__ = ["Call", "Recorder", "Step", "keyset", "path"]


# ---- the keys of one call ----


@dataclasses.dataclass(frozen=True)
class Step:
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


def step(op: str, key: str, kernel: Kernel | None) -> Step:
    """What `key` does with an operator whose table has `kernel` there."""
    if kernel is None or not about(key):
        here = dispatch.has(op, key)
        return Step(key, f"{here.kind}: {here.why}" if here.kind != "own" else here.why, here.where, last=True)
    if kernel.fallthrough:
        return Step(key, "falls through", kernel.where)
    if kernel.source == "math kernel":
        return Step(key, "decomposes (CompositeImplicitAutograd)", kernel.where, last=True)
    if key.startswith("Autograd") and kernel.source == "backend fallback":
        return Step(key, "has no derivative: the fallback's rule holds", kernel.where)
    return Step(key, about(key), kernel.where)


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


def path(op: str, keys: list[str], backend: str) -> list[Step]:
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
    thread: int
    start: float  # seconds since the recording began
    seconds: float = 0.0  # with the calls inside
    own: float = 0.0  # without
    part: float = 0.0  # of the longest call inside that is not itself a composite
    bytes: int = 0  # of the tensors that it reads and writes
    wait: str = ""  # why the host waits for the device
    where: str = ""  # the program's line, if it waits or falls back
    error: str = ""
    number: int = 0  # in the order in which the calls began
    host: float = 0.0  # until the call returned, with the recording of the calls inside
    begins: float = 0.0  # when its kernel began on the stream, in seconds since the recording began
    stream: tuple[int, int] | None = None  # the device's index and the stream's id, if work ran there
    inputs: tuple[str, ...] = ()  # dtypes and shapes
    module: str = ""  # "Transformer.layers.0.norm"
    phase: str = ""  # "forward", "backward of MmBackward0", "optimizer"
    stack: int = -1  # index into `Recorder.stacks`; in backward, the stack of the forward call
    first: bool = False  # the first call of the operator with these dtypes, or it has such a call inside
    after: tuple[int, ...] = ()  # the numbers of the calls that it, or its stream, waited for


_FRAMES = 16  # the most frames of a stack
_COMPOSITES = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
# Copies, and which arguments are the source and the target.
_COPIES = {
    "aten::copy_": (1, 0), "aten::_copy_from": (0, 1), "aten::_copy_from_and_resize": (0, 1), "aten::_to_copy": (0, None)
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records every operator that runs on a device, including those on the autograd engine's threads.

    Times are host times around the call, without waiting for the device: the kernel's time if it ran on the calling
    thread. With `events`, the device's own events are recorded around each call instead, which is correct for queued
    work. Composites are entered, so `own` of a call excludes the calls inside. `overhead` is subtracted from host
    times: the seconds that recording adds to a call, and those that each part adds to a composite.

    With `details`, each call also has its inputs, stream, module and stack.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        target: Target,
        events: bool = False,
        overhead: tuple[float, float] = (0.0, 0.0),
        details: bool = False,
    ) -> None:
        super().__init__()
        self.target, self.events, self.overhead = target, events, overhead
        self.type = torch.device(target.device).type
        self.active = True  # a thread that the program started may outlive the recording
        self.calls: list[Call] = []
        self.elsewhere = 0  # calls that touched no tensor of the device
        self.origin = time.perf_counter()
        self.outer = torch._C._dispatch_tls_local_exclude_set()
        self.stacks: list[tuple[str, ...]] = []  # of the program, the innermost frame first
        self.threads: list[str] = []  # their names
        self.last: dict[tuple[int, int], int] = {}  # by stream, the number of the last call with work there
        self.pending: dict[tuple[int, int], set[int]] = {}  # by stream, the calls that its next work waits for
        self.places = place.Places(self._stack) if details else None
        self._local, self._lock = threading.local(), threading.Lock()
        self._threads: dict[int, int] = {}
        self._numbers = itertools.count()
        self._seen: set[tuple[Any, ...]] = set()
        self._stacks: dict[tuple[Any, ...], int] = {}
        self._record = torch.Event.record  # the original; `trace` replaces it to see the program's records
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

        name, local = func.name(), self._local
        if not hasattr(local, "stack"):
            local.stack = []
        raw = keyset(tensors, self.outer).raw_repr() if tensors else 0
        key = self._backend(raw) or self.target.key
        composite_inside = any(frame[0] is not None for frame in local.stack)
        names = self._names(raw)
        if composite_inside:  # below autograd
            names = [passed for passed in names if not passed.startswith(("Auto", "AD"))]
        elif not torch.is_autocast_enabled(self.type):
            names = [passed for passed in names if not passed.startswith("Autocast")]
        call = Call(name, self._has(name, key, dispatch.policies()), names, len(local.stack), self.thread(), 0.0)
        call.number = next(self._numbers)
        call.first = self._is_first(call, tensors)
        call.wait = self._waits(func, call, args, kwargs)
        if call.wait:
            call.where = place.line()
        enter = call.has == "composite" and not _view(func) and not any(t.is_nested for t in tensors)
        on = None if self._module is None else self._stream(tensors, device)
        if self.places is not None:
            self._describe(call, tensors, on, works=not enter and not _view(func))
        enter = enter and all(frame[1] != name for frame in local.stack)  # under a mode, detach() calls itself
        now = (call.module, call.phase, call.stack)
        local.stack.append([call if enter else None, name, 0.0, [], False, now])  # time, calls and waits of its parts
        self.calls.append(call)
        call.start = time.perf_counter() - self.origin
        function = functools.partial(func._op_dk, _composite_key(name)) if enter else func
        begin = self._event(on)
        if enter:
            self.__enter__()
        started = time.perf_counter()
        try:
            out = function(*args, **kwargs)
        except Exception as error:
            call.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise
        finally:
            ended = time.perf_counter()
            if enter:
                self.__exit__(None, None, None)
            end = self._event(on)
            _, _, inside, children, waited, _ = local.stack.pop()
            call.host, call.begins = ended - started, call.start
            call.first |= any(child.first for child in children)
            per_call, per_part = self.overhead
            call.own = max(0.0, ended - started - inside - per_call - per_part * len(children))
            call.seconds = call.own + sum(child.seconds for child in children)
            call.part = _part(children)
            if waited:  # a part has reported it
                call.wait = call.where = ""
            if local.stack:
                local.stack[-1][4] |= waited or bool(call.wait)
            if begin is not None and end is not None:
                self._pairs.append((call, begin, end, children))
        if not _view(func):
            written = [value for value in tree_iter(out) if isinstance(value, torch.Tensor)]
            unique = {id(t): t for t in (*tensors, *written)}
            call.bytes = sum(_nbytes(t) for t in unique.values())
        if local.stack:
            local.stack[-1][2] += time.perf_counter() - entered
            local.stack[-1][3].append(call)
        return out

    def thread(self) -> int:
        """The number of the calling thread; `threads` has its name."""
        number = self._threads.get(threading.get_ident())
        if number is None:
            thread = threading.current_thread()
            backward = torch._C._current_graph_task_id() != -1 and thread is not threading.main_thread()
            with self._lock:
                number = self._threads[threading.get_ident()] = len(self.threads)
                self.threads.append("backward" if backward else thread.name)
        return number

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self.origin

    def _is_first(self, call: Call, tensors: list[torch.Tensor]) -> bool:
        """Returns true if no call of the operator with these dtypes came before; it may load code."""
        kind = (call.name, call.has, frozenset((t.dtype, t.device.type) for t in tensors))
        new = kind not in self._seen
        self._seen.add(kind)
        return new

    def _stream(self, tensors: list[torch.Tensor], device: Any) -> torch.Stream | None:
        """The current stream of the device of a call."""
        index = next((t.device.index for t in tensors if t.device.type == self.type), None)
        if index is None and device is not None:
            index = torch.device(device).index
        current = getattr(self._module, "current_stream", None)
        return current(index) if current else None

    def _describe(self, call: Call, tensors: list[torch.Tensor], on: torch.Stream | None, works: bool) -> None:
        """Fill in what `details` asks for. `works`: the call itself, not its parts, puts work on the stream."""
        stack = self._local.stack
        call.inputs = tuple(_input(t, self.type) for t in tensors)
        if stack:  # a part of a composite
            call.module, call.phase, call.stack = stack[-1][5]
        else:
            now = self.places.now()
            phase = f"backward of {now.node}" if now.node else now.phase
            call.module, call.phase, call.stack = now.module, phase, -1 if now.site is None else now.site
        if on is None or not works:
            return
        call.stream = stream = (on.device.index, on.stream_id)
        after = self.pending.pop(stream, set())
        if call.wait and stream in self.last:
            after.add(self.last[stream])
        call.after = tuple(sorted(after))
        self.last[stream] = call.number

    def _stack(self) -> int:
        """The program's frames outside torch and these tools, as an index of `stacks`."""
        found = tuple((frame.f_code, frame.f_lineno) for frame in itertools.islice(place.frames(), _FRAMES))
        number = self._stacks.get(found)
        if number is None:
            number = self._stacks[found] = len(self.stacks)
            self.stacks.append(
                tuple(f"{place.relative(code.co_filename)}:{line} in {code.co_qualname}" for code, line in found)
            )
        return number

    def _event(self, on: torch.Stream | None) -> torch.Event | None:
        if not self.events or on is None:
            return None
        event = torch.Event(on.device, enable_timing=True)
        self._record(event, on)
        return event

    def finish(self) -> None:
        """Read the events' times."""
        anchors: dict[int, tuple[torch.Event, float]] = {}  # by device, an event and when it ran
        for call, begin, end, children in self._pairs:  # children before their parents
            end.synchronize()
            device = begin.device.index
            if device not in anchors:
                anchors[device] = self._anchor(device)
            anchor, at = anchors[device]
            call.begins = at - begin.elapsed_time(anchor) / 1e3
            call.seconds = begin.elapsed_time(end) / 1e3
            call.own = max(0.0, call.seconds - sum(child.seconds for child in children))
            call.part = _part(children)
        self._pairs.clear()

    def _anchor(self, device: int) -> tuple[torch.Event, float]:
        """An event that runs as soon as it is recorded, because nothing is queued before it, and that time."""
        stream = self._module.current_stream(device)
        self._event(stream).synchronize()
        event = self._event(stream)
        event.synchronize()
        return event, self.now()

    def _waits(self, func: OpOverload, call: Call, args: tuple, kwargs: dict) -> str:
        """Why the host waits for the device in this call, or an empty string."""
        if call.has == "fallback":
            return "fallback"
        if self.type == "cpu":
            return ""
        if call.name == "aten::_local_scalar_dense":
            return "item"
        if call.name in _COPIES:
            source, target = _COPIES[call.name]
            to = kwargs.get("device") if target is None else args[target].device
            asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if target is not None and to.type == "cpu":  # torch makes a new target pinned
                asynchronous = asynchronous and args[target].is_pinned()
            from_here = args[source].device.type == self.type
            return "copy to host" if from_here and to and torch.device(to).type == "cpu" and not asynchronous else ""
        if torch.Tag.dynamic_output_shape in func.tags:
            return "shape from data"
        return "value from data" if torch.Tag.data_dependent_output in func.tags else ""


def _part(children: list[Call]) -> float:
    return max((child.part if child.has == "composite" else child.seconds for child in children), default=0.0)


def _keys(raw: int) -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet.from_raw_repr(raw)


def _composite_key(op: str) -> torch._C.DispatchKey:
    key = next(key for key in _COMPOSITES if torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    return getattr(torch._C.DispatchKey, key)


def _view(func: OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0


def _input(tensor: torch.Tensor, device: str) -> str:
    shape = " nested" if tensor.is_nested else list(tensor.shape)
    return f"{dtype_name(tensor.dtype)}{shape}{'' if tensor.device.type == device else f'@{tensor.device.type}'}"
