"""It writes to an argument for some values only."""

from __future__ import annotations

import torch

from mistakes import Example, define, right


@right()
def clamps_a_copy():
    op = define("clamps_a_copy(Tensor x) -> Tensor", lambda x: x.clamp(-100, 100), torch.empty_like,
                lambda ctx, g: g * (ctx.saved_tensors[0].abs() <= 100))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])
