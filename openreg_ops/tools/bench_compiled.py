"""``python -m openreg_ops bench compiled``: torch.compile on the device against torch.compile on the CPU.

It then compares compiled with eager mode on the device, and decomposed operators with their own kernels.

Each number is a ratio of medians of alternating rounds in one process. Compiled graphs are called several times per
synchronization, as in a real program.
"""

from __future__ import annotations

import argparse
import gc
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import openreg_ops
from openreg_ops import inductor
from openreg_ops.tools.bench_report import Report
from openreg_ops.tools.timing import LEAST, Comparison, compare, compared, settle, verdict
from openreg_tools.forms import seconds

ROW = 1024  # 1M elements are 1024 rows of 1024


def function(body: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[str], Callable[[], Any]]:
    """Calls of a compiled function on random arguments."""

    def make(device: str) -> Callable[[], Any]:
        torch.manual_seed(0)
        arguments = [torch.randn(shape).to(device) for shape in shapes]
        graph = torch.compile(body, fullgraph=True)
        return lambda: graph(*arguments)

    return make


class Transformer(nn.Module):
    """Two blocks of width 128 on 64 tokens, with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding, self.head = nn.Embedding(96, 128), nn.Linear(128, 96)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x), mask=self.mask, is_causal=True))


def step_of(make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]], compiled: bool = True) -> Callable[[str], Callable[[], None]]:  # fmt: skip
    """Training steps of a model: compiled forward, backward and SGD."""

    def make_step(device: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model, x, target = make()
        model, x, target = model.to(device), x.to(device), target.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compile = torch.compile if compiled else lambda f: f
        loss_of = compile(lambda: F.cross_entropy(model(x).flatten(0, -2), target.flatten()))
        update = compile(optimizer.step)

        def step() -> None:
            optimizer.zero_grad()
            loss_of().backward()
            update()

        return step

    return make_step


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """784-512-512-10 with ReLU, batch 128."""
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, torch.randn(128, 784), torch.randint(10, (128,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Transformer(), torch.randint(96, (8, 64)), torch.randint(96, (8, 64))


MATRIX = (ROW, ROW)
# name: (what is timed on a device, the largest ratio to reach)
CASES: dict[str, tuple[Callable[[str], Callable[[], Any]], float]] = {
    "pointwise-1k": (function(lambda x, y: (x * y + 1).relu().tanh() * 2 - y, (1000,), (1000,)), 1.3),
    "pointwise": (function(lambda x, y: (x * y + 1).relu() * 2 - y, MATRIX, MATRIX), 1.05),
    "softmax": (function(lambda x: torch.softmax(x, -1), MATRIX), 1.05),
    "layer_norm": (function(lambda x, w, b: F.layer_norm(x, (ROW,), w, b), MATRIX, (ROW,), (ROW,)), 1.05),
    "linear+gelu": (function(lambda x, w, b: F.gelu(F.linear(x, w, b)), MATRIX, MATRIX, (ROW,)), 1.05),
    "sum": (function(lambda x: x.sum(), MATRIX), 1.05),
    "sum-columns": (function(lambda x: x.sum(0), MATRIX), 1.05),
    "mlp-step": (step_of(mlp), 1.05),
    "transformer-step": (step_of(transformer), 1.05),
}
NAMES = (*CASES, "compile-time", "against-eager", "decompositions")


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return openreg_ops.rms_norm(x, weight)[0]


def _norm_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, openreg_ops.rms_norm(total, weight)[0]


def _swiglu_of_halves(x: torch.Tensor) -> torch.Tensor:
    return openreg_ops.swiglu(*x.chunk(2, -1))


def _rotary_of_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    q, k, _ = x.view(4, 512, 3, 16, 64).permute(2, 0, 3, 1, 4)
    return openreg_ops.rotary_embedding(q, cos, sin) + openreg_ops.rotary_embedding(k, cos, sin)


ROWS, ANGLES = (2048, ROW), [(512, 32), (512, 32)]
# operator: (alone, shapes), (with the operations around it in a model, shapes)
DECOMPOSABLE = {
    "rms_norm": ((_norm, ROWS, (ROW,)), (_norm_of_sum, ROWS, ROWS, (ROW,))),
    "swiglu": ((openreg_ops.swiglu, ROWS, ROWS), (_swiglu_of_halves, (2048, 2 * ROW))),
    "rotary_embedding": (
        (openreg_ops.rotary_embedding, (4, 16, 512, 64), *ANGLES),
        (_rotary_of_heads, (4, 512, 3 * ROW), *ANGLES),
    ),
}


def decomposition(name: str, body: Callable[..., Any], shapes: Sequence[tuple[int, ...]], rounds: int) -> Comparison:  # fmt: skip
    """Forward and backward decomposed, compared with the operator's own kernels."""
    torch.manual_seed(0)
    arguments = [torch.randn(shape, device="openreg", requires_grad=shape != (512, 32)) for shape in shapes]
    wanted = [x for x in arguments if x.requires_grad]
    default = set(inductor.decompositions)

    def make(decomposed: bool) -> Callable[[], None]:
        inductor.decompositions = default | {name} if decomposed else default - {name}
        # A separate code object, because Dynamo keys graphs by a function's code.
        function = types.FunctionType(body.__code__.replace(), body.__globals__, argdefs=body.__defaults__)
        graph = torch.compile(function, fullgraph=True)
        seeds = torch.utils._pytree.tree_map(torch.randn_like, graph(*arguments))

        def step() -> None:
            torch.autograd.grad(graph(*arguments), wanted, seeds)

        step()
        return step

    try:
        kernels, decomposed = make(False), make(True)
    finally:
        inductor.decompositions = default
    return compare(kernels, decomposed, rounds)


