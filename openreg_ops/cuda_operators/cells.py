"""The fused cells of recurrent networks, for direct callers, torch.func, autocast and compilation: see
csrc/aten/overrides/rnn.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import dtype_name, expect, expect_tensor, kernel

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _expect_like(op: str, name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """A floating-point dtype, the same for all tensors, and one device."""
    if (
        x is not None
        and like.dtype in _FLOATS
        and (x.device, x.dtype) == (like.device, like.dtype)
        and x.shape == shape
    ):
        return  # before messages are made
    expect_tensor(op, name, x)
    expect(
        like.dtype in _FLOATS,
        f"{op}: expected floating-point tensors, but got {dtype_name(like)}; convert them with .to()",
    )
    expect(
        x.device == like.device,
        f"{op}: expected every tensor on {like.device}, but {name} is on {x.device}; move it with .to()",
    )
    expect(
        x.dtype == like.dtype,
        f"{op}: expected every tensor of {dtype_name(like)}, but {name} is of {dtype_name(x)}; convert it with .to()",
    )
    expect(x.shape == shape, f"{op}: expected {name} of shape {list(shape)}, but got {list(x.shape)}")


def _expect_two_dimensions(op: str, name: str, x: Tensor) -> None:
    expect_tensor(op, name, x)
    if x.dim() != 2:
        raise RuntimeError(f"{op}: expected {name} of two dimensions, but got shape {list(x.shape)}")


def _expect_cell(
    op: str,
    count: int,
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> None:
    _expect_two_dimensions(op, "input_gates", input_gates)
    rows, columns = input_gates.shape
    if columns % count:
        shape = list(input_gates.shape)
        raise RuntimeError(f"{op}: expected input_gates of {count} equal parts side by side, but got shape {shape}")
    _expect_like(op, "input_gates", input_gates, input_gates.shape, input_gates)
    _expect_like(op, "hidden_gates", hidden_gates, input_gates.shape, input_gates)
    _expect_like(op, "the hidden state", hidden, (rows, columns // count), input_gates)
    expect((input_bias is None) == (hidden_bias is None), f"{op}: expected two biases or none, but got one")
    if input_bias is not None and hidden_bias is not None:
        _expect_like(op, "input_bias", input_bias, (columns,), input_gates)
        _expect_like(op, "hidden_bias", hidden_bias, (columns,), input_gates)


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


@kernel("_thnn_fused_lstm_cell")
def fused_lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """hy, cy and the activated gates (i, f, g, o side by side), which backward needs."""
    _expect_cell("_thnn_fused_lstm_cell", 4, input_gates, hidden_gates, cx, input_bias, hidden_bias)
    i, f, g, o = (_biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@kernel("_thnn_fused_lstm_cell_backward_impl")
def fused_lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the four gates before activation, of cx, and of one bias."""
    op = "_thnn_fused_lstm_cell_backward_impl"
    if grad_hy is None and grad_cy is None:
        return None, None, None
    _expect_two_dimensions(op, "cx", cx)
    _expect_like(op, "cx", cx, cx.shape, cx)
    _expect_like(op, "cy", cy, cx.shape, cx)
    _expect_like(op, "workspace", workspace, (cx.size(0), 4 * cx.size(1)), cx)
    for name, grad in (("grad_hy", grad_hy), ("grad_cy", grad_cy)):
        if grad is not None:
            _expect_like(op, name, grad, cx.shape, cx)
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    dc = torch.zeros_like(cy) if grad_cy is None else grad_cy
    if grad_hy is None:
        do = torch.zeros_like(o)
    else:
        dc = dc + grad_hy * o * (1 - tanh_cy * tanh_cy)
        do = grad_hy * tanh_cy * o * (1 - o)
    d = torch.cat([dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), do], 1)
    return d, dc * f, d.sum(0) if has_bias else None


@kernel("_thnn_fused_gru_cell")
def fused_gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """hy, and r, z, n, hx and the hidden part of n side by side."""
    _expect_cell("_thnn_fused_gru_cell", 3, input_gates, hidden_gates, hx, input_bias, hidden_bias)
    in_r, in_z, in_n = _biased(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (in_r + hidden_r).sigmoid(), (in_z + hidden_z).sigmoid()
    n = (in_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


@kernel("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the input gates, the hidden gates, hx, and both biases."""
    op = "_thnn_fused_gru_cell_backward"
    _expect_two_dimensions(op, "grad_hy", grad_hy)
    _expect_like(op, "grad_hy", grad_hy, grad_hy.shape, grad_hy)
    _expect_like(op, "workspace", workspace, (grad_hy.size(0), 5 * grad_hy.size(1)), grad_hy)
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    dn, dz = grad_hy * (1 - z) * (1 - n * n), grad_hy * (hx - n) * z * (1 - z)
    dr = dn * hidden_n * r * (1 - r)
    in_gates, hidden_gates = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    biases = (in_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return in_gates, hidden_gates, grad_hy * z, *biases
