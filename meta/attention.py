"""attention and its backward, both operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from openreg_ops.meta import op


def _wide(x: Tensor) -> Tensor:
    return x.to(op.acc_dtype(x.dtype))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """`[B, heads, group, L, D]` of a `[B, H, L, D]`, so that a head of k or v broadcasts over its group of q heads."""
    return _wide(x).unflatten(1, (heads, x.shape[1] // torch.sym_max(heads, 1)))


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, float, Tensor]:
    """The scores `[B, H, Lq, Lk]`, the scale, and which rows see no key; those hold 0."""
    scale = 1 / torch.sym_sqrt(torch.sym_max(q.shape[3], 1)) if scale is None else scale
    scores = scale * (_grouped(q, k.shape[1]) @ _wide(k).unsqueeze(2).mT).flatten(1, 2)
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = scores.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(
            1
        )  # of the same class as scores: a DTensor's mask is a DTensor
        scores = scores.masked_fill(hidden, -math.inf)
    blind = (scores == -math.inf).all(-1)
    return scores.masked_fill(blind.unsqueeze(-1), 0), scale, blind


def _in_memory_of(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x with its dimensions in this order in memory, the fastest last."""
    back = [list(dims).index(d) for d in range(x.dim())]
    return x.permute(*dims).clone(memory_format=torch.contiguous_format).permute(*back)


@op.operator()
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention in memory linear in the lengths, with grouped heads.

    s = scale * q @ k.mT + bias,  out = softmax(s, -1) @ v,  logsumexp = log(sum(exp(s), -1))

    Args:
        q: `[B, H, Lq, D]`, float32, float64, float16 or bfloat16; any strides.
        k: `[B, Hkv, Lk, D]`, dtype of q; H is a multiple of Hkv, and query head h takes head h // (H // Hkv).
        v: `[B, Hkv, Lk, Dv]`, dtype of q.
        bias: broadcastable to `[B, H, Lq, Lk]`, dtype of q; -inf masks. For a boolean mask pass
            `torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)`.
        causal: query i sees keys 0 to i, even if Lq and Lk differ: aligned at the top left, as in torch's
            `scaled_dot_product_attention(is_causal=True)`, not at the bottom right as in FlashAttention.
        scale: 1 / sqrt(D) by default.
    Returns:
        out: `[B, H, Lq, Dv]`, dtype of q, in the memory of `[B, Lq, H, Dv]`, so that `out.transpose(1, 2).flatten(2)`
            is a view.
        logsumexp: `[B, H, Lq]`, float32 (float64 for a float64 q), contiguous.
        A query that sees no key, or only -inf, has out 0 and logsumexp -inf, and all its gradients are 0.
    Raises:
        RuntimeError: q, k or v does not have four dimensions, or their sizes do not match; bias does not broadcast;
            dtypes or devices differ.

    Differentiable any number of times in q, k, v and bias, through both out and logsumexp. Backward recomputes blocks
    of scores, in linear memory; the second derivative holds all scores. The half types are computed in float32,
    but where the processor multiplies bfloat16 (AVX-512 BF16, AMX), the probabilities and the gradients of scores are
    rounded to bfloat16 before a product, as in PyTorch's fused attention.
    Autocast runs it in its lower precision. Results do not depend on the number of threads.
    Sources: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; grouped heads: Ainslie et al. 2023,
    arXiv:2305.13245.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 4)  # one head, two tokens, equal scores
        >>> v = torch.tensor([[1.0], [3.0]]).expand(1, 1, 2, 4)
        >>> out, logsumexp = openreg_ops.attention(q, k, v, causal=True)
        >>> out[0, 0, :, 0]  # the second token attends to both
        tensor([1., 2.])
    """
    scores, _, blind = _scores(q, k, bias, causal, scale)
    logsumexp = op.logsumexp(scores)
    p = torch.softmax(scores, -1).masked_fill(
        blind.unsqueeze(-1), 0
    )  # also right where logsumexp rounds to the maximum
    out = (_grouped(p, k.shape[1]) @ _wide(v).unsqueeze(2)).flatten(1, 2)
    return _in_memory_of(out.to(q.dtype), (0, 2, 1, 3)), logsumexp.masked_fill(blind, -math.inf).contiguous()


@attention.fake
def _(q, v):
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=op.acc_dtype(q.dtype))


@op.operator()
def attention_backward(
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients that `attention` gives its arguments, as a function of independent tensors.

    With p = exp(s - logsumexp), delta = sum(grad_out * out, -1) - grad_logsumexp, ds = p * (grad_out @ v.mT - delta):
    grad_q = scale * ds @ k,  grad_k = scale * ds.mT @ q,  grad_v = p.mT @ grad_out,  grad_bias = ds,
    summed where heads or bias are shared

    Args:
        grad_out: shape and dtype of out.
        grad_logsumexp: shape and dtype of logsumexp, or None for zeros.
        q, k, v, bias, causal, scale: as passed to `attention`.
        out, logsumexp: as returned by `attention`.
        bias_grad: whether to compute the gradient of bias, which takes another pass over the scores.
    Returns:
        grad_q, grad_k, grad_v: shapes, dtype and memory order of q, k and v.
        grad_bias: shape and dtype of bias, contiguous; `[0]` unless wanted.
    Raises:
        RuntimeError: as `attention`, and for another shape, dtype or device of the other tensors; bias_grad without
            bias.

    Differentiable any number of times in all tensors, holding all scores.
    """
    scores, scale, blind = _scores(q, k, bias, causal, scale)
    blind = blind | (logsumexp == -math.inf)
    p = (scores - logsumexp.masked_fill(blind, 0).unsqueeze(-1)).exp().masked_fill(blind.unsqueeze(-1), 0)
    grad_out = _wide(grad_out)
    delta = (grad_out * out).sum(-1)
    if grad_logsumexp is not None:
        delta = delta - grad_logsumexp
    heads = k.shape[1]
    of_p = (_grouped(grad_out, heads) @ _wide(v).unsqueeze(2).mT).flatten(1, 2)
    ds = p * (of_p - delta.masked_fill(blind, 0).unsqueeze(-1))
    grad_q = scale * (_grouped(ds, heads) @ _wide(k).unsqueeze(2)).flatten(1, 2)
    grad_k = scale * (_grouped(ds, heads).mT @ _grouped(q, heads)).sum(2)
    grad_v = (_grouped(p, heads).mT @ _grouped(grad_out, heads)).sum(2)
    if bias is not None and bias_grad:
        grad_bias = ds.sum_to_size(bias.shape).to(q.dtype).contiguous()
    else:
        grad_bias = q.new_empty(0)
    grads = (_in_memory_of(grad.to(x.dtype), op.memory_order(x)) for grad, x in ((grad_q, q), (grad_k, k), (grad_v, v)))
    return *grads, grad_bias


