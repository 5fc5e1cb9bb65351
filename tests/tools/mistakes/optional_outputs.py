"""It has outputs of type Tensor? that may be None."""

from __future__ import annotations

import torch

from mistakes import Example, define, right, without_gradient


def like(x):
    return x.new_empty(x.shape)


@right()
def only_if_wanted():
    op = define("only_if_wanted(Tensor x, bool want) -> Tensor?", lambda x, want: (x * 2).contiguous() if want else None,
                lambda x, want: like(x) if want else None, lambda ctx, g: (None if g is None else g * 2, None),
                lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), False), (torch.rand(4, 6), True)])


@right()
def second_if_wanted():
    def backward(ctx, g, h):
        return g * 3 + (0 if h is None else h * 2), None

    op = define("second_if_wanted(Tensor x, bool want) -> (Tensor, Tensor?)",
                lambda x, want: ((x * 3).contiguous(), (x * 2).contiguous() if want else None),
                lambda x, want: (like(x), like(x) if want else None), backward,
                lambda ctx, inputs, output: None)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), False), (torch.rand(4, 6), True)])


@right()
def gradients_if_needed():
    def kernel(g, x, w=None):
        return (g * x).contiguous(), None if w is None else (g * x).sum(0).contiguous(), x.abs().amax().reshape(1)

    def fake(g, x, w=None):
        y = torch.empty(g.shape, dtype=torch.result_type(g, x), device=g.device)
        return y, None if w is None else y.new_empty(y.shape[1:]), x.new_empty(1)

    op = without_gradient("gradients_if_needed(Tensor g, Tensor x, Tensor? w=None) -> (Tensor, Tensor?, Tensor)", kernel,
                          fake)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(4, 6)), (torch.rand(4, 6), torch.rand(4, 6), torch.rand(6))])
