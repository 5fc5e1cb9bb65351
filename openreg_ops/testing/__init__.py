"""`check` for authors of custom operators, and what the conformance runs need to know about the openreg device.

`check`, `Sample` and `Report` come from `openreg_tools.checker` and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_tools.checker import Report, Sample, check

__all__ = ["Report", "Sample", "check"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from openreg_tools.checker import checker

        return getattr(checker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
