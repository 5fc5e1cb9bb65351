"""Activation checkpointing: the same gradients, with dropout and autocast, and less memory."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def make(device):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]).to(device)


def run(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options) if options else block(x)
    loss = x.square().mean()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in blocks.parameters()]


torch.manual_seed(1)
data = torch.randn(2048, 64)
loss, grads = run(make("cpu"), data.clone().requires_grad_())
peaks = {}
for name, options in {"none": {}, "new": {"use_reentrant": False}, "old": {"use_reentrant": True}}.items():
    blocks, x = make("cuda"), data.cuda().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    result, result_grads = run(blocks, x, **options)
    torch.cuda.synchronize()
    peaks[name] = torch.cuda.max_memory_allocated() - base
    torch.testing.assert_close(result.cpu(), loss, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(result_grads, grads, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-6)
assert peaks["new"] < 0.7 * peaks["none"] and peaks["old"] < 0.7 * peaks["none"], peaks

dropout, x = nn.Dropout(0.5), torch.ones(1000, device="cuda", requires_grad=True)
for reentrant in (False, True):
    x.grad = None
    y = checkpoint(lambda x: dropout(x) * x, x, use_reentrant=reentrant)  # backward runs dropout again
    y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach()) and 0.4 < (y != 0).float().mean().item() < 0.6

blocks = make("cuda")
sequence = nn.Sequential(*blocks)
z = checkpoint_sequential(sequence, 3, data.cuda().requires_grad_(), use_reentrant=False)
z.square().mean().backward()
torch.testing.assert_close(blocks[0][0].weight.grad.cpu(), grads[0], rtol=1e-3, atol=1e-6)

types = []
layer = nn.Linear(64, 64).cuda()


def remember(x):
    types.append(layer(x).dtype)
    return layer(x).sin()


with torch.autocast("cuda", dtype=torch.bfloat16):
    out = checkpoint(remember, data[:4].cuda().requires_grad_(), use_reentrant=False)
out.float().sum().backward()
assert types == [torch.bfloat16, torch.bfloat16]
