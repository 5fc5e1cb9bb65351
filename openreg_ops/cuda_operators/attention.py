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


# ---- what fake tensors compute of the operators for a backend's own attention ----


def _fused(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor | int, ...]:
    """The results of the device's kernel, which has the layouts of the CPU's flash kernel."""
    batch, heads, length = query.shape[:3]
    out = (
        torch.empty_like(query)
        if value.shape[-1] == query.shape[-1]
        else query.new_empty(*query.shape[:3], value.shape[-1])
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    logsumexp = query.new_empty((batch, length, heads), dtype=wide).transpose(1, 2)
    none = query.new_empty(0, dtype=torch.int64)
    return out, logsumexp, none, none, length, key.shape[2], none, none, none


def _fused_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor, grad_input_mask: list[bool], *_: object,
    **__: object,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    grads = [x.new_empty([x.shape[dim] for dim in (0, 2, 1, 3)]).transpose(1, 2) for x in (query, key, value)]
    return *grads, torch.empty_like(attn_bias) if grad_input_mask[3] else None


def correct_fused_attention() -> None:
    """Replace PyTorch's fake kernels, whose results have the layouts of another backend's attention."""
    for name, fake in (("", _fused), ("_backward", _fused_backward)):
        op = f"aten::_scaled_dot_product_fused_attention_overrideable{name}"
        torch.library.register_fake(op, fake, allow_override=True)
