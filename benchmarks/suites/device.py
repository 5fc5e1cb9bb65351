"""What the device adds to PyTorch's operators, to a training step and to the import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from report import Figure, figure, seconds
from timing import LEAST, Timed, compare, compared
from torch.nn import functional as F

from suites.models import mlp, training

SIZES = {"64": (8, 8), "1M": (1024, 1024)}
MEANS = {", 64": 0.95, ", 1M": 1.05}
STEP, IMPORT = 1.05, 1.1  # targets


def custom_abs(x: torch.Tensor) -> Timed:
    """The CPU's side is torch.abs: custom_abs on the CPU runs the reference, which is not a fair comparison."""
    return (lambda: torch.abs(x)) if x.device.type == "cpu" else (lambda: torch.ops.openreg.custom_abs(x))


def layer_norm(x: torch.Tensor) -> Timed:
    weight, shape = x[0].clone(), x.shape[1:]
    return lambda: F.layer_norm(x, shape, weight, weight)


# Each takes an [n, n] tensor and returns the call to time.
OPERATORS: dict[str, Callable[[torch.Tensor], Timed]] = {
    "add": lambda x: lambda: x + x,
    "mul": lambda x: lambda: x * x,
    "relu": lambda x: lambda: torch.relu(x),
    "sum": lambda x: lambda: x.sum(),
    "mm": lambda x: lambda: torch.mm(x, x),
    "view": lambda x: lambda: x.view(-1),
    "slice": lambda x: lambda: x[1:-1],
    "empty": lambda x: lambda shape=x.shape, device=x.device: torch.empty(shape, device=device),
    "clone": lambda x: lambda: x.clone(),
    "softmax": lambda x: lambda: torch.softmax(x, -1),
    "layer_norm": layer_norm,
    "item": lambda x: lambda last=x[-1, -1]: last.item(),
    "custom_abs": custom_abs,
}


def operator(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    for size, shape in SIZES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        calls = [OPERATORS[name](x.to(device)) for device in ("cpu", "openreg")]
        yield figure(f"{name}, {size}", compare(*calls, options.rounds, options.seconds))


def step(options: argparse.Namespace) -> Iterator[Figure]:
    """A step of an MLP with batch 128."""
    calls = [training(partial(mlp, 128), device) for device in ("cpu", "openreg")]
    yield figure("step", compare(*calls, options.rounds, options.seconds), STEP)


def import_seconds(package: str) -> float:
    """Seconds that a fresh process takes to import torch, and then perhaps `package`."""
    code = f"import time; start = time.perf_counter(); import torch, {package}; print(time.perf_counter() - start)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = [sys.executable, "-P", "-c", code]
    return float(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)


def imports(options: argparse.Namespace) -> Iterator[Figure]:
    """The import of torch with the device, against that without."""
    found = compared(*zip(*(map(import_seconds, ("os", "openreg_ops")) for _ in range(LEAST)), strict=True))
    yield figure("import", found, IMPORT, f"adds {seconds(found.measured - found.reference)}")


CASES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    **{name: partial(operator, name) for name in OPERATORS},
    "step": step,
    "import": imports,
}
