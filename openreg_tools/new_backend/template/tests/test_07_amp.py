"""Rung 7: autocast and GradScaler."""

import pytest
import torch
from conftest import same


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    x, w = torch.randn(4, 4, device="acme"), torch.randn(4, 4, device="acme")
    with torch.autocast("acme", dtype):
        product = x @ w
        assert product.dtype == dtype and product.softmax(0).dtype == torch.float32
        assert (product + x).dtype == torch.float32 and torch.acme.get_autocast_dtype() == dtype
        with torch.autocast("acme", enabled=False):
            assert (x @ w).dtype == torch.float32
    same(product, (x.cpu() @ w.cpu()).to(dtype), atol=0.05, rtol=0.05)


def test_grad_scaler():
    model = torch.nn.Linear(3, 1).to("acme")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("acme", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 3, device="acme")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    same(model.weight.detach(), before.cpu() - 0.2)
    model.weight.grad.fill_(float("inf"))
    after = model.weight.detach().clone()
    scaler.scale(torch.ones((), device="acme"))
    scaler.step(optimizer)
    scaler.update()
    same(model.weight.detach(), after.cpu())
    assert scaler.get_scale() == 2.0
