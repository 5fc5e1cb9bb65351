"""fake_quantize and fake_quantize_backward."""

import math

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.func import grad, jacfwd, jacrev
from torch.testing import assert_close

from openreg_ops import fake_quantize, fake_quantize_backward, scale_gradient

OP = torch.ops.openreg.fake_quantize.default
BACKWARD = torch.ops.openreg.fake_quantize_backward.default


def reference(x, scale, zero_point, quant_min, quant_max, axis=None):
    if axis is not None:
        shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    steps = x / scale
    steps = steps + (steps.round() - steps).detach()
    low, high = quant_min - zero_point, quant_max - zero_point
    inside = (steps.detach() >= low) & (
        steps.detach() <= high
    )  # what clamp's gradient is at a bound depends on the torch
    return scale * steps.where(inside, steps.detach().clamp(low, high))


def bound(function, zero_point, *arguments):
    """`function` of x and scale alone; its zero_point follows x to its device."""
    return lambda x, scale: function(x, scale, torch.as_tensor(zero_point, dtype=torch.int32).to(x.device), *arguments)


def scales(*shape, dtype=torch.float32):
    return random(*shape).abs().add(0.1).to(torch.float64 if dtype == torch.float64 else torch.float32)


def zero_points(*shape):
    return torch.randint(-3, 4, shape, dtype=torch.int32).to(DEVICE)


def test_by_hand():  # in steps of 0.5 from -1 to 1.5
    x = kit.tensor([0.6, 0.75, -0.2, 1.9, -7.0]).requires_grad_()
    scale, zero_point = kit.tensor(0.5).requires_grad_(), kit.tensor(2, dtype=torch.int32)
    y = fake_quantize(x, scale, zero_point, 0, 5)
    y.sum().backward()
    assert y.tolist() == [0.5, 1.0, 0.0, 1.5, -1.0]  # 0.75 is halfway: to the even step
    assert x.grad.tolist() == [1, 1, 1, 0, 0]
    # round(x / 0.5) - x / 0.5 for the first three, the bounds 3 and -2 for the last two.
    assert_close(scale.grad.cpu(), torch.tensor(-0.2 + 0.5 + 0.4 + 3 - 2))


