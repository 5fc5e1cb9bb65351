"""The pytest plugin of openreg_ops: the fixture `openreg_check`.

It stands outside the package, so that a pytest run which does not use the fixture imports neither the package nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def openreg_check() -> Callable[..., Any]:
    """`openreg_ops.testing.check` that fails the test, with the report, where a check fails; returns the report."""
    from openreg_ops.testing import check

    def checked(*args: Any, **kwargs: Any) -> Any:
        report = check(*args, **kwargs)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return checked
