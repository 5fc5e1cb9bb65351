"""What a benchmark prints and writes: figures, and how two runs of a suite are compared.

A figure is a dict: its name, the case that it belongs to, the time of both sides, their ratio, the interval of the ratio
(`low` and `high`, absent if there were too few rounds), and perhaps a target, a note, and what the ratio is made `of`.
Figures of one name are compared only if they have intervals and are made of the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Speeds, compared, mean, verdict

Figure = dict[str, Any]
SAME = ("suite", "against", "dtype", "threads", "mode")  # of the head: must be the same in runs that are compared


def seconds(value: float) -> str:
    """12.3 ns, us, ms or s."""
    units = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3))
    unit, scale = next(((name, size) for name, size in units if float(f"{value / size:.4g}") < 1000), ("s", 1.0))
    return f"{value / scale:.4g} {unit}"


def figure(name: str, found: Speeds, target: float | None = None, note: str = "", **more: Any) -> Figure:
    """A comparison as a figure; `of` in `more` says what the other side is made of."""
    result = {"name": name, "cpu_s": found.reference, "openreg_s": found.measured, "ratio": found.ratio}
    if not math.isinf(found.high):
        result |= {"low": found.low, "high": found.high}
    if target is not None:
        result["target"] = target
    return result | ({"note": note} if note else {}) | more


def comparison(found: Figure) -> Speeds:
    return Speeds(1.0, found["ratio"], found.get("low", 0.0), found.get("high", math.inf))


def average(name: str, figures: Sequence[Figure], target: float) -> Figure:
    """The geometric mean of figures, those without an interval left out."""
    enough = [found for found in figures if "low" in found] or figures
    names = [found["name"] for found in enough]
    return figure(name, mean(map(comparison, enough)), target, of=names)


def plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


class Report:
    """The head of a report, printed at once, and its figures, each printed when it is added."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log = sys.stderr if options.json == "-" else sys.stdout
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = f"{next(iter(models), platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
        cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
        self.results: dict[str, Any] = {
            "suite": options.suite,
            "against": "best" if options.best else "cpu",
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "mode": torch.openreg.get_launch_mode(),
            "torch": torch.__version__,
            "processor": processor,
            "load": round(load, 2),
            "rounds": options.rounds,
            "processes": options.processes,
            "figures": [],
        }
        self.say(f"torch {torch.__version__}, {options.rounds} rounds, launch mode {self.results['mode']}")
        busy = " (busy: expect noise)" if load > cores / 2 else ""
        self.say(f"{plural(torch.get_num_threads(), 'thread')}, {plural(cores, 'core')} of {processor}, "
                 f"load {load:.1f}{busy}")  # fmt: skip
        self.say(f"{'':40} {'cpu':>10} {'openreg':>10} {'ratio':>7}")

    def say(self, text: str) -> None:
        print(text.rstrip(), file=self.log, flush=True)

    def add(self, found: Figure) -> None:
        """Print a figure and keep it."""
        self.results["figures"].append(found)
        show: Callable[[float], str] = (lambda value: f"{value:.0f} B") if found.get("unit") == "bytes" else seconds
        times = f"{'':21}"
        if found["cpu_s"] != 1.0:  # of a mean, the other side is 1
            times = f"{show(found['cpu_s']):>10} {show(found['openreg_s']):>10}"
        target = ""
        if "target" in found:
            target = f"   target {found['target']:.2f}: {verdict(comparison(found), found['target'])}"
        note = f"   {found['note']}" if "note" in found else ""
        interval = ""
        if self.options.processes > 1 and "low" in found:
            interval = f"  {found['low']:.2f} to {found['high']:.2f}"
        self.say(f"{found['name']:40} {times} {found['ratio']:7.2f}{interval}{target}{note}")

    def write(self) -> None:
        """Write the results where --json says."""
        text = json.dumps(self.results, indent=1) + "\n"
        if self.options.json == "-":
            sys.stdout.write(text)
        elif self.options.json:
            Path(self.options.json).write_text(text)


def together(runs: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The figures of several processes as one: the medians, and the intervals of the processes' ratios.

    Where the loader puts the libraries, and what the allocators hold, differ from process to process. A figure that some
    process lacks, or that is made of something else there, gets no interval.
    """
    result = []
    for name in dict.fromkeys(found["name"] for run in runs for found in run):
        same = [found for run in runs for found in run if found["name"] == name]
        ratios = compared([1.0] * len(same), [found["ratio"] for found in same])
        whole = len(same) == len(runs) and all(found.get("of") == same[0].get("of") for found in same)
        merged = {key: value for key, value in same[0].items() if key not in ("low", "high")}
        for key in ("cpu_s", "openreg_s", "ratio"):
            merged[key] = statistics.median(found[key] for found in same)
        if whole and not math.isinf(ratios.high):
            merged |= {"low": ratios.low, "high": ratios.high}
        result.append(merged)
    return result


def earlier_results(path: str, now: dict[str, Any]) -> dict[str, Any]:
    """What a file of --json holds.

    Raises:
        SystemExit: it is not such a file, or a run like `now` cannot be compared with it.
    """
    try:
        earlier = json.loads(Path(path).read_text())
        before = {key: earlier[key] for key in SAME}
        ends = [(found["name"], found["case"], found.get("low"), found.get("high")) for found in earlier["figures"]]
    except OSError as error:
        raise SystemExit(f"bench: --against cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"bench: expected a file that --json of this version wrote, but got {path}") from None
    for key, value in before.items():
        if value != now[key]:
            raise SystemExit(f"bench: {path} was measured with {key} {value}, but this run has {now[key]}; "
                             "use the same in both runs")  # fmt: skip
    if all(low is None for *_, low, _ in ends):
        raise SystemExit(f"bench: {path} has no ratio with an interval; write it with --rounds of at least 6")
    return earlier


def against(report: Report, path: str, earlier: dict[str, Any]) -> int:
    """Print the figures that are slower than in `earlier` by more than the noise; 1 if there are some, or one is missing."""
    only = report.options.only
    now = {found["name"]: found for found in report.results["figures"]}
    before = {found["name"]: found for found in earlier["figures"] if "low" in found}
    wanted = [name for name, found in before.items() if not only or found["case"] in only]
    if not wanted:
        raise SystemExit(f"bench: {path} has no figures of the selected cases")
    slower, missing, both = 0, 0, 0
    for key in ("processor", "torch", "processes"):
        if earlier.get(key) != report.results[key]:
            report.say(f"{path} was measured with {key} {earlier.get(key)}, this run with {report.results[key]}")
    for name in wanted:
        was, here = before[name], now.get(name)
        if here is None or "low" not in here:
            missing += 1
            report.say(f"missing: {name} is in {path}, but was not measured here, or has no interval")
        elif was.get("of") != here.get("of"):
            report.say(f"not compared: {name}, which is made of other figures or contenders in {path}")
        else:
            both += 1
            if here["low"] > was["high"]:
                slower += 1
                report.say(f"slower: {name}: {here['ratio']:.2f} ({here['low']:.2f} to {here['high']:.2f}), was "
                           f"{was['ratio']:.2f} ({was['low']:.2f} to {was['high']:.2f})")  # fmt: skip
    report.say(f"against {path}: {slower} of {plural(both, 'figure')} slower beyond the noise, {missing} missing")
    return 1 if slower or missing else 0
