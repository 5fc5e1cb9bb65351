"""Rung 3: copies between all places, pinned memory and non_blocking."""

import itertools

import pytest
import torch
from conftest import same

LAYOUTS = [lambda x: x, lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:1].expand(5, -1)]


@pytest.mark.parametrize("source, target", list(itertools.product(["cpu", "acme:0", "acme:1"], repeat=2)))
def test_pairs(source, target):
    x = torch.arange(24).view(4, 6)
    for layout, dtype in itertools.product(LAYOUTS, (torch.int64, torch.float16, torch.complex64)):
        view = layout(x)
        result = torch.empty(view.shape[::-1], dtype=dtype, device=target).t()
        result.copy_(layout(x.to(source)))
        same(result, view.to(dtype))


def test_lazy_conjugate_and_negative():
    x = torch.tensor([1 + 2j, 3 - 4j], device="acme")
    same(x.conj().imag, torch.tensor([-2.0, 4.0]))
    same(x.conj().to("acme:1"), torch.tensor([1 - 2j, 3 + 4j]))


def test_pinned_memory_is_not_reused_too_early():
    for _ in range(20):
        x = torch.full((100_000,), 7.0).pin_memory()
        assert x.is_pinned() and x[10:].is_pinned() and not torch.ones(1).is_pinned()
        y = x.to("acme", non_blocking=True)
        del x
        torch.zeros(100_000).pin_memory()
        assert y.min().item() == 7


def test_memory_that_is_not_pinned_may_change_at_once():
    x = torch.ones(100_000)
    y = x.to("acme", non_blocking=True)
    x.zero_()
    assert y.min().item() == 1
