"""A compiled transformer block's training, in float32 and with autocast, against the plain one on the CPU."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
data = torch.randn(3, 2, 8, 16)


def train(model, device, dtype=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in data.to(device):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(x).float(), x.flip(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), [parameter.detach().cpu() for parameter in model.parameters()]


model = Block()
copies = [copy.deepcopy(model).cuda() for _ in range(2)]
losses, parameters = train(model, "cpu")
for clone, dtype, tolerance in zip(copies, (None, torch.bfloat16), (1e-3, 5e-2), strict=True):
    our_losses, our_parameters = train(torch.compile(clone), "cuda", dtype)
    torch.testing.assert_close(our_losses, losses, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(our_parameters, parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

q, k, v = (torch.randn(2, 4, 8, 4) for _ in range(3))
attention = torch.compile(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
mask = torch.rand(8, 8) > 0.3
mask.fill_diagonal_(True)
inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
attention(*inputs, mask.cuda()).square().sum().backward()
expected = [x.clone().requires_grad_() for x in (q, k, v)]
F.scaled_dot_product_attention(*expected, attn_mask=mask).square().sum().backward()
for ours, theirs in zip(inputs, expected, strict=True):
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)
