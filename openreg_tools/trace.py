"""``openreg-tools trace SCRIPT.py`` and ``with trace():`` show what a program runs on a device.

For each operator: calls, what serves them, time, bytes, and where the host waits; then which kernels to write next.
`Recorder` defines the times. A composite operator that uses its parts' derivatives (linear, layer_norm) decomposes
above the recorder, which sees its parts instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from openreg_tools import backends, dispatch
from openreg_tools.core import place, waits
from openreg_tools.core.blocks import Block, Lines, Section, Table, Text, seconds, size
from openreg_tools.core.device import LACKS, Target, add_device, has_events, load, target_of, to_stderr, usable
from openreg_tools.core.options import count
from openreg_tools.core.program import add_program, of_rank, program, rank, run
from openreg_tools.core.report import Report, add_output, write
from openreg_tools.explain import trace_lines
from openreg_tools.recorder import Call, Recorder
from openreg_tools.threads import InThreads

__all__ = ["Candidate", "Recording", "Row", "trace"]


@dataclasses.dataclass
class Row:
    """All calls of one operator that were served the same way."""

    operator: str
    has: str  # one of dispatch.HAS
    calls: int = 0
    seconds: float = 0.0  # without the calls inside
    total: float = 0.0  # with them
    part: float = 0.0  # for the longest parts
    bytes: int = 0
    waits: int = 0


@dataclasses.dataclass
class Candidate:
    """An operator worth its own kernel."""

    operator: str
    has: str
    calls: int
    seconds: float  # now, with its parts
    kernel: float  # the minimum with a kernel: launches and its tensors read and written once, or its longest part now
    saved: float  # at most


class Recording(Report):
    """A context manager that records what ran; after it ends, `text()`, `json()` and `html()` report.

    Args:
        device: the device to record; the accelerator of the process unless given.
        key: a dispatch key, instead of `device`.
        name: the program's name in the report.
    """

    def __init__(self, device: str | None = None, key: str | None = None, name: str = "") -> None:
        self.target = target_of(device, key)
        usable(self.target.device)
        self.name = name
        self.calls: list[Call] = []
        self.seconds = 0.0
        self._outside: Counter[tuple[str, str]] = Counter()  # waits outside operators, by reason and line

    def __enter__(self) -> Recording:
        self._recorder = Recorder(self.target, _queues(self.target.device), _overhead(self.target))
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._recorder)
        self._context.enter_context(waits.noticed({self._recorder.type} - {"cpu"}, self._waited, printing=True))
        self._context.enter_context(InThreads(self._recorder))
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        self._recorder.active = False
        self._context.close()
        self._recorder.finish()
        self.calls, self.elsewhere = self._recorder.calls, self._recorder.elsewhere
        self.rank, self.ranks = rank()
        ranked = _rows([call for call in self.calls if not call.first])
        self.candidates = _candidates(ranked, self.target, self._recorder.overhead)

    def _waited(self, why: str) -> None:
        self._outside[why, place.line()] += 1

    # ---- queries ----

    def rows(self) -> list[Row]:
        """A row for each operator, the one with the most time first."""
        return _rows(self.calls)

    def waits(self) -> list[tuple[str, str, int]]:
        """Why and where the host waited for the device, and how often; the most frequent first."""
        counts = Counter((call.wait, call.where) for call in self.calls if call.wait)
        counts.update(self._outside)
        return [(why, where, count) for (why, where), count in counts.most_common()]

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"trace of {self.name or 'a program'}"

    def blocks(self, page: bool = False, top: int = 25, calls: bool = False) -> Iterator[Block]:
        """The operators, the waits and what to write next, `top` lines of each; with `calls`, every call first."""
        if calls:
            yield Section("", [Lines(trace_lines([(call, None) for call in self.calls], self.target.key))])
        inside = sum(call.own for call in self.calls)
        clock = "device events" if self._recorder.events else "host clock around the call"
        of_ranks = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        yield Text(f"{self.name or 'the program'} on {self.target.device}{of_ranks}, torch {torch.__version__}")
        yield Text(self._counts())
        yield Text(f"{seconds(inside)} in operators ({clock}) of {seconds(self.seconds)} with recording")
        if not (rows := self.rows()):
            yield Section("", [Text(f"No operator touched a tensor of {self.target.device}.")])
            return
        table: list[list[Any]] = [["operator", "by", "calls", "time", "each", "bytes", "waits"]]
        table += [
            [r.operator, r.has, r.calls, seconds(r.seconds), seconds(r.seconds / r.calls), size(r.bytes), r.waits or ""]
            for r in rows
        ]
        yield Table(table, left=2, fit=True, top=top, rest=seconds(sum(r.seconds for r in rows[top:])))
        if found := self.waits():
            table = [["times", "why", "where"], *([count, why, where] for why, where, count in found)]
            yield Section("The host waited for the device:", [Table(table, left=0, top=top)])
        yield Section("", self._next(top))

    def _counts(self) -> str:
        by = Counter(call.has for call in self.calls)
        counts = ", ".join(f"{by[has]:,} {has}" for has in dispatch.HAS if by[has])
        counts = f" ({counts})" if counts else ""
        return f"{len(self.calls):,} calls{counts}, {self.elsewhere:,} on other devices"

    def _next(self, top: int) -> list[Block]:
        if not self.candidates:
            return [Text(self._unranked() or "Every operator that takes time has a kernel.")]
        rows = [["write these kernels next", "by", "calls", "now", "kernel", "saves"]]
        rows += [[c.operator, c.has, c.calls, *map(seconds, (c.seconds, c.kernel, c.saved))] for c in self.candidates]
        return [Table(rows, left=2, fit=True, top=top), Text(f"{NOTE} {self._unranked()}".strip())]

    def _unranked(self) -> str:
        """Which operators are not ranked, because only first calls of them were recorded."""
        later = {call.name for call in self.calls if not call.first}
        served = ("composite", "fallback")
        once = sorted({c.name for c in self.calls if c.has in served and c.bytes and c.name not in later})
        if not once:
            return ""
        shown = ", ".join(once[:4]) + (f" and {len(once) - 4} more" if len(once) > 4 else "")
        return f"Not ranked: {shown}. Only first calls were recorded, and those may load code."

    def dict(self) -> dict[str, Any]:
        """What ``--json`` writes; seconds and bytes."""
        return {
            "name": self.name, "device": self.target.device, "torch": torch.__version__, "seconds": self.seconds,
            "clock": "events" if self._recorder.events else "host",
            "operators": [vars(row) for row in self.rows()],
            "next": [vars(candidate) for candidate in self.candidates],
            "waits": [{"why": why, "where": where, "count": count} for why, where, count in self.waits()],
            "calls": [dataclasses.asdict(call) for call in self.calls],
        }  # fmt: skip


NOTE = (
    "kernel = lower bound: launch cost plus one pass over its tensors at the measured bandwidth, and never less than "
    "its slowest part today. saves = now - kernel, an upper bound. Savings overlap where one contains another."
)

trace = Recording


def _queues(device: str) -> bool:
    """Returns true if a device's kernels may still be queued when a call returns; only its events give their times."""
    kind = torch.device(device).type
    if kind in ("cpu", "meta"):
        return False
    return backends.of_device(kind).queues() and has_events(device)


