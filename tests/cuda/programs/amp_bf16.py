"""bfloat16 training without a scaler, in the style of nanoGPT, and which operators autocast runs in which type."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda:1"
device_type = "cuda" if "cuda" in device else "cpu"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
pt_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=pt_dtype)
torch.cuda.set_device(device)


def train(device, ctx):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=device != "cpu")
    tokens = torch.randint(0, 20, (4, 33))
    x, y = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    losses = []
    for _ in range(10):
        with ctx:
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, 20), y.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), logits.dtype


losses, logits_dtype = train(device, ctx)
expected, _ = train("cpu", nullcontext())
assert logits_dtype == torch.bfloat16 and losses[-1] < losses[0]
torch.testing.assert_close(losses, expected, rtol=3e-2, atol=3e-2)

a, b = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (a @ b).dtype == torch.bmm(a[None], b[None]).dtype == F.linear(a, b).dtype == torch.bfloat16
    assert torch.softmax(a @ b, -1).dtype == (a @ b).exp().dtype == F.layer_norm(a @ b, (8,)).dtype == torch.float32
    assert F.mse_loss(a @ b, b).dtype == torch.float32
    assert ((a @ b) + a).dtype == torch.float32 and torch.cat([a @ b, a]).dtype == torch.float32
    assert F.relu(a @ b).dtype == torch.bfloat16
    product = a @ b
assert torch.equal(product, a.bfloat16() @ b.bfloat16())
torch.testing.assert_close(product.float().cpu(), a.cpu() @ b.cpu(), rtol=5e-2, atol=1e-1)
with torch.autocast("cuda"):
    assert (a @ b).dtype == torch.float16
