"""The openreg:: operators at transformer sizes, against what a CPU user would write instead.

`python -m openreg_ops bench operators` compares with eager PyTorch. Times are medians of alternating calls in one
process, of the forward and of the forward with the backward. Memory-bound operators are also compared with the
machine's bandwidth: the bytes per second that they must read and write, as a fraction of what a copy of 256 MB
achieves. Peak memory is the device allocator's, for the operator and for the eager mathematics on the device.

With `--against best` the other side is the fastest of eager PyTorch, `torch.compile` and ATen's own fused operator, in
three dtypes, with one thread and with all. They are first tried in another process. One that crashes it, or takes
minutes, does not compete.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import openreg_ops
from openreg_ops.tools.bench_report import Report, comparable, entry, plural
from openreg_ops.tools.timing import Comparison, alternate, compared, mean, verdict

__all__ = ["CASES", "Case", "run"]

ops = torch.ops.openreg
BATCH, SEQUENCE, WIDTH, VOCABULARY, HEADS = 8, 512, 1024, 32000, 16
ROWS = BATCH * SEQUENCE
MEAN = 1.8  # target: the geometric mean of `--against best`
PATIENCE = 20.0  # seconds: a round that takes longer is run once
LIMIT = 120.0  # seconds: what takes longer to import, compile and call once does not compete
COPY = 256 * 2**20  # bytes of the copy that measures the memory bandwidth


@dataclass
class Case:
    """An operator, the same mathematics in plain PyTorch, and the targets."""

    name: str
    inputs: Callable[[torch.dtype], Sequence[Any]]  # on the CPU
    eager: Callable[..., Any]
    operator: Callable[..., Any]
    fused: Callable[..., Any] | None = None  # ATen's own fused operator, where eager mode does not use it
    forward_bytes: float = 0  # per element of the first input, in units of its size; 0: not memory-bound
    backward_bytes: float | None = 0  # None: no derivative
    faster: float = 1.0  # target: eager seconds / operator seconds, with the backward where there is one
    bandwidth: float | None = None  # target: of the copy's
    memory: float | None = None  # target: of eager's peak
    compiles: bool = True  # whether torch.compile takes the eager side

    @property
    def contenders(self) -> list[str]:
        """What a CPU user would write, the likeliest to fail last."""
        return ["eager", *["fused"] * bool(self.fused), *["compiled"] * self.compiles]


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


STREAMS = dict(faster=2.0, bandwidth=0.7)  # what is asked of the memory-bound ones

CASES = [
    Case(
        "rms_norm",
        lambda t: [activations(t), weights(WIDTH, dtype=t)],
        rms_norm,
        lambda x, weight: ops.rms_norm(x, weight)[0],
        fused=lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        forward_bytes=2,
        backward_bytes=3,
        **STREAMS,
    ),
    Case(
        "fused_add_rms_norm",
        lambda t: [*activation_pair(t), weights(WIDTH, dtype=t)],
        fused_add_rms_norm,
        lambda x, residual, weight: ops.fused_add_rms_norm(x, residual, weight),
        fused=aten_add_rms_norm,
        forward_bytes=4,
        backward_bytes=4,
        **STREAMS,
    ),
    Case(
        "rotary_embedding",
        lambda t: [heads(t), angles(t)],
        lambda x, table: rotary_embedding(x, *table),
        lambda x, table: ops.rotary_embedding(x, *table),
        forward_bytes=2,
        backward_bytes=2,
        **STREAMS,
    ),
    Case(
        "swiglu",
        activation_pair,
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: ops.swiglu(gate, up),
        forward_bytes=3,
        backward_bytes=5,
        **STREAMS,
    ),
    Case(
        "dropout_add",
        activation_pair,
        lambda x, residual: residual + F.dropout(x, 0.1),
        lambda x, residual: ops.dropout_add(x, residual, 0.1)[0],
        forward_bytes=3 + 0.25,  # the mask has a byte for each element
        backward_bytes=2 + 0.25,
        **STREAMS,
    ),
    Case(
        "quantize_rowwise",
        lambda t: [activations(t)],
        quantize_rowwise,
        lambda x: ops.quantize_rowwise(x),
        forward_bytes=1 + 0.25,
        backward_bytes=None,
        **STREAMS,
    ),
    Case(
        "cross_entropy",
        lambda t: [torch.randn(ROWS, VOCABULARY).to(t), torch.randint(VOCABULARY, (ROWS,))],
        cross_entropy,
        lambda logits, target: ops.cross_entropy(logits, target)[0],
        faster=1.5,
    ),
    Case(
        "linear_cross_entropy",
        lambda t: [
            activations(t).view(ROWS, WIDTH),
            weights(VOCABULARY, WIDTH, dtype=t),
            torch.randint(VOCABULARY, (ROWS,)),
        ],
        linear_cross_entropy,
        lambda x, weight, target: ops.linear_cross_entropy(x, weight, target),
        faster=1.0,
        memory=0.25,
    ),
    Case(
        "attention",
        lambda t: [heads(t), heads(t), heads(t)],
        F.scaled_dot_product_attention,
        lambda q, k, v: ops.attention(q, k, v)[0],
        faster=1.0,
    ),
    Case(
        "attention-causal",
        lambda t: [heads(t), heads(t), heads(t)],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: ops.attention(q, k, v, causal=True)[0],
        faster=1.0,
    ),
    Case(
        "adamw_step_",
        lambda t: [adamw("cpu", t), adamw("openreg", t)],
        lambda host, device: host(),
        lambda host, device: device(),
        faster=1.0,
        backward_bytes=None,
        compiles=False,  # the eager side is ATen's fused step already
    ),
]
NAMES = tuple(case.name for case in CASES)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of COPY bytes, the best of several runs."""
    source, target = torch.ones(COPY // 4), torch.empty(COPY // 4)
    target.copy_(source)
    return 2 * COPY / min(timed(lambda: target.copy_(source)) for _ in range(7))


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def training(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
    """The call that runs `function` forward and backward, with a gradient for every floating-point input."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().requires_grad_(x.is_floating_point())
        return [leaf(each) for each in x] if isinstance(x, list) else x

    inputs = [leaf(x) for x in inputs]
    flat = [each for x in inputs for each in (x if isinstance(x, list) else [x])]
    wanted = [x for x in flat if isinstance(x, Tensor) and x.requires_grad]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    cotangents = [torch.ones_like(out) if out.dim() == 0 else torch.randn_like(out) for out in outputs]

    def run() -> Any:
        out = function(*inputs)
        return torch.autograd.grad([out] if isinstance(out, Tensor) else list(out), wanted, cotangents)

    return run


def inference(function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return run


def on_device(x: Any) -> Any:
    """A copy on the device of a tensor, or of those in a list or tuple, that needs no gradient."""
    if isinstance(x, list | tuple):
        return type(x)(on_device(each) for each in x)
    return x.to("openreg") if isinstance(x, Tensor) else x


def peak(call: Callable[[], Any]) -> int:
    """Bytes that a call adds to the allocated memory, at its peak."""
    gc.collect()
    before = torch.openreg.memory_allocated()
    torch.openreg.reset_peak_memory_stats()
    call()
    return torch.openreg.max_memory_allocated() - before


def measure(case: Case, dtype: torch.dtype, limit: float, budget: float) -> dict[str, Any]:
    """One case: seconds of both sides, their ratio, the fraction of the bandwidth, of the memory, and what it missed."""
    torch.manual_seed(0)
    host = list(case.inputs(dtype))
    device = on_device(host)
    result: dict[str, Any] = {
        "name": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "missed": [],
        "undecided": [],
    }
    modes = {"forward": (inference, case.forward_bytes)}
    if case.backward_bytes is not None:
        modes["training"] = (training, case.forward_bytes + case.backward_bytes)
    for mode, (make, passes) in modes.items():
        found = compared(*alternate([make(case.eager, host), make(case.operator, device)], budget))
        final = mode == list(modes)[-1]
        result[mode] = entry(found, 1 / case.faster if final else None)
        if passes:
            result[mode]["bandwidth"] = passes * host[0].numel() * host[0].element_size() / found.measured / limit
    final = result[list(modes)[-1]]
    if case.memory is not None:
        final["memory"] = peak(training(case.operator, device)) / peak(training(case.eager, device))
    said = verdict(found, 1 / case.faster, inverse=True)
    if said != "reached":
        faster = f"faster {1 / found.ratio:.2f}, target {case.faster:.2f}"
        result["missed" if said == "missed" else "undecided"].append(faster + (said != "missed") * f": {said}")
    if case.bandwidth is not None and final["bandwidth"] < case.bandwidth:
        result["missed"].append(f"bandwidth {final['bandwidth']:.2f}, target {case.bandwidth:.2f}")
    if case.memory is not None and final["memory"] > case.memory:
        result["missed"].append(f"memory {final['memory']:.2f}, target {case.memory:.2f}")
    return result


def functions(case: Case, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions of some contenders."""
    torch._dynamo.reset()
    compiled = torch.compile(case.eager, dynamic=False) if "compiled" in names else None
    every = {"eager": case.eager, "fused": case.fused, "compiled": compiled}
    return {name: every[name] for name in names}


def trial(name: str, dtype: str, training_too: bool, threads: int, names: Sequence[str]) -> None:
    """Call some contenders of a case once, and print the name of each after its call."""
    torch.set_num_threads(threads)
    case = next(case for case in CASES if case.name == name)
    make, inputs = training if training_too else inference, list(case.inputs(getattr(torch, dtype)))
    for each, function in functions(case, names).items():
        make(function, inputs)()
        print(each, flush=True)


TRIAL = "from openreg_ops.tools import bench_operators; bench_operators.trial"


def left_out(case: Case, *cell: Any) -> dict[str, str]:
    """The contenders that fail in another process, and why. In this one, a signal would end the bench.

    A contender that ends the process is tried again as the first of a new one, and left out if it fails there.
    """
    waiting, failed = case.contenders, {}
    while waiting:
        words = [sys.executable, "-P", "-c", f"{TRIAL}{(case.name, *cell, waiting)}"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                said, errors = process.communicate(timeout=LIMIT)
                why = errors.strip().rpartition("\n")[2] or f"ended with {process.returncode}"
                if process.returncode < 0:
                    why = f"crashed, {signal.Signals(-process.returncode).name}"
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # compilers, too
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                said, why = process.communicate()[0], f"not done in {LIMIT:.0f} s"
        left = [name for name in waiting if name not in said.split()]
        if left == waiting:
            failed[left.pop(0)] = why
        waiting = left
    return failed


def against_best(
    case: Case, dtype: torch.dtype, training_too: bool, budget: float, names: Sequence[str]
) -> tuple[str, Comparison]:
    """Which of the contenders is the fastest, and the operator compared with it."""
    torch.manual_seed(0)
    host = list(case.inputs(dtype))
    make = training if training_too else inference
    others = functions(case, names)
    calls = [make(each, host) for each in others.values()] + [make(case.operator, on_device(host))]
    *theirs, ours = alternate(calls, budget, patience=PATIENCE)
    best = min(range(len(theirs)), key=lambda index: statistics.median(theirs[index]))
    return list(others)[best], compared(theirs[best], ours)


def run_against_best(options: argparse.Namespace) -> int:
    """Print a table for one thread and one for all, and the cases that are slower."""
    dtypes = [options.dtype] if options.dtype else ["float32", "bfloat16", "float16"]
    report = Report(options, f"batch {BATCH}, sequence {SEQUENCE}, width {WIDTH}, vocabulary {VOCABULARY:,}")
    say = report.say
    say("The fastest of e: eager PyTorch, c: torch.compile, f: ATen's fused operator, over openreg: above 1 is ahead.")
    cells: list[Comparison] = []
    behind, absent, unknown = [], [], 0
    before = torch.get_num_threads()
    for threads in [before] if options.threads or before == 1 else [1, before]:
        torch.set_num_threads(threads)
        say(f"\n{plural(threads, 'thread'):21}" + "".join(f"{each:^20}" for each in dtypes))
        say(f"{'':21}" + f"{'forward':>8}{'+backward':>11} " * len(dtypes))
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            say(f"{case.name:21}", end="")
            for dtype in dtypes:
                for mode in ("forward", "training"):
                    width, margin = (8, "") if mode == "forward" else (11, " ")
                    if mode == "training" and case.backward_bytes is None:
                        say(f"{'':{width}}{margin}", end="")
                        continue
                    cell = f"{case.name}, {dtype}, {mode}, {plural(threads, 'thread')}"
                    why = left_out(case, dtype, mode == "training", threads)
                    names = [name for name in case.contenders if name not in why]
                    absent += [f"{cell}, {name}: {reason}" for name, reason in why.items()]
                    if not names:
                        say(f"{'- *':>{width}}{margin}", end="")
                        unknown += 1
                        continue
                    best, found = against_best(case, getattr(torch, dtype), mode == "training", options.seconds, names)
                    say(f"{f'{1 / found.ratio:.2f} {best[0]}' + '*' * bool(why):>{width}}{margin}", end="")
                    cells.append(found)
                    report.add(found, 1.0, name=case.name, dtype=dtype, threads=threads, mode=mode, best=best,
                               **({"left_out": why} if why else {}))  # fmt: skip
                    if (said := verdict(found, 1.0, inverse=True)) != "reached":
                        behind.append(f"{cell}: {1 / found.ratio:.2f}, {said}")
            say()
    torch.set_num_threads(before)
    if enough := [each for each in cells if not math.isinf(each.high)]:
        average = mean(enough)
        few = f" ({plural(len(cells) - len(enough), 'cell')} with too few rounds left out)" * (len(enough) < len(cells))
        say(
            f"\ngeometric mean {1 / average.ratio:.2f}{few}, target {MEAN:.2f}: {verdict(average, 1 / MEAN, inverse=True)}"
        )
        report.add(average, 1 / MEAN, name="geometric mean", of=list(comparable(report.results)))
    if absent:
        say("\n".join(["*: left out, because the trial failed:", *absent]))
    if behind:
        say("\n".join(["behind, or undecided:", *behind]))
    elif cells:
        say(f"every cell{' with a number' * bool(unknown)} is at least 1.00")
    return report.finish()


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 even if a target is missed, because a busy machine can miss any."""
    if "best" in (options.against or ()):
        return run_against_best(options)
    name = options.dtype or "float32"
    dtype, limit = getattr(torch, name), copy_bandwidth()
    report = Report(options, f"{name}, batch {BATCH}, sequence {SEQUENCE}, width {WIDTH}, vocabulary {VOCABULARY:,}",
                    bandwidth=limit)  # fmt: skip
    report.say(f"a copy of 256 MB moves {limit / 1e9:.1f} GB/s")
    report.say(f"{'':21} {'forward':^30} | {'forward and backward':^31}")
    head = f"{'eager':>8} {'openreg':>8} {'faster':>6} {'of bw':>5}"
    report.say(f"{'':21} {head} | {head}  memory")
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        result = measure(case, dtype, limit, options.seconds)
        report.results["cases"].append(result)
        cells = []
        for mode in ("forward", "training"):
            if row := result.get(mode):
                of_limit = f"{row['bandwidth']:5.2f}" if "bandwidth" in row else " " * 5
                memory = f"{row['memory']:7.2f}" if "memory" in row else ""
                cells.append(f"{row['cpu_s'] * 1e3:6.1f}ms {row['openreg_s'] * 1e3:6.1f}ms {1 / row['ratio']:6.2f} "
                             f"{of_limit} {memory}")  # fmt: skip
        said = [f"MISSED {each}" for each in result["missed"]] + result["undecided"]
        report.say(f"{case.name:21} {'| '.join(cells)}  {'; '.join(said)}".rstrip())
    return report.finish()
