"""Replays of captured work on the device, against eager mode on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from report import Figure, figure, seconds
from timing import Timed, compare
from torch import nn
from torch.nn import functional as F

from suites.models import demo

NODES = 1000


def chain(device: str) -> Timed:
    """100 operators of 64 elements: mul, add, relu and tanh in turn."""
    x = torch.ones(64, device=device)

    def call() -> torch.Tensor:
        y = x
        for _ in range(25):
            y = torch.tanh(torch.relu(y * x + x))
        return y

    return call


def mlp(device: str) -> Timed:
    """A training step of an MLP of width 64 at batch 16, with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device != "cpu")
    x, target = torch.randn(16, 64).to(device), torch.randn(16, 64).to(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def transformer(device: str) -> Timed:
    """The step of `make demo`, the loss left on the device."""
    run, tokens = demo(device, captured=device != "cpu")
    tokens = tokens.to(device)
    return lambda: run.train(tokens)


def single(device: str) -> Timed:
    """NODES operators on one element."""
    x = torch.ones(1, device=device)

    def call() -> None:
        for _ in range(NODES):
            x.mul_(1.0)

    return call


# name: (the call, the largest ratio to reach)
CALLS: dict[str, tuple[Callable[[str], Timed], float]] = {
    "chain": (chain, 0.3),
    "mlp-step": (mlp, 0.5),
    "transformer-step": (transformer, 0.9),
    "node": (single, 0.25),
}


def measure(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    """A replay against the CPU's eager call."""
    make, target = CALLS[name]
    eager, call = make("cpu"), make("openreg")
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    with stream:
        for _ in range(3):  # makes the state of an optimizer
            call()
    torch.openreg.current_stream().wait_stream(stream)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        call()
    found, nodes = compare(eager, graph.replay, options.rounds, options.seconds), len(graph._nodes())
    yield figure(name, found, target, f"{nodes} nodes of {seconds(found.measured / nodes)}")


CASES = {name: partial(measure, name) for name in CALLS}
