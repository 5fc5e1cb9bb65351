"""The openreg:: operators at transformer sizes, against what a CPU user would write instead.

The other side is eager PyTorch. Memory-bound operators are also compared with the machine's bandwidth: the bytes per
second that they must read and write, as a fraction of what a copy of 256 MB achieves. Peak memory is the device
allocator's, for the operator and for the eager mathematics on the device.

With `--against best` the other side is the fastest of eager PyTorch, `torch.compile` and ATen's own fused operator, in
three dtypes, with one thread and with all. One that raises does not compete.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from report import Figure, figure, plural
from timing import Timed, alternate, compared
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import openreg_ops

ops = torch.ops.openreg
BATCH, SEQUENCE, WIDTH, VOCABULARY, HEADS = 8, 512, 1024, 32000, 16
ROWS = BATCH * SEQUENCE
MEANS = {", best": 1 / 1.8}
COPY = 256 * 2**20  # bytes of the copy that measures the memory bandwidth


@dataclass
class Operator:
    """An operator, the same mathematics in plain PyTorch, and the targets."""

    name: str
    inputs: Callable[[torch.dtype], Sequence[Any]]  # on the CPU
    eager: Callable[..., Any]
    operator: Callable[..., Any]
    fused: Callable[..., Any] | None = None  # ATen's own fused operator, where eager mode does not use it
    forward_bytes: float = 0  # per element of the first input, in units of its size; 0: not memory-bound
    backward_bytes: float | None = 0  # None: no derivative
    ratio: float = 1.0  # target: operator seconds / eager seconds, with the backward where there is one
    bandwidth: float | None = None  # target: of the copy's
    memory: float | None = None  # target: of eager's peak
    compiles: bool = True  # whether torch.compile takes the eager side


def activations(dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, WIDTH).to(dtype)


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).mul(0.02).to(dtype)


def activation_pair(dtype: torch.dtype) -> list[Tensor]:
    return [activations(dtype), activations(dtype)]


def heads(dtype: torch.dtype) -> Tensor:
    return activations(dtype).view(BATCH, SEQUENCE, HEADS, WIDTH // HEADS).transpose(1, 2).contiguous()


# ---- the mathematics, as models write it ----


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def aten_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(SEQUENCE), 10000 ** -(torch.arange(0, 1, 2 * HEADS / WIDTH)))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1) / 127
    return (x / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def adamw(device: str, dtype: torch.dtype) -> Callable[[], None]:
    """The step of an optimizer over the parameters of four transformer layers."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)]
    parameters = [torch.nn.Parameter(weights(*shape, dtype=dtype).to(device)) for shape in shapes * 2]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if device == "cpu":
        return torch.optim.AdamW(parameters, fused=True).step
    return openreg_ops.AdamW(parameters).step


STREAMS = dict(ratio=0.5, bandwidth=0.7)  # what is asked of the memory-bound ones

EVERY = [
    Operator(
        "rms_norm",
        lambda t: [activations(t), weights(WIDTH, dtype=t)],
        rms_norm,
        lambda x, weight: ops.rms_norm(x, weight)[0],
        fused=lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        forward_bytes=2,
        backward_bytes=3,
        **STREAMS,
    ),
    Operator(
        "fused_add_rms_norm",
        lambda t: [*activation_pair(t), weights(WIDTH, dtype=t)],
        fused_add_rms_norm,
        lambda x, residual, weight: ops.fused_add_rms_norm(x, residual, weight),
        fused=aten_add_rms_norm,
        forward_bytes=4,
        backward_bytes=4,
        **STREAMS,
    ),
    Operator(
        "rotary_embedding",
        lambda t: [heads(t), angles(t)],
        lambda x, table: rotary_embedding(x, *table),
        lambda x, table: ops.rotary_embedding(x, *table),
        forward_bytes=2,
        backward_bytes=2,
        **STREAMS,
    ),
    Operator(
        "swiglu",
        activation_pair,
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: ops.swiglu(gate, up),
        forward_bytes=3,
        backward_bytes=5,
        **STREAMS,
    ),
    Operator(
        "dropout_add",
        activation_pair,
        lambda x, residual: residual + F.dropout(x, 0.1),
        lambda x, residual: ops.dropout_add(x, residual, 0.1)[0],
        forward_bytes=3 + 0.25,  # the mask has a byte for each element
        backward_bytes=2 + 0.25,
        **STREAMS,
    ),
    Operator(
        "quantize_rowwise",
        lambda t: [activations(t)],
        quantize_rowwise,
        lambda x: ops.quantize_rowwise(x),
        forward_bytes=1 + 0.25,
        backward_bytes=None,
        **STREAMS,
    ),
    Operator(
        "cross_entropy",
        lambda t: [torch.randn(ROWS, VOCABULARY).to(t), torch.randint(VOCABULARY, (ROWS,))],
        cross_entropy,
        lambda logits, target: ops.cross_entropy(logits, target)[0],
        ratio=1 / 1.5,
    ),
    Operator(
        "linear_cross_entropy",
        lambda t: [
            activations(t).view(ROWS, WIDTH),
            weights(VOCABULARY, WIDTH, dtype=t),
            torch.randint(VOCABULARY, (ROWS,)),
        ],
        linear_cross_entropy,
        lambda x, weight, target: ops.linear_cross_entropy(x, weight, target),
        memory=0.25,
    ),
    Operator(
        "attention",
        lambda t: [heads(t), heads(t), heads(t)],
        F.scaled_dot_product_attention,
        lambda q, k, v: ops.attention(q, k, v)[0],
    ),
    Operator(
        "attention-causal",
        lambda t: [heads(t), heads(t), heads(t)],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: ops.attention(q, k, v, causal=True)[0],
    ),
    Operator(
        "adamw_step_",
        lambda t: [adamw("cpu", t), adamw("openreg", t)],
        lambda host, device: host(),
        lambda host, device: device(),
        backward_bytes=None,
        compiles=False,  # the eager side is ATen's fused step already
    ),
]
OPERATORS = {case.name: case for case in EVERY}


