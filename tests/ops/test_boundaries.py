"""Each operator at its boundaries, by the device's kernels and by the plain references that the CPU runs.

Expected values are written down, or computed in plain Python. The operators' own files have what is particular to them.
"""

import math

import pytest
import torch
from kit import NAME
from torch.testing import assert_close

import openreg_ops as ops

INF, NAN = math.inf, math.nan
HALF = (torch.float16, torch.bfloat16)
TINY = 2.0**-149  # the smallest positive float32


@pytest.fixture(params=["cpu", NAME])
def device(request):
    return request.param


def tensor(values, device, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


def same(actual, expected, **tolerance):
    """Equal, NaN and the sign of zero included, unless a tolerance is given."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    assert_close(actual.cpu(), expected, equal_nan=True, **(tolerance or dict(rtol=0, atol=0)))
    if not tolerance and actual.is_floating_point():
        assert actual.cpu().nan_to_num().signbit().tolist() == expected.nan_to_num().signbit().tolist()


def test_rms_norm(device):
    x, weight = tensor([[0.0, 0.0], [3.0, -4.0], [TINY, -TINY], [INF, 1.0]], device), tensor([1.0, 2.0], device)
    y, rstd = ops.rms_norm(x, weight, 0.0)
    same(rstd, [INF, 12.5**-0.5, INF, 0.0], rtol=1e-6, atol=0)
    same(y[1:3], [[3 * 12.5**-0.5, -8 * 12.5**-0.5], [INF, -INF]], rtol=1e-6, atol=0)
    assert y[0].isnan().all() and y[3, 0].isnan() and y[3, 1] == 0
    y, rstd = ops.rms_norm(x[:1], weight, 0.25)
    same(rstd, [2.0])
    same(y, [[0.0, 0.0]])
    for dtype in HALF:  # computed in float32: the square of 300 is out of float16's range
        y, rstd = ops.rms_norm(tensor([[300.0, 300.0]], device, dtype), tensor([1.0, 1.0], device, dtype), 0.0)
        assert rstd.dtype == torch.float32 and y.tolist() == [[1.0, 1.0]]
        same(rstd, [1 / 300], rtol=1e-6, atol=0)
    y, rstd = ops.rms_norm(torch.empty(0, 3, device=device), torch.ones(3, device=device))
    assert y.shape == (0, 3) and rstd.shape == (0,)


def test_fused_add_rms_norm(device):
    """The sum is rounded to the half type before it is normalized."""
    for dtype, small in ((torch.float16, 2.0**-12), (torch.bfloat16, 2.0**-9)):
        x, residual = tensor([[1.0, 1.0]], device, dtype), tensor([[small, -4.0]], device, dtype)
        y, total = ops.fused_add_rms_norm(x, residual, tensor([1.0, 1.0], device, dtype), 0.0)[:2]
        assert total.dtype == dtype and total.tolist() == [[1.0, -3.0]]
        assert_close(y.cpu(), (torch.tensor([[1.0, -3.0]]) * 5**-0.5).to(dtype))


def test_swiglu(device):
    x = tensor([-INF, -80.0, -0.0, 0.0, 80.0, INF, NAN], device)
    got = ops.swiglu(x, torch.full_like(x, 2.0))
    same(got[1:6], [-80 * math.exp(-80) * 2, -0.0, 0.0, 160.0, INF], rtol=1e-4, atol=0)
    assert got[2].signbit() and not got[3].signbit() and got[6].isnan()
    gate = tensor([20.0, -20.0, 1e4, -1e4], device, torch.float16).requires_grad_()
    ops.swiglu(gate, torch.full_like(gate, 3000.0)).sum().backward()
    same(gate.grad, [3000.0, 3000 * (math.exp(-20) * (1 - 20)), 3000.0, 0.0], rtol=1e-2, atol=1e-4)


def test_custom_abs(device):
    x = tensor([-0.0, 0.0, -INF, -TINY, NAN, -1.5], device)
    same(ops.custom_abs(x), [0.0, 0.0, INF, TINY, NAN, 1.5])


def test_quantize_rowwise(device):
    """Halves go to the even step; the range is symmetric; a row of zeros, infinities or numbers too small has q 0."""
    x = [[127.0, 0.5, 1.5, -2.5], [-254.0, 1.0, 3.0, 254.0], [0.0] * 4, [INF, 1.0, -1.0, 0.0], [TINY, 0, -TINY, 0]]
    q, scale = ops.quantize_rowwise(tensor(x, device))
    assert q.dtype == torch.int8
    assert q.tolist() == [[127, 0, 2, -2], [-127, 0, 2, 127], [0] * 4, [0] * 4, [0] * 4]
    same(scale, [1.0, 2.0, 0.0, INF, 0.0])
    q, scale = ops.quantize_rowwise(tensor([[NAN, 1.0], [1.0, NAN]], device))
    assert scale.isnan().all() and not q.any()
    smallest = 127 * TINY
    q, scale = ops.quantize_rowwise(tensor([[smallest, -smallest, TINY]], device))
    assert q.tolist() == [[127, -127, 1]] and scale.item() == TINY
    coarse = tensor([[190 * TINY, -190 * TINY]], device)  # whose step is rounded down, by a third
    assert ops.quantize_rowwise(coarse)[0].tolist() == [[127, -127]]
    q, scale = ops.quantize_rowwise(torch.empty(2, 0, device=device))
    assert q.shape == (2, 0) and scale.tolist() == [0.0, 0.0]
    for dtype in HALF:
        q, scale = ops.quantize_rowwise(tensor([[1.0, -0.25]], device, dtype))
        assert q.tolist() == [[127, -32]] and scale.dtype == torch.float32
        same(scale, [1 / 127], rtol=1e-7, atol=0)


def test_dequantize_rowwise(device):
    q = tensor([[127, -127, 0], [1, 2, -3]], device, torch.int8)
    scale = tensor([INF, TINY], device)
    got = ops.dequantize_rowwise(q, scale)
    same(got, [[INF, -INF, NAN], [TINY, 2 * TINY, -3 * TINY]])
    for dtype in (*HALF, torch.float64):  # the product is rounded once
        got = ops.dequantize_rowwise(q[1:], tensor([0.3], device), dtype=dtype)
        wide = [torch.tensor(0.3, dtype=torch.float32).double() * n for n in (1, 2, -3)]
        wide = torch.stack(wide) if dtype == torch.float64 else torch.stack(wide).float()
        assert got.dtype == dtype and got.cpu().tolist() == [wide.to(dtype).tolist()]


def test_int8_linear(device):
    """Sums of extremes are exact, a row of zeros gives the bias, an infinity gives NaN."""
    x = tensor([[127.0] * 300, [0.0] * 300, [INF] + [1.0] * 299], device)
    weight = torch.full((1, 300), -127, dtype=torch.int8, device=device)
    y = ops.int8_linear(x, weight, tensor([1.0], device), tensor([0.5], device))
    same(y, [[-127.0 * 127 * 300 + 0.5], [0.5], [NAN]])
    y = ops.int8_linear(torch.empty(2, 0, device=device), weight[:, :0], tensor([1.0], device))
    assert y.tolist() == [[0.0], [0.0]]


def fake_quantized(x, scale, zero, low, high):
    t = x / scale
    whole = math.copysign(1.0, t) * INF if math.isinf(t) else round(t)
    return scale * min(max(whole, low - zero), high - zero), low - zero <= whole <= high - zero


@pytest.mark.parametrize("zero", [-3, 0, 2])
def test_fake_quantize(device, zero):
    """Halves go to even; a gradient passes up to where rounding still lands in the range."""
    low, high, scale = -4, 3, 0.5
    edges = [scale * (end - zero) for end in (low, high)]
    values = [end + scale * d for end in edges for d in (-1.0, -0.5078125, -0.5, -0.4921875, 0.0, 0.4921875, 0.5, 0.75)]
    x = tensor([*values, INF, -INF], device).requires_grad_()
    y = ops.fake_quantize(x, tensor(scale, device), tensor(zero, device, torch.int32), low, high)
    y.sum().backward()
    expected = [fake_quantized(v, scale, zero, low, high) for v in x.tolist()]
    same(y.detach(), [value for value, _ in expected], rtol=0, atol=1e-30)
    assert x.grad.tolist() == [float(inside) for _, inside in expected]


def row_loss(x, t, ignore, smoothing, z):
    lse = math.log(sum(math.exp(v - max(x)) for v in x)) + max(x)
    if t == ignore:
        return 0.0, lse
    return lse - (1 - smoothing) * x[t] - smoothing * sum(x) / len(x) + z * lse**2, lse


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.25, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("ignore", [-100, 0, 2])
def test_cross_entropy(device, reduction, smoothing, z, ignore):
    """An ignore_index that is a class; the largest logits; a target of int32."""
    x = [[1.0, 2.0, 3.0], [8192.0, -8192.0, 0.0], [0.0, 0.0, 0.0], [-24576.0, -24576.0, -24576.0], [5.0, 5.0, 6.0]]
    target = [2, 0, 1, 0, ignore]
    rows = [row_loss(row, t, ignore, smoothing, z) for row, t in zip(x, target, strict=True)]
    loss = [value for value, _ in rows]
    count = sum(t != ignore for t in target)
    expected = {"mean": sum(loss) / count, "sum": sum(loss), "none": loss}[reduction]
    options = dict(ignore_index=ignore, label_smoothing=smoothing, z_loss=z, reduction=reduction)
    for dtype, index in ((torch.float64, torch.int64), (torch.float32, torch.int32), (torch.bfloat16, torch.int64)):
        got, lse = ops.cross_entropy(tensor(x, device, dtype), tensor(target, device, index), **options)
        near = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=2e-3, atol=1e-3)
        same(got, expected, **near)
        same(lse, [logsumexp for _, logsumexp in rows], **near)


def test_cross_entropy_of_little(device):
    """One class; no rows; ignored rows alone; a class of probability 0."""
    one = tensor([[5.0], [-5.0]], device).requires_grad_()
    loss, lse = ops.cross_entropy(one, tensor([0, 0], device, torch.int64), reduction="none")
    assert loss.tolist() == [0.0, 0.0] and lse.tolist() == [5.0, -5.0]
    (grad,) = torch.autograd.grad(loss.sum(), one)
    assert grad.tolist() == [[0.0], [0.0]]
    for x, target in (
        (torch.empty(0, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)),
        (torch.ones(2, 3, device=device), torch.full((2,), -100, device=device)),
    ):
        x.requires_grad_()
        loss, _ = ops.cross_entropy(x, target)
        assert loss.isnan()
        loss.backward()
        assert x.grad.count_nonzero() == 0 and not x.grad.isnan().any()
        assert ops.cross_entropy(x, target, reduction="sum")[0] == 0
    for rows in (1, 2):  # of which one counts
        x, target = torch.zeros(rows, 4, device=device), torch.full((rows,), -100, device=device)
        target[0] = 1
        grad = ops.cross_entropy_backward(tensor(2.0, device), None, x, target, x.logsumexp(-1))
        same(grad, [[0.5, -1.5, 0.5, 0.5], [0.0] * 4][:rows], rtol=1e-6, atol=1e-6)
    x = tensor([[0.0, -INF]], device)
    assert ops.cross_entropy(x, tensor([0], device, torch.int64))[0] == 0
    assert ops.cross_entropy(x, tensor([1], device, torch.int64))[0] == INF


def test_dropout_add(device):
    x, residual = tensor([INF, -1.0, NAN], device), tensor([1.0, 2.0, 3.0], device)
    out, mask = ops.dropout_add(x, residual, 0.0)
    same(out, [INF, 1.0, NAN])
    assert mask.all()
    out, mask = ops.dropout_add(tensor([5.0, -1.0], device), residual[:2], 1.0)
    same(out, [1.0, 2.0])
    assert not mask.any()
