"""Rung 6: random numbers can be repeated, and have their distribution."""

from __future__ import annotations

import torch
from torch.nn import functional

from openreg_tools.ladder.rung import check

_SECTION = "PrivateUse1: Register generator for the new backend"
_KEY = "PrivateUse1"
_DRAWS = {
    "rand": lambda device, generator: torch.rand(100, device=device, generator=generator),
    "randn": lambda device, generator: torch.randn(100, device=device, generator=generator),
    "randint": lambda device, generator: torch.randint(1000, (100,), device=device, generator=generator),
    "randperm": lambda device, generator: torch.randperm(100, device=device, generator=generator),
    "bernoulli": lambda device, generator: torch.full((100,), 0.5, device=device).bernoulli(generator=generator),
    "normal_": lambda device, generator: torch.empty(100, device=device).normal_(1, 2, generator=generator),
    "multinomial": lambda device, generator: torch.ones(100, device=device).multinomial(50, generator=generator),
}


@check("csrc/generator.cpp", _SECTION,
       "implement manual_seed_all in the device module, and getDefaultGenerator of the hooks")  # fmt: skip
def seeds(device: str) -> None:
    """torch.manual_seed repeats the numbers of every operator."""
    for name, draw in _DRAWS.items():
        torch.manual_seed(7)
        first, second = draw(device, None), draw(device, None)
        torch.manual_seed(7)
        again = draw(device, None)
        assert torch.equal(first.cpu(), again.cpu()), f"{name} gives other numbers after the same seed"
        assert not torch.equal(first.cpu(), second.cpu()), f"{name} gives the same numbers twice"
        torch.manual_seed(8)
        assert not torch.equal(first.cpu(), draw(device, None).cpu()), f"{name} gives the same numbers for another seed"


@check(
    "csrc/generator.cpp", _SECTION, "derive the generator from c10::GeneratorImpl, and return it from getNewGenerator"
)
def generators(device: str) -> None:
    """A generator is independent, and its state can be saved."""
    generator = torch.Generator(device)
    assert generator.device.type == torch.device(device).type
    generator.manual_seed(3)
    assert generator.initial_seed() == 3
    for name, draw in _DRAWS.items():
        state = generator.get_state()
        torch.manual_seed(1)
        first = draw(device, generator)
        torch.manual_seed(2)
        generator.set_state(state)
        assert torch.equal(first.cpu(), draw(device, generator).cpu()), f"{name} does not use the generator it is given"
    assert state.device.type == "cpu" and state.dtype == torch.uint8, "a state is not a byte tensor on the CPU"
    torch.manual_seed(5)
    expected = torch.rand(10, device=device)
    torch.manual_seed(5)
    torch.rand(10, device=device, generator=generator)
    assert torch.equal(torch.rand(10, device=device).cpu(), expected.cpu()), "drawing from it changes the default one"


@check("torch_acme/device.py", _SECTION, "add get_rng_state and set_rng_state to the device module")
def states(device: str) -> None:
    """fork_rng restores the device's state."""
    module = torch.get_device_module(device)
    torch.manual_seed(0)
    state = module.get_rng_state()
    first = torch.rand(10, device=device)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(10, device=device).cpu(), first.cpu()), "set_rng_state does not restore the numbers"
    torch.manual_seed(0)
    with torch.random.fork_rng(range(module.device_count()), device_type=torch.device(device).type):
        torch.manual_seed(99)
        torch.rand(10, device=device)
    assert torch.equal(torch.rand(10, device=device).cpu(), first.cpu()), "fork_rng does not restore the numbers"


@check("csrc/generator.cpp", _SECTION, "let every random operator read the device's generator", _KEY)
def distributions(device: str) -> None:
    """Random numbers have their distribution."""
    torch.manual_seed(0)
    x = torch.rand(100_000, device=device).cpu()
    assert 0 <= x.min() and x.max() < 1 and abs(x.mean() - 0.5) < 0.01, "rand is not uniform in [0, 1)"
    x = torch.randn(100_000, device=device).cpu()
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02, "randn does not have mean 0 and deviation 1"
    x = torch.randint(3, 9, (10_000,), device=device).cpu()
    assert x.min() == 3 and x.max() == 8, "randint(3, 9) does not fill its range"
    x = torch.randperm(1000, device=device).cpu()
    assert torch.equal(x.sort()[0], torch.arange(1000)), "randperm is not a permutation"
    x = functional.dropout(torch.ones(100_000, device=device), 0.25).cpu()
    assert abs((x == 0).float().mean() - 0.25) < 0.01 and abs(x.mean() - 1) < 0.02, "dropout(0.25) is not scaled"
    x = torch.empty(100_000, device=device).exponential_(2.0).cpu()
    assert x.min() >= 0 and abs(x.mean() - 0.5) < 0.02, "exponential_(2) does not have mean 0.5"
