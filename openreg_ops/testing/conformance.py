"""Run PyTorch's OpInfo database on the device against the CPU, one operator and dtype at a time.

Operators run in worker processes, so that one which crashes or hangs costs only itself. Results go to
a JSON-lines file as they come; a run that was interrupted goes on where it stopped. What is known to
fail stands in `known_failures`, and the run fails when a listed operator passes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

from openreg_ops.testing import opinfo
from openreg_ops.testing.known_failures import KNOWN_FAILURES
from openreg_ops.tools import forms

Record = dict[str, Any]  # one line of the results file: operator, dtype, ran, failures, notes, seconds


# ---- the worker: reads "operator dtype" lines, answers with JSON lines ----


def work(device: str, samples: int, checks: tuple[str, ...], threads: int) -> None:
    """Serve cases from stdin until it closes. What operators print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    torch.set_num_threads(threads)
    database = opinfo.database()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    answer(ready=True)
    for line in sys.stdin:
        name, dtype = line.split()
        start = time.perf_counter()
        report = opinfo.check(
            database[name], getattr(torch, dtype), device, samples, checks, at=lambda where: answer(at=where)
        )
        answer(
            operator=name,
            dtype=dtype,
            ran=dict(report.ran),
            failures=[vars(failure) for failure in report.failures],
            notes=dict(report.notes),
            seconds=round(time.perf_counter() - start, 3),
        )


class Worker:
    """A worker process, started again after it dies."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        a = self.arguments
        self.stderr = tempfile.TemporaryFile()
        command = [sys.executable, "-P", "-m", "openreg_ops.testing.conformance", "--worker", "--device", a.device]
        command += ["--samples", str(a.samples), "--checks", *a.checks, "--threads", str(a.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        if not (self.read(time.monotonic() + 120) or {}).get("ready"):
            self.stop()
            raise RuntimeError(f"the worker did not start: {self.last_words()}")

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.selector.close()
            self.process = None

    def read(self, deadline: float) -> Record | None:
        """The next answer; None at the end of the process, TimeoutError at the deadline."""
        while b"\n" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            if not got:
                return None
            self.buffer += got
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def run(self, name: str, dtype: str) -> Record:
        if self.process is None:
            self.start()
        start, where = time.monotonic(), "start"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{name} {dtype}\n".encode())
            self.process.stdin.flush()
        try:
            while answer := self.read(start + self.arguments.timeout):
                if "operator" in answer:
                    return answer
                where = answer["at"]
            code = self.process.wait()
            kind, message = "crash", f"{f'signal {-code}' if code < 0 else f'exit {code}'}: {self.last_words()}"
        except TimeoutError:
            kind, message = "timeout", f"no result after {self.arguments.timeout} s"
        self.stop()
        check, _, sample = where.partition(", sample ")
        failure = {"check": check, "kind": kind, "sample": int(sample or -1), "message": message}
        return {
            "operator": name, "dtype": dtype, "ran": {}, "failures": [failure], "notes": {},
            "seconds": round(time.monotonic() - start, 3),
        }  # fmt: skip

    def last_words(self) -> str:
        """What the process said before it died: its error, or the fault that ended it."""
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr.read().decode(errors="replace").splitlines() if line.strip()]
        for i, line in enumerate(lines):
            if line.startswith(("Fatal Python error", "Traceback")):
                return lines[i if line.startswith("Fatal") else -1]
        return " ".join(lines[-2:])[:300]


# ---- the run ----


def fingerprint(arguments: argparse.Namespace) -> Record:
    """What must be equal for earlier results to count: the build, the checker, torch, and what was asked."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in (*sorted(package.glob("_C*.so")), Path(opinfo.__file__)):
        digest.update(path.read_bytes())
    return {
        "torch": torch.__version__,
        "build": digest.hexdigest()[:16],
        "device": arguments.device,
        "samples": arguments.samples,
        "checks": list(arguments.checks),
    }


