"""What the stable ABI costs: the operators of examples/stable_operators against their twins, in turns in one process.

`python benchmarks/stable_abi.py`, where both packages are installed. It prints microseconds of one call, the medians,
and their ratio, at 64 elements on the device in launch mode inline.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import stable_operators  # noqa: F401
import torch


def medians(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median microseconds of each call; the rounds alternate, and so does which goes first."""
    timers = [timeit.Timer(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for index in range(-1, rounds):
        for i in range(len(calls)) if index % 2 else reversed(range(len(calls))):
            times[i].append(timers[i].timeit(100) * 1e4)
    return [statistics.median(each[1:]) for each in times]  # the first round fills caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1001)
    rounds = parser.parse_args().rounds
    print(f"{'operator':<10} {'':<22} {'twin':>8} {'stable':>8} {'ratio':>6}")
    for name in ("swiglu", "rms_norm"):
        twin, stable = (
            getattr(getattr(torch.ops, package), name).default for package in ("openreg", "stable_operators")
        )
        for what, grad, mode in (
            ("inference mode", False, torch.inference_mode()),
            ("no gradient wanted", False, torch.enable_grad()),
            ("gradient recorded", True, torch.enable_grad()),
        ):
            with mode:
                x, y = (torch.randn(64, device="openreg", requires_grad=grad) for _ in range(2))
                # Bound now, because the loop continues with other tensors.
                a, b = medians([lambda op=op, x=x, y=y: op(x, y) for op in (twin, stable)], rounds)
            print(f"{name:<10} {what:<22} {a:8.2f} {b:8.2f} {b / a:6.2f}")


if __name__ == "__main__":
    main()
