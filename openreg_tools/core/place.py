"""Where a program is: its line, the module whose forward or backward runs, and the phase of the training step.

The program's frames are those outside PyTorch, these tools, the devices' packages, NumPy and pytest. `Places` follows a
program for `compare`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import linecache
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from openreg_tools import backends

__all__ = ["Place", "Places", "frames", "innermost", "libraries", "line", "relative", "site", "stack"]


def _paths(*modules: str) -> Iterator[str]:
    """The folder of a package, or the file of a module, without importing it."""
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            yield spec.origin.removesuffix("__init__.py")


_LIBRARIES = (
    *_paths("torch", "openreg_tools", "numpy", "pytest", "_pytest", "pluggy"),
    *_paths("concurrent.futures", "contextlib", "ctypes", "functools", "reprlib", "threading", "typing_extensions"),
    os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_"),
)
_MOST = 200_000  # forward calls whose place is kept for backward


# ---- frames ----


def libraries() -> tuple[str, ...]:
    """Path prefixes of files whose lines are not the program's."""
    return (*_LIBRARIES, *(path for backend in backends.registered() for path in backend.hidden))


def frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """The program's frames, the innermost first.

    On one of autograd's threads, they are the frames of the thread that called backward().

    Args:
        frame: where to begin; the caller by default.
    """
    return (found for found, _ in _walk(frame or sys._getframe()))


def innermost(frame: FrameType | None = None) -> tuple[FrameType | None, bool]:
    """The first of `frames`, and whether it is the one that called backward()."""
    return next(_walk(frame or sys._getframe()), (None, False))


def _walk(frame: FrameType) -> Iterator[tuple[FrameType, bool]]:
    found = False
    for outer in _outwards(frame):
        found = True
        yield outer
    if found or torch._C._current_graph_task_id() == -1:
        return
    main = threading.main_thread().ident
    for _, top in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if waiting := [(outer, backward) for outer, backward in _outwards(top) if backward]:
            yield from waiting
            return


def _outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, bool]]:
    """The program's frames, and whether backward() was called on the way there from `frame`."""
    paths, backward = libraries(), False
    while frame is not None and frame.f_code.co_filename != "<frozen runpy>":  # a command runs the program through it
        if frame.f_code.co_name == "_engine_run_backward":  # which devices' packages wrap
            backward = True
        elif not frame.f_code.co_filename.startswith(paths) and not _is_generated(frame):
            yield frame, backward
        frame = frame.f_back


def _is_generated(frame: FrameType) -> bool:
    """Returns true if a frame's code is neither in a file, nor typed in by the user, nor passed with ``python -c``."""
    return frame.f_code.co_filename.startswith("<") and frame.f_globals.get("__name__") != "__main__"


def site() -> tuple[str, int] | None:
    """The file and line of the program; None on a thread that runs none of it."""
    frame = next(frames(), None)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def line() -> str:
    """The file and line of the program, as text; "?" on a thread that runs none of it."""
    found = site()
    return "?" if found is None else f"{relative(found[0])}:{found[1]}"


def stack() -> list[str]:
    """The program's frames, as Python prints them, the innermost last."""
    found = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames()]
    return [
        f"{file}:{number} in {name}: {linecache.getline(file, number).strip()}" for file, number, name in found[::-1]
    ]


@functools.cache
def relative(path: str, root: str = os.curdir) -> str:
    """The path from `root`, if the file is below it, else from site-packages."""
    inside = os.path.relpath(path, root)
    return path.rpartition(f"site-packages{os.sep}")[2] if inside.startswith("..") else inside


# ---- modules and phases ----


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one call was made."""

    module: str  # "Transformer.layers.0.norm", or "" outside
    site: tuple[str, int] | None  # file and line of the program; in backward, where the forward call was made
    phase: str  # "forward", "backward", "optimizer"
    node: str = ""  # the backward node: "MmBackward0"

    def line(self) -> str:
        return self.phase if self.site is None else f"{relative(self.site[0])}:{self.site[1]}"

    def __str__(self) -> str:
        words = [self.line(), self.module and f"in {self.module}"]
        words.append(f"backward of {self.node}" if self.node else self.phase if self.phase != "forward" else "")
        return ", ".join(dict.fromkeys(filter(None, words)))  # without a site, the line is the phase


class Places:
    """Follows a program through PyTorch's global hooks for modules and optimizers."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, int] = {}
        self._local = threading.local()
        # By sequence number: the module, the site, the thread.
        self._forward: dict[int, tuple[str, tuple[str, int] | None, int | None]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Places:
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._filter = warnings.filters[0]
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_step),
            register_optimizer_step_post_hook(self._leave_step),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)

    # ---- recorded by the hooks ----

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        modules = self._modules()
        if module not in self._names:
            self._name(module, modules[-1] if modules else "")
        modules.append(self._names[module])

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if modules := self._modules():
            modules.pop()

    def _name(self, module: nn.Module, inside: str) -> None:
        name = type(getattr(module, "_orig_mod", module)).__name__  # the module inside torch.compile's wrapper
        root = f"{inside}.{name}" if inside else name
        count = self._roots[root] = self._roots.get(root, 0) + 1
        root = root if count == 1 else f"{root}#{count}"
        for path, part in module.named_modules():
            path = path.removeprefix("_orig_mod").removeprefix(".")
            self._names[part] = f"{root}.{path}" if path else root

    def _enter_step(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.step = True

    def _leave_step(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.step = False

    def _modules(self) -> list[str]:
        try:
            return self._local.modules
        except AttributeError:
            self._local.modules = []
            return self._local.modules

    # ---- queried by a mode ----

    def now(self) -> Place:
        """The place of the call that is being dispatched."""
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            if node is None:
                return Place("", None, "backward")
            number = _number(node)  # in-place operators clone their input between their node and themselves
            module, where, _ = self._forward.get(number) or self._forward.get(number + 1, ("", None, None))
            return Place(module, where, "backward", node.name().rpartition("::")[2])
        modules = self._modules()
        module, where = modules[-1] if modules else "", site()
        # The node of the operator, or of the function whose forward it is in, took the number before the next.
        if len(self._forward) >= _MOST:
            for key in list(self._forward)[: _MOST // 2]:
                del self._forward[key]
        number, thread = torch._C._autograd._get_sequence_nr() - 1, threading.get_ident()
        if self._forward.setdefault(number, (module, where, thread))[2] != thread:
            self._forward[number] = "", None, None  # each thread counts for itself, and the node does not say which
        return Place(module, where, "optimizer" if getattr(self._local, "step", False) else "forward")


def _number(node: Any) -> int:
    try:
        return node._sequence_nr()
    except (AttributeError, RuntimeError):
        return -1
