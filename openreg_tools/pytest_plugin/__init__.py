"""The pytest plugin: ``pytest --device DEVICE`` runs a suite there, and reports what would break on it.

See docs/testing-your-library.md. A pytest run that uses neither its options nor its fixtures does not import torch.
session.py and watch.py watch the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from openreg_tools.pytest_plugin import hooks
from openreg_tools.pytest_plugin.misuse import KINDS

# ---- options ----

_DEVICE = {
    "dest": "on_device",
    "metavar": "DEVICES",
    "help": "run the tests that take a device on this one (openreg, cuda:1, …; several: commas between)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("device", "running on a device")
    group.addoption("--on-device", **{**_DEVICE, "help": "--device, if the suite has its own option --device"})
    group.addoption(
        "--device-misuse",
        metavar="KINDS",
        help=f"report misuse: all that the device shows, or some of {', '.join(KINDS)}",
    )
    group.addoption("--device-forbid", metavar="KINDS", help="report these kinds too, and fail the run if one is found")
    group.addoption("--device-report", metavar="FILE", help="write what was found as JSON")
    group.addoption("--device-html", metavar="FILE", help="write what was found as one HTML page")
    group.addoption("--device-sarif", metavar="FILE", help="write what was found as SARIF, for GitHub's code scanning")
    parser.addini("device_names", "arguments of tests that are devices", type="args", default=["device"])


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Iterator[None]:
    """Add --device, once we know that no conftest.py defines it."""
    # Until then its value looks like a file, which keeps pytest from loading the conftest.py of `testpaths`.
    values = {value for option, value in zip(args, args[1:], strict=False) if option == "--device"}
    known = early_config.known_args_namespace
    known.file_or_dir = [path for path in known.file_or_dir if path not in values]
    result = yield
    missing = object()
    if early_config.getoption("--device", missing) is missing:  # else the suite has its own
        parser.getgroup("device").addoption("--device", **_DEVICE)
    return result


@pytest.hookimpl(trylast=True)  # after pytest's faulthandler, which must be on before the first use of the device
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "device_syncs(max): the library may wait for the device so often in this test")
    option = config.option
    if option.on_device:
        from openreg_tools.pytest_plugin.session import Session

        config.pluginmanager.register(Session(config), "openreg_tools.pytest_plugin.session")
    elif (
        option.device_misuse
        or option.device_forbid
        or option.device_report
        or option.device_sarif
        or option.device_html
    ):
        raise pytest.UsageError(
            "--device-misuse and related options watch a device; name it with --device DEVICE (or --on-device)"
        )


# ---- fixtures ----


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Any:
    """The ``torch.device`` that ``--device`` names, "cpu" by default."""
    import torch

    session = pytestconfig.pluginmanager.get_plugin("openreg_tools.pytest_plugin.session")
    return session.devices[0] if session else torch.device("cpu")


@pytest.fixture
def device_syncs(pytestconfig: pytest.Config) -> Callable[..., AbstractContextManager[Any]]:
    """``with device_syncs(max=0) as waits:`` fails if the host waits for the device more than `max` times."""
    from openreg_tools.pytest_plugin.session import device_syncs

    return device_syncs


@pytest.fixture
def openreg_check() -> Callable[..., Any]:
    """`openreg_tools.check.check`, which fails the test with the report if a check fails; returns the report."""
    from openreg_tools.check import check

    def checked(*args: Any, **kwargs: Any) -> Any:
        report = check(*args, **kwargs)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return checked
