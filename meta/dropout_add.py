"""dropout_add and its backward, both operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.identity import identity
from openreg_ops.meta import op


def _scale(p):
    return 0.0 if p == 1 else 1 / (1 - p)


@op.operator(random=True)
def dropout_add(
    x: Tensor, residual: Tensor, p: float, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Zero each element of x with probability p, scale the others to keep the mean, and add the residual.

    out = residual + x * mask / (1 - p)

    There is no training flag: in evaluation, just add. p = 0 keeps every element, and p = 1 keeps none, so out is
    residual (where x is finite, as in `torch.nn.functional.dropout`).

    Args:
        x: any shape and strides, float32, float64, float16 or bfloat16.
        residual: shape and dtype of x.
        p: probability of a zero, from 0 to 1; it is used as a multiple of 2**-32.
        generator: of x's device; by default that device's own, which `torch.manual_seed` seeds.
    Returns:
        out: shape and dtype of x, contiguous.
        mask: shape of x, bool, contiguous; False where x was dropped. Not differentiable.
    Raises:
        RuntimeError: another dtype; residual is not like x; p is not a probability; generator is on another device.

    On openreg, element i's random number is a function (Philox4x32-10) of i and of two numbers drawn from the
    generator: a seed gives one mask for any number of threads, and the CPU's generator does not advance. Other
    devices draw with `Tensor.uniform_`, so their masks differ. Under `torch.vmap` it obeys `randomness`.

    Differentiable any number of times in x and residual. The half types are computed in float32. Autocast runs it in
    the wider of the two dtypes.
    Source: Srivastava et al. 2014, JMLR 15:1929; Salmon et al. 2011, doi:10.1145/2063384.2063405 for Philox.

    Example:
        >>> out, mask = openreg_ops.dropout_add(torch.ones(3), torch.ones(3), 0.0)
        >>> out
        tensor([2., 2., 2.])
    """
    if x.device.type == identity.name:  # in forward mode, with the numbers that the kernel draws
        mask = torch.ops.openreg.dropout_add(x.detach(), residual.detach(), p, generator=generator)[1]
    else:
        mask = x.new_empty(x.shape, dtype=torch.float64).uniform_(generator=generator) >= p
    wide = op.acc_dtype(x.dtype)
    out = residual.to(wide) + x.to(wide) * mask * _scale(p)
    return out.to(x.dtype).contiguous(), mask


@dropout_add.fake
def _(x):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@dropout_add.batched
def _(in_dims, x, residual, p, *, vmap, generator):
    x, residual = op.all_batch_first(in_dims[:2], (x, residual), vmap.batch_size())
    if vmap.randomness() == "different":
        return torch.ops.openreg.dropout_add(x, residual, p, generator=generator), (0, 0)
    one = x.new_zeros(x.shape[1:])
    mask = torch.ops.openreg.dropout_add(one, one, p, generator=generator)[1].expand(x.shape)
    out = residual + x.to(op.acc_dtype(x.dtype)) * mask * _scale(p)  # rounded once, like the kernel
    return (out.to(x.dtype), mask), (0, 0)


@dropout_add.distributed
def _(shards, x, residual, p, generator):
    """Shards draw their own numbers, as in `torch.nn.functional.dropout`; replicated tensors draw the same as on one
    process."""
    at = [d if isinstance(d, int) else None for d in shards.at(x)]
    here, there = shards.local(x, at), shards.local(residual, at)
    if at == [None] * len(at):
        out, mask = torch.ops.openreg.dropout_add(here, there, p, generator=generator)
    else:
        drawn = shards.join(torch.empty_like(here, dtype=torch.float64), at, x.shape).uniform_(generator=generator)
        mask = drawn.to_local() >= p
        wide = op.acc_dtype(x.dtype)
        out = (there.to(wide) + here.to(wide) * mask * _scale(p)).to(x.dtype)
    return shards.join(out, at, x.shape), shards.join(mask, at, x.shape)


@dropout_add.samples
def _(device, dtype):
    for shape, p in (((4, 6), 0.0), ((2, 3, 7), 0.0), ((), 1.0)):  # if there is nothing random
        yield *op.normal(device, dtype, shape, shape), p


@op.operator(batch_first=True, inner=0)
def dropout_add_backward(grad_out: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient that `dropout_add` gives x: grad_out * mask / (1 - p). That of residual is grad_out.

    Args:
        grad_out: shape of mask, float32, float64, float16 or bfloat16.
        mask: bool, as returned by `dropout_add`.
        p: as passed to `dropout_add`.
    Returns:
        grad_x: shape and dtype of grad_out, contiguous; zero for p = 1.
    Raises:
        RuntimeError: another dtype; mask is not like grad_out; p is not a probability.

    Differentiable any number of times in grad_out.
    """
    return (grad_out.to(op.acc_dtype(grad_out.dtype)) * mask * _scale(p)).to(grad_out.dtype).contiguous()


@dropout_add_backward.fake
def _(grad_out):
    return grad_out.new_empty(grad_out.shape)


@dropout_add_backward.samples
def _(device, dtype):
    for shape, p in (((4, 6), 0.5), ((2, 3, 7), 0.1), ((), 1.0)):
        yield torch.randn(shape, dtype=dtype, device=device), torch.rand(shape, device=device) >= p, p
