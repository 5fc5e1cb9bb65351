"""Async mode raises what inline mode raises, at the call: a slice of the conformance checks async and async_errors."""

from __future__ import annotations

import pytest
import torch

from openreg_ops.meta.op import SAMPLES
from openreg_ops.testing import asynchronous, opinfo

DEVICE = "openreg"
MS = 1_000_000

# Operators that are queued, in whole or in part; one of each kind that the kernels make of them.
OPERATORS = (
    "add", "mul", "exp", "mm", "baddbmm", "softmax", "cat", "sum", "argmax", "topk", "where", "fill", "gather",
    "index_put", "scatter_add", "linalg.inv_ex", "nn.functional.nll_loss", "nn.functional.gelu", "_foreach_add",
)  # fmt: skip


def found(report):
    return "\n".join(f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)


@pytest.mark.parametrize("name", OPERATORS)
def test_both_modes_agree(name):
    op, report = opinfo.database()[name], opinfo.Report()
    dtype = opinfo._first_dtype(op)
    asynchronous.check(op, dtype, DEVICE, 1, asynchronous.CHECKS, report, at=lambda where: None)
    assert report.ran["async"] >= 1 and report.ran["async_errors"] > 15
    assert not report.failures, found(report)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_both_modes_agree_on_the_operators_of_the_suite(name):
    samples = list(SAMPLES[name]("cpu", torch.float32))[:2]
    report = asynchronous.check_operator(getattr(torch.ops.openreg, name), samples, DEVICE)
    assert report.ran["async_errors"] > 15
    assert not report.failures, found(report)


def test_the_check_sees_what_differs():
    """A function that is wrong in async mode only, in each way that the check knows."""

    def wrong(kind):
        def function(x):
            if torch.openreg.get_launch_mode() == "inline":
                return x + 1 if kind != "error" else x.view(-1, 7)
            if kind == "late":
                torch.openreg_ops_C_throw()
            return {"value": x + 2, "error type": x.no_such} [kind] if kind == "value" else x + 1

        return function

    report = asynchronous.check_operator(wrong("value"), [(torch.ones(3),)], DEVICE)
    assert {failure.kind for failure in report.failures} == {"value"}
