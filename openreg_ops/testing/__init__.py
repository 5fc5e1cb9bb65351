"""Tools that test operators: `check` for authors of custom operators, and the conformance run.

`check`, `Sample` and `Report` are imported when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_ops.testing.check_report import Report
    from openreg_ops.testing.checker import Sample, check

__all__ = ["Report", "Sample", "check"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from openreg_ops.testing import checker

        return getattr(checker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
