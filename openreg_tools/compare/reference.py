"""A call on the reference device: the copies of its arguments, what it did to them, and its random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openreg_tools import backends
from openreg_tools.compare.facts import Facts
from openreg_tools.core.move import Move, is_plain, tensors_of

__all__ = ["Arguments", "drawing", "shares_numbers", "state_of"]


class Arguments:
    """Copies of a call's arguments, for the same call on the reference.

    Args:
        of: the operator.
        args, kwargs: the arguments on the device.
        reference: where the copies go.
        device: the type of the device.
    """

    def __init__(
        self, of: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], reference: torch.device, device: str
    ) -> None:
        values = (*args, *kwargs.values())
        move = Move(reference, source=device, within=tensors_of(values))  # of a storage, what the arguments reach
        self.args: list[Any] = [move(value) for value in args]
        self.kwargs: dict[str, Any] = move(kwargs)
        self.written: list[tuple[str, Tensor, Tensor]] = []  # the argument, the device's tensor, the copy
        self._before = Move(reference, source=None)  # copies of what the reference's call writes, from before it
        for position, value in [*enumerate(args), *kwargs.items()]:
            if of.writes(position):
                name = of.name_of(position) if isinstance(position, int) else position
                several = isinstance(value, (list, tuple))
                for i, tensor in enumerate(tensors_of((value,))):
                    copy = move(tensor)
                    self.written.append((f"{name}[{i}]" if several else name, tensor, copy))
                    self._before(copy)

    def before(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were before the call. Do not write to them."""
        memory, tensors = self._before.memory, self._before.tensors

        def earlier(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [*map(earlier, value)]
            if not isinstance(value, Tensor):
                return value
            changes = id(value) in tensors or is_plain(value) and value.untyped_storage()._cdata in memory
            return self._before(value) if changes else value

        return [*map(earlier, self.args)], {name: earlier(value) for name, value in self.kwargs.items()}


# ---- random numbers: the reference draws the same ones as the device, where it can ----


def shares_numbers(device: str, reference: str) -> bool:
    """Returns true if the reference's generator draws the device's numbers from the state of the device's generator."""
    as_cpu = [kind == "cpu" or backends.of_device(kind).draws_as_cpu for kind in (device, reference)]
    return device == reference or all(as_cpu)


def _default_generator(device: torch.device) -> torch.Generator:
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
    return _default_generator(torch.device(kwargs.get("device") or next(of_tensors, device))).get_state()


@contextlib.contextmanager
def drawing(reference: torch.device, state: Tensor | None) -> Iterator[None]:
    """The reference's default generator draws from this state, and gets its own back afterwards."""
    default = _default_generator(reference)
    before = default.get_state()
    if state is not None:
        default.set_state(state)
    try:
        yield
    finally:
        default.set_state(before)
