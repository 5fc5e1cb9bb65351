"""custom_autograd_fn_aliasing: a view, with half the gradient."""

import pytest
import torch
from halved_gradient import HalvedGradient
from kit import random

import openreg_ops


class TestAliasing(HalvedGradient):
    function = staticmethod(openreg_ops.custom_autograd_fn_aliasing)
    reference = staticmethod(openreg_ops.custom_autograd_fn_aliasing.reference)
    op = torch.ops.openreg.custom_autograd_fn_aliasing.default

    def test_output_is_a_view(self):
        x = random(3, grad=True)
        y = self.function(x.detach())
        assert y._is_view() and y._base is not None and not y.requires_grad
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            self.function(x * 2).add_(1)
