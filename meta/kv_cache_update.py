"""kv_cache_update_ and kv_cache_update: write keys and values of new tokens to the slots of a paged cache."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from openreg_ops.meta import op


def _write(name: str, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    given, num_slots = slots.tolist(), k_cache.shape[0]
    for position, slot in enumerate(given):
        if slot >= num_slots:
            raise IndexError(
                f"{name}: expected slots below {num_slots}, the number of slots in k_cache, but got slot {slot} "
                f"at position {position}; give -1 to skip a position"
            )
    ordered = sorted((slot, position) for position, slot in enumerate(given) if slot >= 0)
    for (slot, first), (other, position) in pairwise(ordered):
        if slot == other:
            raise IndexError(
                f"{name}: expected slots without repetition, but got slot {slot} at positions {first} and {position}; "
                "give -1 to skip a position"
            )
    kept = slots >= 0
    to, keys, values = slots[kept].long(), k[kept], v[kept]
    k_cache[to] = keys
    v_cache[to] = values


@op.operator(differentiable=False)
def kv_cache_update_(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write the keys and values of N tokens to their slots of a cache, in place.

    k_cache[slots[i]] = k[i],  v_cache[slots[i]] = v[i]  for every i with slots[i] >= 0

    Args:
        k_cache: `[num_slots, ...]`, such as `[num_slots, heads, head_dim]`; any dtype and strides, written through its
            strides. A paged cache `[blocks, block_size, ...]` is `cache.flatten(0, 1)`, a view.
        v_cache: `[num_slots, ...]`; its other dimensions, dtype and strides are its own.
        k: `[N, ...]`, a row of k_cache for each token, in k_cache's dtype. It may be part of the cache: all is read
            before anything is written.
        v: `[N, ...]`, the same for v_cache.
        slots: `[N]`, int32 or int64. A negative slot skips its token, for padding.
    Raises:
        RuntimeError: shapes, dtypes or devices do not match; a cache is expanded or shares memory with the other
            (checked only on openreg); an argument requires a gradient or carries a tangent; under `torch.vmap`, a
            cache that is not mapped over while something else is.
        IndexError: a slot is num_slots or more, or is given twice: two tokens in one slot are a mistake of the
            scheduler, and which one stays would depend on the device.

    If it raises, nothing has been written.

    Not differentiable: an argument that requires a gradient raises immediately; use `torch.no_grad()`, or
    `Tensor.index_copy` if you need a gradient. Autocast casts k and v to the caches' dtypes. Under `torch.compile`
    it is functionalized, and Inductor writes in place. On openreg and CPU the host checks the slots.
    Under `torch.vmap` over slots, the slots of all samples count one after another in errors.
    Source: reshape_and_cache of vLLM; Kwon et al. 2023, arXiv:2309.06180.
    """
    _write("kv_cache_update_", k_cache, v_cache, k, v, slots)


@op.operator(differentiable=False)
def kv_cache_update(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The caches as `kv_cache_update_` would leave them, as new tensors.

    Args:
        k_cache, v_cache, k, v, slots: as `kv_cache_update_` takes them; the caches may be expanded too.
    Returns:
        new_k_cache, new_v_cache: shapes and dtypes of the caches, contiguous.
    Raises:
        RuntimeError, IndexError: as `kv_cache_update_`, except for gradients.
        RuntimeError: at backward, on every device: "derivative for openreg::kv_cache_update is not implemented".

    Not differentiable. Autocast casts k and v to the caches' dtypes.
    """
    new = [cache.clone(memory_format=torch.contiguous_format) for cache in (k_cache, v_cache)]
    _write("kv_cache_update", *new, k, v, slots)
    return new[0], new[1]


@kv_cache_update.fake
def _(k_cache, v_cache):
    return k_cache.new_empty(k_cache.shape), v_cache.new_empty(v_cache.shape)


# Samples that share slots become one more dimension of a row. Otherwise the samples' slots are concatenated, and a slot
# past the end of its sample is moved past the end of all.


@kv_cache_update.batched
def _(in_dims, *inputs):
    *rows, slots = op.all_batch_first(in_dims, inputs)
    if in_dims[4] is None:
        out = torch.ops.openreg.kv_cache_update(*(x.movedim(0, 1) for x in rows), inputs[4])
        return out, (1, 1)
    k_cache, v_cache = torch.ops.openreg.kv_cache_update(
        *(x.flatten(0, 1) for x in rows), _one_after_another(slots, rows[0].shape[1])
    )
    samples = (slots.shape[0], rows[0].shape[1])
    return (k_cache.unflatten(0, samples), v_cache.unflatten(0, samples)), (0, 0)


@kv_cache_update_.batched
def _(in_dims, *inputs):
    for name, dim in zip(("k_cache", "v_cache"), in_dims, strict=False):
        torch._check(
            dim is not None,
            lambda name=name: (
                f"kv_cache_update_: expected vmap to map over {name}, which it writes to, as over other arguments; "
                f"use kv_cache_update, or give {name} a dimension to map over"
            ),
        )
    *rows, slots = op.all_batch_first(in_dims, inputs)
    if in_dims[4] is None:
        torch.ops.openreg.kv_cache_update_(*(x.movedim(0, 1) for x in rows), inputs[4])
        return
    flat = [x.flatten(0, 1) for x in rows]
    torch.ops.openreg.kv_cache_update_(*flat, _one_after_another(slots, rows[0].shape[1]))
    for cache, written in zip(rows[:2], flat[:2], strict=True):  # if flatten had to copy, this writes back
        if not torch._C._is_alias_of(written, cache):
            cache.copy_(written.view(cache.shape))


def _one_after_another(slots: Tensor, num_slots: int) -> Tensor:
    first = num_slots * torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
    end = num_slots * slots.shape[0]
    placed = torch.where(slots < num_slots, slots + first, slots + end)
    return torch.where(slots < 0, -1, placed).flatten()


def _placed(k_cache, v_cache):
    """Each by one of its dimensions behind the slots, or whole: a token's heads may be on several devices."""
    for k in (None, *range(1, k_cache.dim())):
        for v in (None, *range(1, v_cache.dim())):
            yield dict(k_cache=k, k=k, v_cache=v, v=v), (k, v)


kv_cache_update.sharded(_placed)


@kv_cache_update_.sharded
def _(k_cache, v_cache):
    for inputs, _ in _placed(k_cache, v_cache):
        yield inputs, ()


@kv_cache_update_.samples
@kv_cache_update.samples
def _(device, dtype):
    for slots in ([3, 0, -1, 5], [2]):
        rows = (len(slots), 4, 3)
        yield *op.normal(device, dtype, (8, 4, 3), (8, 4, 3), rows, rows), torch.tensor(slots, device=device)
