"""``python -m openreg_ops bench scaling``: how times on the device and on the CPU grow with size and with processes.

Sizes grow over three orders of magnitude of work, in one process. Then 1, 2 and 4 processes with one thread each run a
case at the same time, and all-reduce with each other. A picture goes to `--plot`. Two more figures: the bytes of host
memory that a live tensor takes, and the seconds that the device adds to `import torch`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from openreg_ops.tools.bench_report import Report, plural
from openreg_ops.tools.timing import LEAST, Comparison, compare, compared, settle, verdict
from openreg_tools.forms import Wrong, seconds

DEVICES = ("cpu", "openreg")
PROCESSES = (1, 2, 4)
MEMORY = 1.2  # target: of the CPU's bytes of a tensor
TENSORS = 20_000
WARM_UP = 20  # calls


def add(device: str, n: int) -> Callable[[], Any]:
    x = torch.ones(n, device=device)
    return lambda: x + x


def matmul(device: str, n: int) -> Callable[[], Any]:
    x = torch.ones(n, n, device=device)
    return lambda: x @ x


def attention(device: str, n: int) -> Callable[[], Any]:
    q = torch.ones(1, 4, n, 64, device=device)
    return lambda: F.scaled_dot_product_attention(q, q, q)


def step(device: str, n: int) -> Callable[[], Any]:
    """A training step of an MLP of width 64; n is the batch."""
    from openreg_ops.tools.bench_steps import training

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    return training(net, torch.randn(n, 64), torch.randint(10, (n,)), device)


def all_reduce(device: str, n: int) -> Callable[[], Any]:
    x = torch.zeros(n, device=device)
    return lambda: dist.all_reduce(x)


# name: (the call, sizes of one process, what a size is)
CASES: dict[str, tuple[Callable[[str, int], Callable[[], Any]], Sequence[int], str]] = {
    "add": (add, (1_000, 10_000, 100_000, 1_000_000), "elements"),
    "matmul": (matmul, (32, 70, 150, 320), "rows and columns"),
    "attention": (attention, (32, 100, 320, 1024), "tokens"),
    "step": (step, (8, 80, 800, 8_000), "batch"),
    "all-reduce": (all_reduce, (1_000, 10_000, 100_000, 1_000_000), "elements"),
}
NAMES = (*CASES, "memory", "import")


def measure(name: str, size: int, rounds: int) -> Comparison:
    """The device against the CPU, in this process."""
    make = CASES[name][0]
    calls = [make(device, size) for device in DEVICES]
    gc.disable()
    try:
        return compare(*calls, rounds)
    finally:
        gc.enable()


def among(count: int, name: str, size: int, rounds: int) -> Comparison:
    """The same in `count` processes at once; the slowest determines the time."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-P", "-m", "openreg_ops.tools.bench_scaling", folder, name, str(size), str(rounds)]
        environment = {**os.environ, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                workers.append(subprocess.Popen(words, env=environment | {"RANK": str(rank)}))
            while None in (ended := [worker.poll() for worker in workers]) and not any(ended):
                time.sleep(0.05)
        finally:
            for worker in workers:  # the others would wait for one that has failed
                worker.kill()
            for worker in workers:
                worker.wait()
        if any(ended):
            said = ", ".join("killed" if each is None else str(each) for each in ended)
            raise Wrong(f"{name}: its {count} processes ended with {said}; see above")
        found = [Comparison(**json.loads(Path(folder, str(rank)).read_text())) for rank in range(count)]
    return max(found, key=lambda each: each.measured)


def worker(folder: str, name: str, size: str, rounds: str) -> None:
    """One of these processes."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), count)
    dist.init_process_group("cpu:gloo,openreg:occl", store=store, rank=rank, world_size=count)
    make = CASES[name][0]
    calls = [make(device, int(size)) for device in DEVICES]
    dist.barrier()  # all have imported and made their tensors
    times: list[list[float]] = [[], []]
    waits = torch.openreg.get_launch_mode() == "async"
    for _ in range(WARM_UP):  # until the allocators and the connections have settled
        for call in calls:
            call()
    settle()
    for index in range(int(rounds)):  # every process makes the same calls in the same order, so collectives match
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.perf_counter()
            calls[which]()
            if which and waits:
                torch.accelerator.synchronize()
            times[which].append(time.perf_counter() - start)
    found = compared(*times)
    values = {key: getattr(found, key) for key in ("reference", "measured", "low", "high")}
    Path(folder, str(rank)).write_text(json.dumps(values))
    dist.destroy_process_group()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_of_a_tensor(device: str) -> float:
    """Host memory of a live tensor of 16 bytes: Python's object, torch's, its storage and the data."""
    code = (
        "import torch; from openreg_ops.tools import bench_scaling as b\n"
        f"kept = [torch.empty(4, device={device!r}) for _ in range(1000)]\n"
        f"before = b.resident(); kept += [torch.empty(4, device={device!r}) for _ in range(b.TENSORS)]\n"
        "print((b.resident() - before) / b.TENSORS)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def draw(path: str | None, curves: dict[str, dict[str, list[tuple[int, float, float]]]]) -> str:
    """The picture: a row of plots by size, and a row by processes; returns what to say about it."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(curves)
    figure, axes = pyplot.subplots(2, len(names), squeeze=False, figsize=(3.2 * len(names), 6), layout="constrained")
    for column, name in enumerate(names):
        for line, what in enumerate(("size", "processes")):
            axis, points = axes[line][column], curves[name][what]
            if not points:
                axis.set_visible(False)
                continue
            x, cpu, device = zip(*points, strict=True)
            axis.plot(x, [1e6 * t for t in cpu], "o--", color="gray", label="cpu")
            axis.plot(x, [1e6 * t for t in device], "o-", label="openreg")
            axis.set_yscale("log")
            axis.set_xscale("log", base=10 if what == "size" else 2)
            axis.set(title=name if line == 0 else None, xlabel=CASES[name][2] if what == "size" else "processes")
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend()
    if path is None:
        path = "out/scaling.png"
        Path("out").mkdir(exist_ok=True)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        return f"no picture: {path} cannot be written: {error.strerror}"
    finally:
        pyplot.close(figure)
    return f"picture: {path}"


def run(options: argparse.Namespace) -> int:
    """Measure, print and draw; 0 even if a target is missed, because a busy machine can miss any."""
    from openreg_ops.tools.bench import TARGETS, import_seconds

    chosen = options.only or NAMES
    report = Report(options, f"float32, {options.rounds} rounds")
    report.say(f"{'':11} {'':26} {'cpu':>10} {'openreg':>10} {'ratio':>7}")

    def row(name: str, what: str, value: int, found: Comparison) -> None:
        label = f"{value:,} {CASES[name][2]}" if what == "size" else plural(value, "process")
        times = f"{seconds(found.reference):>10} {seconds(found.measured):>10}"
        report.say(f"{name:11} {label:>26} {times} {found.ratio:7.2f}")
        report.add(found, name=name, size=label, what=what, value=value)

    for name, (_make, sizes, _unit) in CASES.items():
        if name not in chosen:
            continue
        for size in sizes:
            several = name == "all-reduce"
            found = among(2, name, size, options.rounds) if several else measure(name, size, options.rounds)
            row(name, "size", size, found)
        for count in PROCESSES:
            row(name, "processes", count, among(count, name, sizes[2], options.rounds))
    report.say()
    if "memory" in chosen:
        found = compared(*zip(*([bytes_of_a_tensor(each) for each in DEVICES] for _ in range(LEAST)), strict=True))
        report.results["bytes of a tensor"] = {"cpu": found.reference, "openreg": found.measured}
        report.say(f"a live tensor of 16 bytes takes {found.reference:.0f} bytes of host memory on the CPU and "
                   f"{found.measured:.0f} on the device: {found.ratio:.2f}, target {MEMORY:.2f}: {verdict(found, MEMORY)}")  # fmt: skip
        report.results["cases"].append({"name": "memory", "ratio": found.ratio, "low": found.low, "high": found.high,
                                        "target": MEMORY})  # fmt: skip
    if "import" in chosen:
        added, target = import_seconds(), TARGETS["import"]
        report.results["import_s"] = added.measured
        report.say(
            f"the device adds {added.measured:.2f} s to import torch, target {target:.2f}: {verdict(added, target)}"
        )
    picture(report)
    return report.finish()


def picture(report: Report) -> None:
    """Draw the times of a report, unless the options ask for no picture."""
    curves: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    for case in report.results["cases"]:
        if "what" in case:
            of_case = curves.setdefault(case["name"], {"size": [], "processes": []})
            of_case[case["what"]].append((case["value"], case["cpu_s"], case["openreg_s"]))
    if curves and report.options.plot != "-":
        report.say(draw(report.options.plot, curves))


if __name__ == "__main__":
    worker(*sys.argv[1:])
