"""How much longer a training step takes under `compare`: ``python benchmarks/compare_overhead.py``.

Medians of steps of one process, plain and compared steps by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from openreg_tools.compare import compare


def step_of(width: int, batch: int, length: int) -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("openreg")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, length, width, device="openreg")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch.openreg.synchronize()

    return step


def seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for width, batch, length in ((128, 8, 64), (512, 8, 128)):
        step = step_of(width, batch, length)
        step()
        times: dict[str, list[float]] = {"plain": [], "compared": []}
        for _ in range(rounds):
            times["plain"].append(seconds(step))
            with compare() as result:
                times["compared"].append(seconds(step))
        plain, compared = (statistics.median(measured) for measured in times.values())
        print(f"width {width}, {batch} x {length}: {plain * 1e3:.1f} ms a step, {result.operators} operators; compared "
              f"{compared / plain:.2f} times; {len(result.differences)} differ", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
