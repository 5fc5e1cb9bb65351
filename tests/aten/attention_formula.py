"""Checks CUDA's two families of fused attention, which the CPU lacks, on any device against their formula in float64.

`_flash_attention_forward` and `_efficient_attention_forward` are what `varlen_attn` and scaled dot product attention of
jagged tensors call. The cases are the samples of OpInfo and `packed_cases`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing import assert_close

HALVES, FLOATS = ("float16", "bfloat16"), ("float32", "float16", "bfloat16")
OPERATORS = {
    "torch.ops.aten._flash_attention_forward": HALVES,
    "torch.ops.aten._efficient_attention_forward": FLOATS,
}
FLASH = "_flash_attention_forward"

# For outputs. A gradient sums products with rounded outputs, so its tolerance also grows with the square of the inputs.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

Arguments = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    from_end: bool = True,
    slopes: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> Pair:
    """Attention of one sequence, `[length, heads, width]`, in its dtype, and logsumexp, `[heads, length]`.

    Query i sees the keys from i - left to i + right, aligned at the end or at the beginning of both; None means no
    limit. A row that sees nothing is 0 and has a logsumexp of inf. The probabilities are multiplied by `kept`, a
    dropout mask.
    """
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    i = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1] if from_end else 0)
    j = torch.arange(k.shape[1])
    if bias is not None:
        scores = scores + bias
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (i - j).abs()
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    logsumexp = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    empty = ~seen.any(-1)
    p = torch.where(seen, torch.exp(scores - logsumexp.masked_fill(empty, 0)[..., None]), 0)
    if kept is not None:
        p = p * kept
    return (p @ v).transpose(0, 1), logsumexp.masked_fill(empty, math.inf)


def bound(name: str, args: tuple, kwargs: Arguments) -> Arguments:
    """Every argument of the operator `name` by its name."""
    schema = getattr(torch.ops.aten, name).default._schema
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def _sequences(a: Arguments, offsets: str, used: str) -> Iterator[tuple[int, slice, slice]]:
    """The number of each packed sequence, its rows of query, and its rows of key."""
    q, k = (a[f"{offsets}_{x}"].tolist() for x in "qk")
    for b in range(len(q) - 1):
        end = k[b + 1] if a[used] is None else k[b] + int(a[used][b])
        yield b, slice(q[b], q[b + 1]), slice(k[b], end)


def reference(name: str, a: Arguments) -> Pair:
    """Output and logsumexp of an operator's arguments, which are on the CPU; differentiable, in their dtype."""
    query, key, value = a["query"], a["key"], a["value"]
    rules: Arguments = {"scale": a["scale"]}
    if name == FLASH:
        rules["left"], rules["right"] = (
            None if x is None or x < 0 else x for x in (a["window_size_left"], a["window_size_right"])
        )
        if a["is_causal"]:
            rules["right"] = 0
        offsets, used = "cum_seq", "seqused_k"
    else:
        rules |= {"right": 0 if a["custom_mask_type"] else None, "from_end": a["custom_mask_type"] == 2}
        if a["window_size"]:
            rules["left"] = a["window_size"] - 1
        offsets, used = "cu_seqlens", "seqlen_k"
    slopes = a.get("alibi_slopes")
    each_slopes = (
        (lambda b: None) if slopes is None else (lambda b: (slopes if slopes.dim() == 1 else slopes[b]).double())
    )

    if a[f"{offsets}_q"] is None:
        pairs = [
            attend(
                *(x[b] for x in (query, key, value)),
                **rules,
                slopes=each_slopes(b),
                bias=None if a.get("bias") is None else a["bias"][b],
            )
            for b in range(len(query))
        ]
        out, logsumexp = (torch.stack(x) for x in zip(*pairs, strict=True))
    else:
        packed = name == FLASH
        q, k, v = (query, key, value) if packed else (query[0], key[0], value[0])
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        count = len(a[f"{offsets}_q"]) - 1
        logsumexp = torch.full((q.shape[1], len(q)) if packed else (count, q.shape[1], a["max_seqlen_q"]), math.inf)
        logsumexp = logsumexp.to(q.dtype)
        for b, rows, keys in _sequences(a, offsets, used):
            one, row = attend(q[rows], k[keys], v[keys], **rules, slopes=each_slopes(b))
            out = out.index_copy(0, torch.arange(rows.start, rows.stop), one)
            with torch.no_grad():
                (logsumexp[:, rows] if packed else logsumexp[b, :, : len(one)]).copy_(row)
        out = out if packed else out[None]
    if name != FLASH:  # in rows of a multiple of 32
        logsumexp = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=math.inf)
    return out, logsumexp


# ---- cases ----


