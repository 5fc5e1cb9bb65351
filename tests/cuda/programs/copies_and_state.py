"""copy.deepcopy, state_dict between devices, EMA and SWA models, shared and tied parameters, pickles."""

import copy
import pickle

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(6, 4)
expected = copy.deepcopy(model)(x).detach()
on_gpu = copy.deepcopy(model).cuda()
again = copy.deepcopy(on_gpu)
assert again[0].weight.is_cuda and again[0].weight.data_ptr() != on_gpu[0].weight.data_ptr()
torch.testing.assert_close(again(x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)
with torch.no_grad():
    again[0].weight.zero_()
assert on_gpu[0].weight.any()

state = on_gpu.state_dict()
assert all(value.is_cuda for value in state.values())
fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"  # from the GPU to the CPU
assert not fresh[0].weight.is_cuda
torch.testing.assert_close(fresh(x), expected)
moved = {name: value.to("cuda:1") for name, value in state.items()}
second = copy.deepcopy(model).to("cuda:1")
second.load_state_dict(moved, assign=True)
assert second[0].weight.data_ptr() == moved["0.weight"].data_ptr()

identity = id(on_gpu[0].weight)
on_gpu.cpu().cuda(1)
assert id(on_gpu[0].weight) == identity and on_gpu[0].weight.device.index == 1  # parameters stay the same objects
half = copy.deepcopy(model).half().cuda()
assert half[0].weight.dtype == torch.float16 and half.cuda().float()[0].weight.dtype == torch.float32
tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
tied["b"].weight = tied["a"].weight
tied.cuda()
assert tied["b"].weight is tied["a"].weight and len(list(tied.parameters())) == 3
assert copy.deepcopy(tied)["b"].weight is not tied["a"].weight

ema = torch.optim.swa_utils.AveragedModel(second, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
ema.update_parameters(second)
start = second[0].weight.detach().clone()
with torch.no_grad():
    second[0].weight.add_(1.0)
ema.update_parameters(second)
torch.testing.assert_close(ema.module[0].weight.detach().cpu(), start.cpu() + 0.1)
unpickled = pickle.loads(pickle.dumps({"x": x.cuda(1), "p": second[0].weight}))
assert unpickled["x"].device.index == 1 and torch.equal(unpickled["x"].cpu(), x)
vector = nn.utils.parameters_to_vector(second.parameters())
nn.utils.vector_to_parameters(vector * 2, second.parameters())
torch.testing.assert_close(second[0].weight.detach().cpu(), (start.cpu() + 1) * 2)
view = x.cuda()[::2].t()
copied = copy.deepcopy(view)
assert copied.stride() == view.stride() and torch.equal(copied.cpu(), x[::2].t())
