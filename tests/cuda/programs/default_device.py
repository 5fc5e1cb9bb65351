"""torch.set_default_device("cuda") and what it changes."""

import torch
from torch import nn

torch.set_default_device("cuda")
assert torch.get_default_device() == torch.device("cuda", 0)
x = torch.arange(12.0).reshape(3, 4)
assert x.is_cuda and torch.tensor([1, 2]).is_cuda and torch.eye(2).is_cuda and torch.randn(2).is_cuda
assert torch.from_numpy(x.cpu().numpy()).device.type == "cpu"
assert torch.zeros(2, device="cpu").device.type == "cpu" and torch.randperm(5).is_cuda
model = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2))
assert all(parameter.is_cuda for parameter in model.parameters())
output, _ = model(x)

cpu_model = nn.Sequential(nn.Linear(4, 3, device="cpu"), nn.LSTM(3, 2, device="cpu"))
cpu_model.load_state_dict(model.state_dict())
expected, _ = cpu_model(x.cpu())
torch.testing.assert_close(output.cpu(), expected, rtol=1e-4, atol=1e-5)

torch.set_default_device("cuda:1")
assert torch.ones(1).device == torch.device("cuda:1") and torch.get_default_device().index == 1
with torch.device("cpu"):
    assert torch.ones(1).device.type == "cpu" and nn.Linear(2, 2).weight.device.type == "cpu"
with torch.device("meta"):
    big = nn.Linear(10**6, 10**6)
assert big.weight.is_meta and torch.ones(1).device.index == 1
materialized = nn.Linear(3, 3, device="meta").to_empty(device="cuda")
nn.init.eye_(materialized.weight)
nn.init.zeros_(materialized.bias)
assert torch.equal(materialized(x[:, :3]), x[:, :3]) and materialized.weight.device == torch.device("cuda:0")
torch.manual_seed(0)
generator = torch.Generator(device="cuda:1")
assert torch.rand(3, generator=generator.manual_seed(1)).device == torch.device("cuda:1")
torch.set_default_device(None)
assert torch.ones(1).device.type == "cpu" and torch.get_default_device() == torch.device("cpu")
torch.set_default_device(torch.device("cuda"))
torch.cuda.set_device(1)
assert torch.ones(1).device == torch.device("cuda:1")
