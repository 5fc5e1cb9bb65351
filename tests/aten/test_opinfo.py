"""A part of `make conformance`: every second operator with one sample, in float32 or in another dtype by turns."""

from __future__ import annotations

import pytest
import torch

from openreg_ops.testing.known_failures import KNOWN_FAILURES
from openreg_tools.conformance import sweep
from openreg_tools.core import opinfo
from openreg_tools.core.move import Move

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
    known = KNOWN_FAILURES.get(name)
    if known and dtype in known.dtypes:
        assert {failure.check for failure in report.failures} <= set(known.checks), report.failures
        pytest.xfail(known.cause) if report.failures else None
    found = "\n".join(f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)
    assert not report.failures, found


@pytest.mark.slow
def test_the_list_of_known_failures_is_short_and_true():
    assert len(KNOWN_FAILURES) <= 10
    for name, known in KNOWN_FAILURES.items():
        assert len(known.cause) > 20 and set(known.dtypes) <= set(opinfo.DTYPES)
        op = opinfo.database()[name]
        dtypes = [getattr(torch, dtype) for dtype in opinfo.dtypes_of(op) if dtype in known.dtypes]
        reports = [sweep.check(op, dtype, DEVICE, checks=known.checks) for dtype in dtypes]
        assert any(report.failures for report in reports), f"{name} passes: take it off the list"


def wrong(function):
    """An OpInfo whose device side is wrong, to test that the checker finds it."""
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

    def samples(op, device, dtype, requires_grad, **_):
        yield SampleInput(torch.ones(3, dtype=dtype, device=device, requires_grad=requires_grad))

    return OpInfo("wrong", op=function, dtypes=(torch.float32,), sample_inputs_func=samples, supports_out=False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = 1 if x.is_cpu else 2
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad


def refuse(x):
    raise (RuntimeError if x.is_cpu else ValueError)("refused")


@pytest.mark.parametrize(
    "kind, function",
    {
        "value": lambda x: x if x.is_cpu else x + 1,
        "dtype": lambda x: x + 0 if x.is_cpu else x.double(),
        "shape": lambda x: x + 0 if x.is_cpu else x[:2] + 0,
        "device": lambda x: x.cpu() + 0,
        "alias": lambda x: x[:] if x.is_cpu else x + 0,
        "structure": lambda x: [x + 0] if x.is_cpu else (x + 0,),
        "gradient": Scaled.apply,
        "error": lambda x: x + 0 if x.is_cpu else refuse(x),
        "no error": lambda x: refuse(x) if x.is_cpu else x + 0,
        "error type": refuse,
        "rng": lambda x: torch.rand(3).to(x.device),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_checker_sees(kind, function):
    report = sweep.check(wrong(function), torch.float32, DEVICE)
    assert kind in {failure.kind for failure in report.failures}


def test_the_checker_keeps_strides_offsets_and_shared_storage():
    base = torch.arange(12.0).reshape(3, 4)
    move = Move(DEVICE)
    view, other = move([base.t()[1:], base])
    assert view.stride() == (1, 4) and view.storage_offset() == 1
    assert view.untyped_storage()._cdata == other.untyped_storage()._cdata
    assert torch.equal(view.cpu(), base.t()[1:])
