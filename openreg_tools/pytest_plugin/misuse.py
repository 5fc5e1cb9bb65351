"""The misuse that a run found, by kind, line and test, as text of 80 columns and as JSON. Does not import torch."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openreg_tools.core.findings import Finding

# What is looked for, in the order of the report.
KINDS = {
    "host": "the host reads or writes device memory",
    "race": "used before the work that writes it is done",
    "mixed": "tensors of different devices in one operator",
    "cuda": '"cuda" where any device could stand',
    "pinned": "memory that should be pinned, or pinned memory overwritten during a copy",
    "leak": "device memory that outlives the test that made it",
    "seed": "random numbers from the CPU's global generator",
    "sync": "the host waits for the device",
}

_ACCELERATOR = "torch.accelerator.current_accelerator()"
# By kind: what to write instead, where `what` contains the pattern. The first that matches counts.
_REMEDIES = {
    "host": (("", "copy to the host first, with x.cpu() or x.numpy(force=True)"),),
    "race": (
        (" reuses memory", "call record_stream(stream) before the last reference is dropped, with the stream that used it"),
        ("^the host", "call torch.accelerator.synchronize() before the host reads"),
        ("", "let the stream wait first: stream.wait_stream(other)"),
    ),
    "mixed": (("", "create it with device=x.device, or move it with .to(x.device)"),),
    "cuda": (
        ("is_cuda", 'x.device.type != "cpu" is true on every accelerator'),
        (r"\.cuda\(\)", "write .to(device), with the device that the caller uses"),
        ("is_available|device_count", "ask torch.accelerator, which answers for any device"),
        ("==|!=|startswith|^case|^.cuda\\W+(not )?in ", f'compare with "cpu", or with {_ACCELERATOR}.type'),
        (" in |^allow-list", f"add {_ACCELERATOR}.type to the list"),
        ("autocast|GradScaler|custom_[fb]wd", f"name the device: x.device.type, or {_ACCELERATOR}.type"),
        ("nccl", "ask torch.distributed.get_default_backend_for_device(device)"),
        ("DeviceMesh", f"name {_ACCELERATOR}.type"),
        ("ProfilerActivity", "list every device's: torch.profiler.supported_activities()"),
        ("table", 'sort by "device_time_total", which every device has'),
        ("save_on_cpu", "pass device_type=x.device.type"),
        ("FloatTensor|Tensor\"", "write .to(device, dtype)"),
        (r"torch\.cuda", "ask torch.accelerator, or torch.get_device_module(device)"),
        ("[\"']cuda", f"take the device from the caller, or {_ACCELERATOR}"),
        ("", "let the test take the device as an argument"),
    ),
    "pinned": (
        ("^written", "wait for the copy before you write, or write to another buffer"),
        ("", "pin the host memory, or leave out non_blocking=True"),
    ),
    "leak": (("", "limit the cache, or hold weak references; gc frees cycles"),),
    "seed": (("", "pass device=x.device, or a generator that the caller gives"),),
    "sync": (
        ("falls back", "register a kernel of the operator for the device"),
        ("^copy|^non_blocking", "copy later, or to pinned memory with non_blocking=True"),
        ("data-dependent", "use a form of fixed size: torch.where() for a mask"),
        ("synchronize$", "let a stream wait with wait_stream(), or wait later"),
        ("", "keep it in a tensor (torch.where for if), or read it later"),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Misuse:
    """One kind of misuse at one line, in one test."""

    kind: str  # one of KINDS
    what: str
    where: str  # "file.py:12"
    test: str  # "" if the source says it
    own: bool = False  # in the tests' own code

    @property
    def remedy(self) -> str:
        return _remedy(self.kind, self.what)


class Misuses:
    """What was found, and how often each occurred."""

    def __init__(self) -> None:
        self.counts: Counter[Misuse] = Counter()

    def add(self, misuse: Misuse, count: int = 1) -> None:
        """Count a misuse; one without a test comes from a file's source, which several processes may have read."""
        self.counts[misuse] = self.counts[misuse] + count if misuse.test else 1

    def pack(self) -> list[list[Any]]:
        """Remove the misuses and return them as plain values, for another process."""
        packed = [[*dataclasses.astuple(misuse), count] for misuse, count in self.counts.items()]
        self.counts.clear()
        return packed

    def unpack(self, packed: list[list[Any]]) -> None:
        for *fields, count in packed:
            self.add(Misuse(*fields), count)

    def kinds(self) -> set[str]:
        """The kinds that were found, not counting waits in the tests' own code."""
        return {misuse.kind for misuse in self.counts if not _is_allowed(misuse)}

    def lines(self, kind: str) -> list[tuple[int, str, str]]:
        """Count, what and where for one kind; the most frequent first."""
        counts: Counter[tuple[str, str]] = Counter()
        for misuse, count in self.counts.items():
            if misuse.kind == kind and not _is_allowed(misuse):
                counts[misuse.what, misuse.where] += count
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][1]))
        return [(count, *line) for line, count in ordered]

    def tests(self, kind: str, what: str, where: str) -> list[str]:
        """The tests that reached a line of `lines`; none if the source says it."""
        found = {m.test for m in self.counts if (m.kind, m.what, m.where) == (kind, what, where) and not _is_allowed(m)}
        return sorted(found - {""})

    def allowed(self, kind: str) -> int:
        """How often the tests' own code waited, which is not counted."""
        return sum(count for misuse, count in self.counts.items() if misuse.kind == kind and _is_allowed(misuse))

    def text(self, top: int = 10) -> list[str]:
        """The report's lines: the most frequent of each kind."""
        out = []
        for kind, title in KINDS.items():
            lines = self.lines(kind)
            own = self.allowed(kind)
            if lines:
                out.append(f"{kind}: {title}")
                groups: dict[str, list[tuple[int, str, str]]] = {}  # one remedy for lines that share it
                for count, what, where in lines[:top]:
                    groups.setdefault(_remedy(kind, what), []).append((count, what, where))
                for remedy, group in groups.items():
                    out += [text for line in group for text in _line(*line)]
                    out += textwrap.wrap(f"Remedy: {remedy}", 80, initial_indent=" " * 9, subsequent_indent=" " * 9)
                if len(lines) > top:
                    out.append(f"         and {len(lines) - top} more (--device-report FILE has all)")
            if own:
                out.append(f"{'' if lines else kind + ': '}{own:>7,} more in test code (not counted)")
        return out

    def findings(self, forbidden: set[str], root: str) -> Iterator[Finding]:
        """Each line of `lines`; an error if its kind is forbidden. `root` is the folder that their files start at."""
        for kind, title in KINDS.items():
            for count, what, where in self.lines(kind):
                times = f" ({count:,} times)" if count > 1 else ""
                message = f"{title}: {what}{times}\nRemedy: {_remedy(kind, what)}"
                yield Finding(kind, "error" if kind in forbidden else "warning", message, where, root)

    def write(self, path: str, **about: Any) -> None:
        """The report as JSON: every line, with the tests that reached it."""
        rows: dict[tuple[str, str, str, bool], dict[str, int]] = {}
        for f, count in self.counts.items():
            rows.setdefault((f.kind, f.what, f.where, f.own), {})[f.test] = count
        found = [
            {
                "kind": kind, "what": what, "where": where, "in_tests": own, "remedy": _remedy(kind, what),
                "count": sum(tests.values()), "tests": {test: count for test, count in tests.items() if test},
            }
            for (kind, what, where, own), tests in sorted(rows.items())
        ]  # fmt: skip
        Path(path).write_text(json.dumps({**about, "findings": found}, indent=1) + "\n")


def _remedy(kind: str, what: str) -> str:
    return next(remedy for pattern, remedy in _REMEDIES[kind] if re.search(pattern, what))


def _is_allowed(misuse: Misuse) -> bool:
    return misuse.own and misuse.kind == "sync"


def _line(count: int, what: str, where: str) -> list[str]:
    """One line of at most 80 columns, or two."""
    start = f"{count:>7,}  {where}"
    text = f"{start}  {what}"
    if len(text) <= 80:
        return [text]
    room = 80 - 11
    return [start if len(start) <= 80 else f"{count:>7,}  ...{where[-(80 - 12) :]}",
            f"{'':11}{what if len(what) <= room else what[: room - 3] + '...'}"]  # fmt: skip
