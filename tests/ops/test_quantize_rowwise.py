"""quantize_rowwise and dequantize_rowwise."""

import math

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.testing import assert_close

from openreg_ops import dequantize_rowwise, quantize_rowwise

OP = torch.ops.openreg.quantize_rowwise.default
DEQUANTIZE = torch.ops.openreg.dequantize_rowwise.default
SHAPES = [(1,), (1, 1), (5, 123), (0, 4), (2, 0, 3), (2, 3, 64), (40, 17), (2, 5000), (7, 200)]


def reference(x):
    """Element by element, in Python."""
    if x.dim() > 1:
        parts = [reference(row) for row in x]
        return tuple(torch.stack(rows) for rows in zip(*parts, strict=True))
    values = x.tolist()
    scale = torch.tensor(max(map(abs, values), default=0.0), dtype=x.dtype).div(127).float()
    step = scale.to(x.dtype)
    q = [max(-127, min(127, round((v / step).item()))) if step else 0 for v in x]
    return torch.tensor(q, dtype=torch.int8), scale


def test_by_hand():  # the largest, 12.7, is 127 steps of 0.1
    q, scale = quantize_rowwise(kit.tensor([[12.7, -1.0, 0.04, 0.0], [-127.0, 2.5, 3.5, 0.5]]))
    assert q.tolist() == [[127, -10, 0, 0], [-127, 2, 4, 0]]  # halves go to the even neighbour
    assert_close(scale.cpu(), torch.tensor([0.1, 1.0]))
    assert_close(dequantize_rowwise(q, scale)[0].cpu(), torch.tensor([12.7, -1.0, 0.0, 0.0]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x = random(*shape, dtype=dtype)
    q, scale = quantize_rowwise(x)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert q.shape == shape and scale.shape == shape[:-1]
    if x.numel():
        wide = x.cpu().to(torch.float64 if dtype == torch.float64 else torch.float32)
        expected_q, expected_scale = reference(wide)
        assert torch.equal(q.cpu(), expected_q) and torch.equal(scale.cpu(), expected_scale)
    for to in (None, *FLOATS):
        y = dequantize_rowwise(q, scale, dtype=to)
        assert y.dtype == to or (to is None and y.dtype == torch.float32)
        exact = q.cpu().double() * scale.cpu().double().unsqueeze(-1)
        assert_close(y.cpu().double(), exact, **kit.TOLERANCE[to or torch.float32])
    away = (dequantize_rowwise(q, scale, dtype=torch.float64) - x.double()).abs()
    assert (away <= scale.double().unsqueeze(-1) * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_number_of_steps(dtype):
    """-127 to 127 come back as they are: nothing saturates early or wraps."""
    steps = torch.arange(-127, 128).to(dtype)
    q, scale = quantize_rowwise(steps.to(DEVICE))
    assert q.tolist() == list(range(-127, 128)) and scale.item() == 1
    every = torch.arange(-128, 128).to(torch.int8).to(DEVICE)
    assert dequantize_rowwise(every, kit.tensor(0.5)).tolist() == [n / 2 for n in range(-128, 128)]


@pytest.mark.parametrize("width", [3, 64, 77])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_rows_and_bad_numbers(dtype, width):
    """A zero row comes back exactly; a row with a NaN or an infinity comes back NaN; the others are as if alone."""
    x = random(6, width, dtype=dtype)
    x[1] = 0
    for row, bad in ((2, math.nan), (3, math.inf), (4, -math.inf)):
        x[row, row % width] = bad
    q, scale = quantize_rowwise(x)
    assert scale[1:5].tolist()[0] == 0 and scale[2].isnan() and scale[3:5].tolist() == [math.inf] * 2
    assert not q[1:5].any()
    y = dequantize_rowwise(q, scale)
    assert not y[1].any() and y[2:5].isnan().all()
    for row in (0, 5):
        alone = quantize_rowwise(x[row])
        assert torch.equal(q[row], alone[0]) and torch.equal(scale[row], alone[1])
    x[4, 1], x[4, 2] = math.inf, math.nan
    assert quantize_rowwise(x)[1][4].isnan()


def test_rows_below_and_above_the_range_of_scale():
    tiny = kit.tensor([[1e-45, -1e-45, 0.0], [1e-43, 3e-44, -1e-43]])
    q, scale = quantize_rowwise(tiny)
    assert scale[0] == 0 and not q[0].any()
    assert scale[1] > 0 and q[1].abs().max() <= 127 and q[1, 0] == -q[1, 2] > 0
    q, scale = quantize_rowwise(kit.tensor([1e300, 1.0], dtype=torch.float64))
    assert scale.item() == math.inf and not q.any()


@pytest.mark.slow
def test_other_devices():
    """The reference is the kernel bit for bit, bad numbers included."""
    for dtype in FLOATS:
        x = random(6, 100, dtype=dtype)
        x[1], x[2, 3], x[3, 4] = 0, math.nan, math.inf
        kit.check_other_devices(quantize_rowwise, x, grads=False)
        q, scale = quantize_rowwise(x)
        on_cpu = quantize_rowwise(x.cpu())
        assert torch.equal(on_cpu[0], q.cpu()) and torch.equal(on_cpu[1].nan_to_num(1), scale.cpu().nan_to_num(1))
        kit.check_other_devices(lambda q, s, to=dtype: dequantize_rowwise(q, s, dtype=to), q, scale, grads=False)
    assert quantize_rowwise(torch.zeros(3, 0))[1].tolist() == [0.0] * 3


def test_rejects():
    x = random(2, 3)
    q, scale = quantize_rowwise(x)
    kit.check_error(OP, x.long(), match="quantize_rowwise: expected x of float32, float64, float16 or bfloat16, but go")
    kit.check_error(OP, random(), match="quantize_rowwise: expected x of at least one dimension, but got a scalar")
    kit.check_error(DEQUANTIZE, x, scale, match="dequantize_rowwise: expected q of int8, but got float32; make it with")
    kit.check_error(DEQUANTIZE, q[0, 0], scale, match="dequantize_rowwise: expected q of at least one dimension")
    kit.check_error(DEQUANTIZE, q, scale[0], match="expected scale of shape [2], the same as q without its last dimens")
    sentence = "dequantize_rowwise: expected dtype to be float32, float64, float16 or bfloat16, but got int64; convert"
    kit.check_error(lambda q, s: DEQUANTIZE(q, s, dtype=torch.int64), q, scale, match=sentence)


@pytest.mark.parametrize("where", [DEVICE, "cpu", "meta"])
@pytest.mark.parametrize("number", [-1, 127])
def test_refuses_a_number_that_is_no_dtype(where, number):
    """PyTorch takes any number of a byte for a dtype here."""
    q, scale = torch.zeros(2, 3, dtype=torch.int8, device=where), torch.ones(2, device=where)
    with pytest.raises(RuntimeError, match=f"expected dtype to be float32.* but got {number}, which is not a dtype"):
        torch.ops.openreg.dequantize_rowwise(q, scale, dtype=number)
