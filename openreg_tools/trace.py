"""``openreg-tools trace SCRIPT.py`` and ``with trace():`` show what a program runs on a device.

For each operator: calls, what serves them, time, bytes, and where the host waits; then which kernels to write next.
`Recorder` defines the times. A composite operator that uses its parts' derivatives (linear, layer_norm) decomposes
above the recorder, which sees its parts instead.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import gc
import html
import os
import statistics
import sys
import threading
import time
import timeit
from collections import Counter
from typing import Any

import torch

from openreg_tools import backends, dispatch, forms
from openreg_tools.explain import trace_lines
from openreg_tools.forms import Wrong
from openreg_tools.recorder import Call, Recorder, _program_line
from openreg_tools.script import apart, run

__all__ = ["Candidate", "Row", "Trace", "trace"]


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
    """An operator worth a kernel of its own."""

    operator: str
    has: str
    calls: int
    seconds: float  # now, with its parts
    kernel: float  # the minimum with a kernel: launches and its tensors read and written once, or its longest part now
    saved: float  # at most


class Trace:
    """A context manager that records what ran; after it ends, `text()`, `dict()` and `html()` report.

    Args:
        device: the device to record; the accelerator of the process unless given.
        key: a dispatch key, instead of `device`.
        name: the program's name in the report.
    """

    def __init__(self, device: str | None = None, key: str | None = None, name: str = "") -> None:
        self.target = dispatch.target(device, key)
        dispatch.usable(self.target.device)
        self.name = name
        self.calls: list[Call] = []
        self.others: list[tuple[str, str]] = []  # waits outside operators: what, and the program's line
        self.seconds = 0.0

    def __enter__(self) -> Trace:
        self._recorder = Recorder(self.target, _queues(self.target.device), _overhead(self.target))
        self._patched = _Waits(self.target.device, self.others)
        self._recorder.__enter__()
        self._patched.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        self._patched.__exit__()
        self._recorder.__exit__(*exception)
        self._recorder.finish()
        self.calls, self.elsewhere = self._recorder.calls, self._recorder.elsewhere
        self.candidates = _candidates(self.rows(), self.target, sum(self._recorder.overhead))

    # ---- queries ----

    def rows(self) -> list[Row]:
        """By operator, the most time first."""
        rows: dict[tuple[str, str], Row] = {}
        for call in self.calls:
            row = rows.setdefault((call.name, call.has), Row(call.name, call.has))
            row.calls += 1
            row.seconds += call.own
            row.total += call.seconds
            row.part += call.part
            row.bytes += call.bytes
            row.waits += bool(call.wait)
        return sorted(rows.values(), key=lambda row: -row.seconds)

    def waits(self) -> list[tuple[str, str, int]]:
        """Why and where the host waited for the device, and how often; the most frequent first."""
        counts = Counter((call.wait, call.where) for call in self.calls if call.wait)
        counts.update(self.others)
        return [(why, where, count) for (why, where), count in counts.most_common()]

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = 25, calls: bool = False) -> str:
        """The tables for a terminal of 80 columns: the `top` operators, the waits, what to write next; or all `calls`."""
        lines = [self._summary(), ""]
        if calls:
            lines = [*trace_lines([(call, None) for call in self.calls], self.target.key), "", *lines]
        rows = self.rows()
        if not rows:
            return "\n".join([*lines, f"No operator touched a tensor of {self.target.device}."])
        table = [["operator", "by", "calls", "time", "each", "bytes", "waits"]]
        table += [
            [r.operator, r.has, r.calls, forms.seconds(r.seconds), forms.seconds(r.seconds / r.calls),
             forms.size(r.bytes), r.waits or ""]
            for r in rows[:top]
        ]  # fmt: skip
        lines += forms.table(table, left=2, fit=True)
        if len(rows) > top:
            rest = rows[top:]
            lines.append(f"and {len(rest)} more, {forms.seconds(sum(r.seconds for r in rest))} (--top {len(rows)})")
        if waits := self.waits():
            lines += ["", "The host waited for the device:"]
            lines += forms.table([[count, why, where] for why, where, count in waits[:top]], left=0)
        lines += ["", *self._next(top)]
        return "\n".join(lines)

    def _summary(self) -> str:
        by = Counter(call.has for call in self.calls)
        counts = ", ".join(f"{by[has]:,} {has}" for has in dispatch.HAS if by[has])
        inside = sum(call.own for call in self.calls)
        clock = "device events" if self._recorder.events else "host clock around the call"
        return "\n".join(
            forms.wrapped(
                [
                    f"{self.name or 'the program'} on {self.target.device}, torch {torch.__version__}",
                    f"{len(self.calls):,} calls ({counts}), {self.elsewhere:,} on other devices",
                    f"{forms.seconds(inside)} in operators ({clock}) of {forms.seconds(self.seconds)} with recording",
                ],
                0,
            )
        )

    def _next(self, top: int) -> list[str]:
        if not self.candidates:
            return ["Every operator that takes time has a kernel."]
        rows = [["write these kernels next", "by", "calls", "now", "kernel", "saves"]]
        rows += [
            [c.operator, c.has, c.calls, *map(forms.seconds, (c.seconds, c.kernel, c.saved))]
            for c in self.candidates[:top]
        ]
        note = (
            "kernel: at least its launches and its tensors read and written once, at speeds measured here, or the longest "
            "of its parts now; so it saves that at most. Savings overlap where one contains another."
        )
        return [*forms.table(rows, left=2, fit=True), *forms.wrapped([note], 0)]

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

    def html(self) -> str:
        """One self-contained page: the tables and a timeline."""
        table = [["operator", "by", "calls", "time", "with parts", "bytes", "waits"]]
        table += [
            [r.operator, r.has, r.calls, forms.seconds(r.seconds), forms.seconds(r.total), forms.size(r.bytes), r.waits]
            for r in self.rows()
        ]
        ranked = [["write these kernels next", "by", "calls", "now", "kernel", "saves at most"]]
        ranked += [
            [c.operator, c.has, c.calls, *map(forms.seconds, (c.seconds, c.kernel, c.saved))] for c in self.candidates
        ]
        waits = [["the host waited", "where", "times"], *self.waits()]
        legend = " ".join(f'<span style="background:{colour}">{has}</span>' for has, colour in COLOURS.items())
        return forms.page(
            f"trace of {self.name}",
            self.name or "trace",
            f"<p>{html.escape(self._summary())}</p><p>{legend}</p>{self._timeline()}"
            f"{forms.html_table(ranked)}<br>{forms.html_table(waits, left=2)}<br>{forms.html_table(table)}",
            "body{max-width:90em}.timeline{overflow-x:auto;border:1px solid #ddd}rect:hover{stroke:#000}",
        )

    def _timeline(self, most: int = 5000) -> str:
        """The longest calls as rectangles: time on the x axis, composites above their parts, a band for each thread."""
        longest = sorted(self.calls, key=lambda call: -call.seconds)[:most]
        if not longest:
            return ""
        width, height = 3000, 14
        first = min(call.start for call in longest)
        scale = width / max(call.start + call.seconds - first for call in longest)
        deepest = {t: max(c.depth for c in longest if c.thread == t) for t in sorted({c.thread for c in longest})}
        tops, y = {}, 0
        for thread, depth in deepest.items():
            tops[thread] = y
            y += (depth + 1) * height + 8
        boxes = "".join(
            f'<rect x="{(c.start - first) * scale:.1f}" y="{tops[c.thread] + c.depth * height}" '
            f'width="{max(c.seconds * scale, 0.5):.1f}" height="{height - 2}" fill="{COLOURS[c.has]}">'
            f"<title>{html.escape(f'{c.name} {c.has} {forms.seconds(c.seconds)} {c.where}')}</title></rect>"
            for c in longest
        )
        shown = "" if len(longest) == len(self.calls) else f" of {len(self.calls):,}, the longest"
        return (
            f'<div class="timeline"><svg width="{width}" height="{y}">{boxes}</svg></div>'
            f"<p>{len(longest):,}{shown} calls; a band for each thread.</p>"
        )


COLOURS = {"own": "#5a9", "shared": "#8cb", "composite": "#abd", "fallback": "#e94", "refused": "#d44"}

trace = Trace


def _queues(device: str) -> bool:
    """Whether a device's kernels may still be queued when a call returns, so that only its events give their times."""
    kind = torch.device(device).type
    if kind in ("cpu", "meta"):
        return False
    return backends.of_device(kind).queues()


