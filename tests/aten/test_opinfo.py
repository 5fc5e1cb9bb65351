"""A part of `make conformance`: every second operator with one sample, in float32 or in another dtype by turns."""

from __future__ import annotations

import pytest
import torch

from openreg_tools.conformance import sweep
from openreg_tools.core import opinfo

pytestmark = pytest.mark.conformance

DEVICE = "openreg"
CHECKS = sweep.DIRECT  # each sweep has a test file of its own


def cases() -> list:
    chosen = []
    for i, (name, op) in enumerate(opinfo.database().items()):
        dtypes = opinfo.dtypes_of(op)
        others = [dtype for dtype in dtypes if dtype != "float32"]
        if i % 2 or not dtypes:  # the CPU lacks operators without dtypes
            continue
        dtype = others[i % len(others)] if others and not ("float32" in dtypes and i % 3) else "float32"
        chosen.append(pytest.param(name, dtype, id=f"{name}-{dtype}"))
    return chosen


@pytest.mark.parametrize("name, dtype", cases())
def test_agrees_with_the_cpu(name, dtype):
    report = sweep.check(opinfo.database()[name], getattr(torch, dtype), DEVICE, 1, CHECKS)
    found = "\n".join(f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)
    assert not report.failures, found
