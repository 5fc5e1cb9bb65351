"""Convolutions in graphs have the strides of eager mode, under every backend."""

import pytest
import torch
import torch.nn.functional as F
from graphs import uncached
from processes import python
from torch.testing import assert_close

pytestmark = pytest.mark.compiles

STRIDES = """
import sys, torch, openreg_ops
import torch.nn.functional as F

weight = torch.ones(4, 3, 3, 3, device="openreg").to(memory_format=torch.channels_last)
x = torch.randn(2, 3, 32, 32, device="openreg").to(memory_format=torch.channels_last)

def strides(x):
    y = F.conv2d(x, weight, padding=1)
    return y.stride(), y.is_contiguous()

def flat(x):  # a view of a contiguous result, a copy of one in channels_last
    return F.conv2d(x, weight, padding=1).flatten(1) * 2

for backend in ("eager", "aot_eager"):
    assert torch.compile(strides, backend=backend, fullgraph=True)(x) == strides(x), backend
    torch.testing.assert_close(torch.compile(flat, backend=backend, fullgraph=True)(x), flat(x))

class Flat(torch.nn.Module):
    forward = staticmethod(flat)

torch.testing.assert_close(torch.export.export(Flat(), (x,)).module()(x), flat(x))
assert "torch._inductor.compile_fx" not in sys.modules
"""


@pytest.mark.slow
def test_without_inductor():
    done = python("-c", STRIDES)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, size", [("_select_conv_backend", 32), ("_conv_determine_backend_memory_format", 4)])
def test_both_questions_are_answered_as_for_the_cpu(name, size, monkeypatch):
    """The smaller convolution runs another kernel than oneDNN's."""
    x, weight = torch.randn(1, 3, size, size, device="openreg"), torch.randn(3, 3, 3, 3, device="openreg")
    x = x.to(memory_format=torch.channels_last)

    def function(x):
        return F.conv2d(x, weight).relu()

    with uncached():
        assert_close(torch.compile(function)(x), function(x))
    monkeypatch.setattr(torch._C, name, getattr(torch._C, name).__wrapped__)
    with uncached(), pytest.raises(AssertionError, match="expected size"):
        torch.compile(function)(x)
