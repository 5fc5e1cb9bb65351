"""Import this to register sharding rules with DTensor: each device runs the operators on its part instead of
gathering."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

_ops = torch.ops.stable_operators


@register_sharding([_ops.swiglu.default])
def _(gate, up):
    return [([Replicate()], [Replicate()] * 2)] + [([Shard(d)], [Shard(d)] * 2) for d in range(len(gate.shape))]


@register_sharding([_ops.swiglu_backward.default])
def _(grad_y, gate, up):
    return [([Replicate()] * 2, [Replicate()] * 3)] + [([Shard(d)] * 2, [Shard(d)] * 3) for d in range(len(gate.shape))]


@register_sharding([_ops.rms_norm.default])
def _(x, weight, eps=1e-6):
    rows = range(len(x.shape) - 1)
    return [([Replicate()] * 2, [Replicate()] * 2 + [None])] + [
        ([Shard(d)] * 2, [Shard(d), Replicate(), None]) for d in rows
    ]


@register_sharding([_ops.rms_norm_backward.default])
def _(grad_y, x, weight, rstd):
    rows = range(len(x.shape) - 1)
    return [([Replicate()] * 2, [Replicate()] * 4)] + [
        ([Shard(d), Partial()], [Shard(d), Shard(d), Replicate(), Shard(d)]) for d in rows
    ]


# register_sharding makes only integers part of the key of DTensor's cache, so a call would get the eps of an earlier
# call with the same placements.
_propagator = DTensor._op_dispatcher.sharding_propagator
_propagator.op_to_schema_info[_ops.rms_norm.default] = RuntimeSchemaInfo(static_argnum=2, needs_pytree=True)
