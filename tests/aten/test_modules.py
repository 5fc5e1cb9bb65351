"""PyTorch's module database: forward, backward and gradients of every parameter, equal to the CPU's."""

import pytest
import torch

from openreg_tools.conformance import training

pytestmark = pytest.mark.conformance

CASES = [
    pytest.param(name, dtype, id=f"{name.removeprefix('nn.')}-{dtype}")
    for i, (name, info) in enumerate(training.modules().items())
    for dtype in (torch.float32, torch.float64)[: 1 if i % 4 else 2]
    if dtype in info.dtypes
]


@pytest.mark.slow
@pytest.mark.parametrize("name,dtype", CASES)
def test_module(name, dtype):
    report = training.check_module(training.modules()[name], dtype, "openreg", ("train", "eval"))
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.ran["train"] and report.ran["eval"]


@pytest.mark.parametrize(
    "name",
    ["nn.BatchNorm2d", "nn.Conv2d", "nn.Embedding", "nn.GRU", "nn.LSTM", "nn.LSTMCell", "nn.LayerNorm", "nn.Linear",
     "nn.MultiheadAttention", "nn.PReLU", "nn.TransformerEncoderLayer"],
)  # fmt: skip
def test_gradients_for_each_sample(name):
    report = training.check_module(training.modules()[name], torch.float32, "openreg", ("vmap_grad",))
    assert not report.failures, "\n".join(map(str, report.failures))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_chunked_loss_accumulates_as_on_the_cpu(reduction):
    """In float32. In bfloat16, the gradients would be twice as far from those in float64."""
    torch.manual_seed(0)
    x, weight, target = torch.randn(512, 8).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randint(0, 16, (512,))
    options = {"reduction": reduction, "options": torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)}

    def gradients(device, dtype):
        leaves = [tensor.to(device, dtype).detach().requires_grad_() for tensor in (x, weight)]
        loss = torch.nn.functional.linear_cross_entropy(*leaves, target.to(device), **options)
        return [gradient.cpu().double() for gradient in torch.autograd.grad(loss.sum(), leaves)]

    exact = gradients("cpu", torch.float64)
    for ours, theirs, wanted in zip(gradients("openreg", x.dtype), gradients("cpu", x.dtype), exact, strict=True):
        assert 0 < (ours - wanted).abs().max() <= 1.2 * (theirs - wanted).abs().max()
