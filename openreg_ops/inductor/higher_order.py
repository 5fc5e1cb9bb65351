"""Operators that take functions (`cond`, checkpointing, `flex_attention`), which PyTorch runs only on its own devices.

Written against torch 2.13 and 2.15; tests/graph/test_higher_order.py says what breaks without each part.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from openreg_ops.identity import identity

AUTOCAST = torch._C._dispatch_key_parse(identity.autocast)


def register_autocast() -> None:
    """Let the device's autocast pass through, as on PyTorch's own devices: it acts on the operators inside."""
    if identity.name == "cuda":
        return
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(AUTOCAST)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(AUTOCAST)


def register_random_state() -> None:
    """Let graphs save and restore the device's random state, as checkpointing does."""
    rng_prims = sys.modules["torch._prims.rng_prims"]
    save, restore = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
    key = torch._C.DispatchKey.BackendSelect
    save_elsewhere, restore_elsewhere = save.py_kernels[key], restore.py_kernels[key]

    def device_of(args: Any, kwargs: Any) -> torch.device | None:
        devices = [getattr(x, "device", x) for x in (kwargs.get("device"), *args)]
        return next((x for x in devices if isinstance(x, torch.device) and x.type == identity.name), None)

    @functools.wraps(save_elsewhere)
    def save_state(op: Any, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(args, kwargs)) is None:
            return save_elsewhere(op, *args, **kwargs)
        return torch.openreg.get_rng_state(device), op(*args, **kwargs)

    @functools.wraps(restore_elsewhere)
    def with_state(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(args, kwargs)) is None:
            return restore_elsewhere(state, op, *args, **kwargs)
        now = torch.openreg.get_rng_state(device)
        torch.openreg.set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            torch.openreg.set_rng_state(now, device)

    save.py_kernels[key], restore.py_kernels[key] = save_state, with_state
    # The other implementations of `save` call the one replaced as a variable of the function around them.
    for traced in save.python_key_table.values():
        names = getattr(getattr(traced, "__code__", None), "co_freevars", ())
        if save_elsewhere.__name__ in names:
            traced.__closure__[names.index(save_elsewhere.__name__)].cell_contents = save_state


def register_flex_attention() -> None:
    """Let `flex_attention` take the device's tensors, and autocast choose their dtype.

    PyTorch checks against a list of devices; adapt.py handles the operator in Inductor.
    """
    flex = sys.modules["torch.nn.attention.flex_attention"]
    check = flex._validate_device

    @functools.wraps(check)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != identity.name:
            check(query, key, value)

    flex._validate_device = validate_device
    if identity.name == "cuda":  # whose autocast PyTorch registers
        return
    implementation = sys.modules["torch._higher_order_ops.flex_attention"]

    @implementation.flex_attention.py_impl(AUTOCAST)
    def autocast(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST)):
            return implementation._flex_attention_autocast_impl(*args)
