"""`scaled_dot_product_attention` on DTensors, as with CUDA's flash attention: on parts of the batch or of the heads.

PyTorch has rules for CUDA's operators, but not for the CPU's flash attention, which the device uses. Its mask is a
keyword argument, which DTensor does not redistribute, so a handler runs instead of a rule. Imported after
torch.distributed.tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from openreg_ops.distributed.sharding import Shards, by_name
from openreg_ops.meta.op import At
from openreg_ops.torch_patches.import_hooks import after_import

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, SEQUENCE = 0, 1, 2


def _choose(shards: Shards, query: DTensor, key: DTensor, *others: DTensor) -> list[At]:
    """Which dimension is sharded along each dimension of the mesh: the one that most of the tensors already shard."""
    parts = {HEADS: 1, BATCH: 1}
    grouped = query.shape[HEADS] != key.shape[HEADS]
    chosen: list[At] = []
    for along in shards.dims:
        at = [shards.at(x)[along] for x in (query, key, *others)]
        new = {dim: count * shards.mesh.size(along) for dim, count in parts.items()}
        possible = []
        for dim, count in new.items():
            size = key.shape[dim]
            uneven = parts[dim] == 1 and not (grouped and dim == HEADS)  # or else query and key would not match
            if size % count == 0 or (uneven and (count - 1) * -(-size // count) < size):  # no part is empty
                possible.append(dim)
        if not possible or all(sharded is None for sharded in at):
            chosen.append(None)
        else:
            chosen.append(dim := max(possible, key=at.count))
            parts[dim] = new[dim]
    return chosen


def _local_mask(shards: Shards, mask: Tensor | None, at: Sequence[At]) -> Tensor | None:
    """This device's part of a mask, which may be broadcast over the batch and the heads."""
    if mask is None:
        return None
    if not isinstance(mask, DTensor):  # under implicit_replication()
        mask = DTensor.from_local(mask, shards.mesh, [Replicate() for _ in shards.dims], run_check=False)
    return shards.local(
        mask, [dim if mask.dim() == 4 and dim is not None and mask.shape[dim] > 1 else None for dim in at]
    )


def forward(
    shards: Shards,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[DTensor, DTensor]:
    at = _choose(shards, query, key, value)
    mask = _local_mask(shards, attn_mask, at)
    local = (shards.local(x, at) for x in (query, key, value))
    out, logsumexp = FORWARD(*local, dropout_p, is_causal, attn_mask=mask, scale=scale)
    return shards.join(out, at, (*query.shape[:3], value.shape[3])), shards.join(logsumexp, at, query.shape[:3])


def backward(
    shards: Shards,
    grad_out: DTensor,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    out: DTensor,
    logsumexp: DTensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[DTensor, ...]:
    at = _choose(shards, query, key, value, out, logsumexp, grad_out)
    mask = _local_mask(shards, attn_mask, at)
    local = (shards.local(x, at) for x in (grad_out, query, key, value, out, logsumexp))
    grads = BACKWARD(*local, dropout_p, is_causal, attn_mask=mask, scale=scale)
    return tuple(shards.join(grad, at, x.shape) for grad, x in zip(grads, (query, key, value), strict=True))


# ---- context parallelism: the sequence is sharded, and keys and values travel around a ring ----


def _ring(function: str, shards: Shards, tensors: dict[str, DTensor], attn_mask: Tensor | None, **options: Any) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    if attn_mask is not None:
        raise NotImplementedError(
            "scaled_dot_product_attention: expected no attn_mask inside context_parallel(), as on CUDA, but got one of shape "
            f"{list(attn_mask.shape)}; pass is_causal=True, or leave context_parallel()"
        )
    local = {name: shards.local(x, [SEQUENCE]) for name, x in tensors.items()}
    return getattr(_attention, function)(shards.mesh.get_group(), SEQUENCE, **local, **options)


def ring_forward(
    shards: Shards, query: DTensor, key: DTensor, value: DTensor, attn_mask: Tensor | None, **options: Any
) -> tuple[DTensor, DTensor]:
    tensors = {"query": query, "key": key, "value": value}
    out, logsumexp = _ring("_templated_ring_attention", shards, tensors, attn_mask, op=FORWARD, **options)
    shape = (*query.shape[:3], value.shape[3])
    return shards.join(out, [SEQUENCE], shape), shards.join(logsumexp, [SEQUENCE], query.shape[:3])


def ring_backward(shards: Shards, attn_mask: Tensor | None, **given: Any) -> tuple[DTensor, ...]:
    tensors = {name: x for name, x in given.items() if isinstance(x, DTensor)}
    options = {name: x for name, x in given.items() if name not in tensors} | {"grad_out_name": "grad_out"}
    grads = _ring("_templated_ring_attention_backward", shards, tensors, attn_mask, op=BACKWARD, **options)
    names = ("query", "key", "value")
    return tuple(shards.join(grad, [SEQUENCE], given[name].shape) for grad, name in zip(grads, names, strict=True))


def _handler(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        dispatcher = DTensor._op_dispatcher
        mesh = dispatcher.unwrap_to_op_info(op, args, kwargs).compute_mesh  # raises as for any other operator
        with torch.no_grad():
            return function(Shards(mesh), **by_name(op, args, kwargs))

    return run


def register() -> None:
    """Register the handlers, and those that PyTorch uses inside context_parallel()."""
    DTensor._op_dispatcher._custom_op_handlers.update({FORWARD: _handler(forward), BACKWARD: _handler(backward)})

    def register_ring() -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        _attention.custom_ops.update({FORWARD: _handler(ring_forward), BACKWARD: _handler(ring_backward)})

    after_import("torch.distributed.tensor.experimental._context_parallel._attention", register_ring)
