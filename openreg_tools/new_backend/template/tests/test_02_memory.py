"""Rung 2: memory and the minimal operators."""

import pytest
import torch
from conftest import same


def test_views_share_memory():
    x = torch.zeros(4, 6, device="acme")
    x.t()[2:4, 1].fill_(1)
    x.view(-1)[0] = 2
    x.as_strided((2,), (6,), 5).fill_(3)
    expected = torch.zeros(4, 6)
    expected[1, 2:4], expected[0, 0], expected[:2, 5] = 1, 2, 3
    same(x, expected)
    assert x[0, 0].item() == 2 and "device='acme:0'" in repr(x)


def test_resize_and_set():
    x = torch.arange(6.0).to("acme").resize_(3, 4)
    same(x.view(-1)[:6], torch.arange(6.0))
    y = torch.empty(0, device="acme").set_(x)
    assert y.data_ptr() == x.data_ptr() and y.shape == (3, 4) and y.set_().numel() == 0
    weight = (module := torch.nn.Linear(3, 4)).weight
    assert module.to("acme").weight is weight and weight.is_acme


def test_statistics():
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1 << 20, device="acme")
    assert torch.accelerator.memory_allocated() - before == 4 << 20 <= torch.accelerator.memory_reserved()
    del x
    assert torch.accelerator.memory_allocated() == before and torch.accelerator.max_memory_allocated() >= 4 << 20
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before
    with pytest.raises(torch.OutOfMemoryError, match="cannot allocate"):
        torch.empty(1 << 45, dtype=torch.uint8, device="acme")
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1