@cache
def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of COPY bytes, the best of several runs."""
    source, target = torch.ones(COPY // 4), torch.empty(COPY // 4)
    target.copy_(source)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return 2 * COPY / min(times)


def on_device(inputs: Any) -> Any:
    """Copies on the device of the tensors in a list."""
    return pytree.tree_map_only(Tensor, lambda x: x.to("openreg"), inputs)


def training(function: Callable[..., Any], inputs: Sequence[Any]) -> Timed:
    """The call that runs `function` forward and backward, with a gradient for every floating-point input."""
    inputs = [
        x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x  # a table needs no gradient
        for x in inputs
    ]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    cotangents = [
        torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y) for y in pytree.tree_leaves(function(*inputs))
    ]
    return lambda: torch.autograd.grad(pytree.tree_leaves(function(*inputs)), wanted, cotangents)


def inference(function: Callable[..., Any], inputs: Sequence[Any]) -> Timed:
    return torch.no_grad()(partial(function, *inputs))


MODES = {"forward": inference, "training": training}


def modes(case: Operator) -> list[str]:
    return ["forward"] if case.backward_bytes is None else list(MODES)


def peak(call: Timed) -> int:
    """Bytes that a call adds to the allocated memory, at its peak."""
    gc.collect()
    before = torch.openreg.memory_allocated()
    torch.openreg.reset_peak_memory_stats()
    call()
    return torch.openreg.max_memory_allocated() - before


def against_eager(case: Operator, options: argparse.Namespace) -> Iterator[Figure]:
    name = options.dtype or "float32"
    torch.manual_seed(0)
    host = list(case.inputs(getattr(torch, name)))
    device = on_device(host)
    for mode in modes(case):
        make, last, notes = MODES[mode], mode == modes(case)[-1], []
        calls = [make(case.eager, host), make(case.operator, device)]
        found = compared(*alternate(calls, options.rounds, options.seconds))
        if case.forward_bytes:
            passes = case.forward_bytes + (case.backward_bytes if mode == "training" else 0)
            moved = passes * host[0].numel() * host[0].element_size() / found.measured / copy_bandwidth()
            short = last and case.bandwidth is not None and moved < case.bandwidth
            notes.append(f"{moved:.2f} of a copy's bandwidth" + f", target {case.bandwidth}: missed" * short)
        if last and case.memory is not None:
            memory = peak(make(case.operator, device)) / peak(make(case.eager, device))
            said = "reached" if memory <= case.memory else "missed"
            notes.append(f"{memory:.2f} of eager's peak memory, target {case.memory}: {said}")
        yield figure(f"{case.name}, {name}, {mode}", found, case.ratio if last else None, "; ".join(notes))


# ---- against the fastest alternative ----


def contenders(case: Operator, make: Callable[..., Timed], inputs: Sequence[Any]) -> tuple[dict[str, Timed], list[str]]:
    """The calls of what a CPU user would write that work, and why others do not."""
    torch._dynamo.reset()
    functions = {"eager": case.eager, "fused": case.fused}
    if case.compiles:
        functions["compiled"] = torch.compile(case.eager, dynamic=False)
    calls, failed = {}, []
    for name, function in functions.items():
        try:
            if function is not None:
                call = make(function, inputs)
                call()
                calls[name] = call
        except RuntimeError as error:
            failed.append(f"{name} failed: {str(error).splitlines()[0]}")
    return calls, failed


def against_best(case: Operator, options: argparse.Namespace) -> Iterator[Figure]:
    before = torch.get_num_threads()
    for threads in [before] if options.threads or before == 1 else [1, before]:
        torch.set_num_threads(threads)
        for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16", "float16"]:
            for mode in modes(case):
                torch.manual_seed(0)
                host, make = list(case.inputs(getattr(torch, dtype))), MODES[mode]
                calls, failed = contenders(case, make, host)
                ours = make(case.operator, on_device(host))
                *theirs, mine = alternate([*calls.values(), ours], options.rounds, options.seconds)
                best = min(range(len(theirs)), key=lambda index: statistics.median(theirs[index]))
                note = "; ".join([f"against {list(calls)[best]}", *failed])
                yield figure(f"{case.name}, {dtype}, {mode}, {plural(threads, 'thread')}, best",
                             compared(theirs[best], mine), 1.0, note, of=list(calls))  # fmt: skip
    torch.set_num_threads(before)


def measure(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    return (against_best if options.best else against_eager)(OPERATORS[name], options)


CASES = {name: partial(measure, name) for name in OPERATORS}
