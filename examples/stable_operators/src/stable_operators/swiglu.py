"""swiglu and its backward: the functions that users call, and everything that is not a kernel. The kernels are in
csrc/swiglu.cpp."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stable_operators.registration import check_floating, check_like, normal, register, whole_batch, wide


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate `up` with the SiLU of `gate`.

    y = silu(gate) * up,  silu(g) = g * sigmoid(g)

    Args:
        gate: any shape and strides, float32, float64, float16 or bfloat16.
        up: shape and dtype of gate.
    Returns:
        y: shape and dtype of gate, contiguous.
    Raises:
        RuntimeError: another dtype; shapes, dtypes or devices of gate and up differ.

    Differentiable any number of times. The half types are computed in float32. Autocast runs it in the wider of the two
    dtypes.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return torch.ops.stable_operators.swiglu.default(gate, up)


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
    return torch.ops.stable_operators.swiglu_backward.default(grad_y, gate, up)


# ---- checks, and the mathematics in plain PyTorch ----


def _check(name, gate, up):
    check_floating(name, "gate", gate)
    check_like(name, "up", up, "gate", gate)


def _check_backward(name, grad_y, gate, up):
    _check(name, gate, up)
    check_like(name, "grad_y", grad_y, "gate", gate)


def _reference(gate, up):
    g, u = (x.to(wide(gate.dtype)) for x in (gate, up))
    return (torch.nn.functional.silu(g) * u).to(gate.dtype).contiguous()


def _reference_backward(grad_y, gate, up):
    grad, g, u = (x.to(wide(gate.dtype)) for x in (grad_y, gate, up))
    sigma = torch.sigmoid(g)
    grad_gate, grad_up = grad * u * sigma * (1 + g * (1 - sigma)), grad * g * sigma
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(gate.dtype).contiguous()


# ---- the derivative ----


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)  # not silu(gate), which backward recomputes


def _backward(ctx, grad_y):
    return swiglu_backward(grad_y, *ctx.saved_tensors)


# ---- registration ----


def _widest(tensors):
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


def _samples(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield normal(device, dtype, shape, shape)


def _samples_backward(device, dtype):
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield normal(device, dtype, shape, shape, shape)


swiglu.reference = register(
    "swiglu",
    reference=_reference,
    fake=lambda gate, up: gate.new_empty(gate.shape),
    check=_check,
    batched=lambda size, mapped, *args: swiglu(*whole_batch(size, mapped, args)),
    samples=_samples,
    derivative=(_save, _backward),
    autocast=_widest,
)
swiglu_backward.reference = register(
    "swiglu_backward",
    reference=_reference_backward,
    fake=lambda grad_y, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    check=_check_backward,
    batched=lambda size, mapped, *args: swiglu_backward(*whole_batch(size, mapped, args)),
    samples=_samples_backward,
)
