"""swiglu and its backward, both operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate `up` with the SiLU of `gate`, as the feed-forward layers of many language models do.

    y = silu(gate) * up,  silu(g) = g * sigmoid(g)

    Args:
        gate: any shape and strides, float32, float64, float16 or bfloat16.
        up: shape and dtype of gate.
    Returns:
        y: shape and dtype of gate, contiguous.
    Raises:
        RuntimeError: another dtype; shapes, dtypes or devices of gate and up differ.

    Differentiable any number of times. Backward computes silu(gate) again, so that no activation is kept beyond
    the arguments. The half types are computed in float32. Autocast runs it in the wider of the two dtypes.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return torch.ops.openreg.swiglu.default(gate, up)


def swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `swiglu` gives its arguments.

    With sigma = sigmoid(gate):
    grad_gate = grad_y * up * sigma * (1 + gate * (1 - sigma)),  grad_up = grad_y * gate * sigma

    Args:
        grad_y: shape and dtype of gate.
        gate, up: as `swiglu` got them.
    Returns:
        grad_gate, grad_up: shape and dtype of gate, contiguous.
    Raises:
        RuntimeError: as `swiglu`, and for a grad_y of another shape, dtype or device.

    Differentiable any number of times in all three.
    """
    return torch.ops.openreg.swiglu_backward.default(grad_y, gate, up)


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    op.check_floating(name, "gate", gate)
    op.check_same_device(name, "gate", gate, "up", up)
    op.check_dtype(name, "up", up, gate.dtype, "gate")
    op.check_shape(name, "up", up, gate.shape, "that of gate")


def _check_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> None:
    name = "swiglu_backward"
    _check(name, gate, up)
    op.check_same_device(name, "gate", gate, "grad_y", grad_y)
    op.check_dtype(name, "grad_y", grad_y, gate.dtype, "gate")
    op.check_shape(name, "grad_y", grad_y, gate.shape, "that of gate")


@torch.library.register_fake("openreg::swiglu")
def fake(gate: Tensor, up: Tensor) -> Tensor:
    _check("swiglu", gate, up)
    return gate.new_empty(gate.shape)


@torch.library.register_fake("openreg::swiglu_backward")
def fake_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, gate, up)
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@op.reference("swiglu")
def reference(gate: Tensor, up: Tensor) -> Tensor:
    _check("swiglu", gate, up)
    wide = op.acc_dtype(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


@op.reference("swiglu_backward")
def reference_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_backward(grad_y, gate, up)
    wide = op.acc_dtype(gate.dtype)
    grad, g, u = grad_y.to(wide), gate.to(wide), up.to(wide)
    sigma = torch.sigmoid(g)
    grad_gate, grad_up = grad * u * sigma * (1 + g * (1 - sigma)), grad * g * sigma
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(gate.dtype).contiguous()


@op.batched("swiglu")
def batched(in_dims: Sequence[int | None], *inputs: Tensor) -> Any:
    return torch.ops.openreg.swiglu(*op.all_batch_first(in_dims, inputs)), 0


@op.batched("swiglu_backward")
def batched_backward(in_dims: Sequence[int | None], *inputs: Tensor) -> Any:
    return torch.ops.openreg.swiglu_backward(*op.all_batch_first(in_dims, inputs)), (0, 0)


@op.samples("swiglu")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(2))


@op.samples("swiglu_backward")
def samples_backward(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
