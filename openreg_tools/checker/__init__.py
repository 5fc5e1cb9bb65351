"""`check` for authors of custom operators. It, `Sample` and `Report` are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_tools.checker.checker import check
    from openreg_tools.checker.report import Report
    from openreg_tools.samples import Sample

__all__ = ["Report", "Sample", "check"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from openreg_tools.checker import checker

        return getattr(checker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
