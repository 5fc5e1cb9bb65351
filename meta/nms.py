"""nms: non-maximum suppression."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


@op.operator(differentiable=False)
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Keep only the highest-scoring of overlapping boxes: greedy non-maximum suppression.

    In order of decreasing scores, a box is dropped if, for a box kept before it,
    inter / (area + area' - inter) > iou_threshold

    Args:
        boxes: `[N, 4]` as x1, y1, x2, y2; float32, float64, float16 or bfloat16; any strides.
        scores: `[N]`, dtype of boxes.
        iou_threshold: intersection over union above which the box with the lower score is dropped; it ranges from 0 (no
            overlap) to 1.
    Returns:
        Indices of the boxes that are kept, by decreasing score, int64, `[K]` with K <= N. Equal scores keep their
        order; NaN is the highest score; a box with NaN in its coordinates drops no box and is never dropped.
    Raises:
        RuntimeError: another shape or dtype, or two devices; under `torch.vmap`, because K differs from sample to
            sample; on meta, where there is no data to count.

    The result is integers, which have no derivative; boxes and scores may require a gradient. The half types are
    computed
    in float32. Autocast runs it in float32. Under `torch.compile` and `torch.export` K is an unbacked size.
    On openreg it is `torchvision.ops.nms` too.
    Source: torchvision.ops.nms, with which it agrees bit for bit in float32 and float64.

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]])
        >>> openreg_ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5)
        tensor([0, 2])
    """
    order = scores.sort(stable=True, descending=True).indices
    x1, y1, x2, y2 = boxes[order].to(op.acc_dtype(boxes.dtype)).unbind(1)
    area = (x2 - x1) * (y2 - y1)
    dropped = torch.zeros_like(order, dtype=torch.bool)
    kept = []
    for i in range(len(order)):
        if dropped[i]:
            continue
        kept.append(i)
        w = _greater(0.0, _less(x2[i], x2) - _greater(x1[i], x1))
        h = _greater(0.0, _less(y2[i], y2) - _greater(y1[i], y1))
        inter = w * h
        dropped |= (inter / (area[i] + area - inter)).double() > iou_threshold
    return order[kept]


def _greater(a: Tensor | float, b: Tensor) -> Tensor:
    """std::max: a if either is NaN."""
    return torch.where(b > a, b, a)


def _less(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b < a, b, a)


@nms.fake
def _(boxes):
    kept = torch.library.get_ctx().new_dynamic_size()
    torch._check(kept <= boxes.shape[0])
    return boxes.new_empty(kept, dtype=torch.int64)


@nms.batched
def _(*_):
    raise RuntimeError(
        "nms: expected no vmap, because the number of boxes that are kept differs from sample to sample; "
        "call it for each sample, or once with the boxes of each sample moved apart from the others'"
    )


@nms.distributed
def _(shards, boxes, scores, iou_threshold):
    """Every device needs all boxes, because each box may drop any other."""
    whole = [None for _ in shards.dims]
    kept = torch.ops.openreg.nms(shards.local(boxes, whole), shards.local(scores, whole), iou_threshold)
    return shards.join(kept, whole)


@nms.samples
def _(device, dtype):
    for n, threshold in ((6, 0.5), (1, 0.0), (40, 0.3)):
        corner, size = torch.rand(n, 2, dtype=dtype, device=device), torch.rand(n, 2, dtype=dtype, device=device)
        yield torch.cat([corner, corner + size], 1), torch.rand(n, dtype=dtype, device=device), threshold
