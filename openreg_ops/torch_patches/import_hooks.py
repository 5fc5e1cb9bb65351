"""Hooks that run when PyTorch imports one of its own modules later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call `call` once the module `name` has been imported; now, if it already has been."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported.

    A search alone, or an interrupted import, changes nothing: the next import makes the call.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.call()

        spec.loader.exec_module = exec_module
        return spec
