"""Rung 4: kernels, the fallback and autograd."""

import pytest
import torch
from conftest import same


def test_fallback_counts_and_raises():
    torch.acme.fallback_counts(reset=True)
    x = torch.tensor([3.0, 1.0], device="acme")
    same(x.sort().values.cumsum(0), torch.tensor([1.0, 4.0]))
    assert torch.acme.fallback_counts() == {"aten::cumsum.out": 1, "aten::sort.values_stable": 1}
    before = torch.acme.set_fallback_policy("error")
    try:
        with pytest.raises(NotImplementedError, match="aten::cos.out has no kernel for acme"):
            x.cos()
    finally:
        torch.acme.set_fallback_policy(before)


def test_fallback_writes_what_it_should():
    x, y = torch.ones(3, device="acme"), torch.zeros(4, 3, device="acme")
    y.t()[:, 1].add_(x)  # in place, through a view
    torch.add(x, x, out=y[3])
    torch._foreach_mul_([x, y], 2.0)
    same(x, torch.full((3,), 2.0))
    same(y, torch.tensor([[0.0], [2], [0], [4]]).expand(4, 3))


def test_fallback_rejects_views():
    library = torch.library.Library("test_acme", "DEF")
    library.define("first(Tensor(a) x) -> Tensor(a)")
    library.impl("first", lambda x: x[0], "CPU")
    with pytest.raises(RuntimeError, match="view"):
        torch.ops.test_acme.first(torch.ones(2, device="acme"))


@pytest.mark.parametrize("name", ["abs", "selu", "exp"])
def test_gradients(name):
    function = getattr(torch, name)
    expected = torch.linspace(-2, 2, 12).requires_grad_()
    actual = expected.detach().to("acme").requires_grad_()
    for x in (actual, expected):
        function(x).pow(2).sum().backward()
    same(actual.grad, expected.grad)
    same(torch.func.vmap(torch.func.grad(function))(actual), torch.func.vmap(torch.func.grad(function))(expected))


def test_custom_operators():
    x = torch.tensor([-1.0, 0.5, 2.0], device="acme", requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for acme::custom_abs is not implemented"):
        torch.ops.acme.custom_abs(x).sum().backward()
    (torch.ops.acme.swish(x) + torch.ops.acme.scaled(x, 3.0)).sum().backward()
    z = x.detach().cpu().requires_grad_()
    (torch.nn.functional.silu(z) + 3 * z).sum().backward()
    same(x.grad, z.grad)


def test_training():
    def train(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.SELU(), torch.nn.Flatten()
        )
        model.append(torch.nn.Linear(64, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, target = torch.randn(8, 1, 6, 6).to(device), torch.arange(8).to(device) % 3
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
        return loss.detach()

    same(train("acme"), train("cpu"), atol=1e-4, rtol=1e-4)
