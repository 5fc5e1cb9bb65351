"""The version of openreg_tools and the project's addresses, from its metadata, or in a checkout from pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

__all__ = ["address", "version"]

_CHECKOUT = Path(__file__).parents[1] / "pyproject.toml"  # not in a wheel


def version() -> str:
    """The version of openreg_tools, which is openreg_ops's too."""
    if _CHECKOUT.exists():
        return tomllib.loads(_CHECKOUT.read_text())["project"]["version"]
    return importlib.metadata.version("openreg_tools")


def address(name: str) -> str:
    """The address that ``project.urls`` has under a name, such as "Documentation"."""
    if _CHECKOUT.exists():
        return tomllib.loads(_CHECKOUT.read_text())["project"]["urls"][name]
    pairs = importlib.metadata.metadata("openreg_tools").get_all("Project-URL", [])
    return dict(pair.split(", ", 1) for pair in pairs)[name]
