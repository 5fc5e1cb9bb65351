"""The check `freed` of `openreg-tools conformance`: arguments whose storage was resized to 0 bytes, as FSDP does.

A call with such an argument must return, which it may if it reads no values, or raise. It must not end the process or
fail an internal assertion, in any launch mode.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from openreg_tools.conformance.outcomes import Tally
from openreg_tools.core.blocks import first_line
from openreg_tools.core.device import synchronize
from openreg_tools.core.move import Move

CHECK = "freed"


def members(x: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold the elements of a tensor."""
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [x.values()]
    return [x] if x.layout == torch.strided and not x.is_nested and not x.is_quantized else []


def free(x: torch.Tensor) -> bool:
    """Resize the storage of a tensor to 0 bytes; False if it has none."""
    freed = [member for member in members(x) if member.numel() and member.untyped_storage().nbytes()]
    for member in freed:
        member.untyped_storage().resize_(0)
    return bool(freed)


def compare(
    tally: Tally,
    index: int,
    what: str,
    call: Callable[[Any], Any],
    make: Callable[[], Move],
    at: Callable[[str], None] = lambda _: None,
) -> None:
    """Make a call once for each of its tensors, without the memory of that tensor.

    Args:
        call: takes a `Move`, moves the arguments with it, and calls the operator.
        make: returns a new `Move` to the device.
        at: is told before each call, because a call may end the process.
    """
    probe = make()
    with contextlib.suppress(Exception):
        call(probe)
    module = getattr(torch, probe.device.type)
    modes = ("inline", "async") if hasattr(module, "launch_mode") else (None,)
    for which in range(len(probe.tensors)):
        for mode in modes:
            move = make()
            found = []

            def copy(tensor: torch.Tensor, move: Any = move, which: int = which, found: Any = found) -> torch.Tensor:
                moved = type(move).copy(move, tensor)
                if len(move.tensors) == which and moved.device.type == move.device.type:
                    found.append(free(moved))
                return moved

            move.copy = copy
            at(f"{CHECK}, {what}, tensor {which}{f', {mode}' if mode else ''}")
            with module.launch_mode(mode) if mode else contextlib.nullcontext(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    call(move)
                    synchronize(move.device)
                except Exception as error:
                    if "INTERNAL ASSERT" in str(error):
                        message = f"{what}, tensor {which} without memory: {first_line(error)}"
                        tally.fail(CHECK, "internal", index, message)
            tally.ran[CHECK] += any(found)
