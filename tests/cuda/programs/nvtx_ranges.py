"""NVTX ranges around a training loop, emit_nvtx, and the CUDA profiler's start and stop."""

import torch
from torch import nn
from torch.cuda import nvtx

torch.manual_seed(0)
layer, x = nn.Linear(8, 8), torch.randn(4, 8)
expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
layer.cuda()

torch.cuda.cudart().cudaProfilerStart()
nvtx.range_push("forward")  # its depth depends on whether a tool listens
nvtx.range_push("layer")
with nvtx.range("square {}", "loss"):
    loss = layer(x.cuda()).square().sum()
nvtx.mark("forward is done")
nvtx.range_pop()
nvtx.range_pop()
handle = nvtx.range_start("backward")
loss.backward()
nvtx.range_end(handle)
torch.cuda.cudart().cudaProfilerStop()
torch.testing.assert_close(layer.weight.grad.cpu(), expected, rtol=1e-4, atol=1e-4)


@nvtx.range("decorated")
def double(x):
    return x * 2


with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx(record_shapes=True):
    result = double(layer(x.cuda()))
torch.testing.assert_close(result.cpu(), 2 * layer.cpu()(x), rtol=1e-4, atol=1e-5)
free, total = torch.cuda.cudart().cudaMemGetInfo(0)
assert 0 < free <= total
torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
