"""Copies the arguments of a call to a device, with their strides, offsets, aliases, conj and neg bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Move",
    "Packed",
    "RequiresGrad",
    "Stays",
    "StorageOf",
    "bytes_of",
    "has_storage",
    "is_plain",
    "is_written",
    "span",
    "tensors_of",
    "view_of",
]


# ---- arguments that need more than a copy ----


@dataclasses.dataclass
class StorageOf:
    """Stands for the storage of a tensor."""

    tensor: Tensor


@dataclasses.dataclass
class Stays:
    """A tensor that stays on the CPU when the others move."""

    tensor: Tensor


class Packed(Stays):
    """A tensor whose memory holds an object of C++, such as fbgemm's packed weights, and therefore cannot be copied."""


@dataclasses.dataclass
class RequiresGrad:
    """A tensor that requires a gradient after the move."""

    tensor: Tensor


# ---- the move ----


class Move:
    """Copies arguments to a device. Tensors that share memory share it after the move, whatever their dtypes.

    Call it with a value: a tensor, a generator, a device, or containers of these. The same tensor always gives the same
    copy, so one `Move` is for one call.

    Args:
        device: where the copies go.
        requires_grad: whether copies of tensors that require a gradient do so too; `leaves` lists them.
        source: the type of the devices that `device` replaces. A tensor on another device is copied there.
            None replaces every device.
        within: copy only the memory that these tensors span. By default, the whole storage of a tensor is copied.
    """

    def __init__(
        self,
        device: torch.device | str,
        requires_grad: bool = False,
        source: str | None = "cpu",
        within: Iterable[Tensor] = (),
    ) -> None:
        self.device = torch.device(device)
        self.requires_grad, self.source = requires_grad, source
        self.tensors: dict[int, Tensor] = {}  # the copies by the id of the tensor, in order
        self.leaves: list[Tensor] = []  # the copies that require a gradient, in order
        self.memory: dict[int, tuple[Tensor, int]] = {}  # by storage: the copied bytes, and which is the first of them
        self._generators: dict[int, torch.Generator] = {}
        self._host: Move | None = None  # for tensors that stay on the CPU: a call may write to them
        self._kept: list[Any] = []  # keeps the ids valid
        self._within: dict[int, list[Tensor]] = {}
        for tensor in filter(is_plain, within):
            self._within.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)

    def __call__(self, value: Any) -> Any:
        match value:
            case Tensor():
                return self.tensor(value)
            case StorageOf():
                return self.tensor(value.tensor).untyped_storage()
            case Packed():
                return value.tensor
            case Stays():
                self._host = self._host or Move("cpu")
                return self._host.tensor(value.tensor)
            case RequiresGrad():
                return self.tensor(value.tensor).requires_grad_()
            case torch.Generator():
                return self.generator(value)
            case torch.device():
                return self.device if self.replaces(value) else value
            case str():
                return str(self.device) if value == self.source else value
            case torch.Size() | torch.dtype():
                return value
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self, value))
            case list() | tuple():
                return type(value)(map(self, value))
            case dict():
                return {key: self(item) for key, item in value.items()}
            case slice():
                return slice(self(value.start), self(value.stop), self(value.step))
        return value

    def replaces(self, device: torch.device) -> bool:
        """Returns true if what is on this device moves."""
        return self.source is None or device.type == self.source

    def tensor(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        if id(tensor) not in self.tensors:
            with torch.no_grad():
                copy = self.copy(tensor.detach())
            if tensor.requires_grad and self.requires_grad:
                self.leaves.append(copy.requires_grad_())
            self._kept.append(tensor)
            self.tensors[id(tensor)] = copy
        return self.tensors[id(tensor)]

    def generator(self, generator: torch.Generator) -> torch.Generator:
        """A generator that draws the same numbers, where the device can; else one with the same seed."""
        if not self.replaces(generator.device):
            return generator
        if id(generator) not in self._generators:
            copy = torch.Generator(self.device)
            try:
                copy.set_state(generator.get_state())
            except RuntimeError:  # the device has states of another form
                copy.manual_seed(generator.initial_seed())
            self._kept.append(generator)
            self._generators[id(generator)] = copy
        return self._generators[id(generator)]

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a detached tensor. Subclasses change here how arguments are laid out."""
        device = self.device if self.replaces(tensor.device) else tensor.device
        if not is_plain(tensor):
            return tensor.clone().to(device)
        storage = tensor.untyped_storage()
        if tensor.numel() and not storage.nbytes():  # its memory was freed
            copy = torch.empty_like(tensor, device=device)
            copy.untyped_storage().resize_(0)
            return copy
        if storage._cdata not in self.memory:
            low, high = span(self._within[storage._cdata]) if storage._cdata in self._within else (0, storage.nbytes())
            self.memory[storage._cdata] = self.place(bytes_of(tensor, low, high), device), low
            self._kept.append(storage)
        return view_of(*self.memory[storage._cdata], tensor)

    def place(self, memory: Tensor, device: torch.device) -> Tensor:
        """Copies bytes to a device. Subclasses change here where the memory of arguments lies."""
        return memory.to(device, copy=True)


# ---- tensors and their memory ----


def is_written(argument: Any) -> bool:
    """Returns true if a schema says that its operator writes to this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def has_storage(tensor: Tensor) -> bool:
    """Returns true if a tensor has a storage; a sparse tensor has none."""
    return not tensor._is_zerotensor() and torch._C._has_storage(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Returns true if a tensor is a view of numbers in a storage."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested and has_storage(tensor)


def span(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes of their common storage that plain tensors reach, from a multiple of 64 on."""
    low, high = None, 0
    for x in tensors:
        if x.numel():
            first = x.storage_offset() * x.element_size()
            reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            low = first if low is None else min(low, first)
            high = max(high, first + (reach + 1) * x.element_size())
    return (low or 0) // 64 * 64, high


def bytes_of(tensor: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    """Bytes of a plain tensor's storage, as a tensor on that storage: all, or those from `low` to `high`."""
    storage = tensor.untyped_storage()
    count = (storage.nbytes() if high is None else high) - low
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, low, (max(0, count),), (1,))


def view_of(memory: Tensor, low: int, like: Tensor) -> Tensor:
    """A tensor like another one, on bytes that hold the other one's storage from byte `low` on."""
    size = like.element_size()
    offset = max(0, like.storage_offset() - low // size)  # an empty tensor may lie before what was copied
    with torch.no_grad():
        numbers = memory[: memory.numel() // size * size].view(like.dtype)
        x = numbers.as_strided(like.shape, like.stride(), offset).detach()
    if like.is_conj():
        x = torch._conj(x)
    return torch._neg_view(x) if like.is_neg() else x
