"""Checks one operator of PyTorch's OpInfo database on a device against the CPU.

`check(op, dtype, device)` runs the operator's sample inputs on both and compares everything that a program can
observe: values, dtype, shape, device, aliasing, gradients, error types, and that the state of the CPU's generator does
not change. The device is only a name here: ``"cpu"`` checks the checker itself.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from openreg_tools.conformance import freed, graphs, layouts, transforms
from openreg_tools.conformance.one_sample import OneSample
from openreg_tools.conformance.outcomes import Tally
from openreg_tools.core import opinfo
from openreg_tools.core.move import Move

DIRECT = ("forward", "backward", "inplace", "out", "sparse", "errors")
CHECKS = (*DIRECT, "layouts", graphs.CHECK, freed.CHECK, *transforms.CHECKS)

# The checks of one sample, in the order in which they run.
_OF_SAMPLE: dict[str, Callable[[OneSample], None]] = {
    "forward": OneSample.forward,
    "backward": OneSample.backward,
    "inplace": OneSample.inplace,
    "out": OneSample.out,
    "layouts": layouts.check,
    **{name: getattr(transforms, name) for name in transforms.CHECKS},
}


def check(
    op: Any,
    dtype: torch.dtype,
    device: str,
    samples: int = 8,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda where: None,
) -> Tally:
    """Compare `op` on `device` with the CPU over at most `samples` sample inputs; `at` is called with the progress."""
    tally = Tally()
    at("making samples")
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    backward = "backward" in checks and differentiable
    requires_grad = differentiable and not {"backward", *transforms.CHECKS}.isdisjoint(checks)
    is_first = dtype == opinfo.first_dtype(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, sample in enumerate(opinfo.samples(op, dtype, requires_grad, samples)):
            one = OneSample(op, sample, i, device, tally)
            for name, run in _OF_SAMPLE.items():
                if name in checks and (name != "backward" or backward):
                    at(f"{name}, sample {i}")
                    run(one)
        for layout in opinfo.LAYOUTS if "sparse" in checks else ():
            for i, sample in enumerate(opinfo.sparse_samples(op, layout, dtype, samples)):
                at(f"sparse, sample {i}")
                one = OneSample(op, sample, i, device, tally)
                one.forward("sparse")
                if backward:
                    one.backward("sparse")
        if "errors" in checks and op.error_inputs_func and is_first:
            _errors(op, device, 4 * samples, tally, at)
        if freed.CHECK in checks and is_first:
            for i, sample in enumerate(opinfo.samples(op, dtype, False, samples)):
                call = functools.partial(OneSample(op, sample, i, device, tally).call, op)
                freed.compare(tally, i, f"sample {i}", call, lambda: Move(device), at)
        if graphs.CHECK in checks and graphs.supported(device):
            graphs.check(op, dtype, device, samples, tally, at)
    return tally


def _errors(op: Any, device: str, most: int, tally: Tally, at: Callable[[str], None]) -> None:
    """Wrong inputs: the device must raise what the CPU raises, or what OpInfo names for the device."""
    at("making error inputs")
    torch.manual_seed(opinfo.SEED)
    of_cpu, of_device = (list(itertools.islice(op.error_inputs(place), most)) for place in ("cpu", device))
    for i, wrong in enumerate(of_cpu):
        if len(of_cpu) == len(of_device) and wrong.error_type is not of_device[i].error_type:
            continue  # OpInfo names another error for the device, which `refuses` expects below
        at(f"errors, sample {i}")
        OneSample(op, wrong.sample_input, i, device, tally).forward("errors")
    if not tally.failures:
        for i, wrong in enumerate(of_device):
            at(f"errors of the device, sample {i}")
            OneSample(op, wrong.sample_input, i, device, tally).refuses(wrong.error_type)
