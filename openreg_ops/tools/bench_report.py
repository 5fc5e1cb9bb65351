"""What every suite of ``bench`` prints and writes, and how ``--against FILE`` compares a run with an earlier one.

A figure is a dict with a ratio (above 1 is slower than the other side), the interval of the ratio (`low` and `high`,
absent if there were too few rounds) and perhaps a target. Only figures with an interval are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from openreg_ops.tools.timing import LEAST, Comparison, values, verdict
from openreg_tools.forms import Wrong, seconds, write_file

MEAN = "geometric mean"  # the name of its case
NAMING = ("name", "size", "dtype", "threads", "mode")  # the entries of a case that identify its figures
# What must be the same in both runs, and the option or variable that sets it.
SAME = {"suite": "the suite", "threads": "--threads", "mode": "OPENREG_LAUNCH_MODE"}


def suite_of(options: argparse.Namespace) -> str:
    return f"{options.suite}, against the best" if "best" in (options.against or ()) else options.suite


def earlier_file(options: argparse.Namespace) -> str | None:
    """The file that the figures must not be worse than."""
    return next((word for word in options.against or () if word != "best"), None)


class Report:
    """The head of a report, printed at once, and its results for `--json`."""

    def __init__(self, options: argparse.Namespace, about: str, **head: Any) -> None:
        self.options = options
        self.log = sys.stderr if options.json == "-" else sys.stdout
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = next(iter(models), platform.machine())
        vectors, cores = torch.backends.cpu.get_cpu_capability(), len(os.sched_getaffinity(0))
        threads, mode, load = torch.get_num_threads(), torch.openreg.get_launch_mode(), os.getloadavg()[0]
        self.results: dict[str, Any] = {
            "suite": suite_of(options),
            "torch": torch.__version__,
            "threads": threads,
            "mode": mode,
            "processor": f"{processor} ({vectors})",
            "cores": cores,
            "load": round(load, 2),
            "processes": 1,
            "dtype": options.dtype,
            **head,
            "cases": [],
        }
        self.say(f"torch {torch.__version__}, {about}, launch mode {mode}")
        busy = " (busy: expect noise)" if load > cores / 2 else ""
        self.say(
            f"{plural(threads, 'thread')}, {plural(cores, 'core')} of {processor} ({vectors}), load {load:.1f}{busy}"
        )

    def say(self, text: str = "", end: str = "\n") -> None:
        print(text, file=self.log, flush=True, end=end)

    def add(self, found: Comparison, target: float | None = None, **names: Any) -> None:
        self.results["cases"].append({**names, **entry(found, target)})

    def finish(self) -> int:
        """Write the results where `--json` says; with `--against FILE`, return 1 if a figure is worse than there."""
        text = json.dumps(self.results, indent=1)
        if self.options.json == "-":
            print(text)
        elif self.options.json:
            write_file(self.options.json, text + "\n")
        return against(self) if earlier_file(self.options) else 0


def plural(number: int, word: str) -> str:
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number} {word}{ending}"


def entry(found: Comparison, target: float | None = None) -> dict[str, float]:
    """A comparison as a figure."""
    ends = {} if math.isinf(found.high) else {"low": found.low, "high": found.high}
    return {
        "cpu_s": found.reference,
        "openreg_s": found.measured,
        "ratio": found.ratio,
        **ends,
        **({} if target is None else {"target": target}),
    }


def comparison(figure: dict[str, float]) -> Comparison:
    """A figure as a comparison."""
    sides = figure.get("cpu_s", 1.0), figure.get("openreg_s", figure["ratio"])
    return Comparison(*sides, figure.get("low", 0.0), figure.get("high", math.inf))


def figures(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ratios, by a name made of what identifies them."""
    found = {}
    for case in results["cases"]:
        words = [str(case[key]) for key in NAMING if key in case]
        for part in (None, "forward", "training"):
            figure = case if part is None else case.get(part)
            if figure and "ratio" in figure:
                found[", ".join([*words, *([part] if part else [])])] = figure
    return found