def _overhead(target: Target, rounds: int = 5) -> tuple[float, float]:
    """What recording adds to the host time of a call, and to a composite for each part, in seconds.

    On the CPU, if the device lacks a kernel that this needs.
    """
    try:
        return _measured(target, rounds)
    except LACKS:
        return _measured(target_of("cpu"), rounds)


def _measured(target: Target, rounds: int) -> tuple[float, float]:
    x = torch.zeros(1, device=target.device)
    per_call, per_part = [], []
    for _ in range(rounds):
        calls = (lambda: x + x, lambda: torch.empty_like(x))  # a kernel, and a composite of one part
        direct = [timeit.timeit(call, number=20) / 20 for call in calls]
        recorded = []
        for call in calls:
            with Recorder(target) as recorder:
                for _ in range(20):
                    call()
            recorded.append(statistics.median(c.seconds for c in recorder.calls if not c.depth))
        per_call.append(recorded[0] - direct[0])
        per_part.append(recorded[1] - direct[1] - 2 * per_call[-1])
    return max(0.0, statistics.median(per_call)), max(0.0, statistics.median(per_part))


def _rows(calls: list[Call]) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    for call in calls:
        row = rows.setdefault((call.name, call.has), Row(call.name, call.has))
        row.calls += 1
        row.seconds += call.own
        row.total += call.seconds
        row.part += call.part
        row.bytes += call.bytes
        row.waits += bool(call.wait)
    return sorted(rows.values(), key=lambda row: -row.seconds)


# ---- what a kernel would save ----


def _candidates(rows: list[Row], target: Target, overhead: tuple[float, float]) -> list[Candidate]:
    """The operators whose calls a kernel would shorten by more than recording adds, which blurs smaller savings."""
    wanted = [row for row in rows if row.has in ("composite", "fallback") and row.bytes and row.total]
    if not wanted:
        return []
    try:
        launch, bandwidth = _speeds(target, overhead)
    except LACKS:  # it has no kernel for what measures them: its kernels take no time, then
        launch, bandwidth = 0.0, float("inf")
    out = []
    for row in wanted:
        kernel = max(row.calls * launch + row.bytes / bandwidth, row.part)
        if row.total > kernel + sum(overhead) * row.calls:
            out.append(Candidate(row.operator, row.has, row.calls, row.total, kernel, row.total - kernel))
    return sorted(out, key=lambda c: -c.saved)


def _speeds(target: Target, overhead: tuple[float, float], size: int = 1 << 22) -> tuple[float, float]:
    """Seconds of the smallest call, and bytes per second of a large copy, as measured by the recorder."""
    device = torch.device(target.device)
    recorder = Recorder(target, _queues(target.device), overhead)
    with torch.no_grad():
        x, y = torch.ones(1, device=device), torch.empty(size, device=device)
        z = torch.empty_like(y)
        with recorder:
            for _ in range(30):
                x.add_(1)
            for _ in range(5):
                z.copy_(y)
    recorder.finish()
    small = [call.own for call in recorder.calls if call.name.startswith("aten::add_")]
    large = [call.seconds for call in recorder.calls if call.name == "aten::copy_"]
    return statistics.median(small), 2 * y.nbytes / statistics.median(large)


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--calls", action="store_true", help="print every call, nested as in the dispatch trace")
    parser.add_argument("--top", type=count, default=25, metavar="N", help="lines of each table (default 25)")
    add_output(parser)
    add_program(parser)


def main(arguments: argparse.Namespace) -> int:
    """The program's exit status, 1 if it raised, 2 if the request is wrong."""
    words = program(arguments)
    load(arguments.modules, arguments.device)
    recording = Recording(arguments.device, arguments.key, os.path.basename(words[0]))
    with to_stderr() if arguments.json == "-" else contextlib.nullcontext():
        status = run(words, recording)
    for name in ("json", "html"):
        setattr(arguments, name, of_rank(getattr(arguments, name), recording.rank, recording.ranks))
    write(recording, arguments, top=arguments.top, calls=arguments.calls)
    return status
