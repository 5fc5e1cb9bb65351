"""rotary_embedding and its backward, both operators."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    x, cos, sin = map(op.whole_rows, (x, cos, sin))
    x_wide = x.to(op.acc_dtype(x.dtype))
    half = x.shape[-1] // 2  # chunk() and flatten() cannot tell that two halves make up the dimension
    if interleaved:
        a, b = (x_wide[..., first::2].narrow(-1, 0, half) for first in (0, 1))
    else:
        a, b = (x_wide.narrow(-1, start, half) for start in (0, half))
    pair = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(pair, -1) if interleaved else torch.cat(pair, -1)
    return y.to(x.dtype).contiguous().view(x.shape)


@op.operator()
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of elements of each row of x by the angles of the row's position.

    (a, b) -> (a * cos - b * sin, b * cos + a * sin)

    The pairs are (x[..., i], x[..., i + D/2]), as in Llama and GPT-NeoX, or, interleaved, (x[..., 2i], x[..., 2i + 1]),
    as in GPT-J and the paper. Each has one angle, so cos and sin have D/2 columns, as
    in flash-attention. They broadcast to x by the usual rules:

    - x `[B, H, S, D]`, cos `[S, D/2]`: position s of every batch and head;
    - x `[B, S, H, D]`, cos `[S, 1, D/2]` (`cos.unsqueeze(-2)`): the same with heads after positions;
    - x `[B, H, S, D]`, cos `[B, 1, S, D/2]`: separate positions for each batch, like Hugging Face's `position_ids`. Its
      tables have the D/2 columns twice: take `cos[..., : D // 2]`.

    Args:
        x: `[..., D]`, D even, float32, float64, float16 or bfloat16. Contiguous rows, as in `[B, S, H,
            D].transpose(1, 2)`, are read in place.
        cos: broadcasts to `[..., D/2]`; dtype of x, or float32 for the half types.
        sin: shape and dtype of cos.
        interleaved: which elements are a pair.
    Returns:
        Shape and dtype of x, contiguous.
    Raises:
        RuntimeError: x has another dtype, no dimension, or an odd number of columns; cos does not broadcast; sin is
            not like cos; devices differ.

    Linear in x, and differentiable any number of times in x, cos and sin. The half types are computed in float32.
    Autocast runs it in the widest of the three dtypes.
    Source: Su et al. 2021, arXiv:2104.09864; flash-attention's `apply_rotary_emb` for the format of the tables.

    Example:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> cos, sin = torch.zeros(1, 1), torch.ones(1, 1)  # a quarter turn
        >>> openreg_ops.rotary_embedding(x, cos, sin).flatten()
        tensor([0., 1.])
    """
    return _rotate(x, cos, sin, interleaved)


@op.operator()
def rotary_embedding_backward(grad_y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The gradient that `rotary_embedding` gives x: grad_y rotated back, `rotary_embedding(grad_y, cos, -sin)`.

    Args:
        grad_y: `[..., D]`, as x of `rotary_embedding`.
        cos, sin, interleaved: as passed to `rotary_embedding`.
    Returns:
        Shape and dtype of grad_y, contiguous.
    Raises:
        RuntimeError: as `rotary_embedding`.

    Differentiable any number of times in all three tensors.
    """
    return _rotate(grad_y, cos, -sin, interleaved)


@rotary_embedding.fake
def _(x):
    return x.new_empty(x.shape)


@rotary_embedding_backward.fake
def _(grad_y):
    return grad_y.new_empty(grad_y.shape)


def _placed(x, cos):
    """Each dimension of x but the columns, and the matching dimension of cos; None if cos is broadcast."""
    for d in range(x.dim() - 1):
        of_cos = d - x.dim() + cos.dim()
        yield d, of_cos if of_cos >= 0 and cos.shape[of_cos] > 1 else None


@rotary_embedding.sharded
def _(x, cos):
    for d, table in _placed(x, cos):
        yield dict(x=d, cos=table, sin=table), (d,)


@rotary_embedding_backward.sharded
def _(grad_y, cos):
    for d, table in _placed(grad_y, cos):
        yield dict(grad_y=d, cos=table, sin=table), (d,)


def _batch_first(in_dims, x, cos, sin, interleaved):
    """The mapped dimension first, with cos and sin at x's rank so that they still broadcast to it."""
    x, *tables = op.all_batch_first(in_dims[:3], (x, cos, sin))
    if in_dims[1] is None and in_dims[2] is None:
        return x, cos, sin, interleaved
    between = (None,) * (x.dim() - tables[0].dim())
    return x, *(table[(slice(None), *between)] for table in tables), interleaved


rotary_embedding.batched(lambda *given: (torch.ops.openreg.rotary_embedding(*_batch_first(*given)), 0))
rotary_embedding_backward.batched(
    lambda *given: (torch.ops.openreg.rotary_embedding_backward(*_batch_first(*given)), 0)
)


@rotary_embedding_backward.samples
@rotary_embedding.samples
def _(device, dtype):
    for shape, table, *interleaved in (
        ((2, 4, 5, 8), (5, 4)),
        ((2, 5, 3, 6), (5, 1, 3), True),
        ((4,), (2,), False),
    ):
        yield *op.normal(device, dtype, shape, table, table), *interleaved
