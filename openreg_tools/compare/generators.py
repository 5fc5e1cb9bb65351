"""Random numbers: the reference draws the same ones as the device, where it can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openreg_tools import backends
from openreg_tools.core.move import tensors_of

__all__ = ["drawing", "shares_numbers", "state_of"]


def shares_numbers(device: str, reference: str) -> bool:
    """Returns true if the reference's generator draws the device's numbers from the state of the device's generator."""
    as_cpu = [kind == "cpu" or backends.of_device(kind).draws_as_cpu for kind in (device, reference)]
    return device == reference or all(as_cpu)


def default_generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    return module.default_generators[device.index if device.index is not None else module.current_device()]


def state_of(args: Any, kwargs: dict[str, Any], device: str) -> Tensor:
    """The state of the generator that a call draws from."""
    values = (*args, *kwargs.values())
    if (given := next((value for value in values if isinstance(value, torch.Generator)), None)) is not None:
        return given.get_state()
    of_tensors = (tensor.device for tensor in tensors_of(values))
    return default_generator(torch.device(kwargs.get("device") or next(of_tensors, device))).get_state()


@contextlib.contextmanager
def drawing(reference: torch.device, state: Tensor | None) -> Iterator[None]:
    """The reference's default generator draws from this state, and gets its own back afterwards."""
    default = default_generator(reference)
    before = default.get_state()
    if state is not None:
        default.set_state(state)
    try:
        yield
    finally:
        default.set_state(before)
