"""Rung 10: fake tensors, aot_eager and Inductor."""

import pytest
import torch
from conftest import same
from torch._subclasses import FakeTensorMode


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(3, 4, device="acme:1")
        y = torch.ops.acme.swish(x @ x.t())
    assert y.device == torch.device("acme:1") and y.shape == (3, 3)


@pytest.mark.parametrize("name", ["custom_abs", "swish", "scaled"])
def test_opcheck(name):
    x = torch.randn(3, 4, device="acme", requires_grad=name != "custom_abs")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")  # the fourth knows CPU, CUDA and XPU only
    torch.library.opcheck(getattr(torch.ops.acme, name), (x, 2.0) if name == "scaled" else (x,), test_utils=tests)


def model(x, w, scale):
    y = (torch.relu(x @ w) * scale + 1).softmax(1)
    z = torch.ops.acme.swish(y) if x.is_acme else torch.nn.functional.silu(y)
    return z.sum(0) + y[:, ::2].amax(), y.to(torch.float16).t().contiguous()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    w, scale = torch.randn(6, 6), torch.tensor(0.5)
    expected = torch.randn(8, 6, requires_grad=True)
    actual = expected.detach().to("acme").requires_grad_()
    wanted = model(expected, w, scale)
    got = torch.compile(model, backend=backend, fullgraph=True)(actual, w.to("acme"), scale)
    for first, second in (wanted, got):
        (first.sum() + second.float().pow(2).sum()).backward()
    for result, reference in zip((*got, actual.grad), (*wanted, expected.grad), strict=True):
        assert result.is_acme
        same(result.detach(), reference.detach(), atol=2e-3, rtol=2e-3)


def test_inductor_fuses():
    torch._dynamo.reset()
    torch.acme.fallback_counts(reset=True)
    f = torch.compile(lambda x: (x.sin() + 1).cos() * 2, dynamic=True)
    for n in (5, 7):
        x = torch.linspace(-1, 1, n).to("acme:1")
        same(f(x), (x.cpu().sin() + 1).cos() * 2)
    assert not torch.acme.fallback_counts(), "everything ran in generated kernels"
