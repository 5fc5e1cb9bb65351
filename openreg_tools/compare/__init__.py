"""Where do two runs first differ? ``with compare(against="cpu") as result`` runs each operator on a reference too.

`record(path)` keeps a fingerprint of each operator's results, and ``compare("a.trace", "b.trace")`` aligns two traces.
docs/tools.md has both commands and their options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from openreg_tools import dispatch
from openreg_tools.compare.composites import Composites
from openreg_tools.compare.lockstep import Lockstep
from openreg_tools.compare.recording import mark, record
from openreg_tools.compare.regions import Regions
from openreg_tools.compare.result import Difference, Result, Row
from openreg_tools.compare.testcase import assert_operator, load_operators, written
from openreg_tools.compare.tolerance import Tolerance, Tolerances
from openreg_tools.forms import Wrong

__all__ = [
    "Comparing",
    "Difference",
    "Result",
    "Row",
    "Tolerance",
    "assert_operator",
    "compare",
    "load_operators",
    "mark",
    "record",
]


def compare(
    *traces: Any, device: str | None = None, against: str = "cpu", tolerances: Mapping[str, float] | None = None,
    factor: float = 1.0, name: str = "", progress: bool = False,
) -> Any:  # fmt: skip
    """Compare a program with a reference, as a context manager, or compare two traces.

    Without `traces`, returns a context manager that yields a `Result`: each operator of the program that touches
    `device` also runs on `against`, with the same inputs and, if both devices can draw the same, the same random
    numbers.

    With two `traces` (files from `record`, or DebugMode objects with logged hashes), returns the `Parting` of two runs.

    Args:
        device: the device under test; the accelerator of the process unless given.
        against: the reference device.
        tolerances: ulps by pattern of operators, such as {"aten::mm": 32, "aten::_softmax*": 4}.
        factor: multiplies the default tolerances, which `openreg_tools.compare.tolerance` documents.
        name: the program's name in the report.
        progress: print a line to stderr every five seconds.
    Raises:
        Wrong: there is no such device, no such file, or a file is not a trace.
    """
    if traces:
        from openreg_tools.compare.parting import part

        if len(traces) != 2:
            raise Wrong(f"compare: expected two traces, but got {len(traces)}")
        return part(*traces, tolerances=Tolerances(tolerances, factor))
    return Comparing(device, against, Tolerances(tolerances, factor), name, progress)


class Comparing:
    """The context manager that `compare` returns. It yields the `Result`, which is complete when the context ends.

    Args:
        device, against: the device under test, and the reference device.
        tolerances: the tolerance of each operator.
        name: the program's name in the report.
        progress: print a line to stderr every five seconds.
    Raises:
        Wrong: there is no such device, or both are the same.
    """

    def __init__(self, device: str | None, against: str, tolerances: Tolerances, name: str, progress: bool) -> None:
        target = dispatch.target(device)
        for each in (target.device, against):
            dispatch.usable(each)
        if torch.device(target.device).type == torch.device(against).type:
            raise Wrong(f"compare: expected two devices, but both are {torch.device(against).type}")
        if "meta" in (torch.device(target.device).type, torch.device(against).type):
            raise Wrong("compare: tensors on meta have no values to compare; name another device")
        self.result = Result(torch.device(target.device).type, against, name)
        self.result.writer = written
        self.mode = Lockstep(target.device, against, tolerances, self.result, progress)
        self.regions, self.composites = Regions(self.mode), Composites(self.mode)

    def __enter__(self) -> Result:
        self._started = time.perf_counter()
        self.result.command = sys.argv[:]
        self.regions.__enter__()
        self.composites.__enter__()
        self.mode.__enter__()
        return self.result

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.mode.__exit__(kind, error, trace)
        self.composites.__exit__()
        self.regions.__exit__()
        self.result.seconds = time.perf_counter() - self._started
        self.result.used(self.mode.tolerances)
        if isinstance(error, Exception):
            self.result.raised = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if error is not None and (first := self.result.first) is not None and hasattr(error, "add_note"):
            error.add_note(f"compare: the first difference is in {first.operator} at {first.place}")
