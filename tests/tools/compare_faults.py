"""Faults at random places of five programs, and whether `compare` locates them: ``python tests/tools/compare_faults.py``.

A clean run notes which operator each kernel and each copy of a program belongs to. Then one of them fails, drawn at random,
and the first difference must be that call of that operator; for a kernel of a compiled graph, the graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.openreg.faults import inject
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools.compare import compare

DEVICE = "openreg"


def train(model: nn.Module, batches: list[torch.Tensor], loss: Callable[[Any], torch.Tensor], kind: Any) -> None:
    optimizer = kind(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch.to(DEVICE))).backward()
        optimizer.step()


def mlp() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(DEVICE)
    train(model, [torch.randn(8, 16) for _ in range(3)], lambda y: y.square().mean(), torch.optim.SGD)


def transformer() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    model = model.to(DEVICE)
    train(model, [torch.randn(2, 5, 16) for _ in range(2)], lambda y: y.clone().abs().mean(), torch.optim.AdamW)


def rnn() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(x.shape[0], 16, device=x.device)
            states = [h := self.cell(step, h) for step in x.unbind(1)]
            return self.out(torch.stack(states, 1))

    train(
        Model().to(DEVICE),
        [torch.randn(4, 5, 8) for _ in range(2)],
        lambda y: y.contiguous().logsumexp(-1).mean(),
        torch.optim.Adam,
    )


def compiled() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(DEVICE)
    train(torch.compile(model), [torch.randn(8, 16) for _ in range(2)], lambda y: y.square().mean(), torch.optim.SGD)


def ddp() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(DEVICE)
    model = nn.parallel.DistributedDataParallel(model)
    train(model, [torch.randn(8, 16) for _ in range(2)], lambda y: y.square().mean(), torch.optim.SGD)


PROGRAMS = {each.__name__: each for each in (mlp, transformer, rnn, compiled, ddp)}


class Truth(TorchDispatchMode):
    """Notes for each kernel and each copy the call that it belongs to, as `compare` numbers it, or None in between."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.events: dict[str, list[Any]] = {"kernel": [], "copy": []}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _close(self, label: Any) -> None:
        for kind, fault in self._open.items():
            self.events[kind] += [label] * fault.stop()

    def _arm(self) -> None:
        self._open = {kind: inject(f"{kind}_latency", seconds=0.0) for kind in ("kernel", "copy")}

    def __enter__(self) -> Truth:
        self._arm()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._close(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._close(None)
        self._arm()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._close([func.name() if hasattr(func, "name") else str(func), self.result().operators - 1])
            self._arm()


def clean(program: Callable[[], None]) -> tuple[dict[str, list[Any]], str]:
    """The calls that the program's kernels and copies belong to, and the report if anything differs."""
    torch.manual_seed(0)
    context = compare(device=DEVICE)
    with Truth(lambda: context.result) as truth, context as result:
        program()
    return truth.events, result.report() if result.first else ""


def faulty(program: Callable[[], None], kind: str, number: int) -> dict[str, Any]:
    """Run with the number-th kernel or copy failing: what `compare` finds first."""
    torch.manual_seed(0)
    context, raised = compare(device=DEVICE), ""
    try:
        with context as result, inject(kind, after=number) as fault:
            program()
            torch.openreg.synchronize()
    except Exception as error:
        raised = type(error).__name__
    first = result.first
    return {
        "struck": fault.struck, "raised": raised,
        "first": first and [first.operator, first.index, first.sentence(), str(first.place)],
    }  # fmt: skip


def located(expected: Any, found: dict[str, Any]) -> bool:
    """Whether the first difference is the call that failed."""
    if found["first"] is None:
        return False
    operator, index, *_ = found["first"]
    return "compiled graph" in operator if expected is None else [operator, index] == expected


# ---- two ranks, in processes of their own ----


def _rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.openreg.set_device(arguments.rank)
    timeout = datetime.timedelta(seconds=20)
    torch.distributed.init_process_group(
        init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=2, timeout=timeout
    )
    if arguments.kind is None:
        answer: Any = clean(ddp)
    else:
        answer = faulty(ddp, arguments.kind, arguments.number if arguments.rank == arguments.faulty else 1 << 40)
    Path(f"{arguments.store}.{arguments.rank}").write_text(json.dumps(answer))
    os._exit(0)  # the group may have lost a rank


def ranks(kind: str | None = None, number: int = 0, rank: int = 0) -> list[Any]:
    """What `clean` or `faulty` gives on two ranks; None from one that did not end."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        words = [sys.executable, __file__, "--store", store, "--number", str(number), "--faulty", str(rank)]
        words += ["--kind", kind] if kind else []
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
        processes = [
            subprocess.Popen([*words, "--rank", str(i)], env=environment, stderr=subprocess.DEVNULL) for i in range(2)
        ]
        for i in (rank, 1 - rank):
            try:
                processes[i].wait(timeout=90)
            except subprocess.TimeoutExpired:
                processes[i].kill()
        files = [Path(f"{store}.{i}") for i in range(2)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def places(count: int, seed: int, names: list[str]) -> list[tuple[str, int, str, int, Any]]:
    """Random places: program, rank, kind, number and the call that it is in. Raises where a clean run differs."""
    draw, out = random.Random(seed), []
    events: dict[tuple[str, int], dict[str, list[Any]]] = {}
    for name in names:
        if name == "compiled":
            clean(compiled)  # what is compiled for the first time launches more than what is found in the cache
        answers = ranks() if name == "ddp" else [clean(PROGRAMS[name])]
        for rank, (found, report) in enumerate(answers):
            assert not report, f"{name} differs without a fault:\n{report}"
            events[name, rank] = found
    for i in range(count):
        name = names[i % len(names)]
        kind = ("copy", "kernel")[i // len(names) % 2]
        rank = draw.randrange(2) if name == "ddp" else 0
        number = draw.randrange(len(events[name, rank][kind]))
        out.append((name, rank, kind, number, events[name, rank][kind][number]))
    return out


def strike(place: tuple[str, int, str, int, Any]) -> dict[str, Any]:
    name, rank, kind, number, _ = place
    return ranks(kind, number, rank)[rank] if name == "ddp" else faulty(PROGRAMS[name], kind, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    for name, kind in (("--store", str), ("--rank", int), ("--kind", str), ("--number", int), ("--faulty", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        _rank(arguments)
    good = 0
    for place in places(arguments.places, arguments.seed, arguments.programs):
        name, rank, kind, number, expected = place
        found = strike(place)
        right = found is not None and located(expected, found)
        good += right
        where = found and found["first"] and f"{found['first'][0]}, call {found['first'][1]}, {found['first'][3]}"
        print(f"{'located' if right else 'MISSED'}  {name}{f' rank {rank}' * (name == 'ddp')}: {kind} {number} of {expected}: {where}",
              found if not right else "", flush=True)  # fmt: skip
    print(f"{good} of {arguments.places} located")
    return int(good < arguments.places)


if __name__ == "__main__":
    sys.exit(main())
