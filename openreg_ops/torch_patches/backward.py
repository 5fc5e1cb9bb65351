"""Python's backward() and grad() run on the thread that calls them, as on the CPU.

PyTorch's engine has a thread for each device of an accelerator, which launches the backward while the device computes.
Here the thread that launches also computes, except in the launch mode `async`. On a thread of the engine it would have
OpenMP threads of its own, which wait for the processors where the OpenMP threads of the forward still spin.

tests/backend/test_backward.py says what happens without the patch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["register"]

_original = torch.autograd.graph._engine_run_backward


@functools.wraps(_original)
def _engine_run_backward(outputs: Any, *arguments: Any, **options: Any) -> Any:
    if not torch._C._is_multithreading_enabled() or torch.openreg.get_launch_mode() == "async":
        return _original(outputs, *arguments, **options)
    torch._C._set_multithreading_enabled(False)
    try:
        return _original(outputs, *arguments, **options)
    finally:
        torch._C._set_multithreading_enabled(True)


def register() -> None:
    """Install the patch, in both modules that have the function; Dynamo does not trace it, nor the original."""
    dynamo = torch._C._dynamo.eval_frame
    skipped = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
    dynamo.set_code_exec_strategy(_engine_run_backward.__code__, skipped)
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward
