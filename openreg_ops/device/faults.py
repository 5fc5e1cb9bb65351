"""Faults on demand, for tests of recovery: ``with torch.openreg.faults.inject("kernel", after=3): ...``.

Each fault surfaces with the type and at the time that it would on a real accelerator:

- allocation: the n-th allocation raises ``torch.OutOfMemoryError``. Nothing is lost; the program can continue.
- memory: the device shrinks to `fraction` of its memory. An allocation that does not fit raises the same error.
- kernel: the n-th kernel fails asynchronously. The next call that waits for the device raises
  ``torch.AcceleratorError``: in launch mode "inline" the next kernel, in "sync" the call that launched it. Do not use
  its result.
- copy: a byte of the n-th copy to, from or on the device is flipped. Nothing is raised.
- lost: from the n-th kernel on, every call that allocates, launches, waits or queries raises
  ``torch.AcceleratorError`` until `reset_device`.
- kernel_latency, copy_latency: kernels or copies take `seconds` longer, in their stream's order.

OPENREG_FAULTS arms faults for a whole process: "kernel:after=100;copy_latency:seconds=0.001,times=0".
The pytest fixture ``openreg_faults`` is `inject` for the duration of a test.
"""

from __future__ import annotations

import numbers
import os
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.device.device_index import device_index
from openreg_ops.environment import WrongVariable

__all__ = ["inject", "reset_device"]

_KINDS = ("allocation", "kernel", "copy", "lost", "kernel_latency", "copy_latency")
_LATENCY = ("kernel_latency", "copy_latency")
_LONGEST = 10**9  # seconds: their nanoseconds fit in 64 bits


_armed: list[inject] = []  # for `info`

# Each device's limits, from the program and from active injections; the lowest applies.
_limits: dict[int, int] = {}
_shrinks: dict[int, list[int]] = {}


def _set_memory_limit(index: int, limit: int) -> None:
    """Set the program's own limit, which applies alongside a "memory" fault and after it."""
    _limits[index] = limit
    _shrink(index)


def _shrink(index: int) -> None:
    own = _limits.setdefault(index, _C.device_memory())
    _C.set_memory_limit(index, min([*_shrinks.get(index, []), own]))


class inject:  # noqa: N801 -- used as a function
    """Arm a fault immediately; disarm it at the end of a ``with``, or with `stop`.

    Args:
        kind: "allocation", "memory", "kernel", "copy", "lost", "kernel_latency" or "copy_latency".
        device: which device; every device unless given.
        after: how many allocations, kernels or copies to skip first.
        times: how many to strike, one after the other; 0 means all that follow, the default for latencies.
        seconds: the added time, for a latency.
        fraction: the share of the device's memory to keep, 0.0 to 1.0, for "memory".
    Raises:
        ValueError: an unknown kind, or an argument that is out of range or does not apply to the kind.

    Example:
        >>> with torch.openreg.faults.inject("allocation"):
        ...     try:
        ...         torch.ones(3, device="openreg")
        ...     except torch.OutOfMemoryError:
        ...         print("the program can react here")
        the program can react here
    """

    def __init__(
        self,
        kind: str,
        device: torch.types.Device = None,
        *,
        after: int = 0,
        times: int | None = None,
        seconds: float | None = None,
        fraction: float | None = None,
    ) -> None:
        if kind not in (*_KINDS, "memory"):
            raise ValueError(f"inject: expected a kind among {', '.join((*_KINDS, 'memory'))}, but got {kind!r}")
        for name, value in (("seconds", seconds), ("fraction", fraction)):
            if not isinstance(value, numbers.Real | None):
                raise ValueError(f"inject: expected {name} as a number, but got {value!r}")
        if (seconds is not None) != (kind in _LATENCY) or (seconds or 0) < 0:
            raise ValueError(
                f"inject: expected seconds, at least 0, for a latency and for no other kind, but {kind} got {seconds!r}"
            )
        if (fraction is not None) != (kind == "memory") or not 0 <= (fraction or 0) <= 1:
            raise ValueError(
                f"inject: expected fraction, from 0 to 1, for memory and for no other kind, but {kind} got {fraction!r}"
            )
        if not (seconds or 0) <= _LONGEST:
            raise ValueError(f"inject: expected seconds of at most {_LONGEST}, but got {seconds}")
        if not (isinstance(after, int) and isinstance(times, int | None) and max(after, times or 0) < 2**63):
            raise ValueError(f"inject: expected after and times as integers, but got {after!r} and {times!r}")
        if after < 0 or (times or 0) < 0:
            raise ValueError(f"inject: expected after and times of at least 0, but got {after} and {times}")
        if kind == "memory" and (after or times):
            raise ValueError("inject: after and times do not apply to memory, which shrinks immediately")
        self.kind, self.struck = kind, 0
        self._number: int | None = None
        self._limits: dict[int, int] = {}
        where = -1 if device is None else device_index(device)
        _armed.append(self)
        if kind == "memory":
            for index in range(_C.device_count()) if where < 0 else [where]:
                self._limits[index] = int(fraction * _C.device_memory())
                _shrinks.setdefault(index, []).append(self._limits[index])
                _shrink(index)
            return
        times = (0 if kind in _LATENCY else 1) if times is None else times
        self._number = _C.arm_fault(kind, where, after, times, int((seconds or 0) * 1e9))

    def stop(self) -> int:
        """Disarm the fault and return how often it struck, also available as `struck`. A lost device stays lost."""
        if self._number is not None:
            self.struck = _C.disarm_fault(self._number)
            self._number = None
        for index, limit in self._limits.items():
            _shrinks[index].remove(limit)
            _shrink(index)
        self._limits.clear()
        if self in _armed:
            _armed.remove(self)
        return self.struck

    def __enter__(self) -> inject:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def reset_device(device: torch.types.Device = None) -> None:
    """Make a lost device work again; its tensors keep their contents."""
    _C.reset_device(device_index(device))


def _from_environment() -> None:
    """Arm the faults in OPENREG_FAULTS."""
    takes = {"device": str, "seconds": float, "fraction": float}
    for part in filter(None, os.environ.get("OPENREG_FAULTS", "").split(";")):
        kind, _, rest = part.strip().partition(":")
        options: dict[str, Any] = {}
        try:
            for item in filter(None, rest.split(",")):
                name, _, value = item.strip().partition("=")
                options[name] = takes.get(name, int)(value)
            inject(kind, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WrongVariable("OPENREG_FAULTS", f"{part.strip()!r}: {error}") from None
