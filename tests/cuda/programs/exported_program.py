"""torch.export on a GPU, saved, moved to the other GPU, and tracing with torch.fx and make_fx."""

import io

import torch
from torch import fx, nn
from torch.export import Dim, export, load, save
from torch.export.passes import move_to_device_pass
from torch.fx.experimental.proxy_tensor import make_fx


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return torch.relu(self.layer(x)) * self.scale + torch.arange(4, device=x.device)


torch.manual_seed(0)
model, x = Model(), torch.randn(5, 4)
expected = model(x).detach()
model.cuda()
program = export(model, (x.cuda(),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
torch.testing.assert_close(program.module()(x.cuda()).detach().cpu(), expected)
torch.testing.assert_close(program.module()(x[:3].cuda()).detach().cpu(), expected[:3])
assert "arange" in program.graph_module.code and "cuda" in program.graph_module.code
decomposed = program.run_decompositions()
torch.testing.assert_close(decomposed.module()(x.cuda()).detach().cpu(), expected)
file = io.BytesIO()
save(program, file)
file.seek(0)
loaded = load(file)
assert loaded.state_dict["layer.weight"].is_cuda
torch.testing.assert_close(loaded.module()(x.cuda()).detach().cpu(), expected)
moved = move_to_device_pass(loaded, "cuda:1")
result = moved.module()(x.cuda(1))
assert result.device.index == 1
torch.testing.assert_close(result.detach().cpu(), expected)

traced = fx.symbolic_trace(model)
torch.testing.assert_close(traced(x.cuda()).detach().cpu(), expected)
graph = make_fx(lambda x: torch.zeros(3, device=x.device).add_(x.sum()), tracing_mode="fake")(x.cuda())
assert "device(type='cuda', index=0)" in graph.code
torch.testing.assert_close(graph(x.cuda()).cpu(), x.sum().expand(3))
with torch._subclasses.FakeTensorMode():
    fake = torch.empty(1000, 1000, device="cuda")
    assert (fake @ fake).device == torch.device("cuda:0") and fake.is_cuda
try:
    program.module()(x)
except Exception as error:
    assert "cuda" in str(error) or "device" in str(error), error
