"""Errors that CUDA users meet: mixed devices, device-side asserts, views of a wrong type; each is caught."""

import subprocess
import sys

import torch
from torch import nn

x = torch.ones(3, 4)
g = x.cuda()
SAME = "Expected all tensors to be on the same device"
mixed = {
    "add": lambda: x + g,
    "linear": lambda: nn.Linear(4, 2)(g),
    "mm": lambda: torch.mm(g, x.t()),
    "two GPUs": lambda: g + x.cuda(1),
    "cat": lambda: torch.cat([g, x]),
    "loss": lambda: nn.functional.cross_entropy(g, torch.tensor([0, 1, 2])),
    "embedding": lambda: nn.Embedding(4, 2).cuda()(torch.tensor([1])),
    "index_select": lambda: torch.index_select(g, 0, torch.tensor([1])),
    "gather": lambda: g.gather(1, torch.tensor([[1]])),
}
for name, call in mixed.items():
    try:
        call()
    except RuntimeError as error:
        assert SAME in str(error), f"{name}: {error}"
        assert "cuda:0" in str(error) and ("cpu" in str(error) or "cuda:1" in str(error)), f"{name}: {error}"
    else:
        raise AssertionError(f"{name} passed")
try:
    nn.Conv2d(1, 1, 1).cuda()(torch.ones(1, 1, 2, 2))
except RuntimeError as error:
    text = "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"
    assert text in str(error), error
try:
    x[torch.tensor([0], device="cuda")]
except RuntimeError as error:
    assert "indices should be either on cpu or on the same device as the indexed tensor (cpu)" in str(error), error
assert torch.equal(g[torch.tensor([0, 2])].cpu(), x[[0, 2]])  # indices on the CPU are allowed
assert torch.equal((g * torch.tensor(2.0)).cpu(), x * 2)  # a CPU number too
try:
    torch.mm(g, g)
except RuntimeError as error:
    assert "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)" in str(error), error
try:
    g.t().view(-1)
except RuntimeError as error:
    assert "view size is not compatible" in str(error), error

OUT_OF_RANGE = {
    "index": "torch.arange(4, device='cuda')[torch.tensor([7], device='cuda')]",
    "embedding": "torch.nn.Embedding(3, 2).cuda()(torch.tensor([3]).cuda())",
    "gather": "torch.ones(3, 3, device='cuda').gather(0, torch.full((1, 1), 5, device='cuda'))",
    "label": "torch.nn.functional.nll_loss(torch.ones(1, 3, device='cuda'), torch.tensor([3], device='cuda'))",
}
body = """import torch
try:
    {}
    torch.cuda.synchronize()
except (RuntimeError, IndexError) as error:
    print("caught:", error)
"""
for name, code in OUT_OF_RANGE.items():  # each in a process of its own: a real GPU is unusable afterwards
    result = subprocess.run([sys.executable, "-c", body.format(code)], capture_output=True, text=True)
    texts = ("device-side assert triggered", "out of bounds", "out of range")
    assert "caught:" in result.stdout and any(text in result.stdout for text in texts), f"{name}: {result}"
