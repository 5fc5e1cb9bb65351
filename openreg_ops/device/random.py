"""Random numbers on the device, under ``torch.cuda``'s names. No function here touches the CPU's generator.

In a child created by ``fork()`` after its parent had used a device, reading a generator raises. Seeding one does not:
as on CUDA, where seeds wait for the device's initialization, a DataLoader worker may seed every generator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from openreg_ops import _C
from openreg_ops.device.device_index import device_index

__all__ = [
    "default_generators",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

default_generators: tuple[torch.Generator, ...] = tuple(_C.default_generator(i) for i in range(_C.device_count()))


def get_rng_state(device: torch.types.Device = None) -> torch.Tensor:
    """The state of `device`'s default generator, a CPU ByteTensor.

    Example:
        >>> state = torch.openreg.get_rng_state()
        >>> x = torch.rand(2, device="openreg")
        >>> torch.openreg.set_rng_state(state)
        >>> torch.equal(torch.rand(2, device="openreg"), x)
        True
    """
    return default_generators[device_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of every device's default generator."""
    return [get_rng_state(index) for index in range(len(default_generators))]


def set_rng_state(new_state: torch.Tensor, device: torch.types.Device = None) -> None:
    """Set the state of `device`'s default generator to `new_state`, a CPU ByteTensor from `get_rng_state`."""
    if not _C.forked():
        default_generators[device_index(device)].set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of every device's default generator to `new_states`, from `get_rng_state_all`."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator with the integer `seed`.

    Example:
        >>> torch.openreg.manual_seed(0)
        >>> x = torch.rand(2, device="openreg")
        >>> torch.openreg.manual_seed(0)
        >>> torch.equal(torch.rand(2, device="openreg"), x)
        True
    """
    default_generators[_C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's default generator with the integer `seed`; ``torch.manual_seed`` calls this."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's default generator with a number from the operating system."""
    default_generators[_C.current_device()].seed()


def seed_all() -> None:
    """Seed every device's default generator with one number from the operating system."""
    if default_generators:
        manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return default_generators[device_index()].initial_seed()
