"""Times the device against the CPU: `make bench ARGS="SUITE …"`, or `python benchmarks/bench.py SUITE …`.

Exits with 0 even if a target is missed, because a busy machine can miss any, and with 1 if `--against FILE` finds a
slower figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from report import Figure, Report, against, average, earlier_results, together
from timing import LEAST, limit_instructions

import openreg_ops  # noqa: F401 -- registers the device

# A suite is a module of `suites` with CASES (name: a function that takes the options and yields figures), perhaps MEANS
# (the end of the names of the figures, and the target of their geometric mean), and SEPARATE if each case needs a
# process of its own.
SUITES = {
    "device": "what the device adds to PyTorch's operators, to a training step and to the import",
    "operators": "the openreg:: operators at transformer sizes",
    "compiled": "torch.compile against torch.compile on the CPU",
    "steps": "training steps in eager mode",
    "graphs": "replays of captured work against eager mode on the CPU",
    "scaling": "how times grow with size and with processes",
}


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench", description=__doc__.splitlines()[0])
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", help="device if there is none")
    for name, about in SUITES.items():
        suite = suites.add_parser(name, help=about, description=about)
        suite.set_defaults(dtype=None)
        suite.add_argument("--only", metavar="NAME", nargs="+", help="cases to run; an unknown name lists all")
        suite.add_argument("--rounds", type=int, default=101, help="rounds of each case, at most (default 101)")
        limit = 2.0 if name == "operators" else 20.0
        suite.add_argument("--seconds", type=float, default=limit,
                           help=f"a case ends after {LEAST} rounds and this time (default {limit})")  # fmt: skip
        suite.add_argument("--threads", type=int, help="number of threads")
        suite.add_argument("--processes", type=int, metavar="N",
                           help=f"measure in N processes, one after the other (default 1; {LEAST} with --json or "
                           "--against FILE)")  # fmt: skip
        suite.add_argument("--json", metavar="FILE", help="write the results; - writes them to stdout")
        suite.add_argument("--against", metavar="best|FILE", nargs="+", default=[],
                           help="an earlier file of --json; operators: also best, for the fastest of eager PyTorch, "
                           "torch.compile and ATen's fused operator")  # fmt: skip
        if name == "operators":
            suite.add_argument("--dtype", choices=["float32", "float64", "float16", "bfloat16"],
                               help="default float32; with --against best float32, bfloat16 and float16")  # fmt: skip
    chosen = words if words and (words[0] in ("-h", "--help") or words[0][:1] != "-") else ["device", *words]
    options = parser.parse_args(chosen)
    files = [word for word in options.against if word != "best"]
    options.best, options.earlier = "best" in options.against, files[0] if files else None
    if len(files) > 1:
        parser.error(f"--against takes one file, but got {' '.join(files)}")
    if options.best and options.suite != "operators":
        parser.error(f"--against best is for the suite operators, but got {options.suite}")
    if options.processes is None:
        options.processes = LEAST if options.json or options.earlier else 1
    for name in ("rounds", "seconds", "threads", "processes"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name}: expected a number above 0, but got {value}")
    return options


def in_a_process(options: argparse.Namespace, only: list[str] | None, shows: bool = False) -> list[Figure]:
    """The figures of the suite, measured in a process of its own; with `shows`, what that prints is printed."""
    words = [options.suite, "--processes", "1", *(["--only", *only] if only else [])]
    for name in ("rounds", "seconds", "threads", "dtype"):
        words += [f"--{name}", str(value)] if (value := getattr(options, name)) is not None else []
    words += ["--against", "best"] if options.best else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        run = [sys.executable, __file__, *words, "--json", str(path)]
        # JSON may go to stdout, so a report goes to stderr.
        done = subprocess.run(
            run, stdout=(sys.stderr if options.json == "-" else None) if shows else subprocess.DEVNULL
        )
        if done.returncode:
            raise SystemExit(f"bench: a process that measures ended with {done.returncode}")
        return json.loads(path.read_text())["figures"]


def measure(suite: ModuleType, names: list[str], options: argparse.Namespace, report: Report) -> None:
    """Measure cases, and the geometric means of all of them."""
    for name in names:
        separate = getattr(suite, "SEPARATE", False) and len(names) > 1
        for found in in_a_process(options, [name]) if separate else suite.CASES[name](options):
            report.add({**found, "case": name})
    for ending, target in getattr(suite, "MEANS", {}).items():
        of = [found for found in report.results["figures"] if found["name"].endswith(ending)]
        if len(of) > 1:
            report.add({**average(f"geometric mean{ending}", of, target), "case": "geometric mean"})


def main(words: list[str]) -> int:
    options = parse(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    limit_instructions()
    suite: Any = importlib.import_module(f"suites.{options.suite}")
    names = options.only or list(suite.CASES)
    if unknown := [name for name in names if name not in suite.CASES]:
        raise SystemExit(f"bench: no case {', '.join(unknown)} in {options.suite}; there are {', '.join(suite.CASES)}")
    report = Report(options)
    earlier = earlier_results(options.earlier, report.results) if options.earlier else None
    if options.processes > 1:
        runs = [in_a_process(options, options.only, shows=index == 0) for index in range(options.processes)]
        report.say(f"the medians of {options.processes} processes, and their intervals:")
        for found in together(runs):
            report.add(found)
    else:
        measure(suite, names, options, report)
    report.write()
    return against(report, options.earlier, earlier) if earlier else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
