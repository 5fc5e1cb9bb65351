"""torch.compile on the device against torch.compile on the CPU.

Then, on the device: compiled against eager mode, and operators decomposed for Inductor against their own kernels.
"""

from __future__ import annotations

import argparse
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from report import Figure, figure
from timing import LEAST, Speeds, Timed, compare, compared, settle
from torch.nn import functional as F

import openreg_ops
from openreg_ops import inductor
from suites.models import mlp, training, transformer

ROW = 1024  # 1M elements are 1024 rows of 1024
MATRIX = (ROW, ROW)


def function(body: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[str], Timed]:
    """Calls of a compiled function on random arguments."""

    def make(device: str) -> Timed:
        torch.manual_seed(0)
        arguments = [torch.randn(shape).to(device) for shape in shapes]
        graph = torch.compile(body, fullgraph=True)
        return lambda: graph(*arguments)

    return make


def step_of(model: Callable[[], Any]) -> Callable[[str], Timed]:
    return lambda device: training(model, device, torch.compile)


# name: (what is timed on a device, the largest ratio to reach)
GRAPHS: dict[str, tuple[Callable[[str], Timed], float]] = {
    "pointwise-1k": (function(lambda x, y: (x * y + 1).relu().tanh() * 2 - y, (1000,), (1000,)), 1.3),
    "pointwise": (function(lambda x, y: (x * y + 1).relu() * 2 - y, MATRIX, MATRIX), 1.05),
    "softmax": (function(lambda x: torch.softmax(x, -1), MATRIX), 1.05),
    "layer_norm": (function(lambda x, w, b: F.layer_norm(x, (ROW,), w, b), MATRIX, (ROW,), (ROW,)), 1.05),
    "linear+gelu": (function(lambda x, w, b: F.gelu(F.linear(x, w, b)), MATRIX, MATRIX, (ROW,)), 1.05),
    "sum": (function(lambda x: x.sum(), MATRIX), 1.05),
    "sum-columns": (function(lambda x: x.sum(0), MATRIX), 1.05),
    "mlp-step": (step_of(partial(mlp, 128)), 1.05),
    "transformer-step": (step_of(transformer), 1.05),
}


def graph(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    make, target = GRAPHS[name]
    torch._dynamo.reset()
    yield figure(name, compare(make("cpu"), make("openreg"), options.rounds, options.seconds), target)


def compile_time(options: argparse.Namespace) -> Iterator[Figure]:
    """The time to compile the MLP's training step on the CPU and on the device, with nothing cached."""
    from torch._inductor.utils import fresh_cache

    times: dict[str, list[float]] = {"cpu": [], "openreg": []}
    for index in range(min(options.rounds, LEAST) + 1):
        for device in ("cpu", "openreg") if index % 2 else ("openreg", "cpu"):
            torch._dynamo.reset()
            with fresh_cache():
                step = step_of(partial(mlp, 128))(device)
                start = time.perf_counter()
                step()
                settle()
                times[device].append(time.perf_counter() - start)
    yield figure("compile-time", compared(*(side[1:] for side in times.values())), 1.1)  # the first loads the compiler


def against_eager(options: argparse.Namespace) -> Iterator[Figure]:
    """The transformer's step on the device, eager and compiled."""
    torch._dynamo.reset()
    eager, compiled = training(transformer, "openreg"), step_of(transformer)("openreg")
    found = compare(eager, compiled, options.rounds, options.seconds)
    yield figure("against-eager", found, 1.0, "eager mode on the device is the other side")


# ---- operators by their own kernels and decomposed for Inductor ----


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return openreg_ops.rms_norm(x, weight)[0]


def norm_of_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, openreg_ops.rms_norm(total, weight)[0]


def swiglu_of_halves(x: torch.Tensor) -> torch.Tensor:
    return openreg_ops.swiglu(*x.chunk(2, -1))


def rotary_of_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    q, k, _ = x.view(4, 512, 3, 16, 64).permute(2, 0, 3, 1, 4)
    return openreg_ops.rotary_embedding(q, cos, sin) + openreg_ops.rotary_embedding(k, cos, sin)


ROWS, ANGLE = (2048, ROW), (512, 32)
# operator: (alone, shapes), (with the operations around it in a model, shapes)
DECOMPOSABLE = {
    "rms_norm": ((norm, ROWS, (ROW,)), (norm_of_sum, ROWS, ROWS, (ROW,))),
    "swiglu": ((openreg_ops.swiglu, ROWS, ROWS), (swiglu_of_halves, (2048, 2 * ROW))),
    "rotary_embedding": (
        (openreg_ops.rotary_embedding, (4, 16, 512, 64), ANGLE, ANGLE),
        (rotary_of_heads, (4, 512, 3 * ROW), ANGLE, ANGLE),
    ),
}


def decomposition(
    name: str, body: Callable[..., Any], shapes: Sequence[tuple[int, ...]], options: argparse.Namespace
) -> Speeds:
    """Forward and backward decomposed, compared with the operator's own kernels."""
    torch.manual_seed(0)
    arguments = [torch.randn(shape, device="openreg", requires_grad=shape != ANGLE) for shape in shapes]
    wanted = [x for x in arguments if x.requires_grad]
    default = set(inductor.decompositions)

    def make(decomposed: bool) -> Timed:
        inductor.decompositions = default | {name} if decomposed else default - {name}
        # A separate code object, because Dynamo keys graphs by a function's code.
        copy = types.FunctionType(body.__code__.replace(), body.__globals__, argdefs=body.__defaults__)
        compiled = torch.compile(copy, fullgraph=True)
        seeds = torch.utils._pytree.tree_map(torch.randn_like, compiled(*arguments))

        def step() -> None:
            torch.autograd.grad(compiled(*arguments), wanted, seeds)

        step()
        return step

    try:
        kernels, decomposed = make(False), make(True)
    finally:
        inductor.decompositions = default
    return compare(kernels, decomposed, options.rounds, options.seconds)


def decompositions(options: argparse.Namespace) -> Iterator[Figure]:
    """On 4 x 512 tokens of width 1024; the sum of both cases decides which form is the default."""
    for name, cases in DECOMPOSABLE.items():
        torch._dynamo.reset()
        found = [decomposition(name, body, shapes, options) for body, *shapes in cases]
        kernels, decomposed = sum(one.reference for one in found), sum(one.measured for one in found)
        default = name in inductor.decompositions
        said = f"the default is {'decomposed' if default else 'its kernels'}, the "
        said += "faster" if (decomposed < kernels) == default else "slower"
        for where, one in zip(("alone", "in a model"), found, strict=True):
            yield figure(f"{name} decomposed, {where}", one, None, said if where == "in a model" else "")


CASES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    **{name: partial(graph, name) for name in GRAPHS},
    "compile-time": compile_time,
    "against-eager": against_eager,
    "decompositions": decompositions,
}
