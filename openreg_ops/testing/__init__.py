"""`check` for authors of custom operators, and what the conformance runs need to know about the openreg device.

`check`, `Sample` and `Report` come from `openreg_tools.check` and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_tools.check import Report, Sample, check

__all__ = ["Report", "Sample", "check"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import openreg_tools.check

        return getattr(openreg_tools.check, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