def packed_cases(name: str, dtype: torch.dtype, seed: int = 0) -> Iterator[Arguments]:
    """Arguments on the CPU: every mask over packed sequences of unequal, empty and long lengths, and dense batches."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    flash = name == FLASH
    lengths = [([3, 0, 5, 2], [3, 4, 0, 7]), ([1], [1]), ([1, 1], [5, 300]), ([250], [130]), ([4, 9], [4, 9])]
    if flash:
        windows = [(-1, -1, False), (-1, -1, True), (2, -1, False), (3, 1, False), (70, 0, True), (-1, 4, False)]
        masks: list[Arguments] = [
            {"window_size_left": left, "window_size_right": right, "is_causal": causal}
            for left, right, causal in windows
        ]
    else:
        masks = [{"custom_mask_type": 0}, {"custom_mask_type": 1}, {"custom_mask_type": 2}]
    common: Arguments = {"dropout_p": 0.0} | ({"return_debug_mask": False} if flash else {"compute_log_sumexp": True})
    offset = ("cum_seq_q", "cum_seq_k", "max_q", "max_k") if flash else (
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
    for i, ((q, k), mask) in enumerate(itertools.product(lengths, masks)):
        heads, kv_heads, width = 4, 2 if flash and i % 2 else 4, 16
        shapes = (sum(q), heads, width), (sum(k), kv_heads, width), (sum(k), kv_heads, width if flash else 24)
        tensors = [make(*shape) for shape in shapes]
        if not flash:
            tensors = [x[None] for x in tensors]
        offsets = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (q, k))
        yield (
            dict(zip(("query", "key", "value"), tensors, strict=True))
            | dict(zip(offset, (*offsets, max(q), max(k)), strict=True))
            | common
            | mask
            | ({"scale": 0.3} if i % 3 == 0 else {})
        )
    for i, (q, k, mask) in enumerate(itertools.product((1, 7, 100), (7, 140), masks)):
        # Views of one projection, as in models.
        value_width = 16 if flash or i % 2 else 24
        all_k = make(2, k, 4, 16 + value_width)
        arguments: Arguments = {
            "query": make(2, 4, q, 16).transpose(1, 2), "key": all_k[..., :16], "value": all_k[..., 16:],
            **dict.fromkeys(offset), **common, **mask,
        }  # fmt: skip
        if flash:
            arguments |= {"max_q": q, "max_k": k}
        elif i % 2:
            arguments["bias"] = make(2, 4, q, k)
        yield arguments


def _samples(op: Any, name: str, dtype: torch.dtype) -> Iterator[Arguments]:
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):  # and so with logsumexp
        yield bound(name, (sample.input, *sample.args), sample.kwargs)
    for arguments in packed_cases(name, dtype):
        yield bound(name, (), arguments)


# ---- the check ----


def check_case(name: str, a: Arguments, device: str) -> list[tuple[str, str]]:
    """What differs, (kind, message) each: output, logsumexp and the gradients of query, key, value and bias."""
    wanted = [x for x in ("query", "key", "value", "bias") if a.get(x) is not None]
    host = {x: a[x].detach().double().requires_grad_() for x in wanted}
    there = {key: x.detach().to(device) if isinstance(x, torch.Tensor) else x for key, x in a.items()}
    for x in wanted:
        there[x].requires_grad_()
    call = getattr(torch.ops.aten, name).default
    torch.manual_seed(1)
    try:
        out, logsumexp, *_ = call(**there)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        got = torch.autograd.grad(out, [there[x] for x in wanted], weights.to(device))
        torch.manual_seed(1)
        again = call(**there)[0]
    except Exception as error:
        return [("error", f"{type(error).__name__}: {error}")]
    failures = []
    near = TOLERANCE[out.dtype]

    def same(
        kind: str, what: str, actual: torch.Tensor, expected: torch.Tensor, atol: float = near, rtol: float = near
    ) -> None:
        try:
            assert_close(actual.detach().cpu().double(), expected.detach(), atol=atol, rtol=rtol)
        except AssertionError as error:
            failures.append((kind, f"{what}: {' '.join(str(error).split())[:200]}"))

    same("rng", "the same seed again", again, out.detach().cpu().double(), atol=0, rtol=0)
    if a["dropout_p"] > 0:
        # The output is linear in value, with the mask of this call.
        pair = (weights.double() * out.detach().cpu()).sum(), (got[2].cpu().double() * host["value"]).sum()
        same("gradient", "value, dropped as in forward", pair[1].detach(), pair[0], atol=1, rtol=0.05)
        return failures
    expected, expected_logsumexp = reference(name, a | host)
    same("value", "output", out, expected)
    if name == FLASH or a["compute_log_sumexp"]:
        same("value", "logsumexp", logsumexp, expected_logsumexp, atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad(expected, list(host.values()), weights.double())
    size = max((float(x.detach().abs().amax()) for x in host.values() if x.numel()), default=0)
    for x, g, e in zip(wanted, got, gradients, strict=True):
        same("gradient", x, g, e, atol=near * max(1, size**2 / 4))
    return failures


def check(op: Any, dtype: torch.dtype, device: str) -> Iterator[tuple[int, str, str]]:
    """Check every sample of an OpInfo of `OPERATORS`; (sample, kind, message), kind being "" where all agrees."""
    name = op.name.rpartition(".")[2]
    key = torch._C._dispatch_key_for_device(torch.device(device).type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        return  # PyTorch has no formula for it
    for i, arguments in enumerate(_samples(op, name, dtype)):
        failures = check_case(name, arguments, device)
        yield from ((i, kind, message) for kind, message in failures or [("", "")])