class _Waits:
    """Records where the program waits for a device, or prints one of its tensors, which the recorder does not see.

    It covers ``synchronize`` of torch.accelerator, of the device's module, and of its streams and events.
    """

    def __init__(self, device: str, found: list[tuple[str, str]]) -> None:
        self.type = torch.device(device).type
        self.found, self.inside = found, threading.local()
        module = getattr(torch, self.type, None)
        self.undo = contextlib.ExitStack()
        self.places = [(each, "synchronize", "synchronize") for each in (torch.accelerator, module)]
        for name in ("Stream", "Event"):
            places = [getattr(torch, name), getattr(module, name, None)]
            self.places += [(each, "synchronize", f"{name}.synchronize") for each in places]
        if self.type != "cpu":
            self.places.append((torch.Tensor, "__repr__", "print"))

    def __enter__(self) -> None:
        for owner, name, why in self.places:
            if name in getattr(owner, "__dict__", ()):
                before = vars(owner)[name]
                _set(owner, name, self._noting(before, why))
                self.undo.callback(_set, owner, name, before)

    def __exit__(self, *exception: Any) -> None:
        self.undo.close()

    def _noting(self, function: Any, why: str) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            of = self.type if why == "synchronize" else getattr(args[0].device, "type", None)
            if of != self.type or getattr(self.inside, "now", False):  # one calls the other
                return function(*args, **kwargs)
            self.found.append((why, _program_line()))
            self.inside.now = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside.now = False

        return noted


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of torch.Stream and torch.Event, which are static types and have no setattr."""
    try:
        setattr(owner, name, value)
    except TypeError:
        gc.get_referents(vars(owner))[0][name] = value  # the dict that vars() shows read-only
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def _overhead(target: dispatch.Target, rounds: int = 5) -> tuple[float, float]:
    """What recording adds to the host time of a call, and to a composite for each part, in seconds."""
    x = torch.zeros(1, device=target.device)
    each, part = [], []
    for _ in range(rounds):
        calls = (lambda: x + x, lambda: torch.empty_like(x))  # a kernel, and a composite of one part
        direct = [timeit.timeit(call, number=20) / 20 for call in calls]
        recorded = []
        for call in calls:
            with Recorder(target) as recorder:
                for _ in range(20):
                    call()
            recorded.append(statistics.median(c.seconds for c in recorder.calls if not c.depth))
        each.append(recorded[0] - direct[0])
        part.append(recorded[1] - direct[1] - 2 * each[-1])
    return max(0.0, statistics.median(each)), max(0.0, statistics.median(part))


# ---- what a kernel would save ----


def _candidates(rows: list[Row], target: dispatch.Target, least: float) -> list[Candidate]:
    """The operators whose calls a kernel would shorten by more than `least` seconds; recording blurs smaller
    savings."""
    wanted = [row for row in rows if row.has in ("composite", "fallback") and row.bytes and row.total]
    if not wanted:
        return []
    launch, bandwidth = _speeds(target)
    out = []
    for row in wanted:
        kernel = max(row.calls * launch + row.bytes / bandwidth, row.part)
        if row.total > kernel + least * row.calls:
            out.append(Candidate(row.operator, row.has, row.calls, row.total, kernel, row.total - kernel))
    return sorted(out, key=lambda c: -c.saved)


def _speeds(target: dispatch.Target, size: int = 1 << 22) -> tuple[float, float]:
    """Seconds of the smallest call, and bytes per second of a large copy, as measured by the recorder."""
    device = torch.device(target.device)
    recorder = Recorder(target, _queues(target.device), _overhead(target))
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
    dispatch.add_arguments(parser)
    parser.add_argument("--calls", action="store_true", help="print every call, nested, as the dispatch trace does")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="lines of each table (default 25)")
    forms.add_arguments(parser)
    parser.add_argument("script", metavar="SCRIPT.py", help="the program, and its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """The program's exit status, 1 if it raised, 2 if the request is wrong."""
    try:
        dispatch.load(arguments.modules)
        if not os.path.isfile(arguments.script):
            raise Wrong(f"there is no file {arguments.script}")
        recording = Trace(arguments.device, arguments.key, os.path.basename(arguments.script))
    except Wrong as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2
    with apart(arguments.json):
        status = run([arguments.script, *arguments.arguments], recording)
    forms.write(recording, arguments, top=arguments.top, calls=arguments.calls)
    return status
