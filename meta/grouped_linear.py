"""grouped_linear and its backward, both operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import linear

from openreg_ops.meta import op


def _checked(name: str, group_sizes: Tensor, rows: int) -> list[int] | None:
    """The sizes, or None if they cannot be read: then an assertion checks them."""
    if _readable(group_sizes):
        sizes = group_sizes.tolist()
        for e, size in enumerate(sizes):
            torch._check(
                size >= 0,
                lambda e=e, size=size: f"{name}: expected group_sizes of at least 0, but got {size} for group {e}",
            )
        total = min(sum(sizes), 2**63 - 1)
        torch._check(
            total == rows,
            lambda: f"{name}: expected group_sizes that sum to {rows}, the rows of x, but got a sum of {total}",
        )
        return sizes
    if not group_sizes.is_meta:
        sums = (group_sizes >= 0).all() & (group_sizes.sum() == rows)
        torch._assert_async(
            _unwrapped(sums).all(),  # for every sample: the assertion has no batching rule
            f"{name}: expected group_sizes of at least 0 that sum to the rows of x",
        )
    return None


class _Groups:
    """The groups of a number of rows: split() gives the part of each, join() puts the parts together again.

    If the sizes can be read, a part has the group's rows. If not (traced, or mapped over), it has all rows, with zeros
    for other groups, and join() takes its group's rows from each part.
    """

    def __init__(self, name: str, group_sizes: Tensor, rows: int) -> None:
        self.masks = None
        self.sizes = _checked(name, group_sizes, rows)
        if self.sizes is None:
            ends = group_sizes.cumsum(0)
            expert = (torch.arange(rows, device=ends.device).unsqueeze(1) >= ends).sum(1, keepdim=True)
            self.masks = [expert == e for e in range(group_sizes.shape[0])]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        if self.masks is None:
            return x.split(self.sizes)
        return [torch.where(mask, x, 0) for mask in self.masks]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        if self.masks is None:
            return torch.cat(list(parts))
        return sum(torch.where(mask, part, 0) for mask, part in zip(self.masks, parts, strict=True))


def _mapped(x: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _unwrapped(x: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def _readable(x: Tensor) -> bool:
    return not (x.is_meta or is_fake(x) or _mapped(x))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if op.unbacked(x, weight):
        y = op.product(x, weight.mT)
        return y if bias is None else y + bias
    return linear(x, weight, bias)


def _call(x, weights, bias, group_sizes):
    return torch.ops.openreg.grouped_linear(x, weights, bias or [], group_sizes)


@op.operator(call=_call)
def grouped_linear(x: Tensor, weights: Sequence[Tensor], bias: Sequence[Tensor] | None, group_sizes: Tensor) -> Tensor:
    """Apply a separate linear layer to each group of rows, like the experts of a mixture of experts.

    y[i] = weights[e] @ x[i] + bias[e]  where e is the group of row i: the first group_sizes[0] rows of x are
    group 0, the next group_sizes[1] are group 1, and so on.

    Args:
        x: `[rows, in]`, its rows sorted by group; float32, float64, float16 or bfloat16; any strides.
        weights: E tensors `[out, in]`, dtype of x; any strides; a transposed weight is not copied.
        bias: E tensors `[out]`, dtype of x; or None, which the operator gets as an empty list.
        group_sizes: `[E]`, int32 or int64, on the device of x; numbers of rows, 0 included, that sum to `rows`.
    Returns:
        y: `[rows, out]`, dtype of x, contiguous.
    Raises:
        RuntimeError: no weight; shapes, dtypes or devices do not fit; a group size is negative, or they do not sum to
            the rows of x. When compiled for a device other than openreg, this last check is an assertion in the graph.

    Differentiable any number of times in x, every weight and every bias. Group sizes are data: under `torch.compile`
    they may change from call to call, and so may the number of rows. The half types are accumulated in float32.
    Autocast runs it in its lower dtype. When compiled for a device other than openreg, and when `torch.vmap` maps over
    group_sizes, it runs every group on every row.
    Source: Shazeer et al. 2017, arXiv:1701.06538; `torch.nn.functional.grouped_mm` is the counterpart for stacked
    weights.
    """
    groups = _Groups("grouped_linear", group_sizes, x.shape[0])
    arguments = zip(groups.split(x), weights, bias or [None] * len(weights), strict=True)
    return groups.join([_linear(*one) for one in arguments])


@grouped_linear.fake
def _(x, weights):
    return x.new_empty(x.shape[0], weights[0].shape[0])


@op.operator()
def grouped_linear_backward(
    grad_y: Tensor, x: Tensor, weights: Sequence[Tensor], group_sizes: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """The gradients that `grouped_linear` gives x, every weight and every bias.

    With the rows of group e:
    grad_x = grad_y @ weights[e],  grad_weights[e] = grad_y.T @ x,  grad_bias[e] = sum(grad_y, 0)

    Args:
        grad_y: `[rows, out]`, dtype of x.
        x, weights, group_sizes: as passed to `grouped_linear`.
        output_mask: which of the three to compute.
    Returns:
        grad_x: `[rows, in]`, contiguous; None if masked out.
        grad_weights: E tensors `[out, in]`, contiguous; an empty list if masked out.
        grad_bias: E tensors `[out]`; an empty list if masked out.
    Raises:
        RuntimeError: as `grouped_linear`, and for a grad_y of another shape, dtype or device.

    Differentiable any number of times in grad_y, x and the weights.
    """
    groups = _Groups("grouped_linear_backward", group_sizes, x.shape[0])
    grads = groups.split(grad_y)
    return (
        groups.join([op.product(g, w) for g, w in zip(grads, weights, strict=True)]) if output_mask[0] else None,
        [op.product(g.mT, part) for g, part in zip(grads, groups.split(x), strict=True)] if output_mask[1] else [],
        [g.sum(0) for g in grads] if output_mask[2] else [],
    )


@grouped_linear_backward.fake
def _(x, weights, output_mask):
    return (
        x.new_empty(x.shape) if output_mask[0] else None,
        [w.new_empty(w.shape) for w in weights] if output_mask[1] else [],
        [w.new_empty(w.shape[:1]) for w in weights] if output_mask[2] else [],
    )


# ---- DTensors: along a dimension of the mesh, the devices have some of the rows, of the outputs, or of the inputs ----


def _split(shards: Any, x: Any, weights: Sequence[Any], bias: Sequence[Any] = ()) -> list[str | None]:
    """Which of these is sharded, for each dimension of the mesh; None if every device has all."""

    def one(x_at: Any, weight_at: Any) -> str | None:
        if x_at == 0:
            return "rows"
        return "outs" if weight_at == 0 else "ins" if weight_at == 1 and not bias else None

    return [one(*pair) for pair in zip(shards.at(x), shards.at(weights[0]), strict=True)]


def _where(split: Sequence[str | None], **at: Any) -> list[Any]:
    return [at.get(part) for part in split]


def _sizes_here(shards: Any, split: Sequence[str | None], group_sizes: Any, rows: int) -> Tensor:
    """How many of this device's rows belong to each group."""
    sizes = shards.local(group_sizes, [None for _ in split])
    _checked("grouped_linear", sizes, rows)
    here, ends = shards.part(rows, _where(split, rows=0)), sizes.cumsum(0)
    if not here.numel():
        return torch.zeros_like(sizes)
    below = (here.unsqueeze(1) < ends).sum(0, dtype=sizes.dtype)  # rows here that belong to a group up to this one
    return below.diff(prepend=below.new_zeros(1))


