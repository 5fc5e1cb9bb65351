"""fused_add_rms_norm and fused_add_rms_norm_backward."""

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, LAYOUTS, random
from torch.testing import assert_close

from openreg_ops import fused_add_rms_norm, fused_add_rms_norm_backward

OP = torch.ops.openreg.fused_add_rms_norm.default
BACKWARD = torch.ops.openreg.fused_add_rms_norm_backward.default


def reference(x, residual, weight, eps=1e-6):
    s = x + residual
    return s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, s


def reference_backward(grad_y, grad_sum, s, weight, eps):
    rstd, g = (s.square().mean(-1, keepdim=True) + eps).rsqrt(), grad_y * weight
    grad_x = grad_sum + rstd * g - rstd**3 * (g * s).mean(-1, keepdim=True) * s
    return grad_x, (grad_y * s * rstd).sum_to_size(weight.shape)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    change = LAYOUTS[layout]
    x, residual, weight = change(random(6, 5, 12)), change(random(6, 5, 12)), change(random(12))
    kit.check_against(fused_add_rms_norm, reference, x, residual, weight, scale=2)


def test_backward_operator_matches_reference():
    inputs = random(6, 5, 33), random(6, 5, 33), random(6, 5, 33), random(33), 1e-3
    kit.check_against(fused_add_rms_norm_backward, reference_backward, *inputs, scale=10)


def test_gradients_through_one_output():
    """Through y alone the backward gets no grad_sum; through sum alone it is not called."""
    x, residual, weight = random(4, 9), random(4, 9), random(9)
    kit.check_against(lambda *a: fused_add_rms_norm(*a)[0], lambda *a: reference(*a)[0], x, residual, weight, scale=2)
    for each in (x, residual, weight):
        each.requires_grad_()
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_second_derivative_of_half_types(dtype):
    """gradgradcheck is for float64; here the half types' second derivative meets the reference's."""

    def penalty(function):
        def of(x, residual, weight):
            y, s = function(x, residual, weight)
            return torch.autograd.grad((y * y).sum() + s.sum(), [x, residual, weight], create_graph=True)

        return of

    # Both addends have few bits, so that the sum is exact and the reference sees the same one.
    x, residual = ((random(3, 40) * 8).round().div(8).to(dtype) for _ in range(2))
    kit.check_against(penalty(fused_add_rms_norm), penalty(reference), x, residual, random(40, dtype=dtype), scale=4)


def test_half_types_accumulate_in_float32():
    """A float16 sum of 300**2 overflows; a bfloat16 one of 4096 ones stops at 256."""
    x, residual, weight = (torch.full((64,), value, dtype=torch.float16, device=DEVICE) for value in (200, 100, 1))
    assert_close(fused_add_rms_norm(x, residual, weight)[0].cpu(), torch.ones(64, dtype=torch.float16))
    x = torch.ones(4096, 3, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(3, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    fused_add_rms_norm(x, torch.zeros_like(x), weight)[0].sum().backward()
    assert weight.grad.tolist() == [4096.0] * 3


def test_gradients_do_not_depend_on_threads():
    inputs = random(1000, 64), random(1000, 64), random(1000, 64), random(64), 1e-6
    results = kit.with_threads(lambda: fused_add_rms_norm_backward(*inputs))
    for grad_x, grad_weight in results[1:]:
        assert torch.equal(grad_x, results[0][0]) and torch.equal(grad_weight, results[0][1])


def test_derivatives_through_one_output():
    f64 = dict(dtype=torch.float64, grad=True)
    x, residual, weight = random(3, 5, **f64), random(3, 5, **f64), random(5, **f64)
    kit.check_gradients(lambda *inputs: fused_add_rms_norm(*inputs)[0], x, residual, weight)


def test_exported():
    program = kit.check_exported(fused_add_rms_norm, random(4, 10), random(4, 10), random(10))
    assert any(node.target is OP for node in program.graph.nodes)


@pytest.mark.parametrize("device_type", ["openreg", "cpu"])
def test_autocast_runs_in_float32(device_type):
    x = random(3, 8, dtype=torch.bfloat16, device=device_type, grad=True)
    residual, weight = random(3, 8, device=device_type, grad=True), random(8, device=device_type, grad=True)
    with kit.autocast(torch.bfloat16, device_type):
        y, total = fused_add_rms_norm(x, residual, weight)
    assert y.dtype == total.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and residual.grad.dtype == weight.grad.dtype == torch.float32
    assert_close(total.detach().cpu(), x.detach().cpu().float() + residual.detach().cpu())


def test_rejects():
    x, weight = random(2, 3), random(3)
    name = "fused_add_rms_norm"
    kit.check_error(OP, x, x, random(4), match=name + ": expected weight of shape [3], the last dimension of x, but")
    kit.check_error(OP, x, x, weight.double(), match="expected weight of float32, the dtype of x, but got float64")
    kit.check_error(OP, x.long(), x, weight, match="of float32, float64, float16 or bfloat16, but got int64")
    kit.check_error(OP, random(), x, weight, match="expected x of at least one dimension")
    kit.check_error(OP, x, random(3), weight, match="expected residual of shape [2, 3], the same as x, but got [3]")
    kit.check_error(OP, x, x.double(), weight, match="expected residual of float32, the dtype of x, but got float64")
    kit.check_error(OP, x, x, weight.cpu(), match="x is on openreg:0 but weight is on cpu; move one with .to()")
    kit.check_error(OP, x, x.to("openreg:1"), weight, match="x is on openreg:0 but residual is on openreg:1")
    kit.check_error(OP, x.cpu(), x, weight, match="x is on cpu but weight is on openreg:0")
    name += "_backward"
    kit.check_error(BACKWARD, x, x, random(), weight, 1e-6, match=name + ": expected sum of at least one dimension")
    kit.check_error(BACKWARD, x, x, x, random(4), 1e-6, match="expected weight of shape [3], the last dimension of sum")
    kit.check_error(
        BACKWARD, random(3, 2), x, x, weight, 1e-6, match="expected grad_y of shape [2, 3], the same as sum"
    )
    kit.check_error(BACKWARD, x, random(2), x, weight, 1e-6, match="expected grad_sum of shape [2, 3], the same as sum")
    kit.check_error(BACKWARD, x, x.double(), x, weight, 1e-6, match="expected grad_sum of float32, the dtype of sum")
    kit.check_error(BACKWARD, x.cpu(), None, x, weight, 1e-6, match="sum is on openreg:0 but grad_y is on cpu")
