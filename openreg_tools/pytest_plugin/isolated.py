"""Runs a suite in a process with isolated device memory, so that a host access ends that process but not the run.

The run collects as usual, starts the same pytest command with isolation switched on, and forwards its reports. If the
process ends, its current test has failed, and another process continues after that test.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest
from _pytest.skipping import evaluate_xfail_marks

from openreg_tools import backends
from openreg_tools.core import place
from openreg_tools.core.child import Child, Ended, Parent, parent
from openreg_tools.pytest_plugin.misuse import Misuse, Misuses

__all__ = ["Isolated", "child", "run", "starts"]


def _isolation() -> dict[str, str]:
    """The environment variables that isolate the memory of the devices."""
    return {name: value for backend in backends.registered() for name, value in backend.isolation.items()}


def starts(config: pytest.Config) -> bool:
    """Returns true if this run has to start a process; processes of pytest-xdist inherit the environment."""
    if hasattr(config, "workerinput"):
        return False
    if getattr(config.option, "numprocesses", None):
        os.environ |= _isolation()
        return False
    return not (config.option.usepdb or config.option.trace)  # which need the terminal


# ---- in the child ----


def child(config: pytest.Config) -> Isolated | None:
    """The plugin of the child; None in any other run, including one that a child's test starts."""
    asked_by = parent()
    return Isolated(config, asked_by) if asked_by else None


class Isolated:
    """The plugin object of a child: runs the remaining tests, and sends what happens to them."""

    def __init__(self, config: pytest.Config, asked_by: Parent) -> None:
        self.config, self.parent = config, asked_by
        self.done = set(json.loads(asked_by.requests.readline()))
        self.exit = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.parent.answer({"start": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        packed = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.answer({"report": packed})

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.parent.answer({"finish": nodeid})

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # which is shouldstop, or an error of collection
            self.exit = str(excinfo.value) or excinfo.typename

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        end = {"end": int(exitstatus), "exit": self.exit, "stop": session.shouldstop, "fail": session.shouldfail}
        self.parent.answer(end)


# ---- in the run that starts it ----


def run(session: pytest.Session, misuses: Misuses, ended: list[str]) -> None:
    """Run the collected tests in children. `ended` gets the tests that end their process."""
    tests, done = {item.nodeid for item in session.items}, set[str]()
    while left := tests - done:
        end, said = _run_child(session, misuses, ended, done)
        session.shouldstop = session.shouldstop or end.get("stop", False)
        session.shouldfail = session.shouldfail or end.get("fail", False)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if end.get("exit"):
            pytest.exit(end["exit"], returncode=end["end"])
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if not end and tests - done < left:  # a test ended it, or it ended between two
            continue
        if left := tests - done:
            raise pytest.UsageError(
                f"the process for isolated tests ended and did not run {len(left)} of {len(tests)} tests, as {min(left)}; "
                f"it collects them again, and they must have the same ids then:\n{said}"
            )


def _run_child(
    session: pytest.Session, misuses: Misuses, ended: list[str], done: set[str]
) -> tuple[dict[str, Any], str]:
    """Run the remaining tests in a child, and forward its reports; returns its last message, and what it wrote."""
    config, hook = session.config, session.config.hook
    # Its stderr is where the isolation's message and the traceback go; `sys` leaves it alone.
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args, "--capture=sys"]
    test, end = {}, {}
    with Child.start(command, _isolation(), config.invocation_params.dir) as process:
        process.send(sorted(done))
        try:
            while message := process.read():
                if "start" in message:
                    test = {"nodeid": message["start"], "location": message["location"]}
                    hook.pytest_runtest_logstart(**test)
                elif "report" in message:
                    report = hook.pytest_report_from_serializable(config=config, data=message["report"])
                    if isinstance(report.longrepr, list):  # of a skip: JSON has no tuples
                        report.longrepr = tuple(report.longrepr)
                    hook.pytest_runtest_logreport(report=report)
                elif "finish" in message:
                    done.add(message["finish"])
                    hook.pytest_runtest_logfinish(**test)
                    test = {}
                elif "misuses" in message:
                    misuses.unpack(message["misuses"])
                else:
                    end = message
        except Ended as end_of_process:
            errors = process.errors()
            if test and not end:
                done.add(test["nodeid"])
                ended.append(test["nodeid"])
                _crashed(session, misuses, errors, **test)
            return end, f"{end_of_process}\n{process.output()[-4000:]}{errors[-4000:]}"
    return end, ""


def _crashed(session: pytest.Session, misuses: Misuses, said: str, nodeid: str, location: Any) -> None:
    """Report the test in which a child ended."""
    text = f"the process ended:\n{said[-4000:]}"
    found = (re.search(backend.access, said, re.M) for backend in backends.registered())
    if access := next(filter(None, found), None):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', said, re.M)
        ours = [frame for frame in frames if not frame[0].startswith((*place.libraries(), "<"))]
        where = f"{place.relative(ours[0][0], str(session.config.rootpath))}:{ours[0][1]}" if ours else "?"
        misuses.add(Misuse("host", access[1], where, nodeid))
        text = "\n".join([access[0], *(f"{file}:{line}: in {name}" for file, line, name in ours)])
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    item = next((item for item in session.items if item.nodeid == nodeid), None)  # none if it collected other ids
    xfail = evaluate_xfail_marks(item) if item and not session.config.option.runxfail else None
    if xfail and xfail.raises is None:  # the end of the process is not one of its exceptions
        report.outcome, report.wasxfail = "skipped", xfail.reason
    session.config.hook.pytest_runtest_logreport(report=report)
    session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
