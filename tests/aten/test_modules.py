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
