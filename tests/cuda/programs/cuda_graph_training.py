"""Whole-network capture, as in the notes on CUDA graphs: one captured training step, replayed on new data."""

import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8), nn.Dropout(p=0.0))


torch.manual_seed(1)
real_inputs, real_targets = torch.randn(6, 16, 32), torch.randn(6, 16, 8)
static_input, static_target = torch.ones(16, 32, device="cuda"), torch.ones(16, 8, device="cuda")
model = make_model().cuda()
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model(static_input), static_target).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    static_loss = loss_fn(model(static_input), static_target)
    static_loss.backward()
    optimizer.step()
assert not torch.cuda.is_current_stream_capturing()
losses = []
for data, target in zip(real_inputs, real_targets, strict=True):
    static_input.copy_(data)
    static_target.copy_(target)
    graph.replay()
    losses.append(static_loss.item())

reference = make_model()
optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
expected = []
warm_up = [(torch.ones(16, 32), torch.ones(16, 8))] * 3
for data, target in [*warm_up, *zip(real_inputs, real_targets, strict=True)]:
    optimizer.zero_grad()
    loss = loss_fn(reference(data), target)
    loss.backward()
    optimizer.step()
    expected.append(loss.item())
torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[3:]), rtol=1e-3, atol=1e-4)
for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)

try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        static_loss.item()
except RuntimeError as error:
    assert "captur" in str(error), error
else:
    raise AssertionError("item() was captured")
torch.cuda.synchronize()
