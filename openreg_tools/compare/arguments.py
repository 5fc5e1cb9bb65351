"""The arguments of one call on the reference device, and what the call did to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openreg_tools.compare.facts import Facts
from openreg_tools.core.move import Move, is_plain, tensors_of

__all__ = ["Arguments"]


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
