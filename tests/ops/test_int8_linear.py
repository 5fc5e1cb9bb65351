"""int8_linear."""

import math

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, NAME, random
from torch.testing import assert_close

from openreg_ops import int8_linear, quantize_rowwise

OP = torch.ops.openreg.int8_linear.default


def weight(rows, columns, device=DEVICE):
    return quantize_rowwise(random(rows, columns, device=device))


def reference(x, weight_q, weight_scale, bias=None):
    """In float64, from x as it is quantized."""
    q, scale = (tensor.cpu().double() for tensor in quantize_rowwise(x))
    y = (q @ weight_q.cpu().double().mT) * scale.unsqueeze(-1) * weight_scale.cpu().double()
    return y if bias is None else y + bias.cpu().double()


def test_by_hand():  # x is 127 and 64 steps of 1, the weight 127 and -127 steps of 2
    weight_q = kit.tensor([[127, -127], [1, 0]], dtype=torch.int8)
    y = int8_linear(kit.tensor([127.0, 64.2]), weight_q, kit.tensor([2.0, 1.0]), kit.tensor([1.0, 10.0]))
    assert y.tolist() == [127 * (127 - 64) * 2 + 1, 137]


@pytest.mark.parametrize(
    "shape", [(1,), (123,), (1, 7), (5, 123), (0, 4), (2, 0, 3), (2, 3, 64), (40, 17), (2, 3000)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x = random(*shape, dtype=dtype)
    for rows in (1, 5, 64, 131):
        weight_q, weight_scale = weight(rows, shape[-1])
        for bias in (None, random(rows, dtype=dtype), random(rows)):
            y = int8_linear(x, weight_q, weight_scale, bias)
            assert y.dtype == dtype and y.shape == (*shape[:-1], rows)
            expected = reference(x, weight_q, weight_scale, bias) if x.numel() else torch.empty(*shape[:-1], rows)
            tolerance = {name: 4 * value for name, value in kit.TOLERANCE[dtype].items()}
            assert_close(y.cpu().double(), expected.double(), **tolerance)


def test_is_near_the_float_layer():
    x, full, bias = random(200, 512), random(300, 512), random(300)
    exact = torch.nn.functional.linear(x, full, bias)
    y = int8_linear(x, *quantize_rowwise(full), bias)
    assert (y - exact).norm() / exact.norm() < 0.015


def test_sums_are_exact():
    """The largest sum there can be, 132104 products of 127 and -128, which float32 would round."""
    columns = 132104
    x = torch.full((1, columns), 127.0, device=DEVICE)
    x[0, 1] = 126
    weight_q = torch.full((1, columns), -128, dtype=torch.int8, device=DEVICE)
    y = int8_linear(x.double(), weight_q, torch.ones(1, device=DEVICE))
    assert y.item() == -128 * (127 * columns - 1)


def test_without_columns_rows_or_outputs():
    assert int8_linear(random(3, 0), *weight(4, 0), random(4).fill_(2)).tolist() == [[2.0] * 4] * 3
    assert int8_linear(random(3, 5), *weight(0, 5)).shape == (3, 0)
    assert int8_linear(random(0, 5), *weight(4, 5)).shape == (0, 4)


def test_bad_numbers_stay_in_their_row():
    x = random(5, 20)
    x[1, 3], x[2, 4], x[3] = math.nan, -math.inf, 0
    bias = random(7)
    y = int8_linear(x, *weight(7, 20), bias)
    assert y[1:3].isnan().all() and not y[[0, 3, 4]].isnan().any()
    assert torch.equal(y[3], bias)


@pytest.mark.parametrize("device_type", [NAME, "cpu"])
def test_autocast_leaves_the_dtype_alone(device_type):
    """x keeps its dtype. Scales and bias may have any."""
    x, (weight_q, scale) = random(3, 8, device=device_type), weight(5, 8, device=device_type)
    bias, scale = random(5, device=device_type).bfloat16(), scale.bfloat16()
    with torch.autocast(device_type, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            expected = int8_linear(x.to(dtype), weight_q, scale.float(), bias.float())
            assert expected.dtype == dtype
            assert torch.equal(int8_linear(x.to(dtype), weight_q, scale.float(), bias), expected)
            assert torch.equal(int8_linear(x.to(dtype), weight_q, scale, bias.float()), expected)


def test_rejects():
    x, (weight_q, scale), bias = random(2, 3), weight(4, 3), random(4)
    kit.check_error(OP, x.long(), weight_q, scale, match="int8_linear: expected x of float32, float64, float16 or bflo")
    kit.check_error(OP, random(), weight_q, scale, match="int8_linear: expected x of at least one dimension, but got a")
    kit.check_error(OP, x, weight_q.int(), scale, match="expected weight_q of int8, but got int32; make it with quanti")
    kit.check_error(OP, x, weight_q.mT, scale, match="expected weight_q of shape [N, 3], with the last dimension of x,")
    kit.check_error(OP, x, weight_q[0], scale, match="expected weight_q of shape [N, 3]")
    wide = torch.zeros(1, 132105, device=DEVICE)
    kit.check_error(OP, wide, wide.to(torch.int8), scale[:1], match="expected at most 132104 columns, but got 132105,")
    kit.check_error(OP, x, weight_q, scale[:3], match="expected weight_scale of shape [4], the rows of weight_q, but g")
    kit.check_error(OP, x, weight_q, scale, bias[:1], match="expected bias of shape [4], the rows of weight_q, but got")
