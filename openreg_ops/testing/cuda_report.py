"""What a pytest run under OPENREG_DEVICE=cuda says at its end: what ran on the simulated device, and what could not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from openreg_ops import _C
from openreg_ops.device.refusals import refusals
from openreg_tools.core.blocks import counted

__all__ = ["CudaReport"]

# What a test's own skip or an operator's error says if it needs a GPU's libraries.
_NEEDS = re.compile(r"\b(triton|nvcc|cuda_home|cudnn|cublas\w*|cutlass|nvrtc|nvml|nccl|cupy)", re.I)


class CudaReport:
    """The plugin object of a run under OPENREG_DEVICE=cuda."""

    def __init__(self) -> None:
        self.ran: list[str] = []  # tests that gave the device work
        self.races: list[str] = []
        self.refused: dict[str, None] = {}  # lines, in order

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        before = _C.launch_count()
        try:
            return (yield)
        finally:
            if _C.launch_count() != before:
                self.ran.append(item.nodeid)
            for refusal in refusals:
                self.refused[f"{refusal.line}: {refusal.what} needs {refusal.needs}"] = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
        report = yield
        error = call.excinfo.value if call.excinfo else None
        where = f"{item.location[0]}:{(item.location[1] or 0) + 1}"
        if type(error).__name__ == "OpenregSanitizerErrors":
            self.races.append(f"{where}: {next(line for line in str(error).splitlines() if 'found' in line)}")
        elif isinstance(error, NotImplementedError | ImportError | OSError | pytest.skip.Exception):
            text = str(error).partition("\n")[0]
            if _NEEDS.search(text) and not any(text.startswith(f"{refusal.what} needs") for refusal in refusals):
                self.refused[f"{where}: {'skipped: ' if report.skipped else ''}{text}"] = None
        return report

    # With pytest-xdist, tests run in workers, and the main process writes the summary.
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["openreg_cuda"] = (self.ran, self.races, [*self.refused])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        ran, races, refused = getattr(node, "workeroutput", {}).get("openreg_cuda", ([], [], []))
        self.ran += ran
        self.races += races
        self.refused |= dict.fromkeys(refused)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line = terminalreporter.line
        terminalreporter.section("cuda, simulated")
        line(f"{counted(len(self.ran), 'test')} used the simulated device and would otherwise need a GPU")
        if os.environ.get("OPENREG_SANITIZER") != "1":
            line("sanitizer: off; OPENREG_SANITIZER=1 finds missing waits between streams")
        else:
            line(f"sanitizer: {counted(len(self.races), 'failure')}", red=bool(self.races))
        for race in self.races:
            line(f"  {race}")
        line(f"{counted(len(self.refused), 'place')} that {'needs' if len(self.refused) == 1 else 'need'} a real GPU")
        for refusal in self.refused:
            line(f"  {refusal}")
