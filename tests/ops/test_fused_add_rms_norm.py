"""fused_add_rms_norm and fused_add_rms_norm_backward."""

import kit
import pytest
import torch
from kit import FLOATS, random
from torch.testing import assert_close

from openreg_ops import fused_add_rms_norm

OP = torch.ops.openreg.fused_add_rms_norm.default
BACKWARD = torch.ops.openreg.fused_add_rms_norm_backward.default


def reference(x, residual, weight, eps=1e-6):
    s = x + residual
    return s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, s


def test_by_hand():  # 1 + 2 = 3 and 5 - 1 = 4, whose mean square is 12.5
    y, total = fused_add_rms_norm(kit.tensor([1.0, 5.0]), kit.tensor([2.0, -1.0]), kit.tensor([1.0, 10.0]), eps=0.0)
    assert total.tolist() == [3.0, 4.0]
    assert_close(y.cpu(), torch.tensor([0.8485, 11.3137]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (5, 123), (0, 4), (4, 0), (2, 0, 3), (2, 3, 64), (40, 17), (2, 5000)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x, residual, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    kit.check_against(fused_add_rms_norm, reference, x, residual, weight, 1e-5, scale=4)
    y, total = fused_add_rms_norm(x, residual, weight)
    assert y.dtype == total.dtype == dtype
    assert torch.equal(total, x + residual)


def test_gradients_through_one_output():
    """Through y alone the backward gets no grad_sum; through sum alone it is not called."""
    x, residual, weight = random(4, 9), random(4, 9), random(9)
    kit.check_against(lambda *a: fused_add_rms_norm(*a)[0], lambda *a: reference(*a)[0], x, residual, weight, scale=2)
    for tensor in (x, residual, weight):
        tensor.requires_grad_()
    grad = random(4, 9)
    fused_add_rms_norm(x, residual, weight)[1].backward(grad)
    assert torch.equal(x.grad, grad) and torch.equal(residual.grad, grad) and weight.grad is None


def test_the_two_gradients_do_not_share_memory():
    """x and residual have one gradient, of which each leaf keeps its own copy."""
    x, residual, weight = random(3, 8, grad=True), random(3, 8, grad=True), random(8)
    fused_add_rms_norm(x, residual, weight)[0].sum().backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before) and before.any()


def test_rejects():
    x, weight = random(2, 3), random(3)
    name = "fused_add_rms_norm"
    kit.check_error(OP, x, x, random(4), match=name + ": expected weight of shape [3], the last dimension of x, but")
    kit.check_error(OP, x.long(), x, weight, match="of float32, float64, float16 or bfloat16, but got int64")
    kit.check_error(OP, random(), x, weight, match="expected x of at least one dimension")
    kit.check_error(OP, x, random(3), weight, match="expected residual of shape [2, 3], the same as x, but got [3]")
    name += "_backward"
    kit.check_error(BACKWARD, x, x, random(), weight, 1e-6, match=name + ": expected sum of at least one dimension")
    kit.check_error(BACKWARD, x, x, x, random(4), 1e-6, match="expected weight of shape [3], the last dimension of sum")
    kit.check_error(BACKWARD, random(3, 2), x, x, weight, 1e-06, match="expected grad_y of shape [2, 3], the same as s")
    kit.check_error(BACKWARD, x, random(2), x, weight, 1e-6, match="expected grad_sum of shape [2, 3], the same as sum")
