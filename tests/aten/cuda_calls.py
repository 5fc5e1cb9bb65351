"""What CUDA does at the ATen calls that OpInfo's samples make: does the host wait, and is there a deterministic kernel?

``python tests/aten/cuda_calls.py cuda > tests/aten/cuda_calls.json`` asks a GPU; it needs torch and expecttest alone.
The file in the repository is from an H100 with torch 2.11. It lists the operators of which no call waits or is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Call = tuple[tuple, dict]
# The input of a polynomial is its degree, and so the number of steps; the others change or ask where memory is.
LEFT_OUT = ("polynomial", "_test_", "resize", "set_", "_pin_memory", "is_pinned", "record_stream")


class Record(TorchDispatchMode):
    """At most four calls of each operator, by the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, dict[str, Call]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if 0 < len(tensors) < 10 and not any(each in str(op) for each in LEFT_OUT):
            known = self.calls.setdefault(op, {})
            key = str([(tuple(x.shape), str(x.dtype)[6:]) for x in tensors])
            if len(known) < 4 and key not in known:
                copied = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
                known[key] = copied
        return op(*args, **kwargs)


def run_samples(info: Any, record: TorchDispatchMode, count: int) -> None:
    """Run an operator's first samples on the CPU, and their gradients, under a mode that records the calls."""
    for dtype in (torch.float32, torch.int64):
        if dtype not in info.dtypes:
            continue
        gradient = info.supports_autograd and dtype == torch.float32
        try:
            for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradient), count):
                with record:
                    out = info(sample.input, *sample.args, **sample.kwargs)
                    wanted = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                    if wanted:
                        torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
        except Exception:
            pass  # a sample that this machine cannot run


def recorded(count: int) -> Iterator[tuple[Any, str, Call]]:
    """The calls of so many samples of each operator, and of their gradients; some operators come several times."""
    torch.manual_seed(0)
    for info in op_db:
        record = Record()
        run_samples(info, record, count)
        for op, known in record.calls.items():
            for key, call in known.items():
                yield op, key, call


def moved(call: Call, device: str) -> Call:
    """A copy on the device."""

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device, copy=True)
        return torch.device(device) if isinstance(x, torch.device) else x

    return tree_map(move, call)


def error_of(op: Any, call: Call, device: str, sync: str, deterministic: bool) -> str:
    """What the call raises where waits are errors, where only deterministic algorithms may run, or where both is so."""
    args, kwargs = moved(call, device)
    module = torch.get_device_module(device)
    module.synchronize()
    module.set_sync_debug_mode(sync)
    torch.use_deterministic_algorithms(deterministic)
    try:
        op(*args, **kwargs)
    except Exception as error:
        return str(error) or "an error"
    finally:
        module.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    return ""


def outcomes(device: str, count: int = 10) -> dict[str, dict[str, list[bool]]]:
    """For each operator and each call that runs there: whether it waits, and whether it is refused as not deterministic."""
    found: dict[str, dict[str, list[bool]]] = {}
    for op, key, call in recorded(count):
        calls = found.setdefault(str(op), {})
        if key in calls:
            continue
        if not error_of(op, call, device, "error", True):  # most calls
            calls[key] = [False, False]
        elif not error_of(op, call, device, "default", False):  # else a call that the device does not take
            waits = "called a synchronizing" in error_of(op, call, device, "error", False)
            refused = "does not have a deterministic implementation" in error_of(op, call, device, "default", True)
            calls[key] = [waits, refused]
    return found


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, CUDA refuses every matrix product
    warnings.simplefilter("ignore")
    found = outcomes(sys.argv[1])
    never = sorted(op for op, calls in found.items() if calls and not any(map(any, calls.values())))
    told = [
        f"{json.dumps(op)}: {json.dumps(calls)}" for op, calls in sorted(found.items()) if any(map(any, calls.values()))
    ]
    names = textwrap.fill(json.dumps(never), 120, break_on_hyphens=False, break_long_words=False)
    print(f'{{"never": {names},\n"calls": {{' + ",\n".join(told) + "}}")
