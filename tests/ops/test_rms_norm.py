"""rms_norm and rms_norm_backward."""

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.testing import assert_close

from openreg_ops import rms_norm

OP = torch.ops.openreg.rms_norm.default
BACKWARD = torch.ops.openreg.rms_norm_backward.default


def reference(x, weight, eps=1e-6):
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd.unsqueeze(-1) * weight, rstd


def test_by_hand():  # the mean square of 3, 4 is 12.5
    y, rstd = rms_norm(kit.tensor([3.0, 4.0]), kit.tensor([1.0, 10.0]), eps=0.0)
    assert_close(y.cpu(), torch.tensor([0.8485, 11.3137]), atol=1e-4, rtol=0)
    assert_close(rstd.cpu(), torch.tensor(0.2828), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (5, 123), (0, 4), (4, 0), (2, 0, 3), (2, 3, 64), (40, 17), (2, 5000)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    kit.check_against(rms_norm, reference, x, weight, 1e-5, scale=4)
    y, rstd = rms_norm(x, weight)
    assert y.dtype == dtype and rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_long_rows_stay_accurate():
    x = random(1, 3_000_000).abs() + 1
    exact = reference(x.cpu().double(), torch.ones((), dtype=torch.float64))[1]
    assert_close(rms_norm(x, torch.ones(3_000_000, device=DEVICE))[1].cpu().double(), exact, rtol=1e-7, atol=0)


def test_rejects():
    x, weight, rstd = random(2, 3), random(3), random(2)
    kit.check_error(OP, x, random(4), match="rms_norm: expected weight of shape [3], the last dimension of x, but got")
    kit.check_error(OP, x, random(1, 3), match="but got [1, 3]")
    kit.check_error(OP, x.long(), weight, match="of float32, float64, float16 or bfloat16, but got int64")
    kit.check_error(OP, random(), weight, match="rms_norm: expected x of at least one dimension")
    kit.check_error(BACKWARD, random(3, 2), x, weight, rstd, match="rms_norm_backward: expected grad_y of shape [2, 3]")
    kit.check_error(BACKWARD, x, x, weight, random(3), match="expected rstd of shape [2], the same as x without its la")
    kit.check_error(BACKWARD, x, x, weight, rstd.double(), match="expected rstd of float32")
