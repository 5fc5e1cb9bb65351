"""How the benchmarks time a call on the CPU and on the device."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch

ROUND = 2e-3  # seconds that one batch of calls takes, at least one call


def compare(cpu: Callable[[], Any], device: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of one call on the CPU and on the device; batches alternate, and so does who goes first."""
    timers = [timeit.Timer(call) for call in (cpu, device)]
    for timer in timers:  # the first calls fill caches and start threads
        timer.timeit(3)
    number = max(1, int(ROUND / min(timers[0].repeat(3, 3)) * 3))
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            times[which].append(timers[which].timeit(number) / number)
        torch.accelerator.synchronize()
    return statistics.median(times[0]), statistics.median(times[1])


def verdict(value: float, target: float) -> str:
    return "reached" if value <= target else "missed"
