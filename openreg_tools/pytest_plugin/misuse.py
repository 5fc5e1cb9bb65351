"""Watches how a test uses a device: a mode for calls from Python, one for operators, and a few patched functions.

The line that a finding names is the innermost one that is neither torch's, NumPy's nor pytest's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch
from _pytest._io import saferepr
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init as nn_init
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from openreg_tools import backends, dynamo
from openreg_tools.core import place

Found = Callable[[str, str, str, bool], None]  # kind, what, where, whether that is the tests' own code


_TORCH = os.path.dirname(torch.__file__) + os.sep
_FOR_ANY = {
    f"torch.cuda.{name}": f": torch.accelerator.{name} asks for any" for name in ("is_available", "device_count")
}
# Calls that give the host a value. Copies to the host and data-dependent shapes are seen as operators.
_READS = {
    getattr(torch.Tensor, name): name.strip("_")
    for name in (
        "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__repr__", "__format__"
    )
}  # fmt: skip
# What the device says of the other waits of autograd's nodes.
_WAITS = {
    "_local_scalar_dense": "item", "copy_": "copy between host and device", "Stream.synchronize": "synchronize"
}  # fmt: skip
_VALUES = ("item", "tolist", "bool", "int", "float", "complex", "index")
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_IS_CUDA = torch.Tensor.is_cuda.__get__
# The files through which torch calls a mode.
_TO_A_MODE = tuple(_TORCH + file for file in ("_compile.py", f"_dynamo{os.sep}eval_frame.py", "overrides.py"))
# Copies, and which arguments are the source and the target.
_COPIES = {"aten::copy_": (1, 0), "aten::_copy_from": (0, 1), "aten::_to_copy": (0, None)}


@functools.cache
def _watching() -> tuple[str, ...]:
    """Path prefixes of files that watch: these, and the devices'."""
    ours = os.path.dirname(__file__) + os.sep
    return (ours, *(file for backend in backends.registered() for file in backend.watchers))


@functools.cache
def may_name_cuda() -> tuple[str, ...]:
    """The paths of libraries, and all of the devices' packages."""
    files = [sys.modules[backend.package].__file__ for backend in backends.registered()]
    return (*place.libraries(), "<", *(os.path.dirname(file) + os.sep for file in files))


def is_tests(root: Path, variables: dict[str, Any], file: str) -> bool:
    """Whether a module has tests: pytest rewrites its asserts, or its file is in a folder of tests."""
    if type(variables.get("__loader__")).__name__ == "AssertionRewritingHook":
        return True
    return Path(file).is_relative_to(root) and bool({"test", "tests"} & {*Path(file).relative_to(root).parts[:-1]})


def line_of(root: Path, frame: FrameType | None = None) -> tuple[str, bool]:
    """The program's line above a frame, and whether it is the tests' own code.

    A call of backward() is never the tests' own: the library's operators have put there what the pass does.
    """
    found, backward = place.innermost(frame)
    if found is None:
        return "in a backward pass", False
    file = found.f_code.co_filename
    own = not backward and is_tests(root, found.f_globals, file)
    return f"{place.relative(file, str(root))}:{found.f_lineno}", own


def hide(error: BaseException | None) -> None:
    """Remove from the tracebacks of an error the frames by which it passed the watch: it looks as without the watch."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        if (error := errors.pop()) is not None and id(error) not in seen:
            seen.add(id(error))
            _hide(error.__traceback__)
            grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            errors += [error.__cause__, error.__context__, *grouped]


def _hide(trace: TracebackType | None) -> None:
    kept: list[TracebackType] = []
    after = False  # a frame of the watch was the last
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if kept and file.startswith(_watching()):
            while len(kept) > 1 and (way := kept[-1].tb_frame.f_code).co_filename in _TO_A_MODE:
                del kept[-1]
                if way.co_name == "handle_torch_function" and len(kept) > 1:
                    del kept[-1]  # which called it, and is called again behind the mode
            after = True
        elif not (after and file == torch._ops.__file__):
            kept.append(trace)
            after = False
        trace = trace.tb_next
    for each, following in zip(kept, [*kept[1:], None], strict=True):
        each.tb_next = following


def _is_within(path: str, *functions: str) -> bool:
    """Whether a function of a file, or of a folder's files, is on the stack: any function, if none is named."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(path) and (not functions or frame.f_code.co_name in functions):
            return True
        frame = frame.f_back
    return False


