"""The timeline of `trace`: a row for each thread and each stream, as a page and in Chrome's Trace Event Format.

A row of a thread has every call, composites around their parts, and the waits of the host. A row of a stream has the
calls that put work there: when they ran, if the device's events tell, else when they were called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from openreg_tools import pages
from openreg_tools.recorder import Call, Recorder
from openreg_tools.waits import Wait

__all__ = ["KINDS", "Slice", "Timeline", "Track"]

# Classes of style.css for the slices of a timeline, and what they mean.
KINDS = {
    "own": "the device's kernel",
    "shared": "the CPU's kernel on device memory",
    "composite": "decomposes",
    "fallback": "falls back to the CPU",
    "error": "refused",
    "wait": "the host waits",
}
MOST = 100_000  # slices on a page
_PROCESSES = 1000  # process ids of a rank, in Chrome's format
# Chrome's times count from the last multiple of 30 days since 1970, which ranks share. Microseconds in a float64 are
# then exact to a nanosecond.
_BASE = 30 * 24 * 3600 * 10**9


@dataclasses.dataclass
class Track:
    """A row: a thread of the host, or a stream of a device."""

    name: str  # "MainThread", "stream 0"
    group: str  # "host", or "openreg:0"
    device: int = -1  # its index
    slices: list[Slice] = dataclasses.field(default_factory=list)  # by start; enclosing slices first


@dataclasses.dataclass
class Slice:
    """A call or a wait on a track, in nanoseconds since the recording began."""

    of: Call | Wait
    track: int
    start: int
    end: int
    depth: int = 0  # how many slices of the track enclose it


class Timeline:
    """The tracks of a recording that has ended, and the arrows from calls to what waited for them.

    Args:
        recorder: the recorded calls.
        waits: the host's waits outside operators.
        name: the program's name.
        seconds: the length of the recording.
        time: nanoseconds since 1970 when the recording began.
        rank: of this process, if there are several.
    """

    def __init__(
        self, recorder: Recorder, waits: list[Wait], name: str, seconds: float, time: int, rank: int | None = None
    ) -> None:
        self.recorder, self.name, self.time, self.rank = recorder, name, time, rank
        self.tracks = [Track(thread, "host") for thread in recorder.threads]
        for each in (*recorder.calls, *waits):
            self._add(each.thread, each, each.start, each.host if isinstance(each, Call) else each.seconds)
        streams: dict[tuple[int, int], int] = {}
        for device, stream in sorted({call.stream for call in recorder.calls if call.stream}):
            streams[device, stream] = len(self.tracks)
            self.tracks.append(Track(f"stream {stream}", f"{recorder.type}:{device}", device))
        for call in recorder.calls:
            if call.stream:
                length = call.seconds if recorder.events else call.host
                self._add(streams[call.stream], call, call.begins, length)
        for track in self.tracks:
            _nest(track)
        self.length = max([_ns(seconds), *(s.end for track in self.tracks for s in track.slices)])
        self.arrows = list(self._arrows())

    def _add(self, track: int, of: Call | Wait, start: float, seconds: float) -> None:
        self.tracks[track].slices.append(Slice(of, track, _ns(start), _ns(start + seconds)))

    def _arrows(self) -> Iterable[tuple[Slice, Slice]]:
        """From the slice on a stream to the slice that waited for it: on a thread, or on another stream."""
        on_stream = {id(s.of): s for track in self.tracks if track.device >= 0 for s in track.slices}
        on_thread = {id(s.of): s for track in self.tracks if track.device < 0 for s in track.slices}
        calls = {call.number: call for call in self.recorder.calls}
        for each in (s.of for track in self.tracks if track.device < 0 for s in track.slices):
            to = (on_thread if _waits(each) else on_stream).get(id(each))
            for number in each.after:
                source = on_stream.get(id(calls[number])) if number in calls else None
                if source is not None and to is not None:
                    yield source, to

    # ---- the page ----

    def html(self, most: int = MOST) -> str:
        """The timeline for a page that runs timeline.js; of more than `most` slices it shows the longest."""
        slices = [s for track in self.tracks for s in track.slices]
        if not slices:
            return pages.text("Nothing ran on the device.")
        shown = slices
        note = ""
        if len(slices) > most:
            marked = {id(s) for s in slices if isinstance(s.of, Wait)}
            shown = sorted(slices, key=lambda s: (id(s) not in marked, s.start - s.end))[:most]
            note = f"The timeline shows the longest {most:,} of {len(slices):,} slices; --chrome FILE writes all. "
            shown.sort(key=lambda s: (s.track, s.start, s.depth))
        note += (
            "Streams show when kernels ran, according to the device's events."
            if self.recorder.events
            else "Kernels ran inside the calls, so a stream shows the times of the calls."
        )
        kinds = {_kind(s.of) for s in shown} | {"wait" for s in shown if _waits(s.of)}
        used = {kind: ("", meaning) for kind, meaning in KINDS.items() if kind in kinds}
        return (
            f'<div class="timeline" id="timeline">{pages.legend(used)}{pages.text(note)}'
            f"{pages.data('timeline-data', self._data(shown))}</div>"
        )

    def _data(self, shown: list[Slice]) -> dict[str, Any]:
        """What timeline.js reads: columns, with texts by number."""
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        columns: dict[str, list[int]] = {
            name: [] for name in ("track", "depth", "start", "length", "kind", "name", "about", "stack", "flags", "own")
        }
        kinds, stacks = list(KINDS), {}
        for s in shown:
            stack = stacks.setdefault(s.of.stack, len(stacks))
            own = s.end - s.start if isinstance(s.of, Wait) else _ns(s.of.own)
            flags = _waits(s.of) + 2 * (isinstance(s.of, Call) and s.of.first)
            row = (s.track, s.depth, s.start, s.end - s.start, kinds.index(_kind(s.of)), number(_name(s.of)),
                   number("\n".join(_about(s.of))), stack, flags, own)  # fmt: skip
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        places = {id(s): i for i, s in enumerate(shown)}
        arrows = [(places[id(a)], places[id(b)]) for a, b in self.arrows if id(a) in places and id(b) in places]
        cuts, width = _idle(shown, self.length)
        return {
            "length": self.length,
            "kinds": kinds,
            "tracks": [{"name": f"{t.group}, {t.name}" if t.device >= 0 else t.name} for t in self.tracks],
            "stacks": ["\n".join(self.recorder.stacks[i]) if i >= 0 else "" for i in stacks],
            "texts": list(texts),
            "slices": columns,
            "arrows": arrows,
            "cuts": cuts,
            "cut": width,
        }

    # ---- Chrome's format ----

    def chrome(self) -> dict[str, Any]:
        """The Trace Event Format's JSON object. The events of several ranks can be joined: process ids differ, and
        times count from the same base."""
        first = _PROCESSES * (self.rank or 0)
        since = self.time % _BASE

        def at(time: int) -> float:
            return (since + time) / 1e3

        rank = "" if self.rank is None else f"rank {self.rank}: "
        events: list[dict[str, Any]] = []
        threads: list[tuple[int, int]] = []
        for i, track in enumerate(self.tracks):
            process, thread = first + 1 + track.device, i + 1  # the host's comes before the devices'
            threads.append((process, thread))
            name = f"{rank}{self.name if track.device < 0 else track.group}"
            names = {"process_name": {"name": name}, "process_sort_index": {"sort_index": process},
                     "thread_name": {"name": track.name}, "thread_sort_index": {"sort_index": thread}}  # fmt: skip
            events += [
                {"ph": "M", "pid": process, "tid": thread, "ts": at(0), "name": name, "args": args}
                for name, args in names.items()
            ]
        for track in self.tracks:
            for s in track.slices:
                process, thread = threads[s.track]
                events.append({
                    "ph": "X", "pid": process, "tid": thread, "ts": at(s.start), "dur": (s.end - s.start) / 1e3,
                    "name": _name(s.of), "cat": _kind(s.of), "args": self._arguments(s.of),
                })  # fmt: skip
        for number, (a, b) in enumerate(self.arrows):
            # A flow binds to the slice that is open at its time, so its ends are just inside.
            start = max(a.start, a.end - 1)
            end = b.start if start <= b.start else max(b.start, b.end - 1)
            if end < start:
                start = a.start
            if end < start:
                continue  # the clocks of host and device disagree
            flow = {"cat": "wait", "name": "waited for", "id": first * 1_000_000 + number}
            for kind, s, time in (("s", a, start), ("f", b, end)):
                process, thread = threads[s.track]
                events.append({"ph": kind, "pid": process, "tid": thread, "ts": at(time), **flow})
            events[-1]["bp"] = "e"
        return {"traceEvents": events, "displayTimeUnit": "ns", "baseTimeNanoseconds": self.time - since}

    def _arguments(self, of: Call | Wait) -> dict[str, Any]:
        stack = list(self.recorder.stacks[of.stack]) if of.stack >= 0 else []
        if isinstance(of, Wait):
            return {"line": of.where, "stack": stack}
        found = {
            "by": of.has, "inputs": list(of.inputs), "module": of.module, "phase": of.phase, "wait": of.wait,
            "error": of.error, "stack": stack,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value} | {"bytes": of.bytes, "first call": of.first}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _name(of: Call | Wait) -> str:
    return of.name if isinstance(of, Call) else of.why


def _waits(of: Call | Wait) -> bool:
    """Whether the host waits for the device."""
    return isinstance(of, Wait) or bool(of.wait)


def _kind(of: Call | Wait) -> str:
    """One of KINDS."""
    if isinstance(of, Wait):
        return "wait"
    return "error" if of.has == "refused" else of.has


def _about(of: Call | Wait) -> list[str]:
    """Lines for a reader who points at the slice; the first says what it is."""
    if isinstance(of, Wait):
        return ["the host waits", f"at {of.where}"]
    lines = [f"{of.has}: {KINDS[_kind(of)]}"]
    lines += [f"({', '.join(of.inputs)})"] if of.inputs else []
    lines += [", ".join(filter(None, (of.phase, of.module and f"in {of.module}")))] if of.phase else []
    lines += ["first call: may load code"] if of.first else []
    lines += [f"waits: {of.wait}, {of.where}"] if of.wait else []
    return [*lines, *([of.error] if of.error else [])]


def _nest(track: Track) -> None:
    """Sort the slices and find their depths. On a stream, and where clocks round, each ends before the next begins."""
    track.slices.sort(key=lambda s: (s.start, -s.end, s.of.number if isinstance(s.of, Call) else -1))
    around: list[Slice] = []
    for s in track.slices:
        if track.device >= 0:
            if around:
                s.start = max(s.start, around[0].end)
                s.end = max(s.end, s.start)
            around = [s]
            continue
        while around and around[-1].end <= s.start and around[-1].end < s.end:
            around.pop()
        if around:
            s.end = min(s.end, around[-1].end)
        s.depth = len(around)
        around.append(s)


def _idle(slices: list[Slice], length: int) -> tuple[list[tuple[int, int]], int]:
    """The gaps in which nothing ran that are worth cutting, and the width that each is cut to.

    The width is a quarter of what runs between two gaps, so that cut gaps take at most a fifth of the picture.
    """
    gaps, busy, until = [], 0, 0
    for s in sorted(slices, key=lambda s: s.start):
        if s.start > until:
            gaps.append((until, s.start))
        if s.end > until:
            busy += s.end - max(until, s.start)
            until = s.end
    if until < length:
        gaps.append((until, length))
    width = max(1, busy // (4 * max(1, len(gaps))))
    return [gap for gap in gaps if gap[1] - gap[0] > width], width
