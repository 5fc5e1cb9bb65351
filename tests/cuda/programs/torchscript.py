"""TorchScript: scripted and traced modules that are saved, and loaded on another device."""

import io
import tempfile
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("offset", torch.arange(6.0))

    def forward(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            if x.is_cuda:
                x = torch.tanh(self.layer(x)) + self.offset
            else:
                x = self.layer(x).tanh() + self.offset
        return x + torch.zeros(6, device=x.device, dtype=x.dtype)


torch.manual_seed(0)
net = Net().eval()
x = torch.randn(3, 6)
expected = net(x).detach()
scripted = torch.jit.script(net).cuda()
for _ in range(3):  # the profiling executor optimizes after the first runs
    torch.testing.assert_close(scripted(x.cuda()).detach().cpu(), expected)
traced = torch.jit.trace(net.cuda(), x.cuda())
torch.testing.assert_close(traced(x.cuda()).detach().cpu(), expected)
frozen = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.script(net.eval())))
torch.testing.assert_close(frozen(x.cuda()).detach().cpu(), expected)

with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    torch.jit.save(scripted, file.name)
    for place in ("cpu", "cuda:1", torch.device("cuda", 0), None):
        loaded = torch.jit.load(file.name, map_location=place)
        device = torch.device(place or "cuda:0")
        assert loaded.layer.weight.device == device and loaded.offset.device == device
        torch.testing.assert_close(loaded(x.to(device)).detach().cpu(), expected)
buffer = io.BytesIO()
torch.jit.save(traced, buffer)
buffer.seek(0)
torch.testing.assert_close(torch.jit.load(buffer)(x.cuda()).detach().cpu(), expected)


@torch.jit.script
def norm_on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.to(device).pow(2).sum().sqrt() * torch.ones([1], device=torch.device("cuda:1")).to(device)


result = norm_on(x, torch.device("cuda"))
assert result.device == torch.device("cuda:0")
torch.testing.assert_close(result.cpu(), x.norm().reshape(1))
