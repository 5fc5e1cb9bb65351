"""The pytest fixture of the openreg device. The options and the other fixtures are those of openreg_tools.

It stands outside the package, so that a pytest run which does not use it imports neither the package nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest_plugins = ["openreg_tools.pytest_plugin"]


@pytest.fixture
def openreg_faults() -> Iterator[Callable[..., Any]]:
    """`torch.openreg.faults.inject` whose faults end with the test, and their errors; a lost device works again."""
    import torch
    from torch.openreg.faults import inject, reset_device

    armed = []

    def arm(*args: Any, **kwargs: Any) -> Any:
        armed.append(inject(*args, **kwargs))
        return armed[-1]

    yield arm
    for fault in armed:
        fault.stop()
    for device in range(torch.openreg.device_count()):
        reset_device(device)
        if any(fault.kind == "kernel" and fault.struck for fault in armed):
            with suppress(torch.AcceleratorError):  # the next test would get it
                torch.openreg.synchronize(device)
