"""A pytest run on a device: what tests get as `device`, what is watched while they run, and the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openreg_tools import backends
from openreg_tools.core import place
from openreg_tools.core.blocks import counted
from openreg_tools.core.device import usable
from openreg_tools.core.findings import annotate, sarif
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import write_file
from openreg_tools.pytest_plugin import isolated, sources
from openreg_tools.pytest_plugin.misuse import KINDS, Misuse, Misuses
from openreg_tools.pytest_plugin.page import PytestPage
from openreg_tools.pytest_plugin.watch import Leaks, Watch, hide

__all__ = ["Session", "device_syncs"]

# Kinds that need a device which looks for them.
_OF_THE_DEVICE = {"host", "race"}


class Session:
    """The plugin object of a run with --device."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.config = config
        self.devices = [_device(name.strip()) for name in option.on_device.split(",")]
        self.shown = ", ".join(map(str, self.devices))
        self.names: list[str] = config.getini("device_names")
        self.types = {device.type for device in self.devices} - {"cpu"}
        told = {kind for device in self.types for kind in backends.of_device(device).sees}
        self.detectable = set(KINDS) - (_OF_THE_DEVICE - told) if self.types else {"cuda"}
        self.forbidden = self._kinds("--device-forbid", option.device_forbid)
        self.kinds = self._kinds("--device-misuse", option.device_misuse) | self.forbidden
        self.misuses = Misuses()
        self.ended: list[str] = []  # tests that ended their process, which held the record of leaks
        self.tests = 0
        self.watch: Watch | None = None
        self.child = isolated.child(config)
        if self.child:
            config.pluginmanager.register(self.child)
        # A pytest-xdist worker, or a process started by isolated.py, leaves the report to its parent.
        self.is_worker = hasattr(config, "workerinput") or self.child is not None
        self.isolates = "host" in self.kinds and not self.child and isolated.starts(config)

    def _kinds(self, option: str, text: str | None) -> set[str]:
        asked = {kind.strip() for kind in (text or "").split(",")} - {""}
        if unknown := asked - {*KINDS, "all"}:
            raise pytest.UsageError(
                f"{option}: no kind {', '.join(sorted(unknown))}; there are all, {', '.join(KINDS)}"
            )
        if unseen := asked - self.detectable - {"all"}:
            raise pytest.UsageError(
                f"{option}: {_listed(unseen)} cannot be detected on {self.shown}, which has {_listed(self.detectable)}"
            )
        return self.detectable if "all" in asked else asked

    def pytest_report_header(self) -> str:
        return f"device: {self.shown}" + f"; watched for: {_listed(self.kinds)}" * bool(self.kinds)

    # ---- which device a test gets ----

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> Iterator[None]:
        """Replace each device argument with one of ours, whether the suite has a fixture, a parameter, or neither."""
        names = [name for name in self.names if name in metafunc.fixturenames]
        parametrize, seen = metafunc.parametrize, set()

        def substituted(argnames: Any, argvalues: Any, *args: Any, **kwargs: Any) -> None:
            split = [n.strip() for n in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
            for name in set(split) & set(names):
                seen.add(name)
                argvalues = [*argvalues]  # a generator yields its values only once
                if (values := _substitute(split, split.index(name), argvalues, self.devices)) is not None:
                    argvalues = values
                    if not callable(kwargs.get("ids")):
                        kwargs["ids"] = _id
            parametrize(argnames, argvalues, *args, **kwargs)

        metafunc.parametrize = substituted
        try:
            return (yield)
        finally:
            metafunc.parametrize = parametrize
            for name in names:
                if name not in seen:
                    parametrize(name, self.devices, ids=str, scope="session")

    # ---- what is watched ----

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("device_syncs")
        kinds = self.kinds | ({"sync"} if marker else set())
        if self.types and kinds - {"cuda"}:
            self.watch = _ItemWatch(self, item, kinds)
        try:
            return (yield)
        finally:
            self.watch = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        watch = self.watch
        if watch is None:
            return (yield)
        try:
            with watch.watching():
                result = yield
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            watch.failed()
            Leaks.forget(watch)
            if not self.config.option.fulltrace:
                hide(error)
            raise
        watch.hold_to_budget()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.skipped and isinstance(report.longrepr, tuple):
            path, line, reason = report.longrepr
            if "cuda" in self.kinds and "cuda" not in self.types and re.search(r"\b(cuda|gpu)\b", reason, re.I):
                where = f"{place.relative(path, str(self.config.rootpath))}:{line}"
                self.misuses.add(Misuse("cuda", reason.removeprefix("Skipped: "), where, item.nodeid, True))
        if self.is_worker:  # the report goes to the other process, and this goes with it
            report.device_misuses = self.misuses.pack()
        return report

    # ---- the report ----

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call"
        if not self.is_worker:
            self.misuses.unpack(getattr(report, "device_misuses", []))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        Leaks.tell()
        if "cuda" in self.kinds - self.types:
            for misuse in sources.misuses(self.config.rootpath, self.types):
                self.misuses.add(misuse)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["device_misuses"] = self.misuses.pack()
        elif self.child:
            self.child.parent.answer({"misuses": self.misuses.pack()})
        else:
            self._finish(session)
        return (yield)

    def _finish(self, session: pytest.Session) -> None:
        if self.forbidden & self.misuses.kinds() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := self.config.option.device_report:
            self.misuses.write(
                path, torch=torch.__version__, devices=[*map(str, self.devices)], tests=self.tests,
                kinds=[kind for kind in KINDS if kind in self.kinds],
            )  # fmt: skip
        if path := self.config.option.device_html:
            more = [block for blocks in self.config.hook.pytest_device_page() for block in blocks]
            kinds = [kind for kind in KINDS if kind in self.kinds]
            page = PytestPage(self.misuses, self.shown, kinds, self.tests, session.testsfailed, more)
            write_file(path, page.html())
        found = [*self.misuses.findings(self.forbidden, str(self.config.rootpath))]
        annotate(found)
        if path := self.config.option.device_sarif:
            rules = {kind: title for kind, title in KINDS.items() if kind in self.kinds | self.misuses.kinds()}
            page = "testing-your-library.html#what-the-plugin-reports"
            Path(path).write_text(sarif("pytest --device", self.shown, rules, found, page))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.misuses.unpack(getattr(node, "workeroutput", {}).get("device_misuses", []))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        if "host" in self.kinds:  # pytest-xdist says only that a worker ended
            self.misuses.add(Misuse("host", "a worker ended; run this test without -n", crashitem, crashitem))

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests in a process with isolated device memory; a host access ends that process."""
        if not self.isolates or session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None
        isolated.run(session, self.misuses, self.ended)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.kinds and not self.misuses.counts:
            return
        terminalreporter.section(f"device misuse on {self.shown}")
        for line in self.misuses.text() or [f"none found in {counted(self.tests, 'test')}"]:
            terminalreporter.line(line)
        for test in self.ended if "leak" in self.kinds else ():
            terminalreporter.line(f"leak: unknown for the tests that ran before {test} crashed the process", red=True)
        if found := self.forbidden & self.misuses.kinds():
            terminalreporter.line(f"--device-forbid: found {_listed(found)}", red=True)


class _ItemWatch(Watch):
    """The watch over one test."""

    def __init__(self, session: Session, item: pytest.Item, kinds: set[str]) -> None:
        super().__init__(session.types, kinds, session.config.rootpath, self._found)
        self.session, self.item = session, item
        self.waits: dict[str, int] = {}  # in the library, by line

    def _found(self, kind: str, what: str, where: str, own: bool) -> None:
        if kind in self.session.kinds:
            self.session.misuses.add(Misuse(kind, what, where, self.item.nodeid, own))
        if kind == "sync" and not own:
            line = f"{where}  {what}"
            self.waits[line] = self.waits.get(line, 0) + 1

    def hold_to_budget(self) -> None:
        """Fail the test if the library waited more often than its marker allows."""
        marker = self.item.get_closest_marker("device_syncs")
        if marker and (count := sum(self.waits.values())) > (most := _most(*marker.args, **marker.kwargs)):
            pytest.fail(_exceeded("the library", most, count, self.waits), pytrace=False)


def _most(max: int) -> int:  # noqa: A002 -- the marker's argument
    if not isinstance(max, int):
        raise TypeError(f"device_syncs: expected max as an integer, but got {max!r}")
    return max


def _exceeded(who: str, budget: int, count: int, lines: dict[str, int]) -> str:
    ordered = sorted(lines.items(), key=lambda item: -item[1])
    shown = "".join(f"\n  {times:>5,}  {line}" for line, times in ordered[:10])
    return f"{who} waited for the device {count} times, and the budget is {budget}:{shown}"


# ---- the fixture device_syncs ----


@contextlib.contextmanager
def device_syncs(max: int | None = None) -> Iterator[list[str]]:  # noqa: A002
    """Count the waits in the body, including those in test code; yields the list of their lines, complete at the end.

    Args:
        max: fail if there are more.
    """
    waits: list[str] = []
    accelerator = torch.accelerator.current_accelerator()
    # A separate watch even if the run has one, which counts too: nested modes see each call once.
    watch = Watch(
        {accelerator.type} if accelerator else set(), {"sync"}, Path.cwd(),
        lambda kind, what, where, own: waits.append(f"{where}  {what}"),
    )  # fmt: skip
    with watch.watching():
        try:
            yield waits
        except BaseException as error:
            hide(error)
            raise
    if max is not None and len(waits) > max:
        lines = {line: waits.count(line) for line in dict.fromkeys(waits)}
        pytest.fail(_exceeded("the body of device_syncs", max, len(waits), lines), pytrace=False)


# ---- devices ----


def _device(name: str) -> torch.device:
    """The device with this name, after trying it; imports the device's package for suites that do not."""
    packages = importlib.metadata.entry_points(group="torch.backends", name=name.partition(":")[0])
    for package in packages:
        try:
            package.load()
        except Exception as error:
            raise pytest.UsageError(
                f"--device {name}: importing {package.module} failed: {error}; `python -m openreg_tools info` says more"
            ) from error
    try:
        usable(name)
    except Wrong as error:
        more = "" if packages else "; if another package brings the device, import it with `-p PACKAGE`"
        raise pytest.UsageError(f"--device {name}: {error}{more}") from error
    return torch.device(name)


def _listed(kinds: set[str]) -> str:
    return ", ".join(kind for kind in KINDS if kind in kinds)


def _substitute(names: list[str], index: int, rows: list[Any], devices: list[torch.device]) -> list[Any] | None:
    """A parametrization with our devices instead of its own; None if its values are not devices.

    Rows that differ only in their device become one row for each of ours. A row loses its skip marks, which were for
    its old device. None, the default device, counts as a device if another value names one.
    """
    plain = [r.values if type(r).__name__ == "ParameterSet" else (r,) if len(names) == 1 else tuple(r) for r in rows]
    named = [values[index] for values in plain if values[index] is not None]
    if not named or not all(map(_names_a_device, named)):
        return None
    out, seen = [], set()
    for row, values in zip(rows, plain, strict=True):
        marks = [m for m in getattr(row, "marks", ()) if getattr(m, "name", "") not in ("skip", "skipif")]
        own = named[0] if values[index] is None else values[index]
        for device in devices:
            new = (*values[:index], str(device) if isinstance(own, str) else device, *values[index + 1 :])
            if (key := _key(new)) not in seen:
                seen.add(key)
                out.append(pytest.param(*new, marks=marks))
    return out


def _key(value: Any) -> Any:
    """Equal for values that are certainly the same: plain values by repr, others by identity."""
    if type(value) in (tuple, list):
        return type(value), *map(_key, value)
    plain = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
    return (type(value), repr(value)) if type(value) in plain else id(value)


def _names_a_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    try:
        return isinstance(value, str) and bool(torch.device(value))
    except RuntimeError:
        return False


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, torch.device) else None
