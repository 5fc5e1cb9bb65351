"""The table of compositions, and how each enters and leaves the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from openreg_ops.identity import identity

__all__ = ["KERNELS", "dtype_name", "expect", "expect_tensor", "kernel", "without_autocast"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The functions, by the operator's name without its namespace, such as "mm.dtype".
KERNELS: dict[str, Callable[..., Any]] = {}

_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(identity.autocast))


def kernel(*names: str) -> Callable[[_Function], _Function]:
    """Add the decorated function to the table, for an overload, or for that and the one with ``out``."""

    def add(function: _Function) -> _Function:
        KERNELS.update(dict.fromkeys(names, function))
        return function

    return add


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast has acted on the operator itself, and does not change the dtypes inside it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return function(*args, **kwargs)

    return call


def expect(condition: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    """Raise the error that CUDA raises if the condition does not hold."""
    if not condition:
        raise error(message)


def expect_tensor(op: str, name: str, x: torch.Tensor | None) -> None:
    """Raise unless the argument is a tensor."""
    if x is None:
        raise RuntimeError(f"{op}: expected {name} to be a tensor, but got None")


def dtype_name(x: torch.Tensor) -> str:
    """The dtype as C++ names it, such as "Float"."""
    return x.type().rpartition(".")[2].removesuffix("Tensor")
