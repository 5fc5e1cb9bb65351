"""``python -m openreg_ops bench steps``: eager training steps on the device against the CPU's.

Each case runs in its own process, with both sides in alternating rounds.
"""

from __future__ import annotations

import argparse
import gc
import runpy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from openreg_ops.tools.backend import PACKAGE
from openreg_ops.tools.bench_report import Report, comparison, in_a_process
from openreg_ops.tools.timing import Comparison, compare, verdict
from openreg_tools.forms import seconds

Step = Callable[[], Any]
WARM_UP = 2.0  # seconds of steps before the first that counts: in the first hundreds, malloc has not settled yet
DEMO = PACKAGE.parent / "examples" / "train_char_transformer.py"


def training(model: nn.Module, x: torch.Tensor, target: torch.Tensor, device: str) -> Step:
    """Forward, cross entropy, backward and SGD."""
    model, x, target = model.to(device), x.to(device), target.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def mlp(device: str) -> Step:
    """784-512-512-10 with ReLU, batch 64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return training(net, torch.randn(64, 784), torch.randint(10, (64,)), device)


def transformer(device: str) -> Step:
    """The model, the batch and the optimizer of `make demo`."""
    demo = runpy.run_path(str(DEMO))
    run = demo["Run"](96, device, torch.float32)
    tokens = torch.randint(96, (demo["BATCH"], demo["CONTEXT"] + 1), generator=torch.Generator().manual_seed(0))
    return lambda: run.step(tokens)


class Classifier(nn.Module):
    """An LSTM of two layers, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm(device: str) -> Step:
    """Two layers of width 128 on 32 sequences of 32 steps."""
    torch.manual_seed(0)
    return training(Classifier(), torch.randn(32, 32, 64), torch.randint(10, (32,)), device)


class Residual(nn.Module):
    """ResNet's basic block, then the mean over the image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x)).mean((2, 3))


def resnet_block(device: str) -> Step:
    """Width 32 on 16 images of 28 by 28."""
    torch.manual_seed(0)
    return training(Residual(), torch.randn(16, 32, 28, 28), torch.randint(32, (16,)), device)


# name: (the step, the largest ratio to reach)
CASES: dict[str, tuple[Callable[[str], Step], float]] = {
    "mlp": (mlp, 0.97),
    "transformer": (transformer, 0.85),
    "lstm": (lstm, 1.0),
    "resnet-block": (resnet_block, 1.0),
}
NAMES = tuple(CASES)


def measure(name: str, rounds: int) -> Comparison:
    make, _target = CASES[name]
    calls = make("cpu"), make("openreg")
    gc.disable()
    try:
        until = time.perf_counter() + WARM_UP
        while time.perf_counter() < until:
            for call in calls:
                call()
        return compare(*calls, rounds)
    finally:
        gc.enable()


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 even if a target is missed, because a busy machine can miss any."""
    chosen = [name for name in CASES if name in (options.only or CASES)]
    report = Report(options, f"float32, {options.rounds} rounds")
    report.say(f"{'':14} {'cpu':>10} {'openreg':>10} {'ratio':>7}")
    for name in chosen:
        if name == "transformer" and not DEMO.exists():
            report.say(f"{name:14} not measured: it is the model of {DEMO.name}, which a checkout has")
            continue
        if len(chosen) == 1:
            found = measure(name, options.rounds)
        else:
            found = comparison(in_a_process(options, [name], report, name)["cases"][0])
        target = CASES[name][1]
        report.say(f"{name:14} {seconds(found.reference):>10} {seconds(found.measured):>10} {found.ratio:7.2f}   "
                   f"target {target:.2f}: {verdict(found, target)}")  # fmt: skip
        report.add(found, target, name=name)
    return report.finish()
