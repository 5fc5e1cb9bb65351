"""Dtypes that CUDA has and the CPU lacks, and autocast: bounded samples of the conformance checks, and cases by hand."""

import pytest
import torch
from torch.testing import assert_close

from openreg_tools.conformance import cuda_dtypes
from openreg_tools.core import opinfo

pytestmark = pytest.mark.conformance

DEVICE = "openreg"
HALF = [torch.float16, torch.bfloat16]
WITH_MISSING = [name for name, op in opinfo.database().items() if cuda_dtypes.dtypes_of(op)]


def device(values, dtype=None):
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def complex32(*shape):
    return torch.randn(*shape, dtype=torch.complex64).to(torch.complex32).to(DEVICE)


def said(report):
    return "\n".join(f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)


@pytest.mark.parametrize("name", WITH_MISSING)
def test_takes_the_dtypes_of_cuda(name):
    op = opinfo.database()[name]
    report = cuda_dtypes.check(op, opinfo.first_dtype(op), DEVICE, 2, ("cuda_dtypes",))
    assert report.ran["cuda_dtypes"] and not report.failures, said(report)


def test_the_list_of_missing_dtypes_is_that_of_a_gpu():
    """OpInfo asks which GPU there is; on a machine without one, torch.fft would have no half types."""
    missing = {name: cuda_dtypes.dtypes_of(opinfo.database()[name]) for name in WITH_MISSING}
    assert torch.float16 in missing["fft.rfft"] and torch.complex32 in missing["fft.fft"]
    assert torch.int64 in missing["histc"] and torch.bfloat16 in missing["nn.functional.avg_pool3d"]


AUTOCAST = [
    name
    for name, op in opinfo.database().items()
    if torch.float32 in op.supported_dtypes("cpu") and not name.startswith("_foreach")
]


@pytest.mark.parametrize("name", sorted(set(AUTOCAST) - set(cuda_dtypes.REFUSED_UNDER_AUTOCAST))[::4])
def test_runs_under_autocast(name):
    report = cuda_dtypes.check(opinfo.database()[name], torch.float32, DEVICE, 1, ("autocast",))
    assert not report.failures, said(report)


@pytest.mark.parametrize("name", sorted(cuda_dtypes.REFUSED_UNDER_AUTOCAST))
def test_what_autocast_refuses_is_refused(name, monkeypatch):
    monkeypatch.setattr(cuda_dtypes, "REFUSED_UNDER_AUTOCAST", {})
    report = cuda_dtypes.check(opinfo.database()[name], torch.float32, DEVICE, 1, ("autocast",))
    assert report.failures, f"{name} runs under autocast: take it off the list"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_local_response_norm_under_autocast(dtype):
    x = torch.rand(2, 4, 3, 3, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=dtype):
        y = torch.nn.functional.local_response_norm(x.to(dtype), 2)
    y.float().sum().backward()
    assert y.dtype == torch.float32 and x.grad.isfinite().all()  # divided by a power, which autocast widens


# ---- integers are exact ----


def test_histc_by_hand():
    assert torch.histc(device([1, 2, 3, 3, 7, 9, -1]), bins=4, min=0, max=8).tolist() == [1, 3, 0, 1]
    assert torch.histc(device([5, 5], torch.int32), bins=2).tolist() == [0, 2]  # from 4 to 6
    assert torch.histc(device([], torch.uint8), bins=3).tolist() == [0, 0, 0]
    large = 2**62  # next to each other, where float64 has steps of 1024
    counts = torch.histc(device([large, large + 1, large + 1, large + 2]), bins=3)
    assert counts.dtype == torch.int64 and counts.tolist() == [1, 2, 1]
    edges = device([-(2**63), 0, 2**63 - 1])
    assert torch.histc(edges, bins=2).tolist() == [1, 2]


def test_complex_sums_without_nan():
    nan = float("nan")
    x = torch.tensor([1 + 2j, complex(nan, 1), complex(3, nan), 4 - 1j], device=DEVICE, requires_grad=True)
    x.nansum().abs().backward()
    assert torch.nansum(x).item() == 5 + 1j and torch.nanmean(x).item() == 2.5 + 0.5j
    assert (x.grad != 0).tolist() == [True, False, False, True]
    real = torch.tensor([1, nan], device=DEVICE)
    assert torch.nansum(real, dtype=torch.complex64).item() == 1 and torch.nanmean(real, dtype=torch.complex64) == 1


