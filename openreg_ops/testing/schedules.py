"""``pytest --device openreg --device-schedules N``: each test in N orders of its streams. See `torch.openreg.schedules`.

Each order sets up the test's fixtures of function and class scope again. The tests of a class are tried before the first
of them runs, while the fixtures of the class are not set up. Then they run as without the option.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

from openreg_ops import _C
from openreg_ops.schedules.explore import Schedules
from openreg_ops.schedules.page import drawing
from openreg_ops.schedules.report import RETURN
from openreg_tools.core.blocks import Block, Box, PageOnly, Text

try:
    from _pytest.subtests import failed_subtests_key
except ImportError:  # before pytest 9
    failed_subtests_key = None

__all__ = ["SchedulesPlugin"]


def _seeds(text: str) -> range:
    """The seeds that "200" (0 to 199) or "17:18" (17) names."""
    first, colon, end = text.rpartition(":")
    try:
        seeds = range(int(first) if colon else 0, int(end))
    except ValueError:
        seeds = range(0)
    if not seeds or seeds.start < 0:
        raise pytest.UsageError(
            f"--device-schedules: expected a number of orders above 0, or a range of seeds such as 17:18, but got {text!r}"
        )
    return seeds


class _Failed(Exception):
    """A test does not pass in an order; the text is its crash message."""


def _passes(report: pytest.TestReport) -> bool:
    """Returns true if the test, or its fixtures, raised nothing, even if it was expected to fail."""
    return report.passed or str(report.longrepr).startswith(("[XPASS(strict)]", "Unexpected success"))


def _tests(count: int) -> str:
    return f"{count} test{'s' * (count != 1)}"


class _Aside:
    """A test's hooks while its orders run: they keep the reports to themselves."""

    def __init__(self, hooks: Any) -> None:
        self.hooks, self.reports = hooks, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hooks, name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)  # of a subtest

    def pytest_exception_interact(self, **_: object) -> None:
        pass


@contextlib.contextmanager
def _aside(item: pytest.Item) -> Iterator[_Aside]:
    """In the body, the test runs without a watch for misuse, and leaves nothing in its own report."""
    session = item.config.pluginmanager.get_plugin("openreg_tools.pytest_plugin.session")
    watch, session.watch = session.watch, None  # it would count each order, and stand between a launch and its line
    lists = item._report_sections, item.user_properties, item.own_markers
    before, quiet = [[*entries] for entries in lists], _Aside(item.ihook)
    item.session.gethookproxy = lambda path: quiet  # type: ignore[method-assign, assignment]  # what item.ihook returns
    try:
        with warnings.catch_warnings(record=True):
            yield quiet
    finally:
        session.watch = watch
        del item.session.gethookproxy
        for entries, content in zip(lists, before, strict=True):
            entries[:] = content  # type: ignore[index]
        if failed_subtests_key:
            item.config.stash[failed_subtests_key].pop(item.nodeid, None)


class SchedulesPlugin:
    """The plugin object of a run with --device-schedules."""

    def __init__(self, seeds: str) -> None:
        self.seeds = _seeds(seeds)
        self.found: dict[str, Schedules] = {}
        self.fails: dict[str, str] = {}  # tests that fail in their own order
        self.expected: dict[str, str | None] = {}  # why a test may fail in the order where it does
        self.tried: dict[str, tuple[int, bool]] = {}  # orders, and whether one makes a difference; from all processes
        self.untried: dict[str, str] = {}  # tests, and why
        self.pages: dict[
            str, tuple[str, str, str, str]
        ] = {}  # tests that fail: what differs, the wait, how to run it, SVG
        self.classes: set[pytest.Class] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, pytest.Function):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.explore(item)
        found = self.found.get(item.nodeid)
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            passes = report.when == "call" and _passes(report)
            if passes and item.nodeid in self.fails:
                self.untried[item.nodeid] = f"fails when its orders are tried: {self.fails[item.nodeid]}"
            if passes and found and not found.passed:
                reason = self.expected.get(item.nodeid)
                report.outcome = "failed" if reason is None else "skipped"
                vars(report).pop("wasxfail", None)
                if reason is not None:
                    report.wasxfail = reason
                found.again = f"--device-schedules {found.difference.seed}:{found.difference.seed + 1}"
                report.longrepr = str(found)
                if reason is None:
                    self.pages[item.nodeid] = (
                        found.difference.what,
                        found.difference.missing,
                        found.again,
                        drawing(found),
                    )
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def explore(self, item: pytest.Function) -> None:
        """Try the orders of a test. For the first test of a class, try the orders of all its tests."""
        whole = next((node for node in item.listchain() if isinstance(node, pytest.Class)), None)
        if whole is None:
            self.try_orders(item, item.parent)
        elif whole not in self.classes:
            self.classes.add(whole)
            for test in item.session.items:
                if isinstance(test, pytest.Function) and whole in test.listchain():
                    self.try_orders(test, whole.parent)

    def try_orders(self, item: pytest.Function, kept: Any) -> None:
        """Try the orders of a test. Each run sets up all fixtures again, except the fixtures of the collector `kept`."""

        def program() -> None:
            with _aside(item) as quiet:
                for report in runtestprotocol(item, nextitem=kept, log=False):
                    quiet.reports.append(report)
            for report in quiet.reports:
                if not _passes(report):
                    self.expected[item.nodeid] = getattr(report, "wasxfail", None)
                    crash = getattr(report.longrepr, "reprcrash", None)
                    raise _Failed(crash.message if crash else str(report.longrepr))

        try:
            found = self.found[item.nodeid] = torch.openreg.schedules(program, seeds=self.seeds)
            self.tried[item.nodeid] = (found.orders, not found.passed)
        except _Failed as failed:
            self.fails[item.nodeid] = (str(failed).splitlines() or [""])[0]  # perhaps without the option too
        except (RuntimeError, ValueError) as error:
            self.untried[item.nodeid] = str(error).splitlines()[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Iterator[object]:
        try:
            return (yield)
        finally:
            if _C.order_on():
                _C.pass_point(RETURN)  # pytest's reads for its report come after the program

    # With pytest-xdist, tests run in workers, and the main process writes the summary.
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["openreg_schedules"] = (self.tried, self.untried, self.pages)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        tried, untried, pages = getattr(node, "workeroutput", {}).get("openreg_schedules", ({}, {}, {}))
        self.tried |= tried
        self.untried |= untried
        self.pages |= pages

    @pytest.hookimpl(optionalhook=True)
    def pytest_device_page(self) -> list[Block]:
        return [
            Box(f"FAIL {test}: the result depends on the order of the streams",
                [Text(what), Text(f"Missing: {missing}"), PageOnly(drawn), Text(f"To run this order again: {again}")],
                "fail", is_open=True)
            for test, (what, missing, again, drawn) in self.pages.items()
        ]  # fmt: skip

    @pytest.hookimpl(tryfirst=True)  # before the misuse, whichever plugin was loaded first
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("orders of streams")
        differ = sum(differs for _, differs in self.tried.values())
        orders = sum(orders for orders, _ in self.tried.values())
        line = (
            f"{_tests(len(self.tried))} in {orders} order{'s' * (orders != 1)}; the result depends on the order in "
            f"{differ or 'none'}"
        )
        terminalreporter.line(line, red=bool(differ))
        quiet = [name for name, why in self.untried.items() if "queues no work" in why]
        if quiet:
            terminalreporter.line(f"without work on the device: {_tests(len(quiet))}")
        for name, why in self.untried.items():
            if name not in quiet:
                terminalreporter.line(f"not tried: {name}: {why}")
