"""Tools for custom operators and backends of PyTorch, on any device: see ``openreg-tools --help``.

Importing this package registers no device, and imports neither torch nor a backend.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from openreg_tools.core import about

        return about.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
