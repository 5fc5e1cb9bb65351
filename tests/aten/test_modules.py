"""PyTorch's module database: forward, backward and gradients of every parameter, equal to the CPU's."""

import pytest
import torch

from openreg_tools.conformance import training

pytestmark = pytest.mark.conformance

CASES = [
    pytest.param(name, dtype, id=f"{name.removeprefix('nn.')}-{dtype}")
    for name, info in training.modules().items()
    for dtype in (torch.float32, torch.float64)
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


class Doubled(torch.nn.Module):
    """Wrong on the device: in its result, or in a gradient alone."""

    def __init__(self, backward):
        super().__init__()
        self.weight, self.backward = torch.nn.Parameter(torch.ones(3)), backward

    def forward(self, x):
        y = x * self.weight
        if x.is_openreg:
            y = y + (self.weight - self.weight.detach() if self.backward else 1)
        return y


@pytest.mark.parametrize("backward,kind", [(False, "value"), (True, "gradient")])
def test_the_checker_sees(backward, kind):
    from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput

    def inputs(info, device, dtype, requires_grad, training):
        x = torch.ones(3, dtype=dtype, device=device, requires_grad=requires_grad)
        return [ModuleInput(FunctionInput(backward), FunctionInput(x))]

    class Info(ModuleInfo):
        name = "nn.Doubled"

    report = training.check_module(Info(Doubled, module_inputs_func=inputs), torch.float32, "openreg")
    checks = ("train", "eval", "vmap_grad") if backward else ("train", "eval")  # a gradient does not see the result
    assert {(failure.check, failure.kind) for failure in report.failures} == {(check, kind) for check in checks}


def test_lazy_modules_are_made_on_the_device():
    with torch.device("openreg"):
        module = torch.nn.LazyConv1d(4, 3)
    assert module(torch.ones(2, 3, 8, device="openreg")).shape == (2, 4, 6) and module.weight.is_openreg