@dataclasses.dataclass(eq=False)
class _Draw:
    """Numbers that the library drew from the CPU's global generator."""

    what: str
    where: str
    made: bool  # by a call that was given neither tensors nor a device
    told: bool = False


class Watch:
    """Watches what one test does with devices of some types and reports to `found`, inside `with watch.watching():`.

    Args:
        types: device types, without "cpu".
        kinds: what to look for, of `findings.KINDS`.
        root: the folder that lines are relative to.
    """

    def __init__(self, types: set[str], kinds: set[str], root: Path, found: Found) -> None:
        self.types, self.kinds, self.root, self.found = types, kinds, root, found
        self.light = self.kinds <= {"cuda", "sync"}
        self.backends = [backends.of_device(each) for each in sorted(types)]
        self.seeded = False
        self.suspects: list[tuple[str, str, str, bool]] = []  # errors that are misuse if the test does not expect them
        self.draws: list[tuple[str, str, str, bool]] = []  # misuse if the test uses the device
        self.drawn: dict[int, tuple[StorageWeakRef, set[_Draw]]] = {}  # by storage: what its numbers depend on
        self.used = False
        self.quiet = 0  # inside a call that has been reported
        self.placed = 0  # inside a call that specifies the device of its result
        self.fallbacks = 0
        self.named: set[str] = set()  # lines that name a part of torch.cuda

    def tell(self, kind: str, what: str) -> None:
        if kind in self.kinds:
            self.found(kind, what, *line_of(self.root))

    def suspect(self, kind: str, what: str) -> None:
        if kind in self.kinds:
            self.suspects.append((kind, what, *line_of(self.root)))

    def failed(self) -> None:
        """The test failed: report the errors that it hit."""
        for each in self.suspects:
            self.found(*each)

    def on_device(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type in self.types

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for backend in self.backends if self.kinds & {"race", "pinned"} else ():
                stack.enter_context(backend.races(self._raced))
            stack.enter_context(_patched(self))
            if "cuda" in self.kinds - self.types:
                stack.enter_context(_naming_cuda(self))
            stack.enter_context(_Calls(self))
            stack.enter_context(_Operators(self))
            try:
                yield
            finally:
                for each in self.draws if self.used else ():
                    self.found(*each)

    # ---- kinds of misuse ----

    def _raced(self, errors: list[Any]) -> None:
        for error in errors:
            now, then = error.current_access, error.previous_access
            if now.stream is None and now.type.name == "WRITE":
                self.tell("pinned", f"written while {_name(then)} may read it")
            else:
                reader = "the host" if now.stream is None else f"stream {now.stream[1]}"
                self.tell("race", f"{reader} did not wait for {_name(then)}")

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Autograd's nodes without our mode, under which some take another path; the device reports its waits itself.

        Only where nothing but waits is watched for, and the program has no mode of its own.
        """
        watched = [backend.waits(self._waited_for) for backend in self.backends]
        modes = _get_current_dispatch_mode_stack()
        if None in watched or not all(isinstance(mode, _Operators) and mode.watch.light for mode in modes):
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for each in watched:
                stack.enter_context(each)
            yield

    def _waited_for(self, operation: str) -> None:
        name = operation.removeprefix("aten::")
        self.waited(_WAITS.get(name, f"{name}: a size or value that depends on data"))

    def waited(self, what: str) -> None:
        if not self.quiet and not _is_within(saferepr.__file__):
            self.tell("sync", what)

    def cuda(self, what: str) -> None:
        if "cuda" not in self.types and not self.quiet:
            self.tell("cuda", what)

    def names_cuda(self, name: str) -> None:
        """A line names a part of torch.cuda."""
        self.named.add(line_of(self.root)[0])
        self.cuda(name + _FOR_ANY.get(name, ""))

    def uses_cuda(self) -> None:
        """CUDA is initialized: by a function imported by name, if the line does not say torch.cuda."""
        if line_of(self.root)[0] not in self.named:
            self.cuda("torch.cuda is used")

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call of torch's Python interface."""
        __tracebackhide__ = True
        if said := _says_cuda(func, args, kwargs):
            self.cuda(said)
        reads = _READS.get(func)
        device = bool(args) and self.on_device(args[0])
        if self.drawn and args and (func in _TO_NUMPY or reads in _VALUES):
            self._taken(args[0])
        if reads and device:
            self.waited({"repr": "print", "format": "print"}.get(reads, reads))
        hidden = bool(said) or (reads is not None and device)
        placed = kwargs.get("device") is not None
        self.quiet += hidden
        self.placed += placed
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if func in _TO_NUMPY and device:
                self.suspect("host", f"{func.__name__}() of a tensor on {args[0].device}")
            elif "device" in str(error) and len(devices := _devices(args, kwargs)) > 1:
                self.suspect("mixed", f"{getattr(func, '__name__', func)} of {' and '.join(devices)}")
            raise
        finally:
            self.quiet -= hidden
            self.placed -= placed

    def operator(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """An operator, below autograd."""
        __tracebackhide__ = True
        name = func.name()
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = any(x.device.type in self.types for x in tensors)
        made = kwargs.get("device")
        self.used |= here or (made is not None and torch.device(made).type in self.types)
        if name in _COPIES and isinstance(args[_COPIES[name][0]], torch.Tensor):  # torch.func copies numbers too
            self._copy(*_copied(name, args, kwargs))
        elif here and name == "aten::_local_scalar_dense":
            self.waited("item")
        elif here and _depends_on_data(func, tensors):
            self.waited(f"{name.removeprefix('aten::')}: a size or value that depends on data")
        draws = "seed" in self.kinds and _may_draw(func)
        before = _generator_state() if draws else None
        out = func(*args, **kwargs)
        if self.drawn or draws:
            draw = None
            if draws and not _is_same(before, _generator_state()):
                draw = self._drew(name, bool(tensors) or bool(self.placed))
            self._follow(func, args, kwargs, out, draw)
        if here and "sync" in self.kinds:
            fallbacks = sum(backend.fallbacks() for backend in self.backends)
            if fallbacks > self.fallbacks:
                self.waited(f"{name} falls back to the CPU")
            self.fallbacks = fallbacks
        if "leak" in self.kinds:
            self._made(tensors, out)
        return out

    def _copy(self, source: torch.Tensor, to: torch.Tensor | torch.device, non_blocking: bool) -> None:
        there = to.device if isinstance(to, torch.Tensor) else to
        if source.device.type in self.types and there.type == "cpu":
            pinned = not isinstance(to, torch.Tensor) or to.is_pinned()  # torch makes new memory for such a copy pinned
            if not non_blocking:
                self.waited("copy to the host")
            elif not pinned:
                self.tell("pinned", "non_blocking copy to memory that is not pinned: the host waits")
                self.waited("non_blocking copy to memory of the host that is not pinned")
        elif source.device.type == "cpu" and there.type in self.types and non_blocking and not source.is_pinned():
            self.tell("pinned", "non_blocking copy of memory that is not pinned: the host copies it to a buffer first")

    def _drew(self, name: str, placed: bool) -> _Draw | None:
        """An operator drew from the CPU's global generator; returns the draw if the library made it, to follow it."""
        if _is_within(nn_init.__file__) or _is_within(_TORCH + "nn", "reset_parameters"):
            return None  # a module is made on the CPU and moved
        where, own = line_of(self.root)
        what = f"{name.removeprefix('aten::').partition('.')[0]} on the CPU, "
        if not own:
            return _Draw(what + "in the library", where, not placed)
        if not self.seeded:
            self.draws.append(("seed", what + "which this test has not seeded", where, own))
        return None

    def _follow(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, out: Any, draw: _Draw | None) -> None:
        """Follow the numbers of draws through an operator, and report those that come to a device."""
        name = func.name()
        inputs = args[_COPIES[name][0]] if name in _COPIES else (args, kwargs)  # not what a copy overwrites
        draws = {draw} if draw else set()
        for x in tree_iter(inputs):
            draws |= self._draws_in(x)
        if not draws:
            return
        outputs = [x for x in tree_iter((out, _written(func, args, kwargs))) if isinstance(x, torch.Tensor)]
        if any(map(self.on_device, (*tree_iter((args, kwargs)), *outputs))):
            if not _is_within(nn_module.__file__, "_apply", "_load_from_state_dict"):
                for each in draws:
                    self._tell_draw(each)
            return
        for x in outputs:
            if _has_storage(x):
                storage = x.untyped_storage()
                known = self._draws_in(x)
                self.drawn[storage._cdata] = StorageWeakRef(storage), draws | known

    def _draws_in(self, x: Any) -> set[_Draw]:
        if not self.drawn or type(x) not in (torch.Tensor, torch.nn.Parameter) or not _has_storage(x):
            return set()
        reference, draws = self.drawn.get(x.untyped_storage()._cdata, (None, set()))
        return draws if reference is not None and not reference.expired() else set()

    def _taken(self, x: Any) -> None:
        """The library takes numbers as Python's or NumPy's: nothing says where they go."""
        if not line_of(self.root)[1]:
            for each in self._draws_in(x):
                if each.made:
                    self._tell_draw(each)

    def _tell_draw(self, draw: _Draw) -> None:
        if not draw.told:
            draw.told = True
            self.draws.append(("seed", draw.what, draw.where, False))

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
    most = 1000

    @classmethod
    def made(cls, storage: torch.UntypedStorage, watch: Watch, where: str, own: bool) -> None:
        cls.alive.append((StorageWeakRef(storage), storage.nbytes(), watch, where, own))
        if len(cls.alive) > cls.most:
            cls._prune()
            cls.most = max(1000, 2 * len(cls.alive))

    @classmethod
    def _prune(cls) -> None:
        cls.alive = [each for each in cls.alive if not each[0].expired()]

    @classmethod
    def forget(cls, watch: Watch) -> None:
        """A test failed: its traceback keeps its frames' objects alive."""
        cls.alive = [each for each in cls.alive if each[2] is not watch]

    @classmethod
    def tell(cls) -> None:
        """All tests have ended: report what is left."""
        gc.collect()
        cls._prune()
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


@contextlib.contextmanager
def _patched(watch: Watch) -> Iterator[None]:
    """What no mode sees: waits for an entire device, and CUDA's own module."""

    def before(owner: Any, name: str, notice: Callable[..., None]) -> Callable[[], None]:
        function = getattr(owner, name)

        @functools.wraps(function)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            notice(*args, **kwargs)
            watch.quiet += 1
            try:
                return function(*args, **kwargs)
            finally:
                watch.quiet -= 1

        setattr(owner, name, noticed)
        return lambda: setattr(owner, name, function)

    modules = [torch.accelerator, *(getattr(torch, kind, None) for kind in watch.types)]
    undo = [
        before(module, "synchronize", lambda *_, **__: watch.waited("synchronize"))
        for module in modules
        if hasattr(module, "synchronize")
    ]
    undo.append(before(torch.cuda, "_lazy_init", lambda: watch.uses_cuda()))

    def autocast(_: Any, device_type: str = "", *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            watch.cuda('autocast("cuda")')

    def scaler(_: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        if device == "cuda":
            watch.cuda('GradScaler("cuda")')

    def default(kind: Any) -> None:
        if _is_cuda_type(kind):
            watch.cuda(f'"{kind}"')

    def in_backward(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            with watch.in_backward():
                return function(*args, **kwargs)

        dynamo = torch._C._dynamo.eval_frame  # does not trace it, nor the function
        skipped = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
        dynamo.set_code_exec_strategy(_engine_run_backward.__code__, skipped)
        return _engine_run_backward

    if watch.light:
        for owner in (torch.autograd, torch.autograd.graph):
            function = owner._engine_run_backward
            undo.append(functools.partial(setattr, owner, "_engine_run_backward", function))
            owner._engine_run_backward = in_backward(function)

    def profile(_: Any, *, activities: Any = None, **kwargs: Any) -> None:
        listed = activities if isinstance(activities, Collection) else ()  # an iterator can be read only once
        named = {key for each in listed for key in (each if isinstance(each, dict) else (each,))}
        if torch.profiler.ProfilerActivity.CUDA in named and not named & _activities(watch.types):
            watch.cuda("ProfilerActivity.CUDA")

    def table(_: Any, sort_by: str | None = None, *args: Any, **kwargs: Any) -> None:
        if "cuda" in (sort_by or ""):
            watch.cuda(f'table(sort_by="{sort_by}")')

    def save(_: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        if pin_memory and device_type == "cuda":
            watch.cuda("save_on_cpu(pin_memory=True)")

    def mesh(_: Any, device_type: str = "", *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            watch.cuda('DeviceMesh("cuda")')

    def backend(_: Any, backend: Any = "") -> None:
        if "nccl" in str(backend):
            watch.cuda(f'backend "{backend}"')

    undo.append(before(torch.autocast, "__init__", autocast))
    undo.append(before(torch.amp.GradScaler, "__init__", scaler))
    undo.append(before(torch, "set_default_tensor_type", default))
    undo.append(before(torch.profiler.profile, "__init__", profile))
    undo.append(before(torch.autograd.profiler_util.EventList, "table", table))
    undo.append(before(torch.autograd.graph.save_on_cpu, "__init__", save))
    if torch.distributed.is_available():
        undo.append(before(torch.distributed.DeviceMesh, "__init__", mesh))  # also of init_device_mesh
        undo.append(before(torch.distributed.distributed_c10d.BackendConfig, "__init__", backend))
    try:
        yield
    finally:
        for each in reversed(undo):
            each()
        dynamo.forget_replaced()


@contextlib.contextmanager
def _naming_cuda(watch: Watch) -> Iterator[None]:
    """While active, each use of `torch.cuda.NAME` outside torch is reported.

    The modules report attribute accesses. Nothing in them is replaced: classes stay the same, and a test that patches a
    function there restores the right one, however late.
    """

    skip = may_name_cuda()

    class Module(ModuleType):
        def __getattribute__(self, name: str) -> Any:  # does not name `torch`; otherwise Dynamo would compile it
            __tracebackhide__ = True
            value = super().__getattribute__(name)
            if (
                not name.startswith("_")
                and name not in ("autocast", "GradScaler")  # reported when one is created
                and not isinstance(value, ModuleType)
                and not sys._getframe(1).f_code.co_filename.startswith(skip)
            ):
                watch.names_cuda(f"{self.__name__}.{name}")
            return value

    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith("torch.cuda.")]
    before = [(module, type(module)) for module in modules if isinstance(module, ModuleType)]
    try:
        for module, _ in before:
            module.__class__ = Module
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


@contextlib.contextmanager
def noticing_decorators(root: Path, watch: Callable[[], Watch | None]) -> Iterator[None]:
    """While active, what `custom_fwd` and `custom_bwd` decorate for CUDA reports the decorator's line when it runs."""

    def noticing(decorate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decorate)
        def decorator(function: Any = None, *, device_type: str, **options: Any) -> Any:
            if function is None:
                return functools.partial(decorator, device_type=device_type, **options)
            decorated = decorate(function, device_type=device_type, **options)
            if device_type != "cuda":
                return decorated
            where = line_of(root)

            @functools.wraps(decorated)
            def noticed(*args: Any, **kwargs: Any) -> Any:
                if (current := watch()) is not None and "cuda" in current.kinds - current.types:
                    current.found("cuda", f'{decorate.__name__}(device_type="cuda")', *where)
                    current.quiet += 1  # the autocast of custom_bwd
                try:
                    return decorated(*args, **kwargs)
                finally:
                    if current is not None:
                        current.quiet -= 1

            return noticed

        return decorator

    before = {name: getattr(torch.amp, name) for name in ("custom_fwd", "custom_bwd")}
    for name, function in before.items():
        setattr(torch.amp, name, noticing(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.amp, name, function)


@contextlib.contextmanager
def noticing_seeds(watch: Callable[[], Watch | None]) -> Iterator[None]:
    """While active, records that a test has seeded the CPU's generator."""

    def noticing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seeds(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and (current := watch()) is not None:
                current.seeded = True
            return function(*args, **kwargs)

        return seeds

    before = {(owner, name): getattr(owner, name)
              for owner in (torch, torch.random) for name in ("manual_seed", "set_rng_state")}  # fmt: skip
    for (owner, name), function in before.items():
        setattr(owner, name, noticing(function))
    try:
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)
        dynamo.forget_replaced()


# ---- calls and operators ----


def _name(access: Any) -> str:
    return str(access.operator).partition("(")[0]


def _says_cuda(func: Any, args: tuple, kwargs: dict) -> str:
    """The part of a call that insists on CUDA; empty if there is none."""
    if func is torch.Tensor.cuda:
        return ".cuda()"
    if func == _IS_CUDA:
        caller = sys._getframe(3).f_code.co_filename
        return "" if caller.startswith(_TORCH) else "is_cuda"
    if func is torch.Tensor.type:
        return next((f'"{kind}"' for kind in (*args[1:], *kwargs.values()) if _is_cuda_type(kind)), "")
    named = [kwargs.get("device"), *(args if func in (torch.device, torch.Tensor.to) else ())]
    named += [each for each in args if isinstance(each, torch.device)]
    named += args[1:] if func in (torch.Tensor.pin_memory, torch.Tensor.is_pinned) else ()
    for each in named:
        if (isinstance(each, torch.device) and each.type == "cuda") or (
            isinstance(each, str) and each.partition(":")[0] == "cuda"
        ):
            return f'device "{each}"'
    return ""


def _activities(types: set[str]) -> set[Any]:
    """The activities of a profile that record devices of these types."""
    names = {"PrivateUse1" if each == torch._C._get_privateuse1_backend_name() else each.upper() for each in types}
    return {getattr(torch.profiler.ProfilerActivity, name, None) for name in names}


def _is_cuda_type(kind: Any) -> bool:
    """Whether a tensor type's name is one of CUDA's; the types themselves are parts of torch.cuda."""
    return isinstance(kind, str) and kind.startswith("torch.cuda.")


def _devices(args: tuple, kwargs: dict) -> list[str]:
    """The devices of the tensors in a call, except 0-dim CPU tensors, which work with any device."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    return sorted({str(x.device) for x in tensors if x.dim() or x.device.type != "cpu"})


def _copied(name: str, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | torch.device, bool]:
    """For a copy: the source, the target or the device of a new one, and whether it is non_blocking."""
    source, target = _COPIES[name]
    to = kwargs.get("device") if target is None else args[target]
    return (
        args[source],
        to if target is not None else torch.device(args[source].device if to is None else to),
        bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])),
    )


def _generator_state() -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.default_generator.get_state()


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.equal(a, b)


def _written(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments that an operator writes."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return written


@functools.cache
def _may_draw(func: torch._ops.OpOverload) -> bool:
    """Whether an operator may draw random numbers: by its tag, an argument for a generator, or as not PyTorch's."""
    takes = any("Generator" in str(argument.type) for argument in func._schema.arguments)
    return takes or torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prim", "prims")


def _depends_on_data(func: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # only if a mask is among the indices
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _has_storage(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested and torch._C._has_storage(x)
