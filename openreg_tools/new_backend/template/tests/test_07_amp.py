"""Rung 7: autocast and GradScaler."""

import pytest
import torch
from conftest import same


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    x, w = torch.randn(4, 4, device="acme"), torch.randn(4, 4, device="acme")
    with torch.autocast("acme", dtype):
        product = x @ w
        assert product.dtype == dtype and product.softmax(0).dtype == (product + x).dtype == torch.float32
        with torch.autocast("acme", enabled=False):
            assert (x @ w).dtype == torch.float32
    same(product, (x.cpu() @ w.cpu()).to(dtype), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_grad_scaler(gradient):
    weight = torch.zeros(3, device="acme", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("acme", init_scale=4.0)
    scaler.scale((weight * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    skipped = gradient != 1
    same(weight.detach(), torch.full((3,), 0.0 if skipped else -0.1))
    assert scaler.get_scale() == (2.0 if skipped else 4.0)
