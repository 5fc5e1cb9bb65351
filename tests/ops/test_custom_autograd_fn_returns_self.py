"""custom_autograd_fn_returns_self: the input, with half the gradient."""

import torch
from halved_gradient import HalvedGradient

import openreg_ops
from openreg_ops.meta.custom_autograd_fn_returns_self import reference


class TestReturnsSelf(HalvedGradient):
    function = staticmethod(openreg_ops.custom_autograd_fn_returns_self)
    reference = staticmethod(reference)
    op = torch.ops.openreg.custom_autograd_fn_returns_self.default
