"""Watches how a test uses a device: a mode for calls from Python, one for operators, and waits outside operators."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _pytest._io import saferepr
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import data
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from openreg_tools import backends
from openreg_tools.core import place, waits

__all__ = ["Found", "Leaks", "Watch", "hide", "is_tests"]

Found = Callable[[str, str, str, bool], None]  # kind, what, where, whether that is the tests' own code

# Calls that give the host a value. Copies to the host and data-dependent shapes are seen as operators.
_READS = {
    getattr(torch.Tensor, name): name.strip("_")
    for name in (
        "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__repr__", "__format__"
    )
}  # fmt: skip
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_OWN = (os.path.dirname(__file__) + os.sep, waits.__file__)


# ---- where a call comes from ----


def line_of(root: Path) -> tuple[str, bool]:
    """The program's line, and whether it is the tests' own code.

    A call of backward() is never the tests' own: the library's operators determine what the pass does.
    """
    found, backward = place.innermost()
    if found is None:
        return "in a backward pass", False
    file = found.f_code.co_filename
    own = not backward and is_tests(root, found.f_globals, file)
    return f"{place.relative(file, str(root))}:{found.f_lineno}", own


def is_tests(root: Path, variables: dict[str, Any], file: str) -> bool:
    """Returns true if a module has tests: pytest rewrites its asserts, or its file is in a folder of tests."""
    if type(variables.get("__loader__")).__name__ == "AssertionRewritingHook":
        return True
    return Path(file).is_relative_to(root) and bool({"test", "tests"} & {*Path(file).relative_to(root).parts[:-1]})


def hide(error: BaseException) -> None:
    """End the traceback of an error that passed the watch at the program's line, as without the watch."""
    paths = place.libraries()
    trace, last, watched = error.__traceback__, None, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(paths):
            last, watched = trace, False
        watched |= file.startswith(_OWN)
        trace = trace.tb_next
    if last is not None and watched:
        last.tb_next = None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _explains() -> bool:
    """Returns true if pytest is showing a value to explain a failed assertion."""
    return any(frame.f_code.co_filename == saferepr.__file__ for frame in _frames())


def _makes_a_module() -> bool:
    """Returns true if a module is being made, perhaps to be moved to a device, or its parameters are reset."""
    return any(
        frame.f_code.co_filename == nn.init.__file__
        or (
            frame.f_code.co_name in ("__init__", "reset_parameters")
            and isinstance(frame.f_locals.get("self"), nn.Module)
        )
        for frame in _frames()
    )


def _shuffles() -> bool:
    """Returns true if a DataLoader draws the order of its samples, or the seed of its workers."""
    folder = os.path.dirname(data.__file__)
    return any(frame.f_code.co_filename.startswith(folder) for frame in _frames())


# ---- the watch ----


