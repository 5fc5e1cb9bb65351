"""A batching rule that expects the batch in one argument, or in one place."""

from __future__ import annotations

import torch

from mistakes import Example, right, without_gradient, wrong


def placed(x, d, size):
    """x with the batch first."""
    return x.expand(size, *x.shape) if d is None else x.movedim(d, 0)


def product(x, w):
    return torch.mul(x, w).contiguous()


def broadcast(x, *others):
    return torch.empty(torch.broadcast_shapes(x.shape, *(other.shape for other in others)), device=x.device,
                       dtype=torch.result_type(x, others[0]))  # fmt: skip


@wrong("vmap", "vmap_grad")
def needs_the_first_batched():
    def rule(info, in_dims, x, w):
        x = x.movedim(in_dims[0], 0)  # the mistake: in_dims[0] may be None
        w = placed(w, in_dims[1], info.batch_size)
        return op(x, w.unsqueeze(1) if w.dim() < x.dim() else w), 0

    op = without_gradient("needs_the_first_batched(Tensor x, Tensor w) -> Tensor", product,
                broadcast, vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


@wrong("vmap", says="under torch.vmap with … batched … , output 0 differs … , which a loop gives")
def third_never_batched():
    def rule(info, in_dims, x, w, b):
        x, w = (placed(t, d, info.batch_size) for t, d in zip((x, w), in_dims[:2], strict=True))
        return torch.baddbmm(b if b.dim() < 3 else b.sum(0), x, w), 0  # the mistake: in_dims[2] is not read

    def fake(x, w, b):
        torch._check(x.dim() == 2 and w.dim() == 2 and x.shape[1] == w.shape[0], lambda: "shapes do not fit")
        return x.new_empty(x.shape[0], w.shape[1])

    op = without_gradient("third_never_batched(Tensor x, Tensor w, Tensor b) -> Tensor", lambda x, w, b: torch.addmm(b, x, w).contiguous(),
                fake, vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6, 3), torch.rand(4, 3))])


@wrong("vmap")
def batch_in_the_middle():
    def rule(info, in_dims, x, scale):
        scale = placed(scale, in_dims[1], info.batch_size)
        if in_dims[0] is None:
            x = x.expand(info.batch_size, *x.shape)
        elif in_dims[0] == x.dim() - 1:
            x = x.movedim(-1, 0)  # the mistake: only the first and the last place
        return (x * scale.view(-1, *[1] * (x.dim() - 1))).cumsum(-1), 0

    op = without_gradient("batch_in_the_middle(Tensor x, Tensor scale) -> Tensor", lambda x, scale: (x * scale).cumsum(-1).contiguous(),
                broadcast, vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(3, 3, 4), torch.tensor(2.0))])


@wrong("vmap")
def one_of_a_list():
    def rule(info, in_dims, xs):
        return torch.stack([x.movedim(d, 0) for x, d in zip(xs, in_dims[0], strict=True)]).sum(0), 0

    op = without_gradient("one_of_a_list(Tensor[] xs) -> Tensor", lambda xs: sum(xs[1:], xs[0] * 1).contiguous(),
                lambda xs: broadcast(*xs), vmap=rule)  # fmt: skip
    return Example(op, [([torch.rand(4, 6), torch.rand(4, 6)],)])


@right()
def any_batched():
    def rule(info, in_dims, x, w):
        x, w = (placed(t, d, info.batch_size) for t, d in zip((x, w), in_dims, strict=True))
        return op(x, w.unsqueeze(1) if w.dim() < x.dim() else w), 0

    op = without_gradient("any_batched(Tensor x, Tensor w) -> Tensor", product,
                broadcast, vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])


@right()
def without_a_rule():
    def kernel(x, w, b):
        return (x * w + b).contiguous()

    op = without_gradient("without_a_rule(Tensor x, Tensor w, Tensor b) -> Tensor", kernel, kernel)
    return Example(op, [(torch.rand(4, 6), torch.rand(6), torch.rand(6))])


@right()
def refuses_some():
    def rule(info, in_dims, x, w):
        if in_dims[1] is not None:
            raise NotImplementedError("refuses_some: vmap over w is not supported")
        return op(x.movedim(in_dims[0], 0), w), 0

    op = without_gradient("refuses_some(Tensor x, Tensor w) -> Tensor", product,
                broadcast, vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6), torch.rand(6))])
