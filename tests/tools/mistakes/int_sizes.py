"""The schema says int for an argument that is a size, so compiled programs take each value for a constant."""

from __future__ import annotations

import torch

from mistakes import Example, define, right, without_gradient, wrong


def rows(x, n):
    return x[torch.arange(n, device=x.device) % x.shape[0]].contiguous()


def new_rows(x, n):
    return x.new_empty([n, *x.shape[1:]])


@wrong("int_sizes", says="n is the size of dimension 0 of output 0, and the schema says int")
def takes_rows():
    op = without_gradient("takes_rows(Tensor x, int n) -> Tensor", rows, new_rows)
    return Example(op, [(torch.rand(4, 6), 8), (torch.rand(4, 6), 4)])


@wrong("int_sizes")
def expands_to():
    def kernel(x, shape):
        return x.expand(shape).contiguous()

    op = define("expands_to(Tensor x, int[] shape) -> Tensor", kernel, lambda x, shape: x.new_empty(shape),
                lambda ctx, g: (g.sum_to_size(ctx.shape), None),
                lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape))  # fmt: skip
    return Example(op, [(torch.rand(4, 1), [4, 6])])


@wrong("int_sizes")
def scatters():
    def kernel(x, index, rows=None):
        rows = int(index.max()) + 1 if rows is None else rows
        return x.new_zeros(rows, x.shape[1]).index_add(0, index, x), index.clone()

    def fake(x, index, rows=None):
        rows = torch.library.get_ctx().new_dynamic_size() if rows is None else rows
        return x.new_empty(rows, x.shape[1]), torch.empty_like(index)

    op = without_gradient("scatters(Tensor x, Tensor index, int? rows=None) -> (Tensor, Tensor)", kernel, fake)
    return Example(op, [(torch.rand(4, 6), torch.tensor([0, 2, 2, 1]), 6)])


def widened_by(size):
    """Sums of rows, and an operator for its backward that takes a size of this type."""
    name = "widened" if size == "SymInt" else "widened_int"
    wide = without_gradient(f"{name}_backward(Tensor g, {size} n) -> Tensor",
                            lambda g, n: g.unsqueeze(-1).expand(*g.shape, n).contiguous(),
                            lambda g, n: g.new_empty(*g.shape, n))  # fmt: skip

    def kernel(x):
        torch._check(x.dim() > 0, lambda: f"{name}: x has no dimension")
        return x.sum(-1).contiguous()

    def fake(x):
        torch._check(x.dim() > 0, lambda: f"{name}: x has no dimension")
        return x.new_empty(x.shape[:-1])

    return define(f"{name}(Tensor x) -> Tensor", kernel, fake, lambda ctx, g: wide(g, ctx.n),
                  lambda ctx, inputs, output: setattr(ctx, "n", inputs[0].shape[-1]))  # fmt: skip


@wrong(
    "fake_dynamic",
    says="although it takes other sizes; every new size compiles again: mistakes::widened_int_backward takes the size as an int",
)
def backward_takes_width():
    return Example(widened_by("int"), [(torch.rand(4, 6),)])


@right()
def backward_takes_symbolic_width():
    return Example(widened_by("SymInt"), [(torch.rand(4, 6),)])


@right()
def takes_symbolic_rows():
    op = without_gradient("takes_symbolic_rows(Tensor x, SymInt n) -> Tensor", rows, new_rows)
    return Example(op, [(torch.rand(4, 6), 8), (torch.rand(4, 6), 4)])


@right()
def pools():
    def kernel(x, size, stride=1):
        return torch.nn.functional.avg_pool1d(x, size, stride).contiguous()

    op = without_gradient("pools(Tensor x, int size, int stride=1) -> Tensor", kernel, kernel)
    return Example(op, [(torch.rand(2, 4, 8), 2), (torch.rand(2, 4, 8), 4, 2)])


@right()
def heads():
    def kernel(x, heads, dim=1):
        torch._check(x.shape[-1] % heads == 0, lambda: "heads must divide the last dimension")
        return x.unflatten(-1, (heads, -1)).transpose(dim, -2).contiguous()

    op = without_gradient("heads(Tensor x, int heads, int dim=1) -> Tensor", kernel, kernel)
    return Example(op, [(torch.rand(2, 3, 8), 2), (torch.rand(4, 3, 8), 4)])


@right()
def shuffles_groups():
    def kernel(x, groups):
        torch._check(x.shape[1] % groups == 0, lambda: "groups must divide the channels")
        return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2).contiguous()

    op = without_gradient("shuffles_groups(Tensor x, int groups) -> Tensor", kernel, kernel)
    return Example(op, [(torch.rand(2, 4, 3), 2)])
