"""Runs a suite in a process whose device memory is isolated, so that a host access ends that process and not the run.

The run collects as always, starts the same pytest command with OPENREG_ISOLATION=strict, and takes its reports over.
Where the process ends, the test that it was in has failed, and another process goes on behind it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from pytest_openreg_ops import misuse
from pytest_openreg_ops.findings import Finding

if TYPE_CHECKING:
    from pytest_openreg_ops.session import Session

_VARIABLE = "PYTEST_OPENREG_CHILD"  # a JSON object: the pipe to report to, and the tests that are done
_ISOLATION = "OPENREG_ISOLATION"


def is_child() -> bool:
    return _VARIABLE in os.environ


def starts(config: pytest.Config) -> bool:
    """Whether this run has to start a process; pytest-xdist has its own, which inherit the environment."""
    if is_child() or hasattr(config, "workerinput") or os.environ.get(_ISOLATION) in ("strict", "auto"):
        return False
    if getattr(config.option, "numprocesses", None):
        os.environ[_ISOLATION] = "strict"
        return False
    return not config.option.usepdb


# ---- in the child ----


def send(**message: Any) -> None:
    """To the run that started this process."""
    os.write(json.loads(os.environ[_VARIABLE])["pipe"], json.dumps(message).encode() + b"\n")


class Child:
    """The plugin object of a child: runs the tests that are left, and sends what happens to them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.done = set(json.loads(os.environ[_VARIABLE])["done"])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        send(start=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        send(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        send(finish=nodeid, location=location)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        send(end=True)


# ---- in the run that starts it ----


def run(session: pytest.Session, plugin: Session) -> None:
    """Run the collected tests in children."""
    done: set[str] = set()
    while len(done) < len({item.nodeid for item in session.items}):
        before = len(done)
        ended, current, location, said = _run_child(session, plugin, done)
        if ended:
            return
        if current is None:
            if len(done) > before:  # between two tests
                continue
            raise pytest.UsageError(f"the process for isolated tests ended before the first:\n{said[-4000:]}")
        done.add(current)
        _crashed(session, plugin, current, location, said)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


def _run_child(session: pytest.Session, plugin: Session, done: set[str]) -> tuple[bool, str | None, Any, str]:
    """Whether a child ran to its end; else the test that it was in, with its location; and what it wrote to stderr."""
    config, hook = session.config, session.config.hook
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # Its stderr is where the isolation's message and the traceback go; `sys` leaves it alone.
            [sys.executable, "-m", "pytest", *config.invocation_params.args, "--capture=sys"],
            cwd=config.invocation_params.dir,
            env={**os.environ, _ISOLATION: "strict", _VARIABLE: json.dumps({"pipe": writer, "done": sorted(done)})},
            stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[writer],
        )  # fmt: skip
        os.close(writer)
        ended, current, location = False, None, None
        with os.fdopen(reader, "rb") as messages:
            for line in messages:
                message = json.loads(line)
                if "start" in message:
                    current, location = message["start"], message["location"]
                    hook.pytest_runtest_logstart(nodeid=current, location=location)
                elif "report" in message:
                    report = hook.pytest_report_from_serializable(config=config, data=message["report"])
                    hook.pytest_runtest_logreport(report=report)
                elif "finish" in message:
                    done.add(message["finish"])
                    hook.pytest_runtest_logfinish(nodeid=current, location=location)
                    current = None
                elif "findings" in message:
                    plugin.findings.unpack(message["findings"])
                ended |= "end" in message
        child.wait()
        errors.seek(0)
        return ended, current, location, errors.read().decode(errors="replace")


def _crashed(session: pytest.Session, plugin: Session, nodeid: str, location: Any, said: str) -> None:
    """Report the test in which a child ended."""
    text = f"the process ended:\n{said[-4000:]}"
    if access := re.search(r"^openreg: the host (.*?):.*\n.*$", said, re.M):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', said, re.M)
        ours = [frame for frame in frames if not frame[0].startswith(misuse.SKIPPED) and "/ctypes/" not in frame[0]]
        where = misuse.shown(session.config.rootpath, ours[0][0], int(ours[0][1])) if ours else "?"
        plugin.findings.add(Finding("host", access[1], where, nodeid))
        text = "\n".join([access[0], *(f"{file}:{line}: in {name}" for file, line, name in ours)])
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)
    session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
