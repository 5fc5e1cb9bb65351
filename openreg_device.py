"""Gives the device the name `cuda`, before PyTorch is imported, where OPENREG_DEVICE asks for it.

PyTorch decides what CUDA is when it first needs it, so the extension must be loaded before ``import torch`` runs. Each
Python of the environment imports this module at its start if the variable is set: see openreg_device.pth.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

loaded = False  # whether the extension came before PyTorch


class BeforeTorch(importlib.abc.MetaPathFinder):
    """Finds no module, but loads the extension when a program imports torch."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            _load()


def _load() -> None:
    """Load PyTorch's libraries and the extension, if they belong together; `openreg_ops` says why if they do not."""
    global loaded
    torch, package = (importlib.util.find_spec(name) for name in ("torch", "openreg_ops"))
    if not torch or not package or not torch.origin or not package.origin:
        return
    versions, built = (
        _run(Path(torch.origin).with_name("version.py")),
        _run(Path(package.origin).with_name("_build.py")),
    )
    installed, wanted = (
        str(version).split("+")[0] for version in (versions["__version__"], built.get("TORCH_VERSION"))
    )
    if installed != wanted or versions["cuda"] or versions["hip"]:
        return
    extension = Path(package.origin).with_name(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    libraries = Path(torch.origin).with_name("lib")
    ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(libraries / "libtorch_python.so"))
    ctypes.CDLL(str(extension))
    loaded = True


def _run(file: Path) -> dict[str, Any]:
    """The variables that a file without imports defines."""
    variables: dict[str, Any] = {}
    if file.exists():
        exec(file.read_text(), variables)
    return variables


if "torch" not in sys.modules:
    sys.meta_path.insert(0, BeforeTorch())