def comparable(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures with an interval."""
    return {name: figure for name, figure in figures(results).items() if "low" in figure}


# ---- several processes ----


def of_processes(options: argparse.Namespace, count: int, picture: Callable[[Report], None] | None) -> int:
    """Measure the suite in several processes, one after the other: print the report of the first, and all their ratios.

    A ratio is the median of the processes' ratios, and its interval is made from them: where the loader puts the
    libraries, and what the allocators hold, differ from process to process.
    """
    report = Report(options, f"{plural(count, 'process')} one after the other")
    runs = []
    for number in range(1, count + 1):
        begin, about = time.perf_counter(), f"process {number} of {count}"
        runs.append(in_a_process(options, options.only, report, about, shows=number == 1))
        report.say(f"{about} took {time.perf_counter() - begin:.0f} s")
    report.results = together(runs, load=report.results["load"])
    found = figures(report.results)
    width = max(map(len, found), default=0)
    if found:
        report.say(f"{'':{width}} {'ratio':>6}  interval")
    for name, figure in found.items():
        line = f"{name:{width}} {figure['ratio']:6.2f}  "
        line += f"{figure['low']:.2f} to {figure['high']:.2f}" if "low" in figure else f"{'':12}"
        if (target := figure.get("target")) is not None:
            line += f"   target {target:.2f}: {verdict(comparison(figure), target, of='processes')}"
        report.say(line.rstrip())
    for key, what in (("import_s", "import"), ("node_s", "a node")):
        if key in report.results:
            report.say(f"{what}: {seconds(report.results[key])}, the median of {plural(count, 'process')}")
    if picture:
        picture(report)
    return report.finish()


def together(runs: Sequence[dict[str, Any]], **head: Any) -> dict[str, Any]:
    """The results of several processes as one: medians of numbers, and intervals of the processes' ratios.

    A ratio that some process lacks, or that compares with something else there, gets no interval.
    """
    by_key: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for case in run["cases"]:
            by_key.setdefault(str([case.get(key) for key in NAMING]), []).append(case)
    every = [figures(run) for run in runs]
    results = common([{key: value for key, value in run.items() if key != "cases"} for run in runs])
    results |= {**head, "processes": len(runs), "cases": [common(cases) for cases in by_key.values()]}
    for name, figure in figures(results).items():
        same = [each[name] for each in every if name in each]
        found = values([each["ratio"] for each in same])
        figure.pop("low", None), figure.pop("high", None)
        figure["ratio"] = found.measured
        if len(same) < len(runs):
            figure["only_in"] = len(same)  # processes
        elif all(alike(each, same[0]) for each in same) and not math.isinf(found.high):
            figure |= {"low": found.low, "high": found.high}
    return results


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two figures of one name mean the same: they are of the same cases, against the same contenders."""
    return one.get("of") == other.get("of") and one.get("left_out", {}).keys() == other.get("left_out", {}).keys()


def common(entries: Sequence[Any]) -> Any:
    """The same entry of several results: the median of numbers, the entries of dicts, or all values that differ."""
    if all(isinstance(entry, dict) for entry in entries):
        keys = dict.fromkeys(key for entry in entries for key in entry)
        return {key: common([entry[key] for entry in entries if key in entry]) for key in keys}
    if all(isinstance(entry, float) for entry in entries):
        return statistics.median(entries)
    different = [entry for i, entry in enumerate(entries) if entry not in entries[:i]]
    return different[0] if len(different) == 1 else different


def in_a_process(
    options: argparse.Namespace, only: Sequence[str] | None, report: Report, about: str, shows: bool = False
) -> dict[str, Any]:
    """The results of a suite in a process of its own.

    With `shows`, what it prints is printed. Otherwise, a terminal shows its last line while it runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        words = [sys.executable, *"-P -m openreg_ops bench".split(), options.suite]
        words += ["--processes", "1", "--json", str(path)]
        for name in ("rounds", "seconds", "dtype", "threads"):
            words += [f"--{name}", str(value)] if (value := getattr(options, name)) is not None else []
        words += ["--only", *only] if only else []
        words += ["--against", "best"] if "best" in (options.against or ()) else []
        words += ["--plot", "-"] if options.suite == "scaling" else []
        said, terminal = [], report.log.isatty() and not shows
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                for line in process.stdout:
                    said.append(line)
                    if shows:
                        report.say(line, end="")
                    elif terminal:
                        report.say(f"\r\x1b[K{about}: {line.rstrip()[:60]}", end="")
            except BaseException:
                process.terminate()  # it ends its own processes
                process.stdout.close()
                process.wait()
                raise
            finally:
                if terminal:
                    report.say("\r\x1b[K", end="")
        if process.returncode:
            raise Wrong(f"{about} ended with {process.returncode}:\n{''.join(said)[-2000:].rstrip()}")
        return json.loads(path.read_text())


# ---- one run against another ----


def earlier_results(options: argparse.Namespace, path: str) -> dict[str, Any]:
    """What `path` holds, if this run can be compared with it.

    Raises:
        Wrong: it cannot, and why.
    """
    if options.json not in (None, "-") and Path(options.json).resolve() == Path(path).resolve():
        raise Wrong(f"--json would overwrite {path}, which --against compares with; name another file")
    try:
        earlier = json.loads(Path(path).read_text())
        found = comparable(earlier)
        if not all("name" in case for case in earlier["cases"]):
            raise KeyError
        if not all(0 < each["low"] <= each["ratio"] <= each["high"] < math.inf for each in found.values()):
            raise ValueError
        if type(earlier["processes"]) is not int:
            raise TypeError
        if not all(isinstance(each.get("left_out", {}), dict) for each in found.values()):
            raise TypeError
        before = {key: earlier[key] for key in (*SAME, "processor", "torch", "dtype")}
    except OSError as error:
        raise Wrong(
            f'--against takes "best" or a file that --json wrote, but {path} cannot be read: {error.strerror}'
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Wrong(f"expected a file from --json of this version, but got {path}; write it again") from None
    now = {"suite": suite_of(options), "threads": torch.get_num_threads(), "mode": torch.openreg.get_launch_mode()}
    for key, option in SAME.items():
        if before[key] != now[key]:
            raise Wrong(f"{path} was measured with {option} {before[key]}, and this run has {now[key]}; the figures "
                        f"cannot be compared")  # fmt: skip
    for count, whose in ((earlier["processes"], f"{path} has"), (options.processes, "this run has")):
        if count < LEAST:
            raise Wrong(f"times differ from process to process, and {whose} {plural(count, 'process')}; use --processes "
                        f"{LEAST} or more, the default with --json and --against FILE")  # fmt: skip
    if not found:
        raise Wrong(f"{path} has no ratio with an interval, and only these are compared")
    if before["dtype"] not in (None, options.dtype):
        raise Wrong(f"{path} was measured with --dtype {before['dtype']}; pass this option, too")
    if not any(selected(options, name) for name in found):
        raise Wrong(f"{path} has no figures that the options select, but {', '.join(found)}")
    return earlier


def selected(options: argparse.Namespace, name: str) -> bool:
    """Whether the options select a figure. They select a mean only if they select everything."""
    words = name.split(", ")
    threads = options.threads if "best" in options.against else None
    if words[0] == MEAN:
        return not (options.only or options.dtype or threads)
    return (
        (not options.only or words[0] in options.only)
        and (not options.dtype or options.dtype in words)
        and (not threads or str(threads) in words)
    )


def against(report: Report) -> int:
    """Print the figures that are slower than in the file beyond the noise; 1 if there are some, or if one is missing."""
    options, results = report.options, report.results
    path, earlier = earlier_file(options), options.earlier
    before, now = comparable(earlier), comparable(results)
    both = [name for name in before if name in now and alike(before[name], now[name])]
    wanted = [name for name in before if name not in both and selected(options, name)]
    found = figures(results)
    missing = [name for name in wanted if name not in found or "only_in" in found[name]]
    for name in wanted:
        if name not in missing:
            report.say(f"not compared: {name}, which does not mean the same in both runs or in all processes")
    if earlier["processor"] != results["processor"]:
        report.say(f"{path} was measured on {earlier['processor']}, so a difference may be the processor's")
    if earlier["torch"] != results["torch"]:
        report.say(f"{path} was measured with torch {earlier['torch']}, so a difference may be PyTorch's")
    worse = [name for name in both if now[name]["low"] > before[name]["high"]]
    for name in worse:
        was, here = before[name], now[name]
        report.say(f"slower: {name}: {here['ratio']:.2f} ({here['low']:.2f} to {here['high']:.2f}), was "
                   f"{was['ratio']:.2f} ({was['low']:.2f} to {was['high']:.2f})")  # fmt: skip
    for name in missing:
        report.say(f"missing: {name} is in {path}, but was not measured in every process")
    count = plural(len(both), "figure")
    report.say(f"against {path}: {len(worse)} of {count} slower beyond the noise, {len(missing)} missing")
    if not both and not missing:
        raise Wrong(f"no figure of {path} could be compared")
    return 1 if worse or missing else 0
