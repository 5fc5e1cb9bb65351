"""The timeline of `trace` in Chrome's Trace Event Format, which Perfetto and chrome://tracing open.

A thread's row has every call, composites around their parts, and the waits of the host. A stream's row has the calls
that put work there: when they ran, if the device's events tell, else when they were called. An arrow leads from the
last work on a stream to what waited for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from openreg_tools.recorder import Call, Recorder
from openreg_tools.waits import Wait

__all__ = ["chrome"]

_PROCESSES = 1000  # process ids of a rank
# Times count from the last multiple of 30 days since 1970, which ranks share. Microseconds in a float64 are then exact
# to a nanosecond.
_BASE = 30 * 24 * 3600 * 10**9


@dataclasses.dataclass
class _Row:
    """A thread of the host, or a stream of a device."""

    name: str  # "MainThread", "stream 0"
    device: int | None = None  # the index of the stream's device
    slices: list[_Slice] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Slice:
    """A call or a wait in a row, in nanoseconds since the recording began."""

    of: Call | Wait
    row: int
    start: int
    end: int


def chrome(recorder: Recorder, waits: list[Wait], name: str, start: int, rank: int | None = None) -> dict[str, Any]:
    """The JSON object of the format. The events of several ranks can be joined.

    Args:
        recorder: the recorded calls, after the recording has ended.
        waits: the host's waits outside operators.
        name: the program's name.
        start: nanoseconds since 1970 when the recording began.
        rank: of this process, if there are several.
    """
    rows = _rows(recorder, waits)
    first, since = _PROCESSES * (rank or 0), start % _BASE

    def at(time: int) -> float:
        return (since + time) / 1e3

    prefix = "" if rank is None else f"rank {rank}: "
    events: list[dict[str, Any]] = []
    threads: list[dict[str, int]] = []
    for i, row in enumerate(rows):
        process = first + (0 if row.device is None else 1 + row.device)
        threads.append({"pid": process, "tid": i + 1})
        group = name if row.device is None else f"{recorder.type}:{row.device}"
        names = {"process_name": {"name": f"{prefix}{group}"}, "process_sort_index": {"sort_index": process},
                 "thread_name": {"name": row.name}, "thread_sort_index": {"sort_index": i + 1}}  # fmt: skip
        events += [{"ph": "M", **threads[i], "ts": at(0), "name": key, "args": args} for key, args in names.items()]
        events += [
            {"ph": "X", **threads[i], "ts": at(s.start), "dur": (s.end - s.start) / 1e3, "name": _name(s.of),
             "cat": s.of.has if isinstance(s.of, Call) else "wait", "args": _arguments(s.of, recorder)}
            for s in row.slices
        ]  # fmt: skip
    for number, (a, b) in enumerate(_arrows(rows, recorder)):
        # An arrow binds to the slice that is open at its time, so its ends are just inside.
        begins = max(a.start, a.end - 1)
        ends = b.start if begins <= b.start else max(b.start, b.end - 1)
        begins = begins if begins <= ends else a.start
        if begins <= ends:  # else the clocks of host and device disagree
            arrow = {"cat": "wait", "name": "waited for", "id": first * 1_000_000 + number}
            events.append({"ph": "s", **threads[a.row], "ts": at(begins), **arrow})
            events.append({"ph": "f", **threads[b.row], "ts": at(ends), **arrow, "bp": "e"})
    return {"traceEvents": events, "displayTimeUnit": "ns", "baseTimeNanoseconds": start - since}


def _rows(recorder: Recorder, waits: list[Wait]) -> list[_Row]:
    rows = [_Row(thread) for thread in recorder.threads]

    def add(row: int, of: Call | Wait, start: float, seconds: float) -> None:
        rows[row].slices.append(_Slice(of, row, round(start * 1e9), round((start + seconds) * 1e9)))

    for of in (*recorder.calls, *waits):
        add(of.thread, of, of.start, of.host if isinstance(of, Call) else of.seconds)
    streams: dict[tuple[int, int], int] = {}
    for device, stream in sorted({call.stream for call in recorder.calls if call.stream}):
        streams[device, stream] = len(rows)
        rows.append(_Row(f"stream {stream}", device))
    for call in recorder.calls:
        if call.stream:
            add(streams[call.stream], call, call.begins, call.seconds if recorder.events else call.host)
    for row in rows:
        _nest(row)
    return rows


def _nest(row: _Row) -> None:
    """Sort the slices. On a stream, and where clocks round, each ends before the next begins."""
    row.slices.sort(key=lambda s: (s.start, -s.end, s.of.number if isinstance(s.of, Call) else -1))
    around: list[_Slice] = []
    for s in row.slices:
        if row.device is not None:
            if around:
                s.start = max(s.start, around[0].end)
                s.end = max(s.end, s.start)
            around = [s]
            continue
        while around and around[-1].end <= s.start and around[-1].end < s.end:
            around.pop()
        if around:
            s.end = min(s.end, around[-1].end)
        around.append(s)


def _arrows(rows: list[_Row], recorder: Recorder) -> Iterator[tuple[_Slice, _Slice]]:
    """From the slice on a stream to the slice that waited for it: on a thread, or on another stream."""
    on_stream = {id(s.of): s for row in rows if row.device is not None for s in row.slices}
    on_thread = {id(s.of): s for row in rows if row.device is None for s in row.slices}
    calls = {call.number: call for call in recorder.calls}
    for s in on_thread.values():
        host_waits = isinstance(s.of, Wait) or s.of.wait
        waiting = s if host_waits else on_stream.get(id(s.of))
        for number in s.of.after:
            source = on_stream.get(id(calls[number])) if number in calls else None
            if source is not None and waiting is not None:
                yield source, waiting


def _name(of: Call | Wait) -> str:
    return of.name if isinstance(of, Call) else of.why


def _arguments(of: Call | Wait, recorder: Recorder) -> dict[str, Any]:
    stack = list(recorder.stacks[of.stack]) if of.stack >= 0 else []
    if isinstance(of, Wait):
        return {"line": of.where, "stack": stack}
    found = {
        "by": of.has, "inputs": list(of.inputs), "module": of.module, "phase": of.phase, "wait": of.wait,
        "error": of.error, "stack": stack,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value} | {"bytes": of.bytes, "first call": of.first}
