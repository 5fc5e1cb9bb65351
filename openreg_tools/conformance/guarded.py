"""Checks that the CPU's kernel of a call stays within the memory of its arguments: some kernels do not check shapes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance.outcomes import seed
from openreg_tools.core.move import Move, Packed, Stays

__all__ = ["Guarded", "fenced", "stays_within"]

_LIBC = ctypes.CDLL(None)


class Guarded(Move):
    """Copies arguments into CPU memory between two guards. A guard is a page filled with one byte value."""

    PAGE = 4096

    def __init__(self, value: int) -> None:
        super().__init__("cpu")
        self.guard, self.buffers = bytes([value]), []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Stays) and not isinstance(value, Packed):
            return self.tensor(value.tensor)
        return super().__call__(value)

    def place(self, memory: Tensor, device: torch.device) -> Tensor:
        if not memory.numel():
            return super().place(memory, device)
        buffer, start = self.room(memory.numel())
        held = torch.frombuffer(buffer, dtype=torch.uint8, count=memory.numel(), offset=start)
        self.buffers.append((buffer, start, start + memory.numel()))
        return held.copy_(memory)

    def room(self, size: int) -> tuple[Any, int]:
        """Memory, and where in it `size` bytes start."""
        buffer = bytearray(2 * self.PAGE + size)
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        buffer[:] = self.guard * len(buffer)
        return buffer, -address % 64 + self.PAGE - 64  # aligned like a tensor's memory

    def is_whole(self) -> bool:
        """Returns true if no guard has been written to."""
        return all(
            buffer[:start] == self.guard * start and buffer[end:] == self.guard * (len(buffer) - end)
            for buffer, start, end in self.buffers
        )


class _Fenced(Guarded):
    """Copies arguments to the end of pages, before a page that cannot be read: a call that reads on ends the process."""

    def room(self, size: int) -> tuple[Any, int]:
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
    """Returns true if a call on the CPU stays within the memory of its arguments.

    The call runs three times, with guards of another value each time, which new memory is filled with too. It must
    return the same results each time and leave the guards unchanged. A call that raises the same error each time, for
    example because it resizes an argument with elements, is answered by `resizes`.
    """
    found: list[Any] = []
    for value in (0, 0xFF, 0x5A):
        move = Guarded(value)
        seed("cpu")
        _fill_new_memory(~value & 0xFF or 1)
        try:
            out = call(move)
        except Exception as error:
            found.append(re.sub("0x[0-9a-f]+", "", str(error)))  # without addresses
        else:
            found.append([_bits(x) for x in tree_leaves(out) if isinstance(x, Tensor)])
        finally:
            _fill_new_memory(0)
        if not move.is_whole():
            return False
    if any(result != found[0] for result in found):
        return False
    return resizes or not isinstance(found[0], str)


def _fill_new_memory(value: int) -> None:
    """Fill what malloc gives from now on with the complement of this byte, where the C library can; 0 ends it."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(-6, value)  # M_PERTURB


def _bits(x: Tensor) -> Any:
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type != "cpu":
        return str(x.layout)
    with torch.no_grad():
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        return x.dtype, x.shape, ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""
