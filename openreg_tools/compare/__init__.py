"""Where does a program first differ? ``with compare(against="cpu") as result`` runs each operator on a reference too.

docs/tools.md has the command and its options.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from openreg_tools.compare.differences import Difference, Differences, Row
from openreg_tools.compare.lockstep import Lockstep
from openreg_tools.compare.tolerance import Tolerance, Tolerances
from openreg_tools.core.blocks import first_line
from openreg_tools.core.device import target_of, usable
from openreg_tools.core.options import Wrong

__all__ = ["Comparing", "Difference", "Differences", "Row", "Tolerance", "compare"]


class Comparing:
    """The context manager that `compare` returns. It yields the `Differences`, which are complete when the context ends.

    Functions that torch.compile compiles run in eager mode meanwhile, so that each of their operators is compared.
    """

    def __init__(self, mode: Lockstep) -> None:
        self.mode, self.result = mode, mode.result

    def __enter__(self) -> Differences:
        self._started = time.perf_counter()
        self._stance = torch.compiler.set_stance("force_eager")
        self.mode.__enter__()
        return self.result

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.mode.__exit__(kind, error, trace)
        self._stance.__exit__(kind, error, trace)
        self.result.seconds = time.perf_counter() - self._started
        self.result.used(self.mode.tolerances)
        if isinstance(error, Exception):
            self.result.raised = first_line(error)
        if error is not None and (first := self.result.first) is not None:
            error.add_note(f"compare: the first difference is in {first.operator} at {first.place}")


def compare(
    *, device: str | None = None, against: str = "cpu", tolerances: Mapping[str, float] | None = None,
    factor: float = 1.0, name: str = "", progress: bool = False,
) -> Comparing:  # fmt: skip
    """Compare a program with a reference, as a context manager that yields the `Differences`.

    Each operator of the program that touches `device` also runs on `against`, with the same inputs and, if both devices
    can draw the same, the same random numbers.

    Args:
        device: the device under test; the accelerator of the process unless given.
        against: the reference device.
        tolerances: ulps by pattern of operators, such as {"aten::mm": 32, "aten::_softmax*": 4}.
        factor: multiplies the default tolerances, which `openreg_tools.compare.tolerance` documents.
        name: the program's name in the report.
        progress: print a line to stderr every five seconds.
    Raises:
        Wrong: there is no such device, both are the same, or a tolerance is wrong.
    """
    target = target_of(device).device
    for device_name in (target, against):
        usable(device_name)
    kinds = [torch.device(device_name).type for device_name in (target, against)]
    if kinds[0] == kinds[1]:
        raise Wrong(f"compare: expected two devices, but both are {kinds[0]}")
    if "meta" in kinds:
        raise Wrong("compare: tensors on meta have no values to compare; name another device")
    result = Differences(kinds[0], against, name)
    return Comparing(Lockstep(target, against, Tolerances(tolerances, factor), result, progress))
