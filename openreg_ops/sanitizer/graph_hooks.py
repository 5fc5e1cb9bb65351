"""How the sanitizer sees captures and replays: the methods of graphs while it is on, and a hook of optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from openreg_ops.sanitizer.graphs import Captures
from openreg_ops.sanitizer.operators import SanitizerDispatchMode

__all__ = ["unwatch", "watch"]


def _captures_of_thread() -> Captures | None:
    """The captures of the sanitizer that is on in the calling thread, or in the thread whose backward pass it runs."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, SanitizerDispatchMode) and mode.races.on:
            return mode.races.captures
    return None


def _capture_begin(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    if captures := _captures_of_thread():
        with captures.races.lock, torch._C._DisableTorchDispatch():
            captures.races.drain()
            captures.begun(self)


def _capture_end(plain: Callable[..., Any], self: Any) -> None:
    captures, ok = _captures_of_thread(), False
    try:
        plain(self)
        ok = True
    finally:
        if captures:
            with captures.races.lock:
                captures.ended(self, ok)


def _replay(plain: Callable[..., Any], self: Any) -> None:
    captures = _captures_of_thread()
    if captures is None:
        return plain(self)
    with captures.races.lock, torch._C._DisableTorchDispatch():
        accesses = captures.replaying(self)
    plain(self)
    if accesses is not None:
        with captures.races.lock:
            captures.replayed(*accesses)


def _reset(plain: Callable[..., Any], self: Any) -> None:
    captures = _captures_of_thread()
    plain(self)
    self._sanitized = None
    if captures:
        with captures.races.lock:
            captures.ended(self, ok=False)


_WATCHED = {"capture_begin": _capture_begin, "capture_end": _capture_end, "replay": _replay, "reset": _reset}
_plain: list[tuple[type, str, Any]] = []
_hooks: list[Any] = []


def watch(captures: Captures) -> None:
    """Make graphs report captures and replays, until `unwatch`."""
    for kind in (torch.openreg.Graph, getattr(torch.accelerator, "Graph", None)):
        for name, around in _WATCHED.items():
            if kind is not None and name in vars(kind):
                _plain.append((kind, name, vars(kind)[name]))
                setattr(kind, name, _method(around, vars(kind)[name]))
    _hooks.append(register_optimizer_step_post_hook(captures.optimizer_stepped))


def _method(around: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(plain, self, *args, **kwargs)

    return call


def unwatch() -> None:
    """Restore the graphs' own methods."""
    while _plain:
        setattr(*_plain.pop())
    while _hooks:
        _hooks.pop().remove()
