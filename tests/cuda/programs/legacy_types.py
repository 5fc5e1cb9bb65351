"""Typed tensors of old programs: torch.cuda.FloatTensor and its relatives."""

import warnings

import torch

warnings.simplefilter("ignore")
x = torch.cuda.FloatTensor([[1, 2], [3, 4]])
assert x.type() == "torch.cuda.FloatTensor" and x.dtype == torch.float32 and x.device.index == 0
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
assert isinstance(x.cpu(), torch.FloatTensor) and not isinstance(x, torch.FloatTensor)
assert torch.cuda.LongTensor(2, 3).fill_(7).sum().item() == 42
assert torch.cuda.IntTensor([1]).type() == "torch.cuda.IntTensor" and torch.cuda.ByteTensor([1, 0]).dtype == torch.uint8
names = {"Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Bool": torch.bool}
for name, dtype in {**names, "Char": torch.int8, "Short": torch.int16}.items():
    made = getattr(torch.cuda, f"{name}Tensor")(3).zero_()
    assert made.dtype == dtype and made.is_cuda and made.type() == f"torch.cuda.{name}Tensor"

host = torch.arange(4.0)
for kind in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
    half = host.type(kind)
    assert half.is_cuda and half.dtype == torch.float16 and half.tolist() == [0, 1, 2, 3]
assert half.type(torch.FloatTensor).device.type == "cpu" and half.type(torch.float64).is_cuda
assert half.type() == "torch.cuda.HalfTensor" and host.type_as(x).type() == x.type()
assert x.new(2, 2).type() == x.type() and x.new([5.0]).item() == 5 and x.float() is x
with torch.cuda.device(1):
    assert torch.cuda.FloatTensor(1).device.index == 1

dtype = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
variable = torch.autograd.Variable(host.type(dtype), requires_grad=True)
(variable * variable).sum().backward()
assert torch.equal(variable.grad.data.cpu(), 2 * host) and isinstance(variable.data, dtype)

i, v = torch.cuda.LongTensor([[0, 1], [1, 0]]), torch.cuda.FloatTensor([2, 3])
sparse = torch.cuda.sparse.FloatTensor(i, v, torch.Size([2, 2]))
assert sparse.type() == "torch.cuda.sparse.FloatTensor" and sparse.to_dense().tolist() == [[0, 2], [3, 0]]
torch.set_default_tensor_type(torch.cuda.FloatTensor)
assert torch.ones(2).is_cuda and torch.tensor([1.0]).type() == "torch.cuda.FloatTensor"
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
assert torch.ones(2).dtype == torch.float64 and torch.nn.Linear(2, 2).weight.type() == "torch.cuda.DoubleTensor"
torch.set_default_tensor_type(torch.FloatTensor)
assert torch.ones(2).type() == "torch.FloatTensor"
storage = x.storage()
assert storage.is_cuda and storage.tolist() == [1, 2, 3, 4] and type(storage.cpu()[0]) is float
assert x.type(torch.cuda.DoubleTensor).sum().item() == torch.FloatTensor([[1, 2], [3, 4]]).sum().item()
