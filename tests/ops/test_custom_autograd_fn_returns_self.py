"""custom_autograd_fn_returns_self: the input, with half the gradient."""

import torch
from halved_gradient import HalvedGradient

import openreg_ops


class TestReturnsSelf(HalvedGradient):
    function = staticmethod(openreg_ops.custom_autograd_fn_returns_self)
    reference = staticmethod(openreg_ops.custom_autograd_fn_returns_self.reference)
    op = torch.ops.openreg.custom_autograd_fn_returns_self.default
