"""How times on the device and on the CPU grow with size, over three orders of magnitude, and with processes.

In a row of several processes, each has one thread, and the slowest determines the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Figure, figure, plural
from timing import LEAST, Speeds, Timed, alternate, compare, compared
from torch import nn
from torch.nn import functional as F

from suites.models import training

DEVICES = ("cpu", "openreg")
PROCESSES = (1, 2, 4)
MEMORY = 1.2  # target: of the CPU's bytes of a tensor
WARM_UP = 20  # rounds until the allocators and the connections have settled


def add(device: str, n: int) -> Timed:
    x = torch.ones(n, device=device)
    return lambda: x + x


def matmul(device: str, n: int) -> Timed:
    x = torch.ones(n, n, device=device)
    return lambda: x @ x


def attention(device: str, n: int) -> Timed:
    q = torch.ones(1, 4, n, 64, device=device)
    return lambda: F.scaled_dot_product_attention(q, q, q)


def step(device: str, n: int) -> Timed:
    """A training step of an MLP of width 64; n is the batch."""
    net = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    return training(lambda: (net(), torch.randn(n, 64), torch.randint(10, (n,))), device)


def all_reduce(device: str, n: int) -> Timed:
    x = torch.zeros(n, device=device)
    return lambda: dist.all_reduce(x)


# name: (the call, sizes of one process, what a size is)
CALLS: dict[str, tuple[Callable[[str, int], Timed], Sequence[int], str]] = {
    "add": (add, (1_000, 10_000, 100_000, 1_000_000), "elements"),
    "matmul": (matmul, (32, 70, 150, 320), "rows and columns"),
    "attention": (attention, (32, 100, 320, 1024), "tokens"),
    "step": (step, (8, 80, 800, 8_000), "batch"),
    "all-reduce": (all_reduce, (1_000, 10_000, 100_000, 1_000_000), "elements"),
}


def worker(rank: int, count: int, folder: str, name: str, size: int, rounds: int) -> None:
    """One of `count` processes. All make the same calls in the same order, so that collectives match."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), count)
    dist.init_process_group("cpu:gloo,openreg:occl", store=store, rank=rank, world_size=count)
    calls = [CALLS[name][0](device, size) for device in DEVICES]
    dist.barrier()  # all have imported and made their tensors
    times = alternate(calls, WARM_UP + rounds, number=1)
    Path(folder, str(rank)).write_text(json.dumps([side[WARM_UP:] for side in times]))
    dist.destroy_process_group()


def among(count: int, name: str, size: int, rounds: int) -> Speeds:
    """The device against the CPU in `count` processes at once."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (count, folder, name, size, rounds), nprocs=count)
        found = [compared(*json.loads(Path(folder, str(rank)).read_text())) for rank in range(count)]
    return max(found, key=lambda one: one.measured)


def measure(name: str, options: argparse.Namespace) -> Iterator[Figure]:
    make, sizes, unit = CALLS[name]
    for size in sizes:
        if name == "all-reduce":
            found = among(2, name, size, options.rounds)
        else:
            found = compare(*(make(device, size) for device in DEVICES), options.rounds, options.seconds)
        yield figure(f"{name}, {size:,} {unit}", found)
    for count in PROCESSES:
        label = plural(count, "process") if count == 1 else f"{count} processes"
        yield figure(f"{name}, {label}", among(count, name, sizes[2], options.rounds))


def bytes_of_a_tensor(device: str) -> float:
    """Host memory of a live tensor of 16 bytes: Python's object, PyTorch's, its storage and the data."""
    code = (
        "import os, torch, openreg_ops\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        f"kept = [torch.empty(4, device={device!r}) for _ in range(1000)]\n"
        f"before = resident(); kept += [torch.empty(4, device={device!r}) for _ in range(20_000)]\n"
        "print((resident() - before) / 20_000)"
    )
    run = [sys.executable, "-P", "-c", code]
    return float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


def memory(options: argparse.Namespace) -> Iterator[Figure]:
    found = compared(*zip(*(map(bytes_of_a_tensor, DEVICES) for _ in range(LEAST)), strict=True))
    yield figure("memory of a tensor of 16 bytes", found, MEMORY, unit="bytes")


CASES = {**{name: partial(measure, name) for name in CALLS}, "memory": memory}
