"""The arguments of a generated call: moves them to a device, and checks that the CPU's kernel stays within their memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance import opinfo

__all__ = ["Call", "Move", "Packed", "RequiresGrad", "Stays", "StorageOf", "fenced", "stays_within", "writes_beyond"]

_LIBC = ctypes.CDLL(None)


@dataclasses.dataclass
class Call:
    """The arguments of one call, on the CPU."""

    args: list[Any]
    kwargs: dict[str, Any]
    alone: bool = False  # whether the CPU cannot make this call: an argument is on another device or has no memory

    def __str__(self) -> str:
        words = [*map(_shown, self.args), *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())]
        return f"({', '.join(words)})"


@dataclasses.dataclass
class StorageOf:
    """Stands for the storage of a tensor."""

    tensor: torch.Tensor


@dataclasses.dataclass
class Stays:
    """A tensor that stays on the CPU when the others move."""

    tensor: torch.Tensor


class Packed(Stays):
    """A tensor whose memory holds an object of C++, such as fbgemm's packed weights, and therefore cannot be copied."""


@dataclasses.dataclass
class RequiresGrad:
    """A tensor that requires a gradient after the move."""

    tensor: torch.Tensor


class Move(opinfo.Mover):
    """Takes the arguments of a `Call` to a device."""

    host: Move | None = None  # for tensors that stay on the CPU: a call may write to them

    def __call__(self, value: Any) -> Any:
        if isinstance(value, StorageOf):
            return self.tensor(value.tensor).untyped_storage()
        if isinstance(value, Packed):
            return value.tensor
        if isinstance(value, Stays):
            self.host = self.host or Move("cpu")
            return self.host.tensor(value.tensor)
        if isinstance(value, RequiresGrad):
            return self.tensor(value.tensor).requires_grad_()
        if isinstance(value, torch.ScriptObject):
            return value
        return super().__call__(value)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized:
            if tensor.numel() and not tensor.untyped_storage().nbytes():  # a tensor whose memory was freed
                copy = torch.empty_like(tensor, device=self.device)
                copy.untyped_storage().resize_(0)
                return copy
        return super().copy(tensor)


class _Guarded(Move):
    """Copies arguments into CPU memory between two guards. A guard is a page filled with one byte value."""

    PAGE = 4096

    def __init__(self, value: int) -> None:
        super().__init__("cpu")
        self.guard, self.memory = bytes([value]), []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Stays) and not isinstance(value, Packed):
            return self.tensor(value.tensor)
        return super().__call__(value)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or lazy or not tensor.numel():
            return super().copy(tensor)
        storage = tensor.untyped_storage()
        key, count = (storage._cdata, tensor.dtype), storage.nbytes() // tensor.element_size()
        if not count:
            return super().copy(tensor)
        if key not in self.storages:
            buffer, start = self.place(storage.nbytes())
            held = torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=start)
            held.copy_(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,)))
            self.storages[key] = held
            self.memory.append((buffer, start, start + storage.nbytes()))
            self.kept.append(storage)
        return self.storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def place(self, size: int) -> tuple[Any, int]:
        """Memory, and where in it `size` bytes start."""
        buffer = bytearray(2 * self.PAGE + size)
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        buffer[:] = self.guard * len(buffer)
        return buffer, -address % 64 + self.PAGE - 64  # aligned like a tensor's memory

    def is_whole(self) -> bool:
        return all(
            buffer[:start] == self.guard * start and buffer[end:] == self.guard * (len(buffer) - end)
            for buffer, start, end in self.memory
        )


class _Fenced(_Guarded):
    """Copies arguments to the end of pages, before a page that cannot be read: a call that reads on ends the process."""

    def place(self, size: int) -> tuple[Any, int]:
        end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer = mmap.mmap(-1, end + mmap.PAGESIZE)
        fence = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + end
        if _LIBC.mprotect(ctypes.c_void_p(fence), mmap.PAGESIZE, 0):
            raise OSError("mprotect failed")
        return buffer, end - size


def fenced(call: Callable[[Move], Any]) -> None:
    """Make a call on the CPU that ends the process if it reads or writes beyond the memory of its arguments."""
    with contextlib.suppress(Exception):
        call(_Fenced(0))


def stays_within(call: Callable[[Move], Any], resizes: bool = False) -> bool:
    """Whether a call on the CPU stays within the memory of its arguments. Some kernels do not check shapes.

    The call runs three times, with guards of another value each time, which new memory is filled with too. It must
    return the same results each time and leave the guards unchanged. A call that raises the same error each time, for
    example because it resizes an argument with elements, is answered by `resizes`.
    """
    found: list[Any] = []
    for value in (0, 0xFF, 0x5A):
        move = _Guarded(value)
        opinfo.seed("cpu")
        _fill_new_memory(~value & 0xFF or 1)
        try:
            out = call(move)
        except Exception as error:
            found.append(re.sub("0x[0-9a-f]+", "", str(error)))  # without addresses
        else:
            found.append([_bits(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)])
        finally:
            _fill_new_memory(0)
        if not move.is_whole():
            return False
    if any(each != found[0] for each in found):
        return False
    return resizes or not isinstance(found[0], str)


def _fill_new_memory(value: int) -> None:
    """Fill what malloc gives from now on with the complement of this byte, where the C library can; 0 ends it."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(-6, value)  # M_PERTURB


def writes_beyond(call: Callable[[Move], Any]) -> bool:
    """Whether a call on the CPU writes beyond the memory of its arguments."""
    move = _Guarded(0x5A)
    with contextlib.suppress(Exception):
        call(move)
    return not move.is_whole()


def _bits(x: torch.Tensor) -> Any:
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type != "cpu":
        return str(x.layout)
    with torch.no_grad():
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        return x.dtype, x.shape, ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""


def _shown(value: Any) -> str:
    match value:
        case RequiresGrad():
            return f"{_shown(value.tensor)} that requires a gradient"
        case Stays():
            return f"{_shown(value.tensor)} on the CPU"
        case StorageOf():
            return f"storage of {_shown(value.tensor)}"
        case torch.Tensor():
            layout = "" if value.layout == torch.strided else f" {value.layout}"
            shape = "nested" if value.is_nested else list(value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}{shape}{layout}"
        case list() | tuple():
            return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
