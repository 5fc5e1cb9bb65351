"""Each way in which people name a GPU."""

import torch
from torch import nn

x = torch.arange(6.0).reshape(2, 3)
first, second = torch.device("cuda", 0), torch.device("cuda:1")
copies = {
    first: [x.cuda(), x.cuda(0), x.cuda(device=0), x.to("cuda"), x.to("cuda:0"), x.to(0), x.to(first), x.cuda(first)],
    second: [x.cuda(1), x.to("cuda:1"), x.to(1), x.to(second), x.to(device=1), x.cuda("cuda:1"), x.cuda().to(second)],
}
for device, tensors in copies.items():
    for number, tensor in enumerate(tensors):
        assert tensor.device == device, (number, tensor.device, device)
        assert torch.equal(tensor.cpu(), x)
        assert str(tensor.device) == f"cuda:{device.index}" and tensor.device.type == "cuda"

for device in ("cuda:1", 1, second):
    assert torch.zeros(2, device=device).device == second
    assert torch.tensor([1, 2], device=device).device == second
    assert torch.ones_like(x, device=device).device == second
    assert nn.Linear(3, 2, device=device).weight.device == second
    assert nn.Linear(3, 2).to(device).weight.device == second
assert torch.device("cuda").index is None and torch.device("cuda") != first
assert torch.device(1) == second and torch.device(type="cuda", index=1) == second
assert repr(second) == "device(type='cuda', index=1)"
assert str(torch.empty(0, device="cuda").device) == "cuda:0"

half = x.to(device="cuda:1", dtype=torch.float16, copy=True, non_blocking=True)
assert half.device == second and torch.equal(half.float().cpu(), x)
other = x.to(half)
assert other.device == second and other.dtype == torch.float16
assert x.cuda().cuda() is not None and half.to("cuda:1") is half
resident = x.cuda()
assert resident.cuda() is resident and resident.to("cuda") is resident and resident.to(0) is resident
with torch.cuda.device(1):
    assert torch.empty(1, device="cuda").device == second and x.cuda().device == second
with torch.device("cuda:1"):
    assert torch.empty(1).device == second and nn.Linear(3, 2).weight.device == second

values = x.cuda(1)
assert values.new_tensor([1.0]).device == second and values.new_zeros(3).device == second
assert "device='cuda:1'" in repr(values)
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
expected = model(x)
for place in (model.cuda(1), model.to("cuda:0"), model.to(second), model.cuda(), model.cpu()):
    device = next(place.parameters()).device
    torch.testing.assert_close(place(x.to(device)).cpu(), expected)
try:
    torch.zeros(1, device="cuda:7")
except RuntimeError as error:
    assert "CUDA error: invalid device ordinal" in str(error), error
else:
    raise AssertionError("cuda:7 exists")
