"""What the device costs against the CPU: small and large operators, a training step, the import itself.

`python -m openreg_ops bench`, `make bench` and `benchmarks/small_operators.py` are the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import openreg_ops
from openreg_ops.tools.bench_report import Report, comparison, earlier_results, in_a_process, of_processes
from openreg_ops.tools.timing import LEAST, Comparison, compare, limit_instructions, mean, values, verdict
from openreg_tools.forms import Wrong, count, duration, file, seconds

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


def import_seconds() -> Comparison:
    """Seconds that importing openreg_ops takes in a fresh process which has imported torch."""
    code = "import time, torch; start = time.perf_counter(); import openreg_ops; print(time.perf_counter() - start)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = [sys.executable, "-P", "-c", code]
    return values(
        [
            float(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(LEAST)
        ]
    )


def plot(text: str) -> str:
    """A picture's file, or - for none, as the type of an argument."""
    if text != "-" and Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"expected a file that ends with .png, .svg or .pdf, but got {text!r}")
    return file(text)


def threads(text: str) -> int:
    """A number of threads, as the type of an argument."""
    if count(text) > 1024:
        raise argparse.ArgumentTypeError(f"expected at most 1024 threads, but got {text}")
    return count(text)


# option: (the suites that use it, its default there)
USED: dict[str, tuple[tuple[str, ...], Any]] = {
    "rounds": (tuple(name for name in SUITES if name != "operators"), 101),
    "seconds": (("operators",), 2.0),
    "dtype": (("operators",), None),
    "plot": (("scaling",), None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    about = "; ".join(f"{name}: {suite.about}" for name, suite in SUITES.items())
    parser.add_argument("suite", nargs="?", choices=list(SUITES), default="device", help=f"{about} (default: device)")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", help="cases to run; an unknown name prints the list of cases"
    )
    parser.add_argument("--rounds", type=count, help="batches for each side, except for operators (default 101)")
    parser.add_argument("--seconds", type=duration, help="operators: seconds for each case (default 2.0)")
    parser.add_argument("--dtype", choices=["float32", "float64", "float16", "bfloat16"],
                        help="operators: dtype (default float32; with --against best float32, bfloat16 and float16)")  # fmt: skip
    parser.add_argument("--against", metavar="best|FILE", nargs="+",
                        help='operators: "best", the fastest of eager PyTorch, torch.compile and ATen\'s fused operator; '
                        "any suite: a file from --json; exits with 1 if a figure is slower than in the file by more than "
                        "the noise, or is missing")  # fmt: skip
    parser.add_argument("--processes", type=count, metavar="N",
                        help=f"measure in N processes, one after the other (default 1; {LEAST} with --json or "
                        "--against FILE)")  # fmt: skip
    parser.add_argument("--threads", type=threads, help="number of threads, for torch.set_num_threads")
    parser.add_argument(
        "--plot", metavar="FILE", type=plot, help="scaling: the file for the plot, - for none (default out/scaling.png)"
    )
    parser.add_argument("--json", metavar="FILE", type=file,
                        help="also write the results as JSON; - writes only JSON, to stdout")  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Measure and print.

    Returns 0 even if a target is missed, because a busy machine can miss any; 1 if `--against FILE` finds a regression.

    Raises:
        Wrong: the options do not fit each other or the suite, or a process that measures failed.
    """
    with ends_its_processes():
        try:
            return checked(options)
        except KeyboardInterrupt:
            print("bench: interrupted", file=sys.stderr)
            return 130


@contextlib.contextmanager
def ends_its_processes() -> Iterator[None]:
    """SIGTERM raises SystemExit in the body, so that what is started there can be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def checked(options: argparse.Namespace) -> int:
    """Check the options, and run the suite."""
    words = options.against or []
    files = [word for word in words if word != "best"]
    if len(files) > 1 or len(words) - len(files) > 1:
        raise Wrong(f'--against takes "best" and one file, but got {" ".join(words)}')
    if "best" in words and options.suite != "operators":
        raise Wrong(f"--against best is for the suite operators, but got {options.suite}")
    for name, (suites, default) in USED.items():
        if options.suite in suites:
            setattr(options, name, default if getattr(options, name) is None else getattr(options, name))
        elif getattr(options, name) is not None:
            raise Wrong(f"the suite {options.suite} does not use --{name}; {', '.join(suites)} "
                        f"{'does' if len(suites) == 1 else 'do'}")  # fmt: skip
    options.processes = options.processes or (LEAST if options.json or files else 1)
    if options.threads:
        torch.set_num_threads(options.threads)
    limit_instructions()
    suite = SUITES[options.suite]
    module = None if options.suite == "device" else importlib.import_module(f"openreg_ops.tools.{suite.module}")
    cases = (*CASES, "step", "import") if module is None else module.NAMES
    if unknown := [name for name in options.only or () if name not in cases]:
        raise Wrong(f"no case {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, cases))}")
    if files:
        options.earlier = earlier_results(options, files[0])
    if options.processes > 1:
        return of_processes(options, options.processes, getattr(module, "picture", None))
    return run(options) if module is None else module.run(options)


def run(options: argparse.Namespace) -> int:
    """Measure and print the suite `device`."""
    chosen = options.only or (*CASES, "step", "import")
    started = time.perf_counter()
    report = Report(options, f"float32, median of {options.rounds} alternating rounds")
    report.say(f"{'':12} {'elements':>8} {'cpu':>10} {'openreg':>10} {'ratio':>7}")
    found: dict[str, list[Comparison]] = {size: [] for size in (*SIZES, "step")}

    def row(name: str, size: str, result: Comparison) -> None:
        cpu, device = result.reference, result.measured
        report.say(f"{name:12} {size:>8} {seconds(cpu):>10} {seconds(device):>10} {result.ratio:7.2f}")
        report.add(result, TARGETS["step"] if size == "step" else None, name=name, size=size)
        found[size].append(result)

    gc.disable()
    for size, shape in SIZES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        for name, case in CASES.items():
            if name not in chosen:
                continue
            calls = case(x), case(x.to("openreg"))
            if all(calls):
                # 1M-element calls are long, so fewer rounds are just as stable.
                rounds = options.rounds if size == "64" else min(options.rounds, max(options.rounds // 2, LEAST))
                row(name, size, compare(*calls, rounds))
            else:
                report.say(f"{name:12} {size:>8}   not in this build")
    if set(chosen) == {"step"}:
        row("step", "step", compare(training_step("cpu"), training_step("openreg"), options.rounds))
    elif "step" in chosen:
        case = in_a_process(options, ["step"], report, "step")["cases"][0]
        row("step", "step", comparison(case))
    gc.enable()

    report.say()
    for size, label in (("64", "64 elements"), ("1M", "1M elements"), ("step", "training step")):
        if found.get(size):
            average, target = mean(found[size]), TARGETS[size]
            kind = "geometric mean" if size != "step" else "ratio"
            report.say(f"{label:14} {kind:14} {average.ratio:5.2f}   target {target:.2f}: {verdict(average, target)}")
            if len(found[size]) > 1:
                of = [case["name"] for case in report.results["cases"] if case["size"] == size]
                report.add(average, target, name=kind, size=size, of=of)
    if "import" in chosen:
        added = import_seconds()
        report.results["import_s"] = added.measured
        report.say(f"{'import':14} {'adds seconds':14} {added.measured:5.2f}   target {TARGETS['import']:.2f}: "
                   f"{verdict(added, TARGETS['import'])}")  # fmt: skip
    report.say(f"took {time.perf_counter() - started:.0f} s; openreg_ops from {os.path.dirname(openreg_ops.__file__)}")
    return report.finish()
