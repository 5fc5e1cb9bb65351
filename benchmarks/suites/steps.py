"""Training steps in eager mode on the device, against the CPU's. Each case runs in a process of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

from report import Figure, figure
from timing import Timed, compare

from suites.models import demo, lstm, mlp, resnet_block, training

SEPARATE = True  # a step's time on the CPU depends on how malloc has divided its memory
WARM_UP = 2.0  # seconds of steps before the first that counts: in the first hundreds, malloc has not settled yet


def transformer(device: str) -> Timed:
    """The model, the batch and the optimizer of `make demo`."""
    run, tokens = demo(device)
    return lambda: run.step(tokens)


# name: (a step on a device, the largest ratio to reach)
STEPS: dict[str, tuple[Callable[[str], Timed], float]] = {
    "mlp": (partial(training, partial(mlp, 64)), 0.97),
    "transformer": (transformer, 0.85),
    "lstm": (partial(training, lstm), 1.0),
    "resnet-block": (partial(training, resnet_block), 1.0),
}


def measure(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    make, target = STEPS[name]
    calls = make("cpu"), make("openreg")
    until = time.perf_counter() + min(WARM_UP, options.seconds)
    while time.perf_counter() < until:
        for call in calls:
            call()
    yield figure(name, compare(*calls, options.rounds, options.seconds), target)


CASES = {name: partial(measure, name) for name in STEPS}
