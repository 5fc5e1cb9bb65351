"""The operators that are known to differ from the CPU, each with a cause that a reader can check.

The one list: `python -m openreg_ops conformance` and tests/test_opinfo.py read it, and fail when an
operator in it passes. At most ten operators.
"""

from __future__ import annotations

import dataclasses

from openreg_ops.testing import opinfo


@dataclasses.dataclass(frozen=True)
class Known:
    """Why an operator differs, and in which checks and dtypes."""

    cause: str
    checks: tuple[str, ...] = opinfo.CHECKS
    dtypes: tuple[str, ...] = opinfo.DTYPES


KNOWN_FAILURES: dict[str, Known] = {}
