"""Rung 6: random numbers."""

import pytest
import torch
from conftest import same

DRAWS = {
    "uniform_": lambda: torch.empty(100, device="acme").uniform_(),  # a kernel
    "randn": lambda: torch.randn(100, device="acme"),  # falls back, and takes a generator
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(100, device="acme")),  # falls back, and takes none
}


@pytest.mark.parametrize("name", DRAWS)
def test_seed_and_state(name):
    draw, host = DRAWS[name], torch.get_rng_state()
    torch.acme.manual_seed(1)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.acme.manual_seed(1)
    same(draw(), first.cpu())
    state = torch.acme.get_rng_state()
    same(draw(), second.cpu())
    torch.acme.set_rng_state(state)
    same(draw(), second.cpu())
    assert torch.equal(torch.get_rng_state(), host), "the CPU's generator is another one"


def test_generator():
    one, two = torch.Generator("acme").manual_seed(3), torch.Generator("acme")
    two.set_state(one.get_state())
    same(torch.rand(9, device="acme", generator=one), torch.rand(9, device="acme", generator=two).cpu())
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(9, device="acme", generator=torch.Generator())


def test_distribution_and_fork():
    x = torch.empty(100_000, device="acme").uniform_(2, 4)
    assert 2 <= x.min() and x.max() < 4 and abs(x.mean().item() - 3) < 0.01 and abs(x.std().item() - 2 / 12**0.5) < 0.01
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type="acme"):
        y = torch.rand(3, device="acme")
    same(torch.rand(3, device="acme"), y.cpu())
