"""A training run that is interrupted, saved, and continued on the other GPU, with the optimizer's state."""

import io

import torch
from torch import nn


def make(device, lr=0.01):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, batches):
    device = next(model.parameters()).device
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(1)
batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(10)]
expected = train(*make("cpu"), batches)

parts = make("cuda:0")
losses = train(*parts, batches[:5])
file = io.BytesIO()
names = ("model", "optimizer", "scheduler")
torch.save({name: part.state_dict() for name, part in zip(names, parts, strict=True)}, file)

for map_location, device in (("cpu", "cuda:1"), ("cuda:1", "cuda:1"), (None, "cuda:0"), ("cpu", "cpu")):
    file.seek(0)
    checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    resumed = make(device, lr=123.0)
    for name, part in zip(names, resumed, strict=True):
        part.load_state_dict(checkpoint[name])
    for parameter, state in resumed[1].state.items():
        assert state["exp_avg"].device == state["max_exp_avg_sq"].device == parameter.device == torch.device(device)
        assert state["step"].device == torch.device(map_location or "cpu")  # it stays where torch.load puts it
        assert state["step"].item() == 5
    rest = train(*resumed, batches[5:])
    torch.testing.assert_close(torch.tensor(losses + rest), torch.tensor(expected), rtol=1e-3, atol=1e-5)
