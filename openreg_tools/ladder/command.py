"""Run the rungs, each in a process of its own, so that a crash costs one check."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openreg_tools.core import child, device, options
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Progress, add_output, write
from openreg_tools.ladder.report import Checked, Ladder, Program
from openreg_tools.ladder.rung import IMPORTS, RUNGS, Rung, Skip, imports

_FRESH = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # a code generator that has changed writes other kernels


# ---- the worker ----


def serve(name: str) -> None:
    """Answer each request of a rung and a check's place with the check's outcome."""

    def work(request: Any, answer: Callable[[Any], None]) -> None:
        found = RUNGS[request["rung"] - 1].checks()[request["check"]]
        try:
            found.run(name)
            answer({"verdict": "pass", "said": ""})
        except Skip as error:
            answer({"verdict": "skip", "said": str(error)})
        except Exception as error:
            answer({"verdict": "fail", "said": _said(error)})

    child.parent().serve(work)


def _said(error: Exception) -> str:
    """What an error says; for an assertion without a message, what it expects."""
    if not isinstance(error, AssertionError):
        return all_lines(error)
    if str(error):
        return str(error)
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"expected {line.removeprefix('assert ')}"


# ---- the run ----


def run(rung: Rung, arguments: argparse.Namespace, progress: Progress) -> list[Checked]:
    """The outcomes of a rung's checks. A check that ends its process is followed by another process."""
    words = ["ladder", "--worker", "--device", arguments.device]
    words += [word for name in imports() for word in ("--import", name)]
    found: list[Checked] = []
    checks = rung.checks()
    while len(found) < len(checks):
        with child.Child.start([sys.executable, "-P", "-m", "openreg_tools", *words], _FRESH) as worker:
            while len(found) < len(checks):
                one, start = checks[len(found)], time.monotonic()
                worker.send({"rung": rung.number, "check": len(found)})
                ended = False
                try:
                    answer = worker.read(arguments.timeout)
                    worker.read(arguments.timeout)  # the line that ends an answer
                except child.Ended as error:
                    answer, ended = {"verdict": "fail", "said": f"the process ended: {error}"}, True
                found.append(Checked(one, answer["verdict"], answer["said"], time.monotonic() - start))
                progress.step(f"{rung.number} {one.name}", found=answer["verdict"] == "fail")
                if ended:
                    break
    return found


def climb(arguments: argparse.Namespace) -> Ladder:
    """Run every rung."""
    rungs = RUNGS[: arguments.rungs]
    progress = Progress(sum(len(rung.checks()) for rung in rungs), "failed")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = pool.map(lambda rung: run(rung, arguments, progress), rungs)
        return Ladder(arguments.device, {rung.number: found for rung, found in zip(rungs, outcomes, strict=True)},
                      min(arguments.require, arguments.rungs), arguments.trace)  # fmt: skip


def recorded(path: str) -> Program:
    """The operators in a file that `trace --json` wrote.

    Raises:
        Wrong: it is not such a file.
    """
    try:
        found = json.loads(Path(path).read_text())
        names = dict.fromkeys(row["operator"] for row in found["operators"])
        return Program(found["name"] or Path(path).name, tuple(names))
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {error.strerror}; write it with `openreg-tools trace --json`") from None
    except (ValueError, TypeError, KeyError):
        raise Wrong(f"expected a file that `openreg-tools trace --json` wrote, but got {path}") from None


# ---- the command ----


def _rung(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= len(RUNGS):
        raise argparse.ArgumentTypeError(f"expected the number of a rung, 1 to {len(RUNGS)}, but got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device.add_device(parser, key=False)
    parser.add_argument("--require", type=_rung, default=len(RUNGS), metavar="N",
                        help="exit with 0 if rungs 1 to N are reached (default 12)")  # fmt: skip
    parser.add_argument(
        "--timeout", type=options.duration, default=600, help="seconds allowed for one check (default 600)"
    )
    parser.add_argument("--rungs", type=_rung, default=len(RUNGS), metavar="N",
                        help="run only the first N rungs, of which all are required")  # fmt: skip
    parser.add_argument(
        "--jobs", type=options.count, default=os.cpu_count(), help="rungs to run at a time (default: one per core)"
    )
    parser.add_argument("--trace", nargs="+", default=(), metavar="FILE",
                        help="also report the operators of programs, from files that `trace --json` wrote")  # fmt: skip
    add_output(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0 if the required rungs are reached, 1 if not.

    Raises:
        Wrong: there is no such device, or a file of --trace is not one.
    """
    device.load(arguments.modules, arguments.device)
    arguments.device = device.target_of(arguments.device).device
    if arguments.worker:
        serve(arguments.device)
        return 0
    arguments.trace = tuple(recorded(path) for path in arguments.trace)
    os.environ[IMPORTS] = ",".join(arguments.modules)
    return write(climb(arguments), arguments)
