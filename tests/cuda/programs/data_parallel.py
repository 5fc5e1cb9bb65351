"""nn.DataParallel on two GPUs, with the gradients of one batch on the CPU; torch.nn.parallel's functions."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
reference = copy.deepcopy(model)
places = []


class Spy(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, scale=1.0):
        places.append((x.device, x.shape[0], next(self.module.parameters(), x).device))
        return self.module(x) * scale


parallel = nn.DataParallel(Spy(model).cuda())
assert parallel.device_ids == [0, 1] and parallel.output_device == 0
x, y = torch.randn(10, 6), torch.randn(10, 3)
output = parallel(x, scale=0.5)
assert output.device == torch.device("cuda:0")
torch.testing.assert_close(output.detach().cpu(), reference(x).detach() * 0.5, rtol=1e-4, atol=1e-5)
assert sorted((device.index, size) for device, size, _ in places) == [(0, 5), (1, 5)]
nn.functional.mse_loss(output, y.cuda()).backward()
nn.functional.mse_loss(reference(x) * 0.5, y).backward()
for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)

on_second = nn.DataParallel(copy.deepcopy(reference).cuda(1), device_ids=[1])
torch.testing.assert_close(on_second(x.cuda(1)).cpu(), reference(x), rtol=1e-4, atol=1e-5)
assert list(nn.DataParallel(reference).state_dict())[0] == "module.0.weight"
same = nn.parallel.data_parallel(copy.deepcopy(reference).cuda(), x.cuda(), device_ids=[0, 1])
torch.testing.assert_close(same.cpu(), reference(x), rtol=1e-4, atol=1e-5)
try:
    nn.DataParallel(copy.deepcopy(reference).cuda(1), device_ids=[0, 1])(x.cuda())
except RuntimeError as error:
    assert "module must have its parameters and buffers on device cuda:0" in str(error), error
else:
    raise AssertionError("the module was on the wrong GPU")
