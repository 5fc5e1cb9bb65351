"""Rung 6: random numbers."""

import pytest
import torch
from conftest import same

DRAWS = {
    "uniform_": lambda g: torch.empty(100, device="acme").uniform_(generator=g),  # a kernel
    "randn": lambda g: torch.randn(100, device="acme", generator=g),  # falls back, with a generator
    "dropout": lambda g: torch.nn.functional.dropout(torch.ones(100, device="acme")),  # without one
}


@pytest.mark.parametrize("name", DRAWS)
def test_seed(name):
    draw, host = DRAWS[name], torch.get_rng_state()
    torch.acme.manual_seed(1)
    first, second = draw(None), draw(None)
    assert not torch.equal(first, second)
    torch.acme.manual_seed(1)
    same(draw(None), first.cpu())
    state = torch.acme.get_rng_state()
    third = draw(None)
    torch.acme.set_rng_state(state)
    same(draw(None), third.cpu())
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator is another one"


def test_generator():
    one, two = torch.Generator("acme"), torch.Generator("acme")
    one.manual_seed(3), two.set_state(one.get_state())
    same(torch.rand(9, device="acme", generator=one), torch.rand(9, device="acme", generator=two).cpu())
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(9, device="acme", generator=torch.Generator())


def test_distribution():
    x = torch.empty(100_000, device="acme").uniform_(2, 4)
    assert 2 <= x.min() and x.max() < 4 and abs(x.mean().item() - 3) < 0.01 and abs(x.std().item() - 2 / 12**0.5) < 0.01


def test_manual_seed_and_fork():
    torch.manual_seed(5)
    x = torch.rand(3, device="acme")
    with torch.random.fork_rng(devices=[0], device_type="acme"):
        torch.manual_seed(5)
        same(torch.rand(3, device="acme"), x.cpu())
    y = torch.rand(3, device="acme")
    torch.manual_seed(5)
    torch.rand(3, device="acme")
    same(torch.rand(3, device="acme"), y.cpu())
