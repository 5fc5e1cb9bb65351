"""The arguments of one call on the reference device, and what the call did to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from openreg_tools.compare.facts import Facts
from openreg_tools.core.move import Move, bytes_of, is_plain, tensors_of, view_of

__all__ = ["Arguments", "move_to"]

_WHOLE = 1 << 14  # bytes of a storage that is copied whole, so that writes beside a view show


def move_to(reference: torch.device, device: str, values: Iterable[Any]) -> Move:
    """A `Move` to the reference for these arguments: of large storages, only what the arguments reach is copied."""
    large = [t for t in tensors_of(values) if is_plain(t) and t.untyped_storage().nbytes() > _WHOLE]
    return Move(reference, source=device, within=large)


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
        move = move_to(reference, device, (*args, *kwargs.values()))
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

    def written_beside(self) -> str:
        """The first view beside which the device's memory changed, and the reference's did not; "" if there is none."""
        for name, tensor, copy in self.written:
            if not (is_plain(tensor) and is_plain(copy)) or tensor.nbytes == tensor.untyped_storage().nbytes():
                continue
            size, same = tensor.untyped_storage().nbytes(), _geometry(tensor) == _geometry(self._before(copy))
            if size > _WHOLE or size != copy.untyped_storage().nbytes() or not same:  # resized
                continue
            got, want = bytes_of(tensor).to(copy.device, copy=True), bytes_of(copy).clone()
            for _, other, of_other in self.written:  # their elements are compared within the tolerance
                if is_plain(of_other) and of_other.untyped_storage()._cdata == copy.untyped_storage()._cdata:
                    _erase(got, other)
                    _erase(want, other)
            if not torch.equal(got, want):
                return name
        return ""


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def _erase(memory: Tensor, like: Tensor) -> None:
    """Zero the elements of a view in a copy of its storage."""
    x = view_of(memory, 0, like)
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim]:
            x = x.narrow(dim, 0, 1)
    x.zero_()
