"""Values and gradients against PyTorch, and the checker, on every available device."""

import pytest
import stable_operators
import torch
from stable_operators.registration import SAMPLES
from torch.testing import assert_close

from openreg_tools.check import check

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def rms_norm(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (0, 4), (3, 4), (7, 1000), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "rms_norm"])
def test_matches_pytorch(name, shape, dtype, device_in_every_mode):
    inputs = torch.randn(shape, dtype=dtype), torch.randn(shape if name == "swiglu" else shape[-1:], dtype=dtype)
    here = [x.to(device_in_every_mode, copy=True).requires_grad_() for x in inputs]
    there = [x.double().requires_grad_() for x in inputs]
    y = getattr(stable_operators, name)(*here)
    y = y[0] if name == "rms_norm" else y
    expected = globals()[name](*there)
    y.sum().backward()
    expected.sum().backward()
    tolerance = dict(rtol=2e-2, atol=5e-2) if dtype.itemsize == 2 else dict(rtol=1e-4, atol=1e-4)
    for actual, wanted in zip([y, *(x.grad for x in here)], [expected, *(x.grad for x in there)], strict=True):
        assert actual.dtype == dtype
        assert_close(actual.detach().cpu().double(), wanted.detach(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.float8_e5m2, torch.complex32], ids=str)
def test_other_dtypes_are_refused(dtype, device):
    """By the kernels, with Python's name of the dtype."""
    x = torch.empty(3, dtype=dtype, device=device)
    with pytest.raises(
        RuntimeError, match=f"expected gate of float32, .* but got {str(dtype)[6:]}; convert it with .to"
    ):
        stable_operators.swiglu(x, x)


@pytest.mark.parametrize("name", SAMPLES)
def test_checker(name, device):
    samples = list(SAMPLES[name](device, torch.float32))
    # The rest tests how graphs with data-dependent sizes compile, for which one device is enough.
    skip = [] if device == "cpu" else ["compile_unbacked"]
    check(f"stable_operators::{name}", samples, device, skip=skip).raise_if_failed()


@pytest.mark.parametrize("name", SAMPLES)
def test_sharded(name, device):
    """On DTensors each device runs its part: nothing is gathered, and each call uses its own eps."""
    import stable_operators.dtensor  # noqa: F401

    report = check(f"stable_operators::{name}", list(SAMPLES[name](device, torch.float32)), device, only="dtensor")
    report.raise_if_failed()
    assert any("stays sharded" in result.sentence for result in report.of("pass", "dtensor")), str(report)
