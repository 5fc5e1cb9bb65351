"""Mixed precision with the old names under torch.cuda.amp, an overflow that skips a step, and a saved scaler."""

import warnings

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

warnings.simplefilter("ignore", FutureWarning)
torch.manual_seed(0)
weight, x = torch.randn(8, 8), torch.randn(4, 8)
layer = nn.Linear(8, 8, bias=False).cuda()
with torch.no_grad():
    layer.weight.copy_(weight)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler = GradScaler(init_scale=1024.0, growth_interval=2)

with autocast():
    output = layer(x.cuda())
    assert output.dtype == torch.float16
    with autocast(enabled=False):
        assert layer(x.cuda()).dtype == torch.float32
    loss = output.float().pow(2).mean()
scaler.scale(loss).backward()
torch.testing.assert_close(layer.weight.grad.cpu() / 1024, 2 * (x @ weight.t()).t() @ x / 32, rtol=5e-3, atol=5e-3)
scaler.step(optimizer)
scaler.update()
expected = weight - 0.1 * 2 * (x @ weight.t()).t() @ x / 32
torch.testing.assert_close(layer.weight.detach().cpu(), expected, rtol=1e-3, atol=1e-3)

before = layer.weight.detach().clone()
optimizer.zero_grad()
with autocast(dtype=torch.float16):
    loss = layer(x.cuda()).float().sum() * 1e38
scaler.scale(loss).backward()
scaler.step(optimizer)  # gradients are infinite: the step is skipped
scaler.update()
assert torch.equal(layer.weight, before) and scaler.get_scale() == 512.0

for _ in range(2):
    optimizer.zero_grad()
    scaler.scale(layer(x.cuda()).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_scale() == 1024.0  # two good steps
state = scaler.state_dict()
restored = GradScaler()
restored.load_state_dict(state)
assert restored.get_scale() == 1024.0 and state["growth_interval"] == 2
assert scaler.scale(torch.ones(1, device="cuda")).item() == 1024.0


@autocast()
def product(a, b):
    return a @ b


assert product(x.cuda(), weight.cuda()).dtype == torch.float16
assert torch.get_autocast_gpu_dtype() == torch.float16 and not torch.is_autocast_enabled()
