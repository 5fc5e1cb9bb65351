"""The modes through which the race detector (history.py) sees a thread's operators, and its reads without one."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from openreg_ops import _C
from openreg_ops.device.liveness import is_plain
from openreg_ops.identity import identity
from openreg_ops.sanitizer.history import CheckedCall, Races, current_stream, dense_parts, traits_of
from openreg_ops.sanitizer.report import READ, Access, Span, Trace

__all__ = ["SanitizerDispatchMode", "SanitizerFunctionMode"]


class SanitizerDispatchMode(TorchDispatchMode):
    """Checks each operator of a thread, and of the backward passes that it starts."""

    supports_higher_order_operators = True

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without the mode; the compiled operators are checked when they run."""
        return True

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, classes)):  # it calls again with its inner tensors
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*pytree.tree_map(self._checked, args), **pytree.tree_map(self._checked, kwargs))
        traits = traits_of(func)
        if traits.ignored or not self.races.on or not all(map(is_plain, classes)):  # fake tensors
            return func(*args, **kwargs)
        if not self.races.captures.active and _C.is_current_stream_capturing():  # began before the sanitizer was on
            return func(*args, **kwargs)
        kernel = None
        if torch._C._len_torch_dispatch_stack() == 0:  # otherwise the mode below must see the operator
            backend = _backend(args, kwargs)
            composite = traits.composite and not func.has_kernel_for_any_dispatch_key(backend)
            if composite or traits.calls or _is_python(func):
                kernel = self._checked(functools.partial(func.redispatch, backend))
            if composite and kernel:  # below autograd, as in inference mode and in the kernel of another operator
                return kernel(*args, **kwargs)
        return CheckedCall(self.races, func, traits, args, kwargs, kernel).run()

    def _checked(self, function: Any) -> Any:
        """A function that calls `function` with the operators in it checked; other values as they are."""
        if not isinstance(function, (types.FunctionType, functools.partial, torch.nn.Module)):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            functions = SanitizerFunctionMode(self.races)
            seen = any(isinstance(mode, SanitizerFunctionMode) for mode in _get_current_function_mode_stack())
            with contextlib.nullcontext() if seen else functions, self:
                return function(*args, **kwargs)

        return call


def _is_python(func: torch._ops.OpOverload) -> bool:
    """Returns true if the program has replaced the device's kernel of an operator by a Python function."""
    return f"{func.name().replace('::', '/')}/{identity.dense}" in torch.library._impls


def _backend(args: Any, kwargs: Any) -> torch._C.DispatchKeySet:
    """The dispatch key below those of modes at which an operator's kernel is."""
    below = torch._C._dispatch_keyset_full_after(DispatchKey.Python).remove(DispatchKey.BackendSelect)
    key = torch._ops._compute_keyset(args, kwargs, below).highestPriorityTypeId()
    if key != DispatchKey.Undefined:
        return torch._C.DispatchKeySet(key)
    device = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.device)), None)
    is_ours = device is not None and device.type == identity.name
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(identity.dense if is_ours else "CPU"))


class SanitizerFunctionMode(TorchFunctionMode):
    """Checks reads of a tensor without an operator: on the host, and by printing. `_sanitizer` handles saving."""

    READERS = {getattr(torch.Tensor, name) for name in ("__array__", "__dlpack__", "__repr__", "numpy", "tolist")}

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races

    def __torch_function__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # traced with the program
            return func(*args, **(kwargs or {}))

        def read() -> None:
            if func in self.READERS and self.races.on and is_plain(type(args[0])):
                if not torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
                    self.read(f"Tensor.{func.__name__}", args[0])

        if self.races.on and self.races.captures.graphs:
            return self.races.captures.function(func, args, kwargs or {}, read)
        read()
        return func(*args, **(kwargs or {}))

    def read(self, name: str, x: torch.Tensor) -> None:
        with self.races.lock, torch._C._DisableTorchDispatch():
            self.races.drain()
            self.races.seq_num += 1
            for part in dense_parts(x):
                stream = None
                if part.device.type == identity.name:
                    stream = current_stream(part.device.index)
                    self.races.syncs.update_seq_num(stream, self.races.seq_num)
                trace = Trace(self.races.caller)
                access = Access(READ, self.races.seq_num, stream, name, ["self"], False, trace, Span.of(part))
                self.races.check([(part, access)])
                if stream:
                    self.races.syncs.all_streams_wait_for_stream(stream)
