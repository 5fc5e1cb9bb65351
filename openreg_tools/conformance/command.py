"""Run PyTorch's databases, and every operator that a device lists, on any device against the CPU, one case at a time.

A case is an operator, module or optimizer, and a dtype. The suite `schemas` has a case for each operator that the
dispatcher lists for the device, called with arguments made from its schema. Cases run in worker processes, so that one
which crashes or hangs costs only itself. Results go to a JSON-lines file as they come; a run that was interrupted goes
on where it stopped. With --against, it fails where a case that was good in an earlier run is not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

from openreg_tools import backends
from openreg_tools.conformance import cuda_dtypes, generate, generated_calls, schemas, sweep, training
from openreg_tools.conformance.outcomes import Tally
from openreg_tools.conformance.report import Case, ConformanceReport, Record
from openreg_tools.conformance.worker import Worker, on_workers
from openreg_tools.core import child, opinfo, options
from openreg_tools.core import device as devices
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Progress, add_output, write

SUITES = ("operators", "modules", "optimizers", "schemas")
CHECKS = tuple(dict.fromkeys((*sweep.CHECKS, *cuda_dtypes.CHECKS, *training.CHECKS, *generated_calls.CHECKS)))


def dtypes_of(suites: Iterable[str] = SUITES, device: str | None = None) -> dict[str, list[str]]:
    """Everything that can be checked, by name, and the dtypes that the CPU supports for it."""
    found: dict[str, list[str]] = {}
    if "operators" in suites:
        found |= {name: opinfo.dtypes_of(op) for name, op in opinfo.database().items()}
    if "modules" in suites:
        found |= {
            name: [dtype for dtype in training.DTYPES if getattr(torch, dtype) in info.dtypes]
            for name, info in training.modules().items()
        }
    if "optimizers" in suites:
        found |= {name: list(training.DTYPES) for name in training.optimizers()}
    if "schemas" in suites:  # whose generated arguments are of every dtype
        found |= {name: ["float32"] for name in schemas.names(devices.target_of(device).device)}
    return found


def check(
    name: str, dtype: str, device: str, samples: int, checks: tuple[str, ...], at: Callable[[str], None]
) -> Tally:
    """Check one case."""
    if "::" in name:
        return generated_calls.check(name, device, samples, checks, at)
    if name.startswith("nn.") and not name.startswith("nn.functional."):
        return training.check_module(training.modules()[name], getattr(torch, dtype), device, checks, at)
    if name.startswith("optim."):
        return training.check_optimizer(training.optimizers()[name], getattr(torch, dtype), device, checks, at)
    op, type_ = opinfo.database()[name], getattr(torch, dtype)
    tally = sweep.check(op, type_, device, samples, tuple(check for check in checks if check in sweep.CHECKS), at)
    tally.add(cuda_dtypes.check(op, type_, device, samples, checks, at))
    return tally


# ---- the worker ----


def serve(device: str) -> None:
    """Serve the requests of `Worker.ask` until the parent ends."""
    calls: dict[str, generated_calls.Calls] = {}

    def work(request: Record, answer: Callable[[Any], None]) -> None:
        match request:
            case {"load": suites}:  # which takes seconds
                dtypes_of(suites)
            case {"name": name, "dtype": dtype}:
                start = time.perf_counter()
                tally = check(
                    name,
                    dtype,
                    device,
                    request["samples"],
                    tuple(request["checks"]),
                    lambda where: answer({"at": where}),
                )
                answer({
                    "operator": name, "dtype": dtype, "ran": tally.ran,
                    "failures": [vars(failure) for failure in tally.failures], "notes": tally.notes,
                    "seconds": round(time.perf_counter() - start, 3),
                })  # fmt: skip
            case {"given": given}:  # generated calls of an operator
                key = json.dumps(given)
                calls[key] = calls.get(key) or generated_calls.Calls(device, given, answer)
                answer(calls[key].answer_to(request))

    child.parent().serve(work)


# ---- the run ----


def fingerprint(arguments: argparse.Namespace) -> Record:
    """What must be equal for earlier results to count: the backend, the checker, torch, and what was asked."""
    digest = hashlib.sha256()
    libraries = sorted(backends.of_device(arguments.device).files())
    backend = [Path(sys.modules[name].__file__ or "") for name in arguments.modules]
    tools = Path(__file__).parents[1]
    sources = sorted(path for folder in ("conformance", "core") for path in (tools / folder).glob("*.py"))
    for path in (*libraries, *backend, *sources):
        if path.is_file():
            digest.update(path.read_bytes())
    return {
        "torch": torch.__version__,
        "build": digest.hexdigest()[:16],
        "device": arguments.device,
        "samples": arguments.samples,
        "checks": list(arguments.checks),
    }


def load(path: Path, header: Record | None) -> dict[Case, Record]:
    """Earlier results by operator and dtype; none where a `header` is given that is not theirs."""
    if not path.exists():
        return {}
    lines = []
    with path.open() as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed run
                lines.append(json.loads(line))
    if not lines or header not in (None, lines[0]):
        return {}
    return {(record["operator"], record["dtype"]): record for record in lines[1:]}


def run(cases: Iterable[Case], arguments: argparse.Namespace, results: TextIO) -> list[Record]:
    """Run the cases on `arguments.jobs` workers, writing each record as it comes."""
    todo, records, lock = list(cases), [], threading.Lock()
    progress = Progress(len(todo), "differ")

    def one(worker: Worker, case: Case) -> None:
        record = run_case(worker, *case)
        with lock:
            records.append(record)
            results.write(json.dumps(record) + "\n")
            results.flush()
            progress.step(f"{record['operator']} {record['dtype']}", found=bool(record["failures"]))

    on_workers(todo, [Worker(arguments) for _ in range(arguments.jobs)], one)
    return records


def run_case(worker: Worker, name: str, dtype: str) -> Record:
    """The record of a case; of one that ends the worker, too."""
    start, a = time.monotonic(), worker.arguments
    found = worker.ask({"name": name, "dtype": dtype, "samples": a.samples, "checks": list(a.checks)})
    if "ended" not in found:
        return found
    checked, _, sample = found["at"].partition(", sample ")
    failure = {"check": checked, "kind": found["ended"], "sample": int(sample.partition(",")[0] or -1),
               "message": found["message"]}  # fmt: skip
    return {
        "operator": name, "dtype": dtype, "ran": {}, "failures": [failure], "notes": {},
        "seconds": round(time.monotonic() - start, 3),
    }  # fmt: skip


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    devices.add_device(parser, key=False)
    parser.add_argument("--suites", nargs="+", default=SUITES, choices=SUITES, metavar="SUITE",
                        help=f"suites to run, of {', '.join(SUITES)} (default all)")  # fmt: skip
    parser.add_argument(
        "--ops", type=options.regex, default="", metavar="REGEX", help="only cases whose full name matches"
    )
    parser.add_argument("--dtypes", nargs="+", default=opinfo.DTYPES, choices=opinfo.DTYPES, metavar="DTYPE",
                        help=f"dtypes to run, of {', '.join(opinfo.DTYPES)} (default all)")  # fmt: skip
    parser.add_argument("--checks", nargs="+", default=CHECKS, choices=CHECKS, metavar="CHECK",
                        help=f"checks to run, of {', '.join(CHECKS)} (default all)")  # fmt: skip
    parser.add_argument("--samples", type=options.count, default=6,
                        help="sample inputs per case, spread over all of them (default 6)")  # fmt: skip
    parser.add_argument(
        "--jobs", type=options.count, default=os.cpu_count(), help="worker processes (default: one per core)"
    )
    parser.add_argument("--threads", type=options.count, default=1, help="threads of each worker (default 1)")
    parser.add_argument(
        "--timeout", type=options.duration, default=180, help="seconds allowed for one case (default 180)"
    )
    parser.add_argument("--out", type=Path, help="results file (default out/conformance-DEVICE.jsonl)")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results instead of continuing")
    parser.add_argument("--against", type=Path, metavar="FILE",
                        help="an earlier results file: fail only if a case is worse than in this file")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="list every operator, including those that pass")
    add_output(parser)
    parser.add_argument("--generate", type=options.count, metavar="N",
                        help="instead of the suites, make N random calls of every operator that the dispatcher lists")  # fmt: skip
    parser.add_argument(
        "--seed", type=int, help="seed of the generated calls: equal seeds give equal calls (default 0)"
    )
    parser.add_argument(
        "--case", metavar="JSON", help="run one generated call again, from the JSON that a finding prints"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """0 if everything passed, 1 if not, 130 if interrupted.

    Raises:
        Wrong: what was asked for does not exist.
    """
    devices.load(arguments.modules, arguments.device)
    arguments.device = devices.target_of(arguments.device).device
    devices.usable(arguments.device)
    if arguments.worker:
        torch.set_num_threads(arguments.threads)
        serve(arguments.device)
        return 0
    if arguments.against and not arguments.against.is_file():
        raise Wrong(f"there is no results file {arguments.against}")
    if arguments.seed is not None and arguments.generate is None:
        raise Wrong("--seed is the seed of generated calls: add --generate N")
    if arguments.case:
        return write(generate.replay(arguments), arguments, verbose=arguments.verbose)
    return _run(arguments) if arguments.generate is None else _generate(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    defaults = {"--suites": SUITES, "--dtypes": opinfo.DTYPES, "--checks": CHECKS}
    if given := [name for name, default in defaults.items() if getattr(arguments, name[2:]) is not default]:
        raise Wrong(f"--generate makes calls instead of running the suites: leave out {' and '.join(given)}")
    arguments.seed = arguments.seed or 0
    listed = generate.listed(arguments.device)
    names = [name for name in listed if re.search(arguments.ops, name)]
    if not names:
        raise Wrong(options.nothing_matches(arguments.ops, listed))
    return write(generate.search(arguments, names), arguments, verbose=arguments.verbose)


def _run(arguments: argparse.Namespace) -> int:
    pattern, dtypes = re.compile(arguments.ops), dtypes_of(arguments.suites, arguments.device)
    cases = [(name, d) for name, of in dtypes.items() if pattern.search(name) for d in of if d in arguments.dtypes]
    if not any(map(pattern.search, dtypes)):
        raise Wrong(options.nothing_matches(arguments.ops, dtypes))
    if not cases:
        chosen = ", ".join(arguments.dtypes)
        raise Wrong(f"nothing that matches --ops {arguments.ops!r} has one of the dtypes {chosen}")
    path = arguments.out or Path("out") / f"conformance-{arguments.device.replace(':', '')}.jsonl"
    against = load(arguments.against, None) if arguments.against else None  # before it is written, if it is `path`
    header = fingerprint(arguments)
    earlier = {} if arguments.fresh else load(path, header)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written again, so that a record that was run again appears once.
    with path.open("w") as results:
        for line in (header, *earlier.values()):
            results.write(json.dumps(line) + "\n")
        results.flush()
        todo = [case for case in cases if case not in earlier]
        if earlier:
            print(
                f"{len(cases) - len(todo)} of {len(cases)} cases are in {path} already (--fresh runs all)",
                file=sys.stderr,
            )
        try:
            records = run(todo, arguments, results) if todo else []
        except KeyboardInterrupt:
            print(f"\nstopped; the same command continues from {path}", file=sys.stderr)
            return 130
    report = ConformanceReport(header, [earlier[case] for case in cases if case in earlier] + records, against)
    status = write(report, arguments, verbose=arguments.verbose)
    if arguments.json != "-":
        print(f"results in {path}")
    return status
