"""swiglu and its backward, both operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


@op.operator(batch_first=True, inner=0)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate `up` with the SiLU of `gate`, as in the feed-forward layers of many language models.

    y = silu(gate) * up,  silu(g) = g * sigmoid(g)

    Args:
        gate: any shape and strides, float32, float64, float16 or bfloat16.
        up: shape and dtype of gate.
    Returns:
        y: shape and dtype of gate, contiguous.
    Raises:
        RuntimeError: another dtype; shapes, dtypes or devices of gate and up differ.

    Differentiable any number of times. Backward recomputes silu(gate), so no activation is kept beyond the arguments.
    The half types are computed in float32. Autocast runs it in the wider of the two dtypes.
    Source: Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> openreg_ops.swiglu(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    wide = op.acc_dtype(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


@swiglu.fake
def _(gate):
    return gate.new_empty(gate.shape)


swiglu.samples(op.alike(2))


@op.operator(batch_first=True, inner=0)
def swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `swiglu` gives its arguments.

    With sigma = sigmoid(gate):
    grad_gate = grad_y * up * sigma * (1 + gate * (1 - sigma)),  grad_up = grad_y * gate * sigma

    Args:
        grad_y: shape and dtype of gate.
        gate, up: as passed to `swiglu`.
    Returns:
        grad_gate, grad_up: shape and dtype of gate, contiguous.
    Raises:
        RuntimeError: as `swiglu`, and for a grad_y of another shape, dtype or device.

    Differentiable any number of times in all three.
    """
    wide = op.acc_dtype(gate.dtype)
    grad, g, u = grad_y.to(wide), gate.to(wide), up.to(wide)
    sigma = torch.sigmoid(g)
    grad_gate, grad_up = grad * u * sigma * (1 + g * (1 - sigma)), grad * g * sigma
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(gate.dtype).contiguous()


@swiglu_backward.fake
def _(gate):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


swiglu_backward.samples(op.alike(3))
