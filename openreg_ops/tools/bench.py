"""What the device costs against the CPU: small and large operators, a training step, the import itself.

`python -m openreg_ops bench`, `make bench` and `benchmarks/small_operators.py` are the same command.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import openreg_ops
from openreg_ops.tools.timing import Comparison, compare, entry, limit_instructions, machine, mean, report, verdict
from openreg_tools.forms import count, duration, seconds

__all__ = ["add_arguments", "main"]


class Suite(NamedTuple):
    """What the command measures under a name, and the module whose `run` measures it."""

    module: str
    about: str


SUITES = {
    "device": Suite("bench", "what the device adds to torch's operators"),
    "operators": Suite("bench_operators", "the openreg:: operators at transformer sizes"),
    "compiled": Suite("bench_compiled", "torch.compile against that on the CPU"),
    "steps": Suite("bench_steps", "eager training steps against the CPU's"),
    "graphs": Suite("bench_graphs", "replays of captured work against the CPU's eager mode"),
    "scaling": Suite("bench_scaling", "how times grow with size and with processes, with a picture"),
}
SIZES = {"64": (8, 8), "1M": (1024, 1024)}
TARGETS = {"64": 0.95, "1M": 1.05, "step": 1.05, "import": 0.15}


def custom_abs(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The CPU side is torch.abs: custom_abs on the CPU runs the reference, which is not a fair comparison."""
    if x.device.type == "cpu":
        return lambda: torch.abs(x)
    operator = getattr(torch.ops.openreg, "custom_abs", None)
    return operator and (lambda: operator(x))