@pytest.mark.parametrize(
    "shape, axis",
    [((), None), ((0, 3), None), ((5, 123), None), ((40000,), None), ((2, 50000), 0), ((2, 3, 7), 1), ((6, 5), -1),
     ((3, 0), 0), ((0, 3), 1), ((5,), 0), ((1, 2, 40000), -2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, axis, dtype):
    channels = () if axis is None else (shape[axis],)
    arguments = zero_points(*channels).cpu(), -8, 7, axis
    x, scale = 2 * random(*shape, dtype=dtype), scales(*channels, dtype=dtype)
    y = fake_quantize(x, scale, arguments[0].to(DEVICE), *arguments[1:])
    assert y.dtype == dtype and y.is_contiguous()

    def of(function, x, scale):
        y = bound(function, *arguments)(x, scale)
        return (y, *torch.autograd.grad(y, [x, scale], torch.full_like(y, 0.5)))

    inputs = x.requires_grad_(), scale.requires_grad_()
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    tolerance = {name: 4 * value for name, value in kit.TOLERANCE[dtype].items()}
    for actual, expected in zip(of(fake_quantize, *inputs), of(reference, *wide), strict=True):
        assert_close(actual.cpu().double(), expected, **tolerance)


@pytest.mark.parametrize("axis", [None, 1])
def test_matches_torch_exactly(axis):
    x = 3 * random(4, 5, 600)
    scale, zero_point = (scales(), zero_points()) if axis is None else (scales(5), zero_points(5))
    cpu = x.cpu().requires_grad_(), scale.cpu(), zero_point.cpu()
    if axis is None:
        expected = torch.fake_quantize_per_tensor_affine(*cpu, -8, 7)
    else:
        expected = torch.fake_quantize_per_channel_affine(*cpu, axis, -8, 7)
    x.requires_grad_()
    actual = fake_quantize(x, scale, zero_point, -8, 7, axis)
    assert torch.equal(actual.cpu(), expected)
    dy = random(4, 5, 600)
    (actual_dx,), (expected_dx,) = torch.autograd.grad(actual, x, dy), torch.autograd.grad(expected, cpu[0], dy.cpu())
    assert torch.equal(actual_dx.cpu(), expected_dx)


def test_learns_scale_as_torch_does():
    x, scale = 3 * random(4, 500), scales().requires_grad_()
    y = fake_quantize(x, scale, kit.tensor(1, dtype=torch.int32), -8, 7)
    wide = scale.detach().cpu().view(1).requires_grad_()
    expected = torch._fake_quantize_learnable_per_tensor_affine(x.cpu(), wide, torch.ones(1), -8, 7)
    assert_close(
        torch.autograd.grad(y.sum(), scale)[0].cpu(), torch.autograd.grad(expected.sum(), wide)[0][0], rtol=1e-4, atol=0
    )


def test_learned_step_size_trains():
    """LSQ, with its gradient scale from scale_gradient, finds a step that quantizes better than the first one."""
    x = random(4000)
    scale = kit.tensor(0.05).requires_grad_()
    optimizer = torch.optim.Adam([scale], lr=0.02)
    losses = []
    for _ in range(60):
        step = scale_gradient(scale, (x.numel() * 7) ** -0.5)
        loss = (fake_quantize(x, step, kit.tensor(0, dtype=torch.int32), -8, 7) - x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_not_finite(where):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], device=where, requires_grad=True)
    scale = torch.tensor(0.5, device=where, requires_grad=True)
    y = fake_quantize(x, scale, torch.zeros((), dtype=torch.int32, device=where), -8, 7)
    assert_close(y.cpu(), torch.tensor([torch.nan, 3.5, -4.0, 3.5]), equal_nan=True)
    grad_x, grad_scale = torch.autograd.grad(y.sum(), [x, scale])
    assert grad_x.tolist() == [0, 0, 0, 0] and grad_scale.isnan()


@pytest.mark.parametrize("scale", [0.0, torch.inf, torch.nan, -0.5])
def test_scale_that_is_no_scale(scale):
    """One that is zero, not finite or negative: the device and the reference agree, in values and gradients."""
    results = []
    for where in (DEVICE, "cpu"):
        x = torch.tensor([0.0, 1.0, -3.0, torch.inf], device=where, requires_grad=True)
        s = torch.tensor(scale, device=where, requires_grad=True)
        y = fake_quantize(x, s, torch.tensor(1, dtype=torch.int32, device=where), -8, 7)
        grads = torch.autograd.grad(y.sum(), [x, s])
        results.append([result.cpu() for result in (y.detach(), *grads)])
    assert_close(*results, equal_nan=True)
    assert results[0][1].isfinite().all()
    if not math.isfinite(scale):
        assert results[0][2] == 0


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_gradient_is_straight_through_at_every_level(where):
    """gradcheck cannot serve, as the gradient is not the derivative. For y**2 it is, by hand, linear through each level."""
    x = torch.tensor([0.6, 1.9], dtype=torch.float64, device=where, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64, device=where, requires_grad=True)
    zero_point = torch.zeros((), dtype=torch.int32, device=where)

    def loss(x, scale):
        return fake_quantize(x, scale, zero_point, -2, 3).square().sum()  # y = 0.5 in range, 1.5 out of it

    jacobian = torch.tensor([[1, 0, -0.2], [0, 0, 3]], dtype=torch.float64)  # of y in x and scale
    gradient, hessian = jacobian.T @ torch.tensor([1.0, 3.0], dtype=torch.float64), 2 * jacobian.T @ jacobian
    grads = torch.autograd.grad(loss(x, scale), [x, scale], create_graph=True)
    assert_close(torch.cat([grads[0], grads[1][None]]).cpu(), gradient)
    rows = [torch.autograd.grad(first, [x, scale], retain_graph=True) for first in (*grads[0], grads[1])]
    assert_close(torch.stack([torch.cat([dx, ds[None]]) for dx, ds in rows]).cpu(), hessian)

    def joined(both):
        return loss(both[:2], both[2])

    both = torch.cat([x, scale[None]]).detach()
    assert_close(grad(joined)(both).cpu(), gradient)
    for outer, inner in [(jacfwd, jacrev), (jacrev, jacrev), (jacrev, jacfwd), (jacfwd, jacfwd)]:
        assert_close(outer(inner(joined))(both).cpu(), hessian)
    third = grad(lambda b: grad(lambda b: grad(joined)(b).sum())(b).sum())(both)
    assert_close(third, torch.zeros_like(third), atol=1e-12, rtol=0)


def test_backward_operator_is_linear_in_grad_y():
    x, scale, zero_point = random(3, 5, dtype=torch.float64), scales(5, dtype=torch.float64), zero_points(5)
    kit.check_gradients(
        lambda grad_y: fake_quantize_backward(grad_y, x, scale, zero_point, -2, 1, 1),
        random(3, 5, dtype=torch.float64, grad=True),
    )


def test_transforms_of_a_negative_axis():
    axis, inputs = -2, (random(3, 4, dtype=torch.float64), scales(3, dtype=torch.float64), zero_points(3))
    kit.check_transforms(fake_quantize, *inputs, -2, 1, axis)
    kit.check_transforms(fake_quantize_backward, random(3, 4, dtype=torch.float64), *inputs, -2, 1, axis)


def test_rejects():
    x, scale, zero_point = random(2, 3), scales(3), zero_points(3)

    def refuse(match, x=x, scale=scale, zero_point=zero_point, quant_min=-8, quant_max=7, axis=1):
        kit.check_error(OP, x, scale, zero_point, quant_min, quant_max, axis, match="fake_quantize: " + match)

    floats = "float32, float64, float16 or bfloat16"
    refuse(f"expected x of {floats}, but got int64; convert it with .to()", x=x.long())
    refuse("expected axis to be one of the 2 dimensions of x, but got 2", axis=2)
    refuse("expected axis to be one of the 2 dimensions of x, but got -3", axis=-3)
    refuse("expected axis to be one of the 0 dimensions of x, but got 0", x=x[0, 0], axis=0)
    refuse("expected quant_min of at most quant_max, but got 8 and 7", quant_min=8)
    refuse("expected scale of float32 for x of float32, but got float64; convert it with .to()", scale=scale.double())
    refuse("expected scale of float32 for x of float16, but got float16", x=x.half(), scale=scale.half())
    refuse("expected zero_point of int32, but got int64; convert it with .to()", zero_point=zero_point.long())
    refuse("expected scale of shape [], one number because axis is None, but got [3]", axis=None)
    refuse("expected scale of shape [2], the size of x along axis, but got [3]", axis=0)
    refuse("expected zero_point of shape [3], the size of x along axis, but got [1]", zero_point=zero_point[:1])

    def refuse_backward(match, grad_y):
        sentence = "fake_quantize_backward: " + match
        kit.check_error(BACKWARD, grad_y, x, scale, zero_point, -8, 7, 1, match=sentence)

    refuse_backward("expected grad_y of shape [2, 3], the same as x, but got [3, 2]", x.T)


def test_any_quant_range():
    x, scale, zero_point = random(2, 3), scales(3), zero_points(3)
    unbounded = fake_quantize(x, scale, zero_point, -(2**63), 2**63 - 1, 1)
    assert_close(unbounded, (x / scale).round() * scale)