@grouped_linear.distributed
def _(shards, x, weights, bias, group_sizes):
    """Rows, outputs and inputs stay sharded; the terms of sharded inputs are left to be summed."""
    split, out = _split(shards, x, weights, bias or ()), weights[0].shape[0]
    of_x, of_weight = _where(split, rows=0, ins=1), _where(split, outs=0, ins=1)
    y = torch.ops.openreg.grouped_linear(
        shards.local(x, of_x),
        [shards.local(weight, of_weight) for weight in weights],
        [shards.local(vector, _where(split, outs=0)) for vector in bias or ()],
        _sizes_here(shards, split, group_sizes, x.shape[0]),
    )
    return shards.join(y, _where(split, rows=0, outs=1, ins=op.SUM), (x.shape[0], out))


@grouped_linear_backward.distributed
def _(shards, grad_y, x, weights, group_sizes, output_mask):
    split = _split(shards, x, weights)
    of_weight = _where(split, outs=0, ins=1)
    grad_x, grad_weights, grad_bias = torch.ops.openreg.grouped_linear_backward(
        shards.local(grad_y, _where(split, rows=0, outs=1)),
        shards.local(x, _where(split, rows=0, ins=1)),
        [shards.local(weight, of_weight) for weight in weights],
        _sizes_here(shards, split, group_sizes, x.shape[0]),
        output_mask,
    )
    to_weight, to_bias = _where(split, rows=op.SUM, outs=0, ins=1), _where(split, rows=op.SUM, outs=0)
    return (
        None if grad_x is None else shards.join(grad_x, _where(split, rows=0, outs=op.SUM, ins=1), x.shape),
        [shards.join(grad_weight, to_weight, weights[0].shape) for grad_weight in grad_weights],
        [shards.join(bias, to_bias, weights[0].shape[:1]) for bias in grad_bias],
    )


@grouped_linear.samples
def samples(device, dtype):
    for sizes, has_bias in (([3, 0, 2], True), ([4], False)):
        x, weights = torch.randn(sum(sizes), 4, dtype=dtype, device=device), torch.randn(len(sizes), 6, 4, dtype=dtype)
        bias = torch.randn(len(sizes), 6, dtype=dtype, device=device).unbind() if has_bias else ()
        yield x, list(weights.to(device).unbind()), list(bias), torch.tensor(sizes, device=device)


@grouped_linear_backward.samples
def _(device, dtype):
    for x, weights, bias, sizes in samples(device, dtype):
        grad_y = torch.randn(x.shape[0], 6, dtype=dtype, device=device)
        yield grad_y, x, weights, sizes, [True, True, bool(bias)]
