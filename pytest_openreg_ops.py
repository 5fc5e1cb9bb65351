"""The pytest fixture and the option of the openreg device. The others are those of openreg_tools.

It stands outside the package, so that a pytest run which does not use it imports neither the package nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest_plugins = ["openreg_tools.pytest_plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("device", "running on a device").addoption(
        "--device-schedules", metavar="N",
        help="run each test in N orders of its streams, or with the seeds A:B; needs --device openreg",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)  # after openreg_tools has tried the device
def pytest_configure(config: pytest.Config) -> None:
    device = os.environ.get("OPENREG_DEVICE", "").partition(":")[0] or "openreg"
    if device == "cuda":
        from openreg_ops.testing.cuda_report import CudaReport

        config.pluginmanager.register(CudaReport(), "openreg_ops.testing.cuda_report")
    if config.option.device_schedules is None:
        return
    if not (config.option.on_device or "").startswith(device):
        raise pytest.UsageError(f"--device-schedules needs --device {device}, whose scheduler it controls")
    from openreg_ops.testing.schedules import SchedulesPlugin

    config.pluginmanager.register(SchedulesPlugin(config.option.device_schedules), "openreg_ops.testing.schedules")


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
