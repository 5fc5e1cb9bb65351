"""The pytest plugin of openreg_ops: the fixtures `openreg_check` and `openreg_faults`.

It stands outside the package, so that a pytest run which does not use the fixture imports neither the package nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture
def openreg_faults() -> Iterator[Callable[..., Any]]:
    """`openreg_ops.faults.inject` whose faults end with the test; a device that one lost works again."""
    import torch

    from openreg_ops.faults import inject, reset_device

    armed = []

    def arm(*args: Any, **kwargs: Any) -> Any:
        armed.append(inject(*args, **kwargs))
        return armed[-1]

    yield arm
    for fault in armed:
        fault.stop()
    for device in range(torch.openreg.device_count()):
        reset_device(device)