@attention_backward.fake
def _(q, k, v, bias, bias_grad):
    return *(torch.empty_like(x) for x in (q, k, v)), q.new_empty(bias.shape if bias is not None and bias_grad else 0)


# ---- batching: a mapped dimension joins the batch ----


def _joined(bias: Tensor | None, *others: Tensor | None) -> list[Tensor | None]:
    """All tensors with samples and batch as one dimension; bias, whose samples have up to four dimensions, comes
    last."""
    batch = next(x.shape[1] for x in others if x is not None)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *[1] * (5 - bias.dim()), *bias.shape[1:]).expand(-1, batch, -1, -1, -1)
    return [x if x is None else x.flatten(0, 1) for x in (*others, bias)]


@attention.batched
def _(in_dims, *inputs, **options):
    q, k, v, bias = op.all_batch_first(in_dims, inputs)
    outs = torch.ops.openreg.attention(*_joined(bias, q, k, v), **options)
    return tuple(x.unflatten(0, q.shape[:2]) for x in outs), (0, 0)


@attention_backward.batched
def _(in_dims, *inputs, bias_grad, **options):
    *before, bias, out, logsumexp = op.all_batch_first(in_dims, inputs)
    *joined, joined_bias = _joined(bias, *before, out, logsumexp)
    *grads, grad_bias = torch.ops.openreg.attention_backward(
        *joined[:5], joined_bias, *joined[5:], bias_grad=bias_grad, **options
    )
    samples, batch = out.shape[:2]
    if bias is not None and bias_grad:
        grad_bias = grad_bias.unflatten(0, (samples, batch))
        if bias.dim() < 5 or bias.shape[1] == 1:
            grad_bias = grad_bias.sum(1)
        grad_bias = grad_bias.reshape(bias.shape)
    else:
        grad_bias = grad_bias.expand(samples, 0)
    return (*(x.unflatten(0, (samples, batch)) for x in grads), grad_bias), (0, 0, 0, 0)


# ---- DTensors: batches, heads and queries are independent ----


def _placed(q, k, bias, causal, shards):
    """A dimension of q, out and the scores, the matching one of k and v or None, and the matching one of bias or
    None."""
    for d in (0, 1, 2):
        if d == 1 and q.shape[1] != k.shape[1] and k.shape[1] % shards:
            continue  # a head of k and its group of q would be on different devices
        if d == 2 and causal:
            continue  # a query's index counts from the first query
        of_bias = None if bias is None else d - 4 + bias.dim()
        shared = of_bias is None or of_bias < 0 or bias.shape[of_bias] == 1
        yield d, d if d < 2 else None, None if shared else of_bias


@attention.sharded
def _(q, k, bias, causal, shards):
    for d, of_keys, of_bias in _placed(q, k, bias, causal, shards):
        yield dict(q=d, k=of_keys, v=of_keys, bias=of_bias), (d, d)


@attention_backward.sharded
def _(q, k, bias, causal, bias_grad, shards):
    for d, of_keys, of_bias in _placed(q, k, bias, causal, shards):
        to_keys = op.SUM if of_keys is None else of_keys
        to_bias = None if bias is None or not bias_grad else op.SUM if of_bias is None else of_bias
        inputs = dict(grad_out=d, grad_logsumexp=d, q=d, k=of_keys, v=of_keys, bias=of_bias, out=d, logsumexp=d)
        yield inputs, (d, to_keys, to_keys, to_bias)


# ---- samples: shapes of q, k, v and bias ----

_SHAPES = (
    ((2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3)),
    ((1, 4, 3, 5), (1, 2, 6, 5), (1, 2, 6, 4), (4, 1, 6)),
    ((2, 1, 5, 2), (2, 1, 3, 2), (2, 1, 3, 2), (5, 3)),
)


@attention.samples
def _(device, dtype):
    for shapes in _SHAPES:
        yield op.normal(device, dtype, *shapes)


@attention_backward.samples
def _(device, dtype):
    for shapes in _SHAPES:
        q, k, v, *bias = op.normal(device, dtype, *shapes)
        out, logsumexp = attention.reference(q, k, v, *bias)
        yield torch.randn_like(out), torch.randn_like(logsumexp), q, k, v, *(bias or [None]), out, logsumexp
