"""Copies between GPUs, views, other dtypes, and two streams that wait for each other."""

import torch

assert torch.cuda.can_device_access_peer(0, 1) in (True, False)
values = torch.randn(64, 32)
first = values.to("cuda:0")
second = first.to("cuda:1")
assert second.device.index == 1 and torch.equal(second.cpu(), values)
assert torch.equal(first.t().to("cuda:1").cpu(), values.t())
assert torch.equal(first[::3, 1::2].cuda(1).cpu(), values[::3, 1::2])
assert torch.equal(first.to("cuda:1", torch.float64).cpu(), values.double())
target = torch.zeros(32, 64, device="cuda:1", dtype=torch.float16)
target.t().copy_(first, non_blocking=True)
assert torch.equal(target.cpu(), values.half().t())
target[4:8] = first[:, 4:8].t().half()
assert torch.equal(target[4:8].cpu(), values.half().t()[4:8])

streams = [torch.cuda.Stream(device=index) for index in range(2)]
streams[0].wait_stream(torch.cuda.current_stream(0))
with torch.cuda.stream(streams[0]):
    produced = first * 3
    ready = streams[0].record_event()
with torch.cuda.stream(streams[1]):
    streams[1].wait_event(ready)
    moved = produced.to("cuda:1", non_blocking=True)
    produced.record_stream(torch.cuda.current_stream(0))
    result = moved - 1
torch.cuda.synchronize(1)
torch.testing.assert_close(result.cpu(), values * 3 - 1)


class TwoGPUs(torch.nn.Module):
    """Model parallelism as in the tutorial."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net1 = torch.nn.Linear(32, 16).to("cuda:0")
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(16, 5).to("cuda:1")

    def forward(self, x):
        return self.net2(self.relu(self.net1(x.to("cuda:0"))).to("cuda:1"))


model = TwoGPUs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reference = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
state = {name.replace("net1", "0").replace("net2", "2"): value for name, value in model.state_dict().items()}
reference.load_state_dict(state)
reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
labels = torch.randn(64, 5)
for _ in range(3):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(values), labels.to("cuda:1")).backward()
    optimizer.step()
    reference_optimizer.zero_grad()
    torch.nn.functional.mse_loss(reference(values), labels).backward()
    reference_optimizer.step()
for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-5)
