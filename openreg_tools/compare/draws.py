"""Notices programs that draw random numbers from two generators: the CPU's and the device's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from openreg_tools.compare.copies import Facts, tensors_of
from openreg_tools.core.place import line

__all__ = ["Draws"]


class Draws:
    """The first draws from the default generators of the CPU and of a device.

    On the CPU, both kinds of numbers come from one generator, so the same seed gives others there.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.both: tuple[str, str] | None = None  # the first draw of the CPU and of the device, once both have drawn
        self._first: dict[torch.device, str] = {}

    def drew(self, of: Facts, args: tuple, kwargs: dict, out: Any) -> bool:
        """Take note of a call; returns True if with it, both generators have drawn for the first time."""
        device = next((t.device for t in tensors_of((out, *args))), None)
        if self.both or device is None or device.type not in ("cpu", self.device):
            return False
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            return False
        if device not in self._first and _is_used(device):  # attention without dropout draws nothing
            self._first[device] = f"{line()} ({of.name})"
        for other in [each for each in self._first if each.type != device.type]:
            if not _is_used(other):  # the program has set the seed since
                del self._first[other]
        first = {each.type: where for each, where in reversed(self._first.items())}
        if len(first) == 2:
            self.both = first["cpu"], first[self.device]
        return bool(self.both)

    def sentence(self) -> str:
        """Where the two generators were used."""
        return f"the CPU's, first at {self.both[0]}, and {self.device}'s, first at {self.both[1]}" if self.both else ""


def _is_used(device: torch.device) -> bool:
    """Whether the default generator of a device has drawn since its seed was set; True if it does not say."""
    with contextlib.suppress(AttributeError, RuntimeError):
        cpu = device.type == "cpu"
        of_device = torch.default_generator if cpu else getattr(torch, device.type).default_generators[device.index]
        fresh = torch.Generator(device).manual_seed(of_device.initial_seed())
        return not torch.equal(of_device.get_state(), fresh.get_state())
    return True
