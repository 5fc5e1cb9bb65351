"""Where a program is: its line, the module whose forward or backward runs, and the phase of the training step.

`Places` follows a program for `compare`, `record` and `trace`.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Place", "Places", "frames", "line", "relative", "site", "stack"]

_TOOLS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_COMPILED = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
_THREADS = (threading.__file__, os.path.join(os.path.dirname(threading.__file__), "concurrent", "futures") + os.sep)
_OURS = (os.path.dirname(torch.__file__) + os.sep, _TOOLS, _COMPILED, *_THREADS, "<frozen", "<eval_with_key>")
_MOST = 200_000  # forward calls whose place is kept for backward


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one call was made."""

    module: str  # "Transformer.layers.0.norm", or "" outside
    site: Any  # what `Places` asked `locate` for: file and line of the program; in backward, where the forward call was made
    phase: str  # "forward", "backward", "optimizer"
    node: str = ""  # the backward node: "MmBackward0"

    def line(self) -> str:
        return self.phase if self.site is None else f"{relative(self.site[0])}:{self.site[1]}"

    def __str__(self) -> str:
        words = [self.line(), self.module and f"in {self.module}"]
        words.append(f"backward of {self.node}" if self.node else self.phase if self.phase != "forward" else "")
        return ", ".join(dict.fromkeys(filter(None, words)))  # without a site, the line is the phase


class Places:
    """Follows a program through PyTorch's global hooks for modules and optimizers.

    Args:
        locate: gives the `site` of a call in forward; the file and line of the program unless given.
    """

    def __init__(self, locate: Callable[[], Any] | None = None) -> None:
        self._locate = locate or site
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, int] = {}
        self._local = threading.local()
        self._forward: dict[
            int, tuple[str, Any, int | None]
        ] = {}  # by sequence number: the module, the site, the thread
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
        for path, each in module.named_modules():
            path = path.removeprefix("_orig_mod").removeprefix(".")
            self._names[each] = f"{root}.{path}" if path else root

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

    def module(self) -> str:
        """The innermost module whose forward runs, "" outside all modules."""
        modules = self._modules()
        return modules[-1] if modules else ""

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
        module, where = modules[-1] if modules else "", self._locate()
        # The node of the operator, or of the function whose forward it is in, took the number before the next.
        if len(self._forward) >= _MOST:
            for key in list(self._forward)[: _MOST // 2]:
                del self._forward[key]
        number, thread = torch._C._autograd._get_sequence_nr() - 1, threading.get_ident()
        if self._forward.setdefault(number, (module, where, thread))[2] != thread:
            self._forward[number] = "", None, None  # each thread counts for itself, and the node does not say which
        return Place(module, where, "optimizer" if getattr(self._local, "step", False) else "forward")


@functools.cache
def relative(path: str) -> str:
    """The path from the working directory, if the file is below it."""
    inside = os.path.relpath(path)
    return path if inside.startswith("..") else inside


def _number(node: Any) -> int:
    try:
        return node._sequence_nr()
    except (AttributeError, RuntimeError):
        return -1


def frames() -> Iterator[FrameType]:
    """The program's frames, those outside PyTorch and these tools, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "<frozen runpy>":  # a command runs the program through it
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) and code.co_name != "_engine_run_backward":  # which backends wrap
            yield frame
        frame = frame.f_back


def site() -> tuple[str, int] | None:
    """The file and line of the program."""
    frame = next(frames(), None)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def line() -> str:
    """The file and line of the program, as text; "backward" on a thread that runs none of it."""
    found = site()
    return "backward" if found is None else f"{relative(found[0])}:{found[1]}"


def stack() -> list[str]:
    """The program's frames, as Python prints them, the innermost last."""
    found = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames()]
    return [
        f"{file}:{number} in {name}: {linecache.getline(file, number).strip()}" for file, number, name in found[::-1]
    ]
