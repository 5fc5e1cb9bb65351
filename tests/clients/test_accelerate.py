"""accelerate: its training loop, written for any accelerator. It is told of the device by ACCELERATE_TORCH_DEVICE."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")


def train(mixed_precision="no"):
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return accelerator, model, losses


def test_it_trains_as_on_the_cpu(use):
    accelerator, model, losses = train()
    assert accelerator.device.type == "openreg" and next(model.parameters()).is_openreg
    use("cpu")
    assert losses == pytest.approx(train()[2], rel=1e-5)


def test_mixed_precision(use):
    losses = train("bf16")[2]
    use("cpu")
    assert losses == pytest.approx(train("bf16")[2], rel=2e-2)


def test_state_is_saved_and_loaded(tmp_path):
    accelerator, model, _ = train()
    accelerator.save_state(tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
