"""safetensors with the device's name: `load_file(path, device="openreg:1")`, `safe_open` and `load_model`.

safetensors parses device names in Rust, from a list of vendors, and takes an integer for the accelerator's device of that
index. `safe_open` here gives it the integer. Libraries that load through safetensors, such as accelerate, diffusers and
peft, then accept the device too. "openreg" without an index is the device that is current when the file is opened. `openreg_ops` imports this module as soon as both it and safetensors are imported.
"""

from __future__ import annotations

import sys
from typing import Any

import safetensors
import torch

from openreg_ops.identity import identity

__all__ = ["safe_open"]

_original = safetensors.safe_open


class _Opens(type):
    """The files that it opens are safetensors' own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _original)


class safe_open(metaclass=_Opens):  # noqa: N801, a name of safetensors
    __doc__ = _original.__doc__

    def __new__(cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        return _original(filename, framework, _index(device), **options)


def _index(device: Any) -> Any:
    """The index of a device of ours, and everything else as it is."""
    kind, _, index = str(device).partition(":")
    if kind != identity.name or not (index.isdecimal() or str(device) == identity.name):
        return device
    return int(index) if index else torch.openreg.current_device()


# Modules that imported the name before.
for _module in list(sys.modules.values()):
    if getattr(_module, "__dict__", {}).get("safe_open") is _original:
        _module.safe_open = safe_open
