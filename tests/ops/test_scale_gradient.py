"""scale_gradient: the identity, with a scaled gradient."""

import kit
import pytest
import torch
from halved_gradient import HalvedGradient
from kit import random
from torch.testing import assert_close

from openreg_ops import scale_gradient


class TestHalf(HalvedGradient):
    arguments = (0.5,)

    @staticmethod
    def function(x):
        return scale_gradient(x, 0.5)

    @staticmethod
    def reference(x):
        return scale_gradient.reference(x, 0.5)

    op = torch.ops.openreg.scale_gradient.default


@pytest.mark.parametrize("scale", [-1.0, 0.0, 3, float("inf")])
@pytest.mark.parametrize("where", [kit.DEVICE, "cpu"])
def test_any_scale(scale, where):
    x, grad = random(3, 4, device=where, grad=True), random(3, 4, device=where)
    y = scale_gradient(x, scale)
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], grad * scale)


def test_gradient_reversal():
    """A discriminator learns from its loss; the features before the reversal learn against it."""
    features, weight = random(8, 4, grad=True), random(4, grad=True)

    def gradients(reverse):
        hidden = scale_gradient(features, -1.0) if reverse else features
        return torch.autograd.grad(torch.nn.functional.softplus(hidden @ weight).sum(), [features, weight])

    (features_plain, weight_plain), (features_reversed, weight_reversed) = gradients(False), gradients(True)
    assert torch.equal(features_reversed, -features_plain) and torch.equal(weight_reversed, weight_plain)


def test_compiled_scale_is_an_argument():
    kit.check_compiled(lambda x: scale_gradient(x, -1.0).sin(), random(6, 10))
    compiled = torch.compile(scale_gradient, backend="aot_eager", fullgraph=True)
    for scale in (2.0, 3.0):
        x = random(3, grad=True)
        assert_close(torch.autograd.grad(compiled(x, scale).sum(), x)[0], torch.full_like(x, scale))
