"""What backward does at an operator without an autograd kernel for the device.

PyTorch's own default only warns and then leaves that operator's part out of the gradient. On openreg
the default is ``"error"``: backward raises "derivative for mylib::foo is not implemented". The
environment variable ``OPENREG_AUTOGRAD_FALLBACK`` and the functions here choose ``"error"``,
``"warn"`` (PyTorch's default) or ``"nothing"`` (silently left out). The choice applies to the whole process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from openreg_ops import _C

__all__ = ["fallback_mode", "get_fallback_mode", "set_fallback_mode"]

_mode = "error"


def get_fallback_mode() -> str:
    """The current mode."""
    return _mode


def set_fallback_mode(mode: str) -> None:
    """Set the mode.

    Raises:
        ValueError: `mode` is not ``"error"``, ``"warn"`` or ``"nothing"``.
    """
    global _mode
    _C.set_autograd_fallback(mode)
    _mode = mode


@contextlib.contextmanager
def fallback_mode(mode: str) -> Iterator[None]:
    """``with autograd_fallback.fallback_mode("warn"):`` sets the mode temporarily."""
    before = _mode
    set_fallback_mode(mode)
    try:
        yield
    finally:
        set_fallback_mode(before)


set_fallback_mode(os.environ.get("OPENREG_AUTOGRAD_FALLBACK", "") or "error")