def layer_norm(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    weight, shape = x[0].clone(), x.shape[1:]
    return lambda: F.layer_norm(x, shape, weight, weight)


# Each takes an [n, n] tensor and returns the call to time.
CASES: dict[str, Callable[[torch.Tensor], Callable[[], Any] | None]] = {
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


def training_step(device: str) -> Callable[[], None]:
    """One step of an MLP 784-512-512-10 with ReLU, batch 128, SGD, on random data."""
    torch.manual_seed(0)
    Linear, ReLU = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(Linear(784, 512), ReLU(), Linear(512, 512), ReLU(), Linear(512, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(128, 784).to(device), torch.randint(10, (128,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def in_a_fresh_process(name: str, options: argparse.Namespace) -> Comparison:
    """Measure, in its own process, a case whose time depends on the memory that earlier cases leave in the
    allocators."""
    words = [sys.executable, "-P", "-m", "openreg_ops", "bench", options.suite, "--only", name, "--json", "-"]
    words += ["--rounds", str(options.rounds), "--threads", str(torch.get_num_threads())]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"bench: the process that measures {name} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    case = json.loads(done.stdout)["cases"][0]
    return Comparison(case["cpu_s"], case["openreg_s"], case["low"], case["high"])


def import_seconds(rounds: int) -> float:
    """Median seconds that importing openreg_ops takes in a fresh process which has imported torch."""
    code = "import time, torch; start = time.perf_counter(); import openreg_ops; print(time.perf_counter() - start)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = [sys.executable, "-P", "-c", code]
    return statistics.median(
        float(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    names = [*CASES, "step", "import"]
    about = "; ".join(f"{name}: {suite.about}" for name, suite in SUITES.items())
    parser.add_argument("suite", nargs="?", choices=list(SUITES), default="device", help=f"{about} (default: device)")
    parser.add_argument("--only", metavar="NAME", nargs="+", help=f"cases to run; of device: {', '.join(names)}")
    parser.add_argument(
        "--rounds", type=count, default=101, help="batches for each side, except for operators (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=duration, default=2.0, help="operators: seconds for each case (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=["float32", "float64", "float16", "bfloat16"],
                        help="operators: dtype (default float32; with --against best float32, bfloat16 and float16)")  # fmt: skip
    parser.add_argument("--against", metavar="best|FILE",
                        help='operators: "best", the fastest of eager PyTorch, torch.compile and ATen\'s fused operator; '
                        "any suite: a file from --json; exits with 1 if a figure is slower than in the file by more than the noise")  # fmt: skip
    parser.add_argument("--threads", type=count, help="number of threads, for torch.set_num_threads")
    parser.add_argument("--plot", metavar="FILE", default="out/scaling.png",
                        help="scaling: the file for the plot (default %(default)s)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the results as JSON; - writes only JSON, to stdout")


def main(options: argparse.Namespace) -> int:
    """Measure and print.

    Returns 0 even if a target is missed, because a busy machine can miss any; 1 if `--against FILE` finds a regression.
    """
    if options.against not in (None, "best") and not os.path.isfile(options.against):
        print(f'bench: --against takes "best" or a file that --json wrote, but got {options.against}', file=sys.stderr)
        return 2
    if options.against == "best" and options.suite != "operators":
        print(f"bench: --against best is for the suite operators, but got {options.suite}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    limit_instructions()
    suite = SUITES[options.suite]
    module = None if options.suite == "device" else importlib.import_module(f"openreg_ops.tools.{suite.module}")
    cases = {*CASES, "step", "import"} if module is None else set(module.NAMES)
    if unknown := set(options.only or ()) - cases:
        print(f"bench: no case {', '.join(sorted(unknown))}; there are {', '.join(sorted(cases))}", file=sys.stderr)
        return 2
    if module is not None:
        return module.run(options)
    options.only = options.only or cases
    log = sys.stderr if options.json == "-" else sys.stdout

    def say(text: str = "") -> None:
        print(text, file=log, flush=True)

    started = time.perf_counter()
    say(f"torch {torch.__version__}, float32, median of {options.rounds} alternating rounds")
    say(machine())
    say(f"{'':12} {'elements':>8} {'cpu':>10} {'openreg':>10} {'ratio':>7}")
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cases": []}
    found: dict[str, list[Comparison]] = {size: [] for size in (*SIZES, "step")}

    def row(name: str, size: str, result: Comparison) -> None:
        cpu, device = result.reference, result.measured
        say(f"{name:12} {size:>8} {seconds(cpu):>10} {seconds(device):>10} {result.ratio:7.2f}")
        results["cases"].append({"name": name, "size": size, "cpu_s": cpu, "openreg_s": device, **entry(result)})
        found[size].append(result)

    gc.disable()
    for size, shape in SIZES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        for name, case in CASES.items():
            if name not in options.only:
                continue
            calls = case(x), case(x.to("openreg"))
            if all(calls):
                # 1M-element calls are long, so fewer rounds are just as stable.
                row(name, size, compare(*calls, options.rounds if size == "64" else max(options.rounds // 2, 3)))
            else:
                say(f"{name:12} {size:>8}   not in this build")
    if set(options.only) == {"step"}:
        row("MLP step", "step", compare(training_step("cpu"), training_step("openreg"), options.rounds))
    elif "step" in options.only:
        row("MLP step", "step", in_a_fresh_process("step", options))
    gc.enable()

    say()
    results["summary"] = {}
    for size, label in (("64", "64 elements"), ("1M", "1M elements"), ("step", "training step")):
        if found.get(size):
            average = mean(found[size])
            results["summary"][size] = average.ratio
            kind = "geometric mean" if size != "step" else "ratio"
            target = TARGETS[size]
            say(f"{label:14} {kind:14} {average.ratio:5.2f}   target {target:.2f}: {verdict(average, target)}")
    if "import" in options.only:
        added = results["summary"]["import_s"] = import_seconds(5)
        say(f"{'import':14} {'adds seconds':14} {added:5.2f}   target {TARGETS['import']:.2f}: "
            f"{'reached' if added <= TARGETS['import'] else 'missed'}")  # fmt: skip
    say(f"took {time.perf_counter() - started:.0f} s; openreg_ops from {os.path.dirname(openreg_ops.__file__)}")

    return report(results, options)