def compile_time(rounds: int) -> Comparison:
    """The time to compile the MLP's training step on the CPU and on the device, nothing cached."""
    from torch._inductor.utils import fresh_cache

    times: dict[str, list[float]] = {"cpu": [], "openreg": []}
    for i in range(rounds + 1):
        for device in ("cpu", "openreg") if i % 2 else ("openreg", "cpu"):
            torch._dynamo.reset()
            with fresh_cache():
                step = step_of(mlp)(device)
                start = time.perf_counter()
                step()
                settle()
                times[device].append(time.perf_counter() - start)
    return compared(*(each[1:] for each in times.values()))  # the first loads the compiler


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 even if a target is missed, because a busy machine can miss any."""
    chosen = options.only or NAMES
    report = Report(options, f"float32, {options.rounds} rounds")

    def row(name: str, found: Comparison, target: float | None = None, width: int = 18, of: str = "") -> None:
        said = "" if target is None else f"   target {target:.2f}: {verdict(found, target)}"
        times = f"{seconds(found.reference):>10} {seconds(found.measured):>10} {found.ratio:7.2f}"
        report.say(f"{name:{width}} {times}{said}")
        report.add(found, target, name=f"{of}{name}")

    report.say(f"{'':18} {'cpu':>10} {'openreg':>10} {'ratio':>7}")
    for name, (make, target) in CASES.items():
        if name in chosen:
            torch._dynamo.reset()
            calls = make("cpu"), make("openreg")
            gc.disable()
            row(name, compare(*calls, options.rounds), target)
            gc.enable()
    if "compile-time" in chosen:
        row("compile-time", compile_time(min(options.rounds, max(options.rounds // 20, LEAST))), 1.1)
    if "against-eager" in chosen:
        torch._dynamo.reset()
        eager, compiled = step_of(transformer, compiled=False)("openreg"), step_of(transformer)("openreg")
        report.say("transformer's step on the device, eager (first column) and compiled:")
        row("against-eager", compare(eager, compiled, options.rounds), 1.0)
    if "decompositions" in chosen:
        report.say("operators on 4 x 512 tokens of width 1024, forward and backward, by their own")
        report.say("kernels (first column) and decomposed for Inductor; the sum of both cases decides:")
        for name, cases in DECOMPOSABLE.items():
            torch._dynamo.reset()
            found = [decomposition(name, body, shapes, options.rounds) for body, *shapes in cases]
            for each, where in zip(found, ("alone", "in a model"), strict=True):
                row(f"{name}, {where}", each, width=28, of="decompositions, ")
            kernels, decomposed = sum(each.reference for each in found), sum(each.measured for each in found)
            default = "decomposed" if name in inductor.decompositions else "its kernels"
            right = (decomposed < kernels) == (name in inductor.decompositions)
            report.say(f"{'':28} the default is {default}: {'the faster' if right else 'the slower'}")
    return report.finish()
