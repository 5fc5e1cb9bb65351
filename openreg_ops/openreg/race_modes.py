"""The modes through which the race detector (races.py) sees a thread's operators, and its reads without one."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from openreg_ops import _C
from openreg_ops.openreg.liveness import is_plain
from openreg_ops.openreg.race_report import READ, Access, Span, Trace
from openreg_ops.openreg.races import Call, Races, current_stream, dense_parts, traits_of

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
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.ignored or not self.races.on or not all(map(is_plain, classes)):  # fake tensors
            return func(*args, **kwargs)
        if not self.races.captures.active and _C.is_current_stream_capturing():  # began before the sanitizer was on
            return func(*args, **kwargs)
        return Call(self.races, func, traits, args, kwargs).run()


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
                if part.device.type == "openreg":
                    stream = current_stream(part.device.index)
                    self.races.syncs.update_seq_num(stream, self.races.seq_num)
                trace = Trace(self.races.caller)
                access = Access(READ, self.races.seq_num, stream, name, ["self"], False, trace, Span.of(part))
                self.races.check([(part, access)])
                if stream:
                    self.races.syncs.all_streams_wait_for_stream(stream)
