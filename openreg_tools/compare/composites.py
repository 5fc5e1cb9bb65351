"""Compares recurrent networks as a whole: PyTorch composes them of other operators on the CPU than on some devices.

Operators are compared one by one, below these functions, so all of them can agree although the results do not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openreg_tools.compare.copies import copied, tensors_of
from openreg_tools.compare.lockstep import DEVICE_ERRORS, Lockstep
from openreg_tools.compare.result import Difference
from openreg_tools.compare.tolerance import Tolerance, largest, measure
from openreg_tools.core.place import stack
from openreg_tools.samples import shown

__all__ = ["Composites"]

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_active: list[Composites] = []


class Composites:
    """While active, the functions for recurrent networks also run on the reference."""

    def __init__(self, mode: Lockstep) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self._before = [(module, name, vars(module).get(name)) for module in (torch, torch._VF) for name in NAMES]
        for module, name, _ in self._before:
            setattr(module, name, _wrapper(name, getattr(module, name)))
        _active.append(self)

    def __exit__(self, *exception: Any) -> None:
        _active.remove(self)
        for module, name, function in self._before:
            if function is None:
                delattr(module, name)
            else:
                setattr(module, name, function)

    def both(self, name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The call on the device, and then on the reference."""
        mode = self.mode
        tensors = [*tensors_of((*args, *kwargs.values()))]
        device = next((t.device for t in tensors if t.device.type == mode.type), None)
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if device is None or not mode.active or transformed or torch.is_autocast_enabled(mode.type):
            return function(*args, **kwargs)
        try:
            with mode.lock, mode.quiet():
                given, words = copied([[*args], [*kwargs.values()]], mode.reference)
                state = mode.state_of(device)
        except DEVICE_ERRORS:
            raise
        except (NotImplementedError, RuntimeError):  # of a subclass, whose tensors have no memory of their own
            return function(*args, **kwargs)
        before = mode.result.unequal()
        out = function(*args, **kwargs)
        if mode.result.unequal() > before:
            return out  # the operator is reported
        with mode.quiet(), mode.drawing(state), contextlib.suppress(NotImplementedError):
            expected = function(*given, **dict(zip(kwargs, words, strict=True)))
            pairs = zip(tensors_of((out,)), tensors_of((expected,)), strict=True)
            self._compare(name, [*given, *words], list(pairs))
        return out

    def _compare(self, name: str, given: list[Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        mode, place = self.mode, self.mode.places.now()
        tolerance = Tolerance("chain", 16.0 * mode.tolerances.factor)
        most = 0.0
        for i, (got, want) in enumerate(pairs):
            got, scale = got.detach().to(mode.reference), largest([*tensors_of(given), want])
            error = measure(got, want.detach(), "chain", scale, tolerance.ulps)
            most = max(most, error.ulps if error else 0.0)
            if error and error.ulps > tolerance.ulps:
                inputs = [shown(value) for value in given]
                difference = Difference(
                    mode.result.operators, name, f"result {i}", place, inputs, error, tolerance, "", mode.type,
                    str(mode.reference), result=shown(got), stack=stack(),
                )  # fmt: skip
                mode.result.add(difference)
        if most:
            mode.result.note(
                f"{name} at {place.line()}: its operators agree, but as a whole it differs from {mode.reference} by up "
                f"to {most:.3g} ulps of the largest value: PyTorch composes it of other operators there"
            )


@functools.cache  # TorchScript knows a function by its address
def _wrapper(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        return _active[-1].both(name, function, args, kwargs) if _active else function(*args, **kwargs)

    torch.jit._builtins._register_builtin(both, f"aten::{name}")
    return both
