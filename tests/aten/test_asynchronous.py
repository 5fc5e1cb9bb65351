"""Async mode raises what inline mode raises, at the call: a slice of the conformance checks async and async_errors."""

from __future__ import annotations

import launch_modes as asynchronous
import pytest
import torch
from stream_kit import in_threads

from openreg_ops import _C
from openreg_ops.meta.op import SAMPLES
from openreg_tools.conformance import outcomes
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import first_line
from openreg_tools.core.samples import sample_of

pytestmark = pytest.mark.conformance

DEVICE = "openreg"

# Operators that are queued, fully or partly; one of each kind.
OPERATORS = (
    "add", "mul", "exp", "mm", "baddbmm", "softmax", "cat", "sum", "argmax", "topk", "where", "fill", "gather",
    "index_put", "scatter_add", "linalg.inv_ex", "nn.functional.nll_loss", "nn.functional.gelu", "_foreach_add",
)  # fmt: skip


def found(report):
    return "\n".join(f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)


@pytest.mark.parametrize("name", OPERATORS)
def test_both_modes_agree(name):
    op, report = opinfo.database()[name], outcomes.Tally()
    dtype = opinfo.first_dtype(op)
    asynchronous.check(op, dtype, DEVICE, 1, asynchronous.CHECKS, report, at=lambda where: None)
    assert report.ran["async"] >= 1 and report.ran["async_errors"] > 15
    assert not report.failures, found(report)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_both_modes_agree_on_the_operators_of_the_suite(name):
    samples = map(sample_of, list(SAMPLES[name]("cpu", torch.float32))[:2])
    report = asynchronous.check_operator(getattr(torch.ops.openreg, name), samples, DEVICE)
    assert report.ran["async_errors"] > 15
    assert not report.failures, found(report)


@pytest.mark.parametrize(
    "inline, late, seen",
    [
        ("index 4 is out of bounds", "index 4 is out of bounds", False),
        ("index 4 is out of bounds", "too late", True),
        ("refused", "refused", True),
        ("refused", "too late", True),
    ],
)
def test_only_what_a_kernel_asserts_may_be_raised_late(inline, late, seen):
    def function(x):
        if torch.openreg.get_launch_mode() == "inline":
            raise IndexError(inline)
        _C.launch_failure(0, late)
        return x

    report = asynchronous.check_operator(function, [sample_of(torch.ones(3))], DEVICE)
    assert {failure.kind for failure in report.failures} == ({"late"} if seen else set()), found(report)


REFUSED = {
    "float8": lambda x: x.to(torch.float8_e4m3fn) + x.to(torch.float8_e4m3fn),
    "float8 in place": lambda x: x.to(torch.float8_e5m2).mul_(2),
    "bool product": lambda x: (x > 0) @ (x > 0),
    "integral softmax": lambda x: x.int().softmax(0),
    "uint16 with a number": lambda x: x.to(torch.uint16) + 1,
    "a dtype for out": lambda x: torch.mm(x, x, out=torch.empty(3, 3, dtype=torch.float64, device=DEVICE)),
    "out that overlaps itself": lambda x: torch.mm(x, x, out=x.new_empty(1).expand(3, 3)),
    "float indices": lambda x: x.index_put((x[0],), x[0]),
    "a fill that does not fit": lambda x: x.half().fill_(1e5),
    "a stranger's reduction": lambda x: x.scatter(0, x.long(), x, reduce="no such"),
    "a singular matrix": lambda x: torch.linalg.inv_ex(torch.zeros_like(x), check_errors=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_refuses_is_raised_at_the_call(name):
    x = torch.ones(3, 3, device=DEVICE)
    with pytest.raises(Exception) as inline:
        REFUSED[name](x)
    with torch.openreg.launch_mode("async"):
        x + x, x @ x, x.softmax(0), x.half().fill_(1)  # accepted, but in another dtype or with another value
        for _ in range(2):
            with pytest.raises(type(inline.value)) as caught:
                REFUSED[name](x)
            assert first_line(caught.value) == first_line(inline.value)
        torch.openreg.synchronize()
        assert torch.equal((x + x).cpu(), torch.full((3, 3), 2.0))


def waits(call):
    """Returns true if a call waits for the stream: if so, it raises the error of the work before it."""
    with torch.openreg.launch_mode("async"):
        _C.launch_failure(0, "an earlier error")
        try:
            call()
        except torch.AcceleratorError:
            return True
        with pytest.raises(torch.AcceleratorError, match="an earlier error"):
            torch.openreg.synchronize()
    return False


def test_the_first_call_of_a_kind_runs_ahead_too():
    x = torch.ones(7, 11, 3, device=DEVICE)
    assert not waits(lambda: (x * 2.25, x.clone().addcmul_(x, x, value=0.125), x.sigmoid(), x.clone().fill_(0.375)))


def test_the_first_large_call_of_a_kind_runs_ahead_too():
    """Its trial uses small tensors. A dtype that the kernel rejects still raises at the call."""
    x = torch.ones(701, 601, device=DEVICE)
    row, column = x.new_ones(601), x.new_ones(701, 1)
    assert not waits(lambda: [x.add_(row, alpha=0.25 + i / 8) for i in range(3)])
    assert not waits(lambda: (x * x, x - column, torch.softmax(x, 1), torch.cat([x, x]), x @ x.T, x.sum(0)))
    eighths = x.to(torch.float8_e4m3fn)
    with torch.openreg.launch_mode("async"), pytest.raises(NotImplementedError, match="Float8"):
        eighths + eighths


def test_threads_try_calls_at_once():
    x = torch.arange(24.0, device=DEVICE)
    expected = {n: [(x.cpu()[:n] * k).tolist() for k in range(8)] for n in range(1, 24)}

    def work():
        for n in range(1, 24):
            assert [(x[:n] * k).tolist() for k in range(8)] == expected[n]
            with pytest.raises(NotImplementedError):
                x[:n].to(torch.float8_e5m2) * 2

    with torch.openreg.launch_mode("async"):
        in_threads(*[work] * 4)
        torch.openreg.synchronize()
