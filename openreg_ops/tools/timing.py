"""How the benchmarks time calls against each other, and when they say that a target is reached."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROUND = 2e-3  # seconds that one batch of calls takes, at least one call
# What holds oneDNN, torch.compile's C++ code, and MKL on Intel processors to the instructions that ATEN_CPU_CAPABILITY
# allows PyTorch's kernels.
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "TORCHINDUCTOR_CPP_MARCH")
INSTRUCTIONS = {"default": ("SSE41", "SSE4_2", "x86-64-v2"), "avx2": ("AVX2", "AVX2", "x86-64-v3")}


@dataclass(frozen=True)
class Comparison:
    """Median seconds of one call on either side, and the 95 % confidence interval of their ratio.

    The interval comes from the ratios of the rounds by order statistics, so it assumes nothing about their distribution:
    a busy machine makes it wide.
    """

    reference: float
    measured: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Measured over reference: above 1 is slower."""
        return self.measured / self.reference

    @property
    def noise(self) -> float:
        """Half the width of the interval, relative to the ratio."""
        return (self.high - self.low) / 2 / self.ratio


def compared(reference: Sequence[float], measured: Sequence[float]) -> Comparison:
    """Compare the seconds of two sides; entries with the same index are from the same round."""
    ratios = sorted(b / a for a, b in zip(reference, measured, strict=True))
    n = len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))  # 1.96 standard deviations of a median's rank
    low, high = ratios[max((n - 1) // 2 - reach, 0)], ratios[min(n // 2 + reach, n - 1)]
    first, second = statistics.median(reference), statistics.median(measured)
    return Comparison(first, second, min(low, second / first), max(high, second / first))


def alternate(calls: Sequence[Callable[[], Any]], budget: float, patience: float = math.inf) -> list[list[float]]:
    """Seconds of each call for each round; the calls of a round alternate.

    Runs for `budget` seconds and at least five rounds, or for a single round if that takes longer than `patience`
    seconds.
    """
    start = time.perf_counter()
    for call in calls:  # the first calls fill caches and start threads
        call()
    least = 5 if time.perf_counter() - start < patience else 1
    times: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + budget
    while len(times[0]) < least or (least > 1 and time.perf_counter() < until):
        for index in range(len(calls)) if len(times[0]) % 2 else reversed(range(len(calls))):
            start = time.perf_counter()
            calls[index]()
            times[index].append(time.perf_counter() - start)
    return times


def compare(cpu: Callable[[], Any], device: Callable[[], Any], rounds: int) -> Comparison:
    """Compare short calls on the CPU and on the device; batches alternate, and so does which side goes first.

    A batch on the device ends when its work has: in async mode, the calls return earlier.
    """
    timers = [timeit.Timer(call) for call in (cpu, device)]
    for timer in timers:  # the first calls fill caches and start threads
        timer.timeit(3)
    number = max(1, int(ROUND / min(timers[0].repeat(3, 3)) * 3))
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            elapsed = timers[which].timeit(number)
            if which == 1:
                start = time.perf_counter()
                torch.accelerator.synchronize()
                elapsed += time.perf_counter() - start
            times[which].append(elapsed / number)
    return compared(*times)


def mean(comparisons: Iterable[Comparison]) -> Comparison:
    """The geometric mean of the ratios, as a comparison with 1; the errors of the cases are independent."""
    every = list(comparisons)
    ratio = math.exp(statistics.fmean(math.log(each.ratio) for each in every))
    width = math.sqrt(sum(each.noise**2 for each in every)) / len(every)
    return Comparison(1.0, ratio, ratio * (1 - width), ratio * (1 + width))


def verdict(found: Comparison, target: float) -> str:
    """Whether a ratio is at most `target`: "reached", "missed", or that the machine is too busy to tell."""
    if found.high <= target:
        return "reached"
    if found.low > target:
        return "missed"
    return f"too noisy to tell, {found.low:.2f} to {found.high:.2f}"


def limit_instructions() -> None:
    """Under ATEN_CPU_CAPABILITY, let no side use instructions that a processor with only these lacks."""
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "")
    if limit in INSTRUCTIONS and platform.machine() == "x86_64":
        for name, value in zip(SETTINGS, INSTRUCTIONS[limit], strict=True):
            os.environ.setdefault(name, value)
        from torch._inductor import config  # has read its variable, if it was imported before

        config.cpp.march = os.environ["TORCHINDUCTOR_CPP_MARCH"]


def machine() -> str:
    """Threads, cores, load, processor and vector instructions, as one line for the head of a report."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    names = [line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    processor = names[0].strip() if names else platform.machine()
    busy = " (busy: expect noise)" if load > cores / 2 else ""
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{torch.get_num_threads()} threads, {cores} cores of {processor} ({vectors}), load {load:.1f}{busy}"


def entry(found: Comparison) -> dict[str, float]:
    """A comparison in the JSON of a report: the ratio (above 1 is slower than the reference) and its interval."""
    return {"ratio": found.ratio, "low": found.low, "high": found.high}


def report(results: dict[str, Any], options: argparse.Namespace) -> int:
    """Write the results where `--json` says; with `--against FILE`, return 1 if a figure is worse than in FILE beyond
    the noise."""
    if options.json == "-":
        print(json.dumps(results, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    if options.against in (None, "best"):
        return 0
    log = sys.stderr if options.json == "-" else sys.stdout
    before, now = figures(json.loads(Path(options.against).read_text())), figures(results)
    common = before.keys() & now.keys()
    worse = sorted(name for name in common if now[name]["low"] > before[name]["high"])
    for name in worse:
        was, here = before[name], now[name]
        print(f"slower: {name}: {here['ratio']:.2f} ({here['low']:.2f} to {here['high']:.2f}), was {was['ratio']:.2f} "
              f"({was['low']:.2f} to {was['high']:.2f})", file=log)  # fmt: skip
    print(f"against {options.against}: {len(worse)} of {len(common)} figures are slower beyond the noise", file=log)
    if not common:
        print(f"bench: {options.against} has none of these figures; write it with the same suite and --json",
              file=sys.stderr)  # fmt: skip
        return 2
    return 1 if worse else 0


def figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The comparisons in a report's JSON, by a name made of what identifies them."""
    found = {}
    for case in results["cases"]:
        words = [str(case[key]) for key in ("name", "size", "dtype", "threads", "mode") if key in case]
        for mode in (None, "forward", "training"):
            figure = case if mode is None else case.get(mode)
            if figure and "low" in figure:
                found[", ".join([*words, *([mode] if mode else [])])] = figure
    return found
