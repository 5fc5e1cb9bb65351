"""Indexing, scatter, sorting, counting, scans and masks on a GPU against the CPU."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.randn(6, 7)
index = torch.tensor([4, 0, 4, 2])
g, gi = x.cuda(), index.cuda()


def same(ours, theirs, tolerance=1e-5):
    assert ours.is_cuda
    torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


same(g[gi], x[index])
same(g[:, gi, None], x[:, index, None])
same(g[g > 0], x[x > 0])
same(g[gi, gi + 1], x[index, index + 1])
same(torch.where(g > 0, g, 0.0), torch.where(x > 0, x, 0.0))
filled, theirs = g.clone(), x.clone()
filled[gi] += 1
theirs[index] += 1
filled[filled < 0] = 0
theirs[theirs < 0] = 0
filled[1:3, ::2] = torch.arange(4.0).cuda()
theirs[1:3, ::2] = torch.arange(4.0)
same(filled, theirs)
same(torch.zeros(6).cuda().index_put_((gi,), torch.ones(4).cuda(), accumulate=True), torch.tensor([1.0, 0, 1, 0, 2, 0]))
rows = torch.randint(0, 6, (6, 7))
same(torch.zeros_like(g).scatter_add_(0, rows.cuda(), g), torch.zeros_like(x).scatter_add_(0, rows, x))
same(g.gather(0, rows.cuda()), x.gather(0, rows))
for reduce in ("sum", "mean", "amax", "prod"):
    ours = torch.ones_like(g).scatter_reduce(0, rows.cuda(), g, reduce=reduce)
    same(ours, torch.ones_like(x).scatter_reduce(0, rows, x, reduce=reduce))
same(torch.zeros(6, 7).cuda().index_add(0, gi, g[:4]), torch.zeros(6, 7).index_add(0, index, x[:4]))
for ours, wanted in zip(torch.sort(g, dim=1, descending=True), torch.sort(x, dim=1, descending=True), strict=True):
    same(ours, wanted)
for ours, wanted in zip(torch.topk(g, 3), torch.topk(x, 3), strict=True):
    same(ours, wanted)
same(g.argsort(0), x.argsort(0))
same(torch.nonzero(g > 0.5), torch.nonzero(x > 0.5))
for ours, wanted in zip(g.median(1), x.median(1), strict=True):
    same(ours, wanted)
same(torch.quantile(g, torch.tensor([0.1, 0.9]).cuda(), dim=1), torch.quantile(x, torch.tensor([0.1, 0.9]), dim=1))
integers = torch.randint(0, 5, (200,))
for ours, wanted in zip(
    torch.unique(integers.cuda(), return_inverse=True, return_counts=True),
    torch.unique(integers, return_inverse=True, return_counts=True),
    strict=True,
):
    same(ours, wanted)
same(torch.bincount(integers.cuda()), torch.bincount(integers))
same(torch.histc(g, 10, -2, 2), torch.histc(x, 10, -2, 2))
same(torch.searchsorted(torch.arange(5.0).cuda(), g), torch.searchsorted(torch.arange(5.0), x))
for name in (
    "sum",
    "mean",
    "std",
    "var",
    "prod",
    "amax",
    "amin",
    "argmax",
    "logsumexp",
    "cumsum",
    "cumprod",
    "softmax",
):
    same(getattr(g, name)(dim=1), getattr(x, name)(dim=1))
same(g.cummax(1).values, x.cummax(1).values)
same(F.one_hot(gi, 5), F.one_hot(index, 5))
same(torch.triu(g, 1) + torch.roll(g, 2, 1).flip(0), torch.triu(x, 1) + torch.roll(x, 2, 1).flip(0))
same(
    F.interpolate(g[None, None], scale_factor=2, mode="bilinear"),
    F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
)
grid = torch.rand(1, 4, 4, 2) * 2 - 1
ours = F.grid_sample(g[None, None], grid.cuda(), align_corners=False)
same(ours, F.grid_sample(x[None, None], grid, align_corners=False))
same(torch.cdist(g, g[:3]), torch.cdist(x, x[:3]), 1e-3)
same(
    torch.repeat_interleave(g, torch.tensor([0, 1, 2, 0, 3, 1]).cuda(), 0),
    x.repeat_interleave(torch.tensor([0, 1, 2, 0, 3, 1]), 0),
)
assert torch.equal(g.isnan().any().cpu(), x.isnan().any()) and (g > 0).sum().item() == int((x > 0).sum())
a = g.clone().requires_grad_()
a[gi].square().sum().backward()
same(a.grad, torch.zeros(6, 7).index_add(0, index, 2 * x[index]))
