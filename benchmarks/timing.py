"""How the benchmarks time calls against each other, and when a target counts as reached."""

from __future__ import annotations

import gc
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

Timed = Callable[[], Any]  # what is timed
BATCH = 2e-3  # seconds that one batch of calls takes, at least one call
LEAST = 6  # the smallest sample whose full range is a 95 % interval of its median
PATIENCE = 20.0  # seconds: a round that takes longer is the only one
# The variables that limit the instructions of oneDNN, of MKL on Intel processors and of torch.compile's C++ code, as
# ATEN_CPU_CAPABILITY limits those of PyTorch's kernels.
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "TORCHINDUCTOR_CPP_MARCH")
INSTRUCTIONS = {"default": ("SSE41", "SSE4_2", "x86-64-v2"), "avx2": ("AVX2", "AVX2", "x86-64-v3")}


@dataclass(frozen=True)
class Speeds:
    """Median seconds of one call on either side, and the 95 % confidence interval of their ratio.

    The interval comes from the ratios of the rounds by order statistics, so it assumes nothing about their
    distribution: a busy machine makes it wide. With fewer than LEAST rounds, it is 0 to infinity.
    """

    reference: float
    measured: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Measured over reference: above 1 is slower."""
        return self.measured / self.reference


def compared(reference: Sequence[float], measured: Sequence[float]) -> Speeds:
    """Compare the seconds of two sides; entries with the same index are from the same round."""
    ratios = sorted(b / a for a, b in zip(reference, measured, strict=True))
    n = len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))  # 1.96 standard deviations of a median's rank
    low, high = ratios[max((n - 1) // 2 - reach, 0)], ratios[min(n // 2 + reach, n - 1)]
    first, second = statistics.median(reference), statistics.median(measured)
    if n < LEAST:
        return Speeds(first, second, 0.0, math.inf)
    return Speeds(first, second, min(low, second / first), max(high, second / first))


def settle() -> None:
    """Wait for the device's work, which ends later than the calls in async mode."""
    torch.accelerator.synchronize()


def batch_of(call: Timed) -> int:
    """How many calls take BATCH seconds."""
    timer = timeit.Timer(call)
    if timer.timeit(1) > BATCH:
        return 1
    return max(1, int(3 * BATCH / min(timer.repeat(3, 3))))


def alternate(
    calls: Sequence[Timed], rounds: int, seconds: float = math.inf, number: int | None = None
) -> list[list[float]]:
    """Seconds of each call in each round, in batches of `number` calls. The batches alternate, and so does their order.

    Ends after `rounds` rounds, or after `seconds` seconds and at least LEAST rounds.
    """
    timers = [timeit.Timer(call) for call in calls]
    for timer in timers:  # the first calls compile, fill caches and start threads
        timer.timeit(1)
    settle()
    number = number or batch_of(calls[0])
    times: list[list[float]] = [[] for _ in calls]
    collects = gc.isenabled()
    gc.disable()
    begin = time.perf_counter()
    for index in range(rounds):
        for which in range(len(calls)) if index % 2 else reversed(range(len(calls))):
            elapsed = timers[which].timeit(number)
            start = time.perf_counter()
            settle()
            times[which].append((elapsed + time.perf_counter() - start) / number)
        spent = time.perf_counter() - begin
        # Without a limit, processes whose collectives match make the same number of calls.
        if seconds < math.inf and (spent > PATIENCE * (index + 1) or (index + 1 >= LEAST and spent > seconds)):
            break
    if collects:
        gc.enable()
    return times


def compare(cpu: Timed, device: Timed, rounds: int, seconds: float = math.inf) -> Speeds:
    """Compare a call on the CPU and one on the device."""
    return compared(*alternate([cpu, device], rounds, seconds))


def mean(comparisons: Iterable[Speeds]) -> Speeds:
    """The geometric mean of the ratios, as a comparison with 1; the errors of the cases are independent."""
    every = list(comparisons)
    ratio = math.exp(statistics.fmean(math.log(found.ratio) for found in every))
    if any(math.isinf(found.high) for found in every):
        return Speeds(1.0, ratio, 0.0, math.inf)
    down = math.hypot(*(math.log(found.ratio / found.low) for found in every)) / len(every)
    up = math.hypot(*(math.log(found.high / found.ratio) for found in every)) / len(every)
    return Speeds(1.0, ratio, ratio * math.exp(-down), ratio * math.exp(up))


def verdict(found: Speeds, target: float) -> str:
    """Compares a ratio with its largest allowed value: "reached", "missed", or why it is undecided."""
    if math.isinf(found.high):
        return "too few rounds to tell"
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