# ---- rounded once, and what is written is written ----


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounds_once(dtype):
    x = torch.randn(1, 2, 8, 8, 8, dtype=dtype)
    expected = torch.nn.functional.avg_pool3d(x.float(), 4).to(dtype)
    assert_close(torch.nn.functional.avg_pool3d(x.to(DEVICE), 4).cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_in_every_launch_mode(mode):
    x, y = complex32(5, 4), complex32(5, 4)
    half = torch.randn(2, 2, 4, 4, 4, dtype=torch.float16).to(DEVICE)

    def all_():
        out = torch.empty(4, 5, dtype=torch.complex32, device=DEVICE).T
        torch.exp(x, out=out)
        z = x.clone()
        z.div_(y).tanh_()
        counts = torch.histc(torch.arange(6, device=DEVICE), 3)
        pooled = torch.nn.functional.avg_pool3d(half, 2)
        return (
            out,
            z,
            (x / y).sum(),
            x.angle(),
            counts,
            pooled,
            torch.fft.rfft(half),
            torch.nansum(x.to(torch.complex64)),
        )

    expected = [t.cpu() for t in all_()]
    with torch.openreg.launch_mode(mode):
        found = all_()
        torch.openreg.synchronize()
        for e, a in zip(expected, found, strict=True):
            assert torch.equal(torch.view_as_real(e) if e.is_complex() else e,
                               torch.view_as_real(a.cpu()) if a.is_complex() else a.cpu())  # fmt: skip


def test_promotes_as_the_meta_device_does():
    x, half = complex32(3), torch.randn(3, dtype=torch.float16, device=DEVICE)
    number, wide = torch.tensor(2.0), torch.ones(3, dtype=torch.float64, device=DEVICE)
    for call in (
        lambda x, half, wide: x / x,
        lambda x, half, wide: x / 2,
        lambda x, half, wide: x / wide,
        lambda x, half, wide: x / number,
        lambda x, half, wide: half / x,
        lambda x, half, wide: half / 2j,
        lambda x, half, wide: x**2,
        lambda x, half, wide: half**2j,
        lambda x, half, wide: 2j**half,
        lambda x, half, wide: half.sum(dtype=torch.complex32),
        lambda x, half, wide: x.sum(dtype=torch.complex64),
        lambda x, half, wide: x.angle(),
        lambda x, half, wide: torch.logaddexp(x, x),
    ):
        expected = call(x.to("meta"), half.to("meta"), wide.to("meta"))
        assert call(x, half, wide).dtype == expected.dtype


def test_writes_to_views_and_resizes():
    x, base = complex32(4, 3), torch.zeros(6, 8, dtype=torch.complex32, device=DEVICE)
    view = base.T[::2, 1:4]
    assert torch.exp(x, out=view) is view
    assert torch.equal(view, torch.exp(x)) and base.abs().bool().sum().item() == 12
    resized = torch.empty(0, dtype=torch.complex32, device=DEVICE)
    assert torch.equal(torch.exp(x.T, out=resized), torch.exp(x.T)) and resized.stride() == torch.exp(x.T).stride()
    expected = torch.exp(x)
    assert torch.exp(x, out=x) is x and torch.equal(x, expected)
    counted = device([1, 1, 1, 5])
    with pytest.warns(UserWarning, match="output with one or more elements was resized"):
        assert torch.histc(counted, 2, out=counted).tolist() == [3, 1]


# ---- what CUDA refuses is refused ----


def test_refusals():
    half = torch.randn(6, dtype=torch.float16, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"fft_rfft: expected signal sizes that are powers of two .* got \[6\]"):
        torch.fft.rfft(half)
    with pytest.raises(RuntimeError, match=r"_fft_c2c: expected signal sizes that are powers of two"):
        torch.fft.fft(complex32(6))
    assert torch.fft.rfft(half, n=8).shape == (5,) and torch.fft.irfft(half[:5]).shape == (8,)
    with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
        torch.nn.functional.avg_pool3d(torch.ones(1, 2, 2, 2, dtype=torch.int32, device=DEVICE), 2)
    with pytest.raises(NotImplementedError, match="'Half'"):  # weight is of another dtype
        target = device([0, 1, 2])
        torch.nn.functional.multi_margin_loss(half.view(3, 2), target, weight=torch.ones(2, device=DEVICE))
    with pytest.raises(NotImplementedError, match="'Bool'"):
        torch.histc(device([True]))
    with pytest.raises(RuntimeError, match="histc: expected bins to be positive, but got bins=0"):
        torch.histc(device([1]), bins=0)
    with pytest.raises(RuntimeError, match="histc: expected out of dtype Int"):
        torch.histc(device([1], torch.int32), out=torch.empty(0, device=DEVICE))
    x = complex32(16)
    with pytest.raises(RuntimeError, match="refers? to a single memory location"):
        torch.exp(x[:8], out=x[4:12])
    with pytest.raises(RuntimeError, match="refers? to a single memory location"):
        torch.exp(x[:4], out=x[:1].expand(4))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.fft.fft(half[:4].requires_grad_(), out=complex32(0))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.fft.fft(half[:4].detach(), out=complex32(0).requires_grad_())
    with pytest.raises(RuntimeError, match="fft_fft: Expected all tensors to be on the same device, but out is on cpu"):
        torch.fft.fft(half[:4].detach(), out=torch.empty(0, dtype=torch.complex32))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype .*BFloat16, but got float"):
        torch.ops.aten.avg_pool3d.out(
            torch.ones(1, 2, 2, 2, device=DEVICE).bfloat16(), 2, out=half.new_empty(0).float()
        )
    with pytest.raises(RuntimeError, match="result type ComplexHalf can't be cast to the desired output type Half"):
        half.detach().div_(1j)
    half = half.detach()
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.fft.rfft(half[:4], out=torch.empty(0, dtype=torch.float16, device=DEVICE))


# ---- softmax of float16 to float32 ----


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_of_half_to_float(name, mode):
    op, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward_data")
    for x in (torch.randn(4, 5).half(), torch.randn(5, 4).half().t(), torch.randn(0, 5).half(), torch.randn(()).half()):
        expected, there = op(x.float(), -1, False), x.to(DEVICE)
        y = op(there, -1, True)
        assert y.dtype == torch.float32 and torch.equal(y.cpu(), expected)
        for out in (torch.empty(0, device=DEVICE), torch.empty(x.shape[::-1], device=DEVICE).t()):
            assert torch.equal(op.out(there, -1, True, out=out).cpu(), expected)
        dy = torch.randn(x.shape)
        dx = backward(dy, expected, -1, torch.float32).half()
        assert torch.equal(backward(dy.to(DEVICE), y, -1, torch.float16).cpu(), dx)
        out = torch.empty(x.shape[::-1], dtype=torch.float16, device=DEVICE).t()
        key = "grad_input" if name == "_softmax" else "out"
        assert torch.equal(backward.out(dy.to(DEVICE), y, -1, torch.float16, **{key: out}).cpu(), dx)
        with pytest.raises(RuntimeError, match="conversion is supported for Half type only"):
            op(there.bfloat16(), -1, True)
        with pytest.raises(RuntimeError, match="conversion is supported for Half type only"):
            op.out(there.float(), -1, True, out=torch.empty(0, device=DEVICE))
        with pytest.raises(RuntimeError, match="expected out of Half"):
            backward.out(dy.to(DEVICE), y, -1, torch.float16, **{key: torch.empty(0, device=DEVICE)})


# ---- transforms ----


def test_under_transforms():
    x, c = torch.randn(4, 8, dtype=torch.float16).to(DEVICE), complex32(4, 8)
    assert torch.equal(torch.vmap(torch.fft.rfft)(x), torch.fft.rfft(x))
    assert torch.equal(torch.vmap(torch.exp)(c), torch.exp(c))
    volume = torch.randn(3, 2, 4, 4, 4, dtype=torch.float16).to(DEVICE)
    pool = torch.nn.functional.avg_pool3d
    assert torch.equal(torch.vmap(lambda v: pool(v, 2))(volume), pool(volume, 2))
    gradient = torch.func.grad(lambda x: torch.fft.rfft(x).abs().sum())(x)
    assert gradient.dtype == torch.float16 and gradient.shape == x.shape
    per_sample = torch.vmap(torch.func.grad(lambda x: torch.fft.rfft(x).abs().sum()))(x)
    assert_close(per_sample, gradient)
    _, tangent = torch.func.jvp(torch.fft.rfft, (x,), (x,))
    assert_close(tangent, torch.fft.rfft(x))


@pytest.mark.parametrize("name", ["fft", "ifft2", "irfft2", "rfftn", "hfft"])
def test_half_transforms_over_a_dimension_that_is_missing(name):
    dim = 2 if name in ("fft", "hfft") else [0, 2]
    with pytest.raises(IndexError, match="Dimension out of range"):
        getattr(torch.fft, name)(torch.ones(2, 3, dtype=torch.half, device="openreg"), dim=dim)
