"""``set_sync_debug_mode``: warns or raises when the host waits for the device, as on CUDA, and names the line."""

from __future__ import annotations

import warnings

import torch

from openreg_ops import _C
from openreg_ops.identity import identity
from openreg_tools.core import place

__all__ = ["get_sync_debug_mode", "set_sync_debug_mode"]

_MODES = ("default", "warn", "error")  # as PyTorch numbers them
_NAME = "CUDA" if identity.name == "cuda" else identity.name
_REMEDIES = {
    "aten::_local_scalar_dense": "keep the value in a tensor on the device, or read it after the loop",
    "aten::copy_": "pin the host memory and pass non_blocking=True",
    "Stream.synchronize": "let a stream wait for it with wait_stream(), or wait later",
}
_DATA_DEPENDENT = (
    "use a form that does not read device memory on the host, such as torch.where() for a mask, output_size= or "
    "num_classes= for a size, and indices on the device"
)


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Set what happens when an operator makes the host wait for the device. Applies to the whole process.

    As on CUDA, these are the operators that read a value (``item()``, ``if x:``), have a result whose size depends on
    the data (``nonzero()``, indexing with a mask), or copy between host and device without ``non_blocking=True``, and
    ``Stream.synchronize()``. ``Event.synchronize()``, ``torch.openreg.synchronize()``, and operators on sparse tensors
    are not covered. ``x[mask] = y`` is not reported if `y` is 0-dimensional. The report depends only on the call, so it
    is the same in every launch mode.

    Args:
        debug_mode: "default" or 0 does nothing. "warn" or 1 gives a UserWarning. "error" or 2 raises a RuntimeError
            before the operator runs. Both name the operator and the line of the program.
    Raises:
        RuntimeError: An unknown mode.
    """
    numbered = isinstance(debug_mode, int) and not isinstance(debug_mode, bool) and 0 <= debug_mode < len(_MODES)
    mode = _MODES[debug_mode] if numbered else debug_mode
    if mode not in _MODES:
        raise RuntimeError(
            f"set_sync_debug_mode: invalid value of debug_mode, expected one of `default`, `warn`, `error` or 0, 1, 2, "
            f"but got {debug_mode!r}"
        )
    _C.initialize()
    _C.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    """The mode that `set_sync_debug_mode` has set: 0 (default), 1 (warn) or 2 (error)."""
    return _MODES.index(_C.sync_debug_mode())


def _report(operation: str) -> None:
    """Warn about an operation that is about to wait, or raise."""
    node = torch._C._current_autograd_node()
    frame = next(place.frames(), None)
    where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    backward = f" in the backward of {node.name()}" if node else ""
    message = (
        f"called a synchronizing {_NAME} operation, {operation}{where}{backward}: the host waits for the device. "
        f"To avoid the wait, {_REMEDIES.get(operation, _DATA_DEPENDENT)}; "
        f'torch.{identity.module}.set_sync_debug_mode("default") permits it.'
    )
    if _C.sync_debug_mode() == "error":
        raise RuntimeError(message)
    if frame:
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        module = frame.f_globals.get("__name__", "<string>")  # None would silence it
        warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)
    else:
        warnings.warn(message, UserWarning, stacklevel=1)
