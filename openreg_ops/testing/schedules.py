"""``pytest --device openreg --device-schedules N``: each test in N orders of its streams. See `torch.openreg.schedules`.

An order includes the test's fixtures of function scope, which are set up anew for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _pytest.runner import runtestprotocol

from openreg_ops import _C
from openreg_ops.openreg.schedule_report import RETURN
from openreg_ops.openreg.schedules import Schedules

__all__ = ["SchedulesPlugin"]


def _seeds(text: str) -> range:
    """From "200" or "17:18", the seeds from 17 on that are below 18."""
    first, colon, end = text.rpartition(":")
    try:
        seeds = range(int(first) if colon else 0, int(end))
    except ValueError:
        seeds = range(0)
    if not seeds or seeds.start < 0:
        raise pytest.UsageError(
            f"--device-schedules: expected a number of orders above 0, or seeds as in 17:18, but got {text!r}"
        )
    return seeds


class _Failed(Exception):
    """A test that does not pass in an order; its text is the crash."""


def _tests(count: int) -> str:
    return f"{count} test{'s' * (count != 1)}"


class SchedulesPlugin:
    """The plugin object of a run with --device-schedules."""

    def __init__(self, seeds: str) -> None:
        self.seeds = _seeds(seeds)
        self.found: dict[str, Schedules] = {}
        self.untried: dict[str, str] = {}  # tests, and why

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, pytest.Function):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.explore(item)
        found = self.found.get(item.nodeid)
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.when == "call" and report.passed and found and not found.passed:
                report.outcome = "failed"
                found.again = f"--device-schedules {found.difference.seed}:{found.difference.seed + 1}"
                report.longrepr = str(found)
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def explore(self, item: pytest.Function) -> None:
        def program() -> None:
            for report in runtestprotocol(item, nextitem=item.parent, log=False):  # type: ignore[arg-type]
                if not report.passed:
                    crash = getattr(report.longrepr, "reprcrash", None)
                    raise _Failed(crash.message if crash else str(report.longrepr))

        try:
            self.found[item.nodeid] = torch.openreg.schedules(program, seeds=self.seeds)
        except _Failed:
            pass  # it fails or is skipped without us
        except (RuntimeError, ValueError) as error:
            self.untried[item.nodeid] = str(error).splitlines()[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Iterator[object]:
        try:
            return (yield)
        finally:
            if _C.order_on():
                _C.pass_point(RETURN)  # what pytest reads for its report comes after the program

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("orders of streams")
        differ = [name for name, found in self.found.items() if not found.passed]
        orders = sum(found.orders for found in self.found.values())
        line = (
            f"{_tests(len(self.found))} in {orders} orders; the result depends on the order in {len(differ) or 'none'}"
        )
        terminalreporter.line(line, red=bool(differ))
        quiet = [name for name, why in self.untried.items() if "queues no work" in why]
        if quiet:
            terminalreporter.line(f"without work on the device: {_tests(len(quiet))}")
        for name, why in self.untried.items():
            if name not in quiet:
                terminalreporter.line(f"not tried: {name}: {why}")
