"""``python -m openreg_ops bench graphs``: replays of captured work against the CPU's eager mode."""

from __future__ import annotations

import argparse
import gc
import runpy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from openreg_ops.tools.bench_report import Report
from openreg_ops.tools.bench_steps import DEMO
from openreg_ops.tools.timing import Comparison, batches, compare, values, verdict
from openreg_tools.forms import seconds

Call = Callable[[], Any]
NODES = 1000


def captured(call: Call) -> tuple[torch.openreg.Graph, Call]:
    """The graph of a call that has been made before, and its replay."""
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        call()
    return graph, graph.replay


def chain(device: str) -> Call:
    """100 operators of 64 elements: mul, add, relu and tanh in turn."""
    x = torch.ones(64, device=device)

    def call() -> torch.Tensor:
        y = x
        for _ in range(25):
            y = torch.tanh(torch.relu(y * x + x))
        return y

    return call


def mlp(device: str) -> Call:
    """A whole training step of an MLP of width 64 at batch 16, with AdamW."""
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


def transformer(device: str) -> Call:
    """The step of `make demo`, the loss left on the device."""
    demo = runpy.run_path(str(DEMO))
    run = demo["Run"](96, device, torch.float32, captured=device != "cpu")
    tokens = torch.randint(96, (demo["BATCH"], demo["CONTEXT"] + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device)
    return lambda: run.train(tokens)


# name: (the call, the largest ratio to reach)
CASES: dict[str, tuple[Callable[[str], Call], float]] = {
    "chain": (chain, 0.3),
    "mlp-step": (mlp, 0.5),
    "transformer-step": (transformer, 0.9),
}
NAMES = (*CASES, "node")
NODE = 150e-9  # target: seconds of a node


def measure(name: str, rounds: int) -> tuple[Comparison, int]:
    """A replay against the CPU's eager call, and how many nodes it has."""
    make = CASES[name][0]
    eager, call = make("cpu"), make("openreg")
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    with stream:
        for _ in range(3):  # makes the state of an optimizer
            call()
    torch.openreg.current_stream().wait_stream(stream)
    graph, replay = captured(call)
    gc.disable()
    try:
        return compare(eager, replay, rounds), len(graph._nodes())
    finally:
        gc.enable()


def seconds_of_a_node(rounds: int) -> Comparison:
    """Of a graph of NODES operators on one element each."""
    x = torch.ones(1, device="openreg")

    def call() -> None:
        for _ in range(NODES):
            x.mul_(1.0)

    graph, replay = captured(call)
    nodes = len(graph._nodes())
    assert nodes >= NODES
    return values([each / nodes for each in batches(replay, replay, rounds)[1]])


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 also when a target is missed, because a busy machine can miss any."""
    report = Report(options, f"float32, {options.rounds} rounds")
    report.say(f"{'':18} {'nodes':>6} {'cpu':>10} {'replay':>10} {'ratio':>7}")
    for name in NAMES:
        if name not in (options.only or NAMES):
            continue
        if name == "node":
            node = seconds_of_a_node(options.rounds)
            report.results["node_s"] = node.measured
            report.say(f"{'a node':18} {'':6} {'':10} {seconds(node.measured):>10} {'':7}   target {seconds(NODE)}: "
                       f"{verdict(node, NODE, seconds)}")  # fmt: skip
            continue
        if name == "transformer-step" and not DEMO.exists():
            report.say(f"{name:18} not measured: it is the model of {DEMO.name}, which a checkout has")
            continue
        result, nodes = measure(name, options.rounds)
        target = CASES[name][1]
        report.say(f"{name:18} {nodes:6} {seconds(result.reference):>10} {seconds(result.measured):>10} "
                   f"{result.ratio:7.2f}   target {target:.2f}: {verdict(result, target)}")  # fmt: skip
        report.add(result, target, name=name, nodes=nodes)
    return report.finish()
