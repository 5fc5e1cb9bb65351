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

from openreg_tools.conformance import asynchronous, attention, freed, graphs, layouts, opinfo, transforms
from openreg_tools.conformance.one_sample import Sample

DIRECT = ("forward", "backward", "inplace", "out", "sparse", "errors")
CHECKS = (*DIRECT, "layouts", "attention", "async", "async_errors", graphs.CHECK, freed.CHECK, *transforms.CHECKS)


def check(
    op: Any,
    dtype: torch.dtype,
    device: str,
    samples: int = 8,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda where: None,
) -> opinfo.Report:
    """Compare `op` on `device` with the CPU over at most `samples` sample inputs; `at` is called with the progress."""
    report = opinfo.Report()
    if op.name in attention.OPERATORS:  # the CPU lacks them
        for i, kind, message in attention.check(op, dtype, device, at) if "attention" in checks else ():
            report.ran["attention"] += 1
            if kind:
                report.failures.append(opinfo.Failure("attention", kind, i, message))
        return report
    checks = tuple(name for name in checks if name != "attention")
    at("making samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        backward = "backward" in checks and differentiable
        requires_grad = differentiable and not {"backward", *transforms.CHECKS}.isdisjoint(checks)
        for i, sample in enumerate(opinfo._samples(op, dtype, requires_grad, samples)):
            one = Sample(op, sample, i, device, report)
            for name in checks:
                if name in ("sparse", "errors", "async", "async_errors", graphs.CHECK, freed.CHECK) or (
                    name == "backward" and not backward
                ):
                    continue
                at(f"{name}, sample {i}")
                if name == "layouts":
                    layouts.check(one)
                else:
                    getattr(transforms, name)(one) if name in transforms.CHECKS else getattr(one, name)()
        if "sparse" in checks:
            for layout in opinfo.LAYOUTS:
                for i, sample in enumerate(opinfo._sparse_samples(op, layout, dtype, samples)):
                    at(f"sparse, sample {i}")
                    one = Sample(op, sample, i, device, report)
                    one.forward("sparse")
                    if backward:
                        one.backward("sparse")
        if "errors" in checks and op.error_inputs_func and dtype == opinfo._first_dtype(op):
            at("making error inputs")
            torch.manual_seed(opinfo.SEED)
            wrongs, of_device = (list(itertools.islice(op.error_inputs(each), 4 * samples)) for each in ("cpu", device))
            for i, wrong in enumerate(wrongs):
                if len(wrongs) == len(of_device) and wrong.error_type is not of_device[i].error_type:
                    continue  # OpInfo names another error for the device, which `refuses` expects below
                at(f"errors, sample {i}")
                Sample(op, wrong.sample_input, i, device, report).forward("errors")
            if not report.failures:
                for i, wrong in enumerate(of_device):
                    at(f"errors of the device, sample {i}")
                    Sample(op, wrong.sample_input, i, device, report).refuses(wrong.error_type)
        if {"async", "async_errors"} & set(checks):
            asynchronous.check(op, dtype, device, samples, checks, report, at)
        if freed.CHECK in checks and dtype == opinfo._first_dtype(op):
            for i, sample in enumerate(opinfo._samples(op, dtype, False, samples)):
                one = Sample(op, sample, i, device, report)
                call = functools.partial(one.call, op)
                freed.compare(report, i, f"sample {i}", call, lambda: opinfo.Mover(device), at)
        if graphs.CHECK in checks and graphs.supported(device):
            graphs.check(op, dtype, device, samples, report, at)
    return report
