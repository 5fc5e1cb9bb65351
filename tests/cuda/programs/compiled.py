"""torch.compile with the default backend and aot_eager: training, dynamic shapes, graph breaks, reduce-overhead."""

import torch
import torch.nn.functional as F
from torch import nn


def make(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(device)


def train(model, step, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


torch.manual_seed(1)
data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
reference = make("cpu")
expected = train(reference, lambda x, y: F.cross_entropy(reference(x), y), data)
on_gpu = [(x.cuda(), y.cuda()) for x, y in data]
for options in ({"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}):
    model = make("cuda")
    compiled = torch.compile(lambda x, y, model=model: F.cross_entropy(model(x), y), **options)
    losses = train(model, compiled, on_gpu)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)


@torch.compile(dynamic=True)
def normalize(x):
    if x.is_cuda and x.device.index == 1:
        x = x + 1
    scale = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * scale


for size in (4, 7, 12):
    for device in ("cuda:0", "cuda:1"):
        x = torch.randn(3, size)
        scale = torch.arange(size)
        plain = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * scale
        result = normalize(x.to(device))
        assert result.device == torch.device(device)
        torch.testing.assert_close(result.cpu(), plain, rtol=1e-3, atol=1e-4)


@torch.compile
def with_break(x):
    y = x.sin()
    print("break", end="")
    if y.sum().item() > 0:
        return y.cumsum(0)
    return torch.topk(y, 2).values


for x in (torch.full((5,), 0.5), torch.tensor([-1.0, -2.0, -0.5])):
    y = x.sin()
    torch.testing.assert_close(with_break(x.cuda()).cpu(), y.cumsum(0) if y.sum() > 0 else y.topk(2).values)
