"""Flash and memory-efficient attention of dense tensors, by the device's kernels for packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import kernel

aten = torch.ops.aten


def _swap(*tensors: Tensor) -> list[Tensor]:
    """Tensors of shape `[batch, heads, length, width]` as `[batch, length, heads, width]`, and back."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _gradients(*grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients in the strides that CUDA's kernel gives them, which graphs rely on."""
    return tuple(grad.contiguous().transpose(1, 2) for grad in grads)


@kernel("_scaled_dot_product_efficient_attention")
def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with a bias of the shape of the scores; a causal mask counts from the top left."""
    out, logsumexp, seed, offset, _, _ = aten._efficient_attention_forward(
        *_swap(query, key, value), attn_bias, None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp,
        scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), logsumexp, seed, offset


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of query, key, value and, if asked for, of the bias."""
    if grad_out_ is None:
        return None, None, None, None
    grad, q, k, v, forward = _swap(grad_out_, query, key, value, out)
    *grads, grad_bias = aten._efficient_attention_backward(
        grad, q, k, v, attn_bias, forward, None, None, q.size(1), k.size(1), logsumexp, dropout_p, philox_seed,
        philox_offset, int(is_causal), grad_input_mask[3], scale=scale,
    )  # fmt: skip
    return *_gradients(*grads), grad_bias if grad_input_mask[3] else None


@kernel("_scaled_dot_product_flash_attention")
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, Tensor]:
    """Attention without a bias, in half types."""
    longest = query.size(2), key.size(2)
    out, logsumexp, state, unused, debug = aten._flash_attention_forward(
        *_swap(query, key, value), None, None, *longest, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), logsumexp, None, None, *longest, state, unused, debug


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_attention_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of query, key and value."""
    if grad_out is None:
        return None, None, None
    grad, q, k, v, forward = _swap(grad_out, query, key, value, out)
    grads = aten._flash_attention_backward(
        grad, q, k, v, forward, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    return tuple(_swap(*grads))