class Watch:
    """Watches what one test does with devices of some types and reports to `found`, inside `with watch.watching():`.

    Args:
        types: device types, without "cpu".
        kinds: what to look for, of `misuse.KINDS`.
        root: the folder that lines are relative to.
    """

    def __init__(self, types: set[str], kinds: set[str], root: Path, found: Found) -> None:
        self.types, self.kinds, self.root, self.found = types, kinds, root, found
        self.backends = [backends.of_device(kind) for kind in sorted(types)]
        self.suspects: list[tuple[str, str, str, bool]] = []  # errors that are misuse if the test does not expect them
        self.draws: list[tuple[str, str, str, bool]] = []  # misuse if the test uses the device
        self.used = False
        self.quiet = 0  # inside a call that has been reported

    def tell(self, kind: str, what: str) -> None:
        if kind in self.kinds:
            self.found(kind, what, *line_of(self.root))

    def suspect(self, kind: str, what: str) -> None:
        if kind in self.kinds:
            self.suspects.append((kind, what, *line_of(self.root)))

    def failed(self) -> None:
        """The test failed: report the errors that it hit."""
        for suspect in self.suspects:
            self.found(*suspect)

    def on_device(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type in self.types

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for backend in self.backends if self.kinds & {"race", "pinned"} else ():
                stack.enter_context(backend.races(self._raced))
            stack.enter_context(waits.noticed(self.types, self.waited))
            stack.enter_context(_Calls(self))
            stack.enter_context(_Operators(self))
            try:
                yield
            finally:
                Leaks.prune()
                for drawn in self.draws if self.used else ():
                    self.found(*drawn)

    def waited(self, what: str) -> None:
        if not self.quiet and not _explains():
            self.tell("sync", what)

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call of torch's Python interface."""
        __tracebackhide__ = True
        device = bool(args) and self.on_device(args[0])
        reads = _READS.get(func) if device else None
        if reads:
            self.waited({"repr": "print", "format": "print"}.get(reads, reads))
        self.quiet += bool(reads)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if func in _TO_NUMPY and device:
                self.suspect("host", f"{func.__name__}() of a tensor on {args[0].device}")
            elif "device" in str(error) and len(devices := _devices(args, kwargs)) > 1:
                self.suspect("mixed", f"{getattr(func, '__name__', func)} of {' and '.join(devices)}")
            raise
        finally:
            self.quiet -= bool(reads)

    def operator(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """An operator, below autograd."""
        __tracebackhide__ = True
        name = func.name()
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = any(x.device.type in self.types for x in tensors)
        made = kwargs.get("device")
        self.used |= here or (made is not None and torch.device(made).type in self.types)
        if copy := waits.copy_of(func, args, kwargs):
            self._copied(*copy)
        if reason := waits.why(func, args, kwargs, tensors, self.types):
            self.waited(f"{name.removeprefix('aten::')}: {reason}" if reason.startswith("data") else reason)
        draws = "seed" in self.kinds and _may_draw(func)
        before = _generator_state() if draws else None
        fallbacks = self._fallbacks() if here and "sync" in self.kinds else None
        out = func(*args, **kwargs)
        if draws and not _is_same(before, _generator_state()):
            self._drew(name.removeprefix("aten::").partition(".")[0])
        if fallbacks is not None and self._fallbacks() > fallbacks:
            self.waited(f"{name} falls back to the CPU")
        if "leak" in self.kinds:
            self._made(tensors, out)
        return out

    def _fallbacks(self) -> int:
        return sum(backend.fallbacks() for backend in self.backends)

    # ---- kinds of misuse ----

    def _raced(self, errors: list[Any]) -> None:
        """Accesses of one operator or of the host that came too early: each mistake counts once."""
        found = set()
        for error in errors:
            now, then = error.current_access, error.previous_access
            name = str(then.operator).partition("(")[0]
            if now.stream is None and now.type.name == "WRITE":
                found.add(("pinned", f"written while {name} may read it"))
            else:
                # Streams are taken by turns, so the number of a side stream says nothing.
                stream = "a side stream" if now.stream and now.stream[1] else "the default stream"
                reader = "the host" if now.stream is None else stream
                freed = getattr(then, "freed", None)
                did = f"did not wait for {name}" if freed is None else f"reuses memory freed before {name} ran"
                found.add(("race", f"{reader} {did}"))
        for kind, what in sorted(found):
            self.tell(kind, what)

    def _copied(self, source: torch.Tensor, to: torch.device, non_blocking: bool, pinned: bool) -> None:
        if not non_blocking:
            return
        if source.device.type in self.types and to.type == "cpu" and not pinned:
            self.tell("pinned", "non_blocking copy to memory that is not pinned: the host waits")
        elif source.device.type == "cpu" and to.type in self.types and not source.is_pinned():
            self.tell("pinned", "non_blocking copy of memory that is not pinned: the host copies it to a buffer first")

    def _drew(self, name: str) -> None:
        """An operator drew from the CPU's global generator."""
        where, own = line_of(self.root)
        if not own and not _makes_a_module() and not _shuffles():
            self.draws.append(("seed", f"{name} on the CPU, in the library", where, own))

    def _made(self, tensors: list[torch.Tensor], out: Any) -> None:
        known = {x.untyped_storage()._cdata for x in tensors if _has_storage(x)}
        for x in tree_iter(out):
            if self.on_device(x) and _has_storage(x) and (storage := x.untyped_storage())._cdata not in known:
                if storage.device.type != "meta" and storage.nbytes():  # a fake tensor's size may be unknown
                    Leaks.made(storage, self, *line_of(self.root))


class Leaks:
    """Device memory that tests allocated and that is still alive; one list, because the last test may free the
    first's."""

    alive: list[tuple[StorageWeakRef, int, Watch, str, bool]] = []

    @classmethod
    def made(cls, storage: torch.UntypedStorage, watch: Watch, where: str, own: bool) -> None:
        cls.alive.append((StorageWeakRef(storage), storage.nbytes(), watch, where, own))

    @classmethod
    def prune(cls) -> None:
        """Forget the memory that is freed."""
        cls.alive = [held for held in cls.alive if not held[0].expired()]

    @classmethod
    def forget(cls, watch: Watch) -> None:
        """A test failed: its traceback keeps its frames' objects alive."""
        cls.alive = [held for held in cls.alive if held[2] is not watch]

    @classmethod
    def tell(cls) -> None:
        """All tests have ended: report what is left."""
        gc.collect()
        cls.prune()
        for _, nbytes, watch, where, own in cls.alive:
            watch.found("leak", f"{nbytes:,} bytes", where, own)
        cls.alive = []


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.watch.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled operators are seen when they run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        __tracebackhide__ = True
        if any(map(is_traceable_wrapper_subclass_type, types)):  # called again with the tensors in it
            return NotImplemented
        plain = all(kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl for kind in types)
        if not plain or not isinstance(func, torch._ops.OpOverload):  # fake tensors; higher-order operators
            return func(*args, **(kwargs or {}))
        return self.watch.operator(func, args, kwargs or {})


# ---- calls and operators ----


def _devices(args: tuple, kwargs: dict) -> list[str]:
    """The devices of the tensors in a call, except 0-dim CPU tensors, which work with any device."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    return sorted({str(x.device) for x in tensors if x.dim() or x.device.type != "cpu"})


def _generator_state() -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.default_generator.get_state()


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.equal(a, b)


@functools.cache
def _may_draw(func: torch._ops.OpOverload) -> bool:
    """Returns true if an operator may draw random numbers: it has the tag or a generator, or is not PyTorch's."""
    takes = any("Generator" in str(argument.type) for argument in func._schema.arguments)
    return takes or torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prim", "prims")


def _has_storage(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested and torch._C._has_storage(x)
