"""A small GPT in nanoGPT's style: training, sampling with a generator, a key-value cache, against the CPU."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = (p.view(B, T, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(C, dim=2))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.norm2(x)), (k, v)


class GPT(nn.Module):
    def __init__(self, vocabulary=17, length=16, width=24):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(Block(width, 4) for _ in range(2)), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, tokens, caches=None):
        start = caches[0][0].shape[2] if caches else 0
        x = self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        new = []
        for index, block in enumerate(self.blocks):
            x, cache = block(x, caches[index] if caches else None)
            new.append(cache)
        return self.head(self.norm(x)), new


torch.manual_seed(0)
reference = GPT()
model = copy.deepcopy(reference).to("cuda")
data = torch.randint(0, 17, (6, 8, 17))
losses = {}
for network, device in ((reference, "cpu"), (model, "cuda")):
    decay = [p for p in network.parameters() if p.dim() >= 2]
    others = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    losses[device] = []
    for step, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / len(data)))
        logits, _ = network(batch[:, :-1].to(device))
        loss = F.cross_entropy(logits.view(-1, 17), batch[:, 1:].to(device).reshape(-1), ignore_index=-1)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[device].append(loss.item())
torch.testing.assert_close(torch.tensor(losses["cuda"]), torch.tensor(losses["cpu"]), rtol=1e-3, atol=1e-4)

prompt = data[0, :2, :4]
with torch.no_grad():
    tokens, caches, step = prompt.cuda(), None, prompt.cuda()
    for _ in range(8):  # greedy, with a cache
        logits, caches = model(step, caches)
        step = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
    full = model(tokens[:, :-1])[0][:, 3:].argmax(-1)
    assert torch.equal(full, tokens[:, 4:])
    logits = model(prompt.cuda())[0][:, -1] / 0.8
    top, _ = torch.topk(logits, 5)
    probabilities = F.softmax(logits.masked_fill(logits < top[:, [-1]], -math.inf), -1)
    generator = torch.Generator(device="cuda").manual_seed(1)
    draws = torch.multinomial(probabilities, 20000, replacement=True, generator=generator)
    frequencies = torch.stack([row.bincount(minlength=17) for row in draws]) / 20000
    assert (frequencies - probabilities).abs().max() < 0.02
    expected = F.softmax(reference(prompt)[0][:, -1] / 0.8, -1)
    torch.testing.assert_close(F.softmax(logits, -1).cpu(), expected, rtol=1e-2, atol=1e-3)
