"""Mixed precision as in PyTorch's recipe: autocast in float16, GradScaler, gradients clipped after unscale_."""

import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))


torch.manual_seed(1)
inputs, targets = torch.randn(10, 8, 16), torch.randn(10, 8, 4)
loss_fn = nn.MSELoss()

model = make_model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
losses = []
for x, y in zip(inputs.cuda(), targets.cuda(), strict=True):
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        output = model(x)
        assert output.dtype is torch.float16 and torch.is_autocast_enabled("cuda")
        loss = loss_fn(output, y)
        assert loss.dtype is torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    assert norm.is_cuda
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
assert scaler.get_scale() == 2.0**10 and scaler.is_enabled()
assert all(parameter.dtype is torch.float32 for parameter in model.parameters())

reference = make_model()
optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
expected = []
for x, y in zip(inputs, targets, strict=True):
    loss = loss_fn(reference(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    expected.append(loss.item())
torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-2, atol=2e-2)
for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=5e-3)
