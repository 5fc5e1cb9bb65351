"""The custom operators of csrc/custom.cpp: their fake kernels, and the derivative of `swish`. Rungs 4 and 10.

Document: "Operator Registration", section "Custom Operators", "Register Metadata".
"""

import torch

custom_abs = torch.ops.acme.custom_abs
swish = torch.ops.acme.swish
scaled = torch.ops.acme.scaled


@torch.library.register_fake("acme::custom_abs")
@torch.library.register_fake("acme::swish")
def _elementwise(x):
    return torch.empty_like(x)


@torch.library.register_fake("acme::swish_backward")
def _swish_backward(grad, x):
    return _elementwise(grad)


@torch.library.register_fake("acme::scaled")
def _scaled(x, scale):
    return _elementwise(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return torch.ops.acme.swish_backward(grad, *ctx.saved_tensors)


torch.library.register_autograd("acme::swish", _backward, setup_context=_keep)
