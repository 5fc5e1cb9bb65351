"""How the benchmarks time calls against each other, and when they say that a target is reached."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROUND = 2e-3  # seconds that one batch of calls takes, at least one call
LEAST = 6  # values whose range holds their median with 95 % confidence: all of fewer can easily lie on one side of it
# The variables that limit the instructions of oneDNN, of MKL on Intel processors and of torch.compile's C++ code, as
# ATEN_CPU_CAPABILITY limits those of PyTorch's kernels.
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "TORCHINDUCTOR_CPP_MARCH")
INSTRUCTIONS = {"default": ("SSE41", "SSE4_2", "x86-64-v2"), "avx2": ("AVX2", "AVX2", "x86-64-v3")}


@dataclass(frozen=True)
class Comparison:
    """Median seconds of one call on either side, and the 95 % confidence interval of their ratio.

    The interval comes from the ratios of the rounds by order statistics, so it assumes nothing about their distribution:
    a busy machine makes it wide. From fewer than LEAST rounds, it is 0 to infinity.
    """

    reference: float
    measured: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Measured over reference: above 1 is slower."""
        return self.measured / self.reference


def compared(reference: Sequence[float], measured: Sequence[float]) -> Comparison:
    """Compare the seconds of two sides; entries with the same index are from the same round."""
    ratios = sorted(b / a for a, b in zip(reference, measured, strict=True))
    n = len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))  # 1.96 standard deviations of a median's rank
    low, high = ratios[max((n - 1) // 2 - reach, 0)], ratios[min(n // 2 + reach, n - 1)]
    first, second = statistics.median(reference), statistics.median(measured)
    if n < LEAST:
        return Comparison(first, second, 0.0, math.inf)
    return Comparison(first, second, min(low, second / first), max(high, second / first))


def settle() -> None:
    """In async mode, wait for the device's work, which ends later than the calls."""
    if torch.openreg.get_launch_mode() == "async":
        torch.accelerator.synchronize()


def alternate(calls: Sequence[Callable[[], Any]], budget: float, patience: float = math.inf) -> list[list[float]]:
    """Seconds of each call, the last of which is the device's, for each round; the calls of a round alternate.

    Runs for `budget` seconds and at least LEAST rounds, or for a single round if that takes longer than `patience`
    seconds.
    """
    for call in calls:  # the first calls compile, fill caches and start threads
        call()
    settle()
    times: list[list[float]] = [[] for _ in calls]
    quick, until = True, time.perf_counter() + budget
    while not times[0] or (quick and (len(times[0]) < LEAST or time.perf_counter() < until)):
        for index in range(len(calls)) if len(times[0]) % 2 else reversed(range(len(calls))):
            start = time.perf_counter()
            calls[index]()
            if index == len(calls) - 1:
                settle()
            times[index].append(time.perf_counter() - start)
        quick = sum(each[0] for each in times) < patience
    return times


def compare(cpu: Callable[[], Any], device: Callable[[], Any], rounds: int) -> Comparison:
    """Compare short calls on the CPU and on the device."""
    return compared(*batches(cpu, device, rounds))


def batches(cpu: Callable[[], Any], device: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a call on either side for each round, in batches that alternate, and so does which side goes first.

    A batch on the device ends when its work has: in async mode, the calls return earlier.
    """
    timers = [timeit.Timer(call) for call in (cpu, device)]
    for timer in timers:  # the first calls fill caches and start threads
        timer.timeit(3)
    settle()
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
    return times


def values(seconds: Sequence[float]) -> Comparison:
    """The median of times and its interval, in seconds: a comparison with 1."""
    return compared([1.0] * len(seconds), seconds)


def mean(comparisons: Iterable[Comparison]) -> Comparison:
    """The geometric mean of the ratios, as a comparison with 1; the errors of the cases are independent.

    A single ratio keeps its interval.
    """
    every = list(comparisons)
    ratio = math.exp(statistics.fmean(math.log(each.ratio) for each in every))
    if len(every) == 1 or any(math.isinf(each.high) for each in every):
        return Comparison(1.0, ratio, min(each.low for each in every), max(each.high for each in every))
    down = math.hypot(*(math.log(each.ratio / each.low) for each in every)) / len(every)
    up = math.hypot(*(math.log(each.high / each.ratio) for each in every)) / len(every)
    return Comparison(1.0, ratio, ratio * math.exp(-down), ratio * math.exp(up))


def verdict(
    found: Comparison,
    target: float,
    text: Callable[[float], str] = "{:.2f}".format,
    inverse: bool = False,
    of: str = "rounds",
) -> str:
    """Whether a ratio is at most `target`: "reached", "missed", or why it is undecided.

    `text` formats the ends of the interval, of the ratio or its inverse. `of` names what an interval is made of.
    """
    if math.isinf(found.high):
        return f"too few {of} to tell"
    if found.high <= target:
        return "reached"
    if found.low > target:
        return "missed"
    low, high = (1 / found.high, 1 / found.low) if inverse else (found.low, found.high)
    return f"too noisy to tell, {text(low)} to {text(high)}"


def limit_instructions() -> None:
    """Under ATEN_CPU_CAPABILITY, let no side use instructions that a processor with only these lacks."""
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "")
    if limit in INSTRUCTIONS and platform.machine() == "x86_64":
        for name, value in zip(SETTINGS, INSTRUCTIONS[limit], strict=True):
            os.environ.setdefault(name, value)
        from torch._inductor import config  # has read its variable, if it was imported before

        config.cpp.march = os.environ["TORCHINDUCTOR_CPP_MARCH"]
