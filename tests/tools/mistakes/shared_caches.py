"""Correct: its arguments are views of one buffer, and it writes only to what its schema declares."""

from __future__ import annotations

import torch
from torch import Tensor

from mistakes import Example, define, right


@right()
def put_into_a_cache():
    @torch.library.custom_op("mistakes::put_into_a_cache", mutates_args=("k_cache",))
    def op(k_cache: Tensor, v_cache: Tensor, k: Tensor) -> Tensor:
        k_cache[: k.shape[0]].copy_(k)
        return (k_cache.sum(0) + v_cache.sum(0)).to(k.dtype)

    op.register_fake(lambda k_cache, v_cache, k: k.new_empty(k_cache.shape[1:]))
    kv = torch.rand(2, 8, 6)
    return Example(op, [(kv[0], kv[1], torch.rand(4, 6))])


@right()
def put_into_both_caches():
    """Columns of one buffer, whose elements alternate in memory."""

    @torch.library.custom_op("mistakes::put_into_both_caches", mutates_args=("k_cache", "v_cache"))
    def op(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k_cache[slots] = k.to(k_cache.dtype)
        v_cache[slots] = v.to(v_cache.dtype)

    op.register_fake(lambda k, v, k_cache, v_cache, slots: None)
    kv = torch.rand(8, 2, 6)
    return Example(op, [(torch.rand(3, 6), torch.rand(3, 6), kv[:, 0], kv[:, 1], torch.tensor([4, 0, 7]))])


@right()
def reads_overlapping_windows():
    def kernel(x, y):
        return (x * y).contiguous()

    def fake(x, y):
        shape = torch.broadcast_shapes(x.shape, y.shape)
        return x.new_empty(shape, dtype=torch.result_type(x, y))

    op = define("reads_overlapping_windows(Tensor x, Tensor y) -> Tensor", kernel, fake,
                lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]))  # fmt: skip
    x = torch.rand(24)
    return Example(op, [(x[:12].view(3, 4), x[5:17].view(3, 4)), (x[:6], x[:6])])


@right()
def updates_part_of_a_list():
    """A list of buffers of which the schema declares all written; another argument lies between them."""

    @torch.library.custom_op("mistakes::updates_part_of_a_list", mutates_args=("states",))
    def op(states: list[Tensor], decay: Tensor) -> Tensor:
        for state in states:
            state.mul_(decay)
        return torch.stack([state.sum() for state in states]).to(decay.dtype)

    op.register_fake(lambda states, decay: decay.new_empty(len(states)))
    buffer = torch.rand(3, 5)
    return Example(op, [([buffer[0], buffer[2]], buffer[1])])
