"""A wrapper that refuses tensors that are not on a GPU, as wrappers of CUDA kernels do."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence


def scaled_add(x, weight, out=None):
    if not (x.is_cuda and weight.is_cuda):
        raise ValueError(f"expected CUDA tensors, but got {x.device} and {weight.device}")
    if x.get_device() != weight.get_device():
        raise ValueError("expected both on one GPU")
    return torch.addcmul(x, x, weight, out=out)


assert torch.cuda.is_available()
x, weight = torch.randn(4, 5), torch.randn(5)
expected = x + x * weight
torch.testing.assert_close(scaled_add(x.cuda(), weight.cuda()).cpu(), expected)

for wrong in ((x, weight.cuda()), (x.cuda(), weight), (x.cuda(0), weight.cuda(1))):
    try:
        scaled_add(*wrong)
    except ValueError:
        continue
    raise AssertionError(f"accepted {[tensor.device for tensor in wrong]}")

model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
assert not next(model.parameters()).is_cuda
model.cuda()
assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
loss = model(x.cuda()).sum()
loss.backward()
assert loss.is_cuda and all(parameter.grad.is_cuda for parameter in model.parameters())

packed = pack_sequence([torch.ones(3), torch.ones(2)])
assert packed.cuda().is_cuda and not packed.is_cuda and packed.cuda().data.is_cuda
assert x.cuda().untyped_storage().is_cuda and not x.untyped_storage().is_cuda
assert x.to_sparse().cuda().is_cuda and x.to_sparse_csr().cuda().is_cuda
assert not x.to("meta").is_cuda and not x.cuda().is_cpu and not x.cuda().is_xpu and not x.cuda().is_mps
assert x.cuda()[0].is_cuda and x.cuda().t().is_cuda and x.cuda().numpy(force=True).sum() == x.numpy().sum()
assert x.get_device() == -1 and x.cuda(1).get_device() == 1
