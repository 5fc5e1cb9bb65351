"""torch.compile(backend="openreg"): Inductor, the default backend, with an error for other devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from openreg_ops.identity import identity


def openreg(
    model: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph with Inductor.

    Args:
        model, inputs: the graph and its arguments, on openreg and the CPU. A program for the device can have graphs
            that use only the CPU, so those compile too.
        mode, options: as for `torch.compile`.
    Raises:
        RuntimeError: an argument is on another device.
    """
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.device.type not in (identity.name, "cpu"):
            raise RuntimeError(
                f'torch.compile(backend="openreg"): expected tensors on openreg or the CPU, but got one on {x.device}; '
                'use backend="inductor"'
            )
    return torch._TorchCompileInductorWrapper(mode, options, None)(model, inputs)


def register() -> None:
    """Register the backend's name with Dynamo."""
    from torch._dynamo.backends.registry import register_backend

    register_backend(openreg, name="openreg")
