"""Runs a suite in a process with isolated device memory, so that a host access ends that process but not the run.

The run collects as usual, starts the same pytest command with isolation switched on, and forwards its reports. If the
process ends, its current test has failed, and another process continues after that test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.skipping import evaluate_xfail_marks

from openreg_tools import backends
from openreg_tools.core import place
from openreg_tools.pytest_plugin.findings import Finding

if TYPE_CHECKING:
    from openreg_tools.pytest_plugin.session import Session

_VARIABLE = "PYTEST_OPENREG_CHILD"  # a JSON object: the pipe to report to, and a file of the tests that are done


def _isolation() -> dict[str, str]:
    """The environment variables that isolate the memory of the devices."""
    return {name: value for backend in backends.registered() for name, value in backend.isolation.items()}


def starts(config: pytest.Config) -> bool:
    """Whether this run has to start a process; pytest-xdist has its own processes, which inherit the environment."""
    if hasattr(config, "workerinput"):
        return False
    if getattr(config.option, "numprocesses", None):
        os.environ |= _isolation()
        return False
    return not (config.option.usepdb or config.option.trace)  # which need the terminal


# ---- in the child ----


def child(config: pytest.Config) -> Child | None:
    """The child's configuration; None in any other run, including one that a child's test starts."""
    given = os.environ.pop(_VARIABLE, None)
    return Child(config, **json.loads(given)) if given else None


class Child:
    """The plugin object of a child: runs the remaining tests, and sends what happens to them."""

    def __init__(self, config: pytest.Config, pipe: int, done: str) -> None:
        self.config = config
        self.pipe = open(pipe, "w")  # noqa: SIM115 -- open to the end of the process
        self.done = set(json.loads(Path(done).read_text()))
        self.exit = ""

    def send(self, **message: Any) -> None:
        """Send to the run that started this process; values that are not JSON, such as a test's property, are sent as
        text."""
        print(json.dumps(message, default=str), file=self.pipe, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send(start=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send(finish=nodeid, location=location)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # which is shouldstop, or an error of collection
            self.exit = str(excinfo.value) or excinfo.typename

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.send(end=int(exitstatus), exit=self.exit, stop=session.shouldstop, fail=session.shouldfail)


# ---- in the run that starts it ----


@dataclasses.dataclass
class _End:
    """How a child ended."""

    status: int | None = None  # pytest's; None where the process ended first
    exit: str = ""  # what a test passed to pytest.exit, or the exception with which it interrupted the run
    test: str | None = None  # the test that it was in
    location: Any = None
    output: str = ""
    errors: str = ""


def run(session: pytest.Session, plugin: Session) -> None:
    """Run the collected tests in children."""
    tests, done = {item.nodeid for item in session.items}, set[str]()
    while left := tests - done:
        end = _run_child(session, plugin, done)
        if end.status is None and end.test is not None:
            done.add(end.test)
            _crashed(session, plugin, end.test, end.location, end.errors)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if end.exit:
            pytest.exit(end.exit, returncode=end.status)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if end.status is None and tests - done < left:  # a test ended it, or it ended between two
            continue
        said = f"{end.output[-4000:]}{end.errors[-4000:]}"
        if end.status is None:
            raise pytest.UsageError(f"the process for isolated tests ended and ran none of the remaining ones:\n{said}")
        if end.status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise pytest.UsageError(f"the process for isolated tests ended with status {end.status}:\n{said}")
        if left := tests - done:
            raise pytest.UsageError(
                f"the process for isolated tests did not run {len(left)} of {len(tests)} tests, as {min(left)}; "
                f"it collects them again, and they must have the same ids then:\n{said}"
            )


def _run_child(session: pytest.Session, plugin: Session, done: set[str]) -> _End:
    """Run the remaining tests in a child, and forward its reports."""
    config, hook = session.config, session.config.hook
    reader, writer = os.pipe()
    end = _End()
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.NamedTemporaryFile("w") as tests_done,  # too many for the environment
    ):
        json.dump(sorted(done), tests_done)
        tests_done.flush()
        child = subprocess.Popen(
            # Its stderr is where the isolation's message and the traceback go; `sys` leaves it alone.
            [sys.executable, "-m", "pytest", *config.invocation_params.args, "--capture=sys"],
            cwd=config.invocation_params.dir,
            env={**os.environ, **_isolation(), _VARIABLE: json.dumps({"pipe": writer, "done": tests_done.name})},
            stdin=subprocess.DEVNULL, stdout=output, stderr=errors, pass_fds=[writer],
        )  # fmt: skip
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as messages:
                for line in messages:
                    message = json.loads(line)
                    if "start" in message:
                        end.test, end.location = message["start"], message["location"]
                        hook.pytest_runtest_logstart(nodeid=end.test, location=end.location)
                    elif "report" in message:
                        report = hook.pytest_report_from_serializable(config=config, data=message["report"])
                        if isinstance(report.longrepr, list):  # of a skip: JSON has no tuples
                            report.longrepr = tuple(report.longrepr)
                        hook.pytest_runtest_logreport(report=report)
                    elif "finish" in message:
                        done.add(message["finish"])
                        hook.pytest_runtest_logfinish(nodeid=end.test, location=end.location)
                        end.test = None
                    elif "findings" in message:
                        plugin.findings.unpack(message["findings"])
                    elif "end" in message:
                        end.status, end.exit = message["end"], message["exit"]
                        session.shouldstop = session.shouldstop or message["stop"]
                        session.shouldfail = session.shouldfail or message["fail"]
            child.wait()
        finally:
            child.kill()
            child.wait()
        for file in (output, errors):
            file.seek(0)
        end.output, end.errors = (file.read().decode(errors="replace") for file in (output, errors))
        return end


def _crashed(session: pytest.Session, plugin: Session, nodeid: str, location: Any, said: str) -> None:
    """Report the test in which a child ended."""
    if "leak" in plugin.kinds:
        plugin.ended.append(nodeid)
    text = f"the process ended:\n{said[-4000:]}"
    found = (re.search(backend.access, said, re.M) for backend in backends.registered())
    if access := next(filter(None, found), None):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', said, re.M)
        ours = [frame for frame in frames if not frame[0].startswith((*place.libraries(), "<"))]
        where = f"{place.relative(ours[0][0], str(session.config.rootpath))}:{ours[0][1]}" if ours else "?"
        plugin.findings.add(Finding("host", access[1], where, nodeid))
        text = "\n".join([access[0], *(f"{file}:{line}: in {name}" for file, line, name in ours)])
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    item = next((item for item in session.items if item.nodeid == nodeid), None)  # none if it collected other ids
    xfail = evaluate_xfail_marks(item) if item and not session.config.option.runxfail else None
    if xfail and xfail.raises is None:  # the end of the process is not one of its exceptions
        report.outcome, report.wasxfail = "skipped", xfail.reason
    session.config.hook.pytest_runtest_logreport(report=report)
    session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