def load(path: Path, header: Record) -> dict[tuple[str, str], Record]:
    """Earlier results of the same fingerprint, by operator and dtype."""
    if not path.exists():
        return {}
    lines = []
    with path.open() as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed run
                lines.append(json.loads(line))
    if not lines or lines[0] != header:
        return {}
    return {(record["operator"], record["dtype"]): record for record in lines[1:]}


class Progress:
    """A bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.total, self.out, self.done, self.failed = total, out, 0, 0
        self.start = self.shown = time.monotonic()
        self.live = out.isatty()

    def step(self, record: Record) -> None:
        self.done += 1
        self.failed += bool(record["failures"])
        now = time.monotonic()
        if now - self.shown < (0.1 if self.live else 30) and self.done < self.total:
            return
        self.shown = now
        left = (now - self.start) / self.done * (self.total - self.done)
        filled = 30 * self.done // self.total
        text = (
            f"[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total} {self.failed} failed, "
            f"{left / 60:.0f} min left  {record['operator']} {record['dtype']}"
        )
        print(f"\r{text:<110.110}" if self.live else text, end="" if self.live else "\n", file=self.out, flush=True)
        if self.live and self.done == self.total:
            print(file=self.out)


def run(cases: Iterable[tuple[str, str]], arguments: argparse.Namespace, results: TextIO) -> list[Record]:
    """Run the cases on `arguments.jobs` workers, writing each record as it comes."""
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    records: list[Record] = []
    progress, lock, errors = Progress(todo.qsize(), sys.stderr), threading.Lock(), []

    def serve() -> None:
        worker = Worker(arguments)
        try:
            while not errors:
                record = worker.run(*todo.get_nowait())
                with lock:
                    records.append(record)
                    results.write(json.dumps(record) + "\n")
                    results.flush()
                    progress.step(record)
        except queue.Empty:
            pass
        except Exception as error:
            errors.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(arguments.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return records


# ---- the summary ----


DEFAULT_SAMPLES = 6


def fixed(records: list[Record]) -> set[str]:
    """The listed operators that pass in every dtype they are listed for, all of those having run."""
    passed = {(r["operator"], r["dtype"]) for r in records if not r["failures"] and r["ran"]}
    return {
        name
        for name, known in KNOWN_FAILURES.items()
        if all((name, dtype) in passed for dtype in opinfo.dtypes_of(opinfo.database()[name]) if dtype in known.dtypes)
    }


def judge(record: Record, fixed: Collection[str] = ()) -> str:
    """pass, fail, known, or fixed: a known failure of an operator that passes."""
    known = KNOWN_FAILURES.get(record["operator"])
    listed = known is not None and record["dtype"] in known.dtypes
    if record["failures"]:
        return "known" if listed and {f["check"] for f in record["failures"]} <= set(known.checks) else "fail"
    return "fixed" if listed and record["operator"] in fixed else "pass"


def summarize(records: list[Record], thorough: bool = True) -> bool:
    """Print the table by dtype and the ranked failures; whether the run is good."""
    verdict = functools.partial(judge, fixed=fixed(records) if thorough else ())
    verdicts = ("pass", "known", "fail", "fixed")
    kinds = [kind for kind in opinfo.KINDS if any(f["kind"] == kind for r in records for f in r["failures"])]
    notes = sorted({note for r in records for note in r["notes"]})
    dtypes = [dtype for dtype in opinfo.DTYPES if any(r["dtype"] == dtype for r in records)]

    def row(name: str, chosen: list[Record]) -> list[Any]:
        judged = collections.Counter(map(verdict, chosen))
        failing = [{f["kind"] for f in r["failures"]} for r in chosen]
        return [
            name, sum(sum(r["ran"].values()) for r in chosen), len(chosen), *(judged[v] for v in verdicts),
            *(sum(kind in each for each in failing) for kind in kinds),
            *(sum(note in r["notes"] for r in chosen) for note in notes),
        ]  # fmt: skip

    rows = [["dtype", "compared", "cases", *verdicts, *kinds, *(f"({note})" for note in notes)]]
    rows += [row(dtype, [r for r in records if r["dtype"] == dtype]) for dtype in dtypes]
    rows.append(row("all", records))
    print(*forms.table(rows), sep="\n")
    print(
        "\nA case is an operator and a dtype; columns after `fixed` count cases in which something of that class"
        "\ndiffered, those in brackets what is allowed to: strides, and values equal only within tolerance.",
    )
    if kinds:
        print(*(f"  {kind}: {opinfo.KINDS[kind]}" for kind in kinds), sep="\n")

    groups: dict[tuple[str, str, str], list[tuple[Record, Record]]] = collections.defaultdict(list)
    for record in records:
        if verdict(record) == "fail":
            for failure in record["failures"]:
                groups[record["operator"], failure["check"], failure["kind"]].append((record, failure))
    if groups:
        print("\nFailures, most frequent first:")
    for (name, check, kind), found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        dtypes_hit = sorted({record["dtype"] for record, _ in found}, key=opinfo.DTYPES.index)
        record, failure = found[0]
        print(
            f"  {len(found):4} {name} {check} [{kind}] {','.join(dtypes_hit)}; "
            f"{record['dtype']} sample {failure['sample']}: {failure['message']}",
        )
    for record in records:
        if verdict(record) == "fixed":
            print(
                f"  {record['operator']} {record['dtype']} is a known failure but passes: take it off the list",
            )
    judged = collections.Counter(map(verdict, records))
    operators = {r["operator"] for r in records}
    bad = {r["operator"] for r in records if verdict(r) in ("fail", "fixed")}
    print(
        f"\n{len(operators)} operators, {len(operators) - len(bad)} good, {len(bad)} not; {len(records)} cases: "
        + ", ".join(f"{judged[v]} {v}" for v in verdicts),
    )
    return not bad


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="openreg", help="device under test (default openreg)")
    parser.add_argument("--ops", default="", metavar="REGEX", help="only operators whose full name matches")
    parser.add_argument("--dtypes", nargs="+", default=opinfo.DTYPES, choices=opinfo.DTYPES, metavar="DTYPE")
    parser.add_argument("--checks", nargs="+", default=opinfo.CHECKS, choices=opinfo.CHECKS, metavar="CHECK")
    parser.add_argument(
        "--samples", type=int, default=DEFAULT_SAMPLES, help="sample inputs a case, spread over all (default 6)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes (default: one a core)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker (default 1)")
    parser.add_argument("--timeout", type=float, default=180, help="seconds allowed for one case (default 180)")
    parser.add_argument("--out", type=Path, help="results file (default out/conformance-DEVICE.jsonl)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results instead of going on")
    parser.add_argument("--retry", action="store_true", help="run again the cases that failed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        work(arguments.device, arguments.samples, tuple(arguments.checks), arguments.threads)
        return 0
    pattern = re.compile(arguments.ops)
    cases = [
        (name, dtype)
        for name, op in opinfo.database().items()
        if pattern.search(name)
        for dtype in opinfo.dtypes_of(op)
        if dtype in arguments.dtypes
    ]
    if not cases:
        print(f"no operator matches --ops {arguments.ops!r} with dtypes {', '.join(arguments.dtypes)}", file=sys.stderr)
        return 2
    path = arguments.out or Path("out") / f"conformance-{arguments.device.replace(':', '')}.jsonl"
    header = fingerprint(arguments)
    earlier = {} if arguments.fresh else load(path, header)
    if arguments.retry:
        earlier = {case: record for case, record in earlier.items() if not record["failures"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written anew, so that a record that is run again stands once.
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
            print(f"\nstopped; the same command goes on from {path}", file=sys.stderr)
            return 130
    # Fewer samples or checks can miss a known failure.
    thorough = arguments.samples >= DEFAULT_SAMPLES and set(arguments.checks) == set(opinfo.CHECKS)
    good = summarize([earlier[case] for case in cases if case in earlier] + records, thorough)
    print(f"results in {path}")
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
