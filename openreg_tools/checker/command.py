"""``openreg-tools check MODULE:OP``: the checker on the command line; ``check --abi LIBRARY``: the unstable symbols of
a binary.

The checks run in a child process, so an operator that ends or hangs its process fails one check, and does not end the
report.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openreg_tools import dispatch, forms
from openreg_tools.checker import run
from openreg_tools.checker.checker import Checks, prepare
from openreg_tools.checker.checks import CHECKS
from openreg_tools.checker.report import Report, Result
from openreg_tools.forms import Wrong
from openreg_tools.samples import dtype_of, parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op", metavar="OP", nargs="?", help="MODULE:NAME (an operator, or the result of custom_op), or ns::name"
    )
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="a module to import first, for an operator given as ns::name")  # fmt: skip
    parser.add_argument(
        "--samples", metavar="MODULE:FUNCTION", help="a function of (device, dtype) that returns samples"
    )
    parser.add_argument("--input", action="append", default=[], metavar="ARGUMENTS",
                        help="one sample, such as 'f32[3,4], f32[4], eps=1e-5'; may be repeated")  # fmt: skip
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="a plain function of the same arguments")
    parser.add_argument("--device", help="where to run (default: where the samples are)")
    parser.add_argument("--dtype", default="float32", help="dtype of generated samples (default float32)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="CHECK",
        help=f"checks to run: fast, for those that take a second, or of {', '.join(CHECKS)}",
    )
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK", help="checks to leave out")
    parser.add_argument("--abi", metavar="LIBRARY", help="instead of OP, a library such as mypkg/_C.abi3.so: which symbols "
                        "of torch and CPython it uses that may change, and the lowest versions that it runs with")  # fmt: skip
    parser.add_argument("--explain", metavar="CHECK", help="instead of OP, print what a check tests, with an example")
    parser.add_argument("--require-stable", action="store_true", help="with --abi: exit with 1 if a symbol may change")
    parser.add_argument("--generate", type=forms.count, metavar="N",
                        help="also make N calls with hypothesis, in child processes: layouts, dtypes, special values, aliases")  # fmt: skip
    parser.add_argument(
        "--seed", type=int, help="seed of the generated calls: equal seeds give equal calls (default 0)"
    )
    parser.add_argument(
        "--timeout", type=forms.duration, default=180, help="seconds allowed for one check of one sample (default 180)"
    )
    forms.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="also show why checks were skipped, and what passed")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing failed, 1 if something did, 2 if the request is wrong, 130 if interrupted."""
    try:
        if arguments.abi:
            return _abi(arguments)
        if arguments.explain:
            print(explanation(arguments.explain))
            return 0
        if arguments.op is None:
            raise Wrong("expected an operator, --explain CHECK or --abi LIBRARY")
        if arguments.require_stable:
            raise Wrong("--require-stable applies to a library: give --abi LIBRARY too")
    except Wrong as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # python -P omits it, and my_module is most likely here
    live = sys.stderr.isatty()

    def progress(where: str) -> None:
        if not arguments.quiet:
            print(f"\r{where:<60.60}" if live else where, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        if arguments.seed is not None and arguments.generate is None:
            raise Wrong("--seed is the seed of generated calls: add --generate N")
        if "generated" in _names([*arguments.only, *arguments.skip]):
            raise Wrong("--only and --skip take checks; generated calls are made with --generate N alone")
        # A child imports the operator, so that a library that ends its process there ends a child.
        report = run.in_children(functools.partial(prepared, arguments), arguments.timeout, progress)
        if arguments.generate is not None:
            _generated(report, arguments)
    except (Wrong, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncheck: interrupted", file=sys.stderr)
        return 130
    finally:
        if live and not arguments.quiet:
            print(f"\r{'':60}\r", end="", file=sys.stderr)
    forms.write(report, arguments, verbose=arguments.verbose)
    return 0 if report.passed else 1


def prepared(arguments: argparse.Namespace, started: Callable[[Report], None] = lambda report: None) -> Checks:
    """The checks that the options ask for.

    Raises:
        Wrong, ValueError: the request is wrong.
    """
    return prepare(
        *_asked(arguments), arguments.device, dtype=dtype_of(arguments.dtype), only=_names(arguments.only),
        skip=_names(arguments.skip), reference=_named(arguments.reference) if arguments.reference else None,
        started=started,
    )  # fmt: skip


<<<<<<< HEAD
=======
def _serve(arguments: argparse.Namespace) -> int:
    answer = serving()
    try:
        checks = prepared(arguments, lambda report: answer(at="inputs", report=dataclasses.asdict(report)))
    except (Wrong, ValueError) as error:
        answer(wrong=str(error))
        return 2
    checks.command = tuple(sys.orig_argv[1:])
    with preserved(checks.report.device):
        answer(ready=True, report=dataclasses.asdict(checks.report), known=checks.known, may_pass=checks.may_pass)
        for line in sys.stdin:
            i, name = line.split()
            answer(**dataclasses.asdict(checks.result(int(i), name)))
    return 0


class Checking(Worker):
    """The process that runs the checks of an operator."""

    report: Report | None = None  # as far as the process has prepared it
    known: dict[str, str] = {}
    may_pass: list[str] = []

    @property
    def flags(self) -> tuple[str, ...]:
        return () if sys.path[:1] == [os.getcwd()] else ("-P",)

    def words(self) -> list[str]:
        a = self.arguments
        words = ["check", a.op, "--worker", f"--dtype={a.dtype}"]
        for option in ("device", "samples", "reference"):
            if value := getattr(a, option):
                words.append(f"--{option}={value}")
        words += [f"--input={text}" for text in a.input]
        for option in ("only", "skip"):
            if names := getattr(a, option):
                words += [f"--{option}", *names]
        return words

    def start(self) -> None:
        self.shown = 0  # bytes of its stderr
        super().start()

    def read(self, deadline: float) -> dict[str, Any] | None:
        answer = super().read(deadline)
        if answer and "wrong" in answer:
            raise Wrong(answer["wrong"])
        if answer and "report" in answer and self.report is None or answer and "ready" in answer:
            self.report = Report(**answer["report"])
            self.known, self.may_pass = answer.get("known", {}), answer.get("may_pass", [])
        return answer

    def last_words(self) -> str:
        self.show()
        return super().last_words()

    def show(self) -> None:
        """Print what the process has printed. Reading must not move the offset, which the process shares."""
        while text := os.pread(self.stderr.fileno(), 1 << 16, self.shown):
            self.shown += len(text)
            sys.stderr.write(text.decode(errors="replace"))


def _checked(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    """The report of the checks, which run in a worker process."""
    worker = Checking(arguments)
    began = time.perf_counter()
    try:
        try:
            worker.start()
        except (RuntimeError, TimeoutError) as error:
            if worker.report is None:  # the operator has no part in this
                raise Wrong(f"the process that imports the operator ended: {error}") from None
            return _ended_early(worker.report, error)
        report, worker.report = worker.report, None
        _run(worker, report, progress)
        report.finish(worker.known, worker.may_pass)
    finally:
        worker.stop()
    report.seconds = time.perf_counter() - began
    return report


def _ended_early(report: Report, error: Exception) -> Report:
    report.device, report.samples = report.device or "an unknown device", ["the inputs that were being made"]
    why = f"{report.operator}: the process ended while it made the inputs: {error or 'it did not answer'}"
    report.results.append(Result("runs", 0, "fail", why, "give sample inputs, and find out what ends the process"))
    report.about.setdefault("runs", "The operator accepts the sample.")
    return report


def _run(worker: Checking, report: Report, progress: Callable[[str], None]) -> None:
    ended = hung = 0
    stopped: dict[int, str] = {}  # by sample: why its remaining checks are skipped
    for i, name in report.planned():
        progress(f"checking sample {i}: {name}")
        if i in stopped:
            report.results.append(Result(name, i, "skip", stopped[i]))
            continue
        start = time.perf_counter()
        try:
            answer, kind, message, _ = worker.exchange(f"{i} {name}", "status")
        except RuntimeError as error:  # a new process did not start
            answer, kind, message = None, "crash", str(error)
        if answer is not None:
            worker.show()
            report.results.append(Result(**answer))
            continue
        hung, ended = hung + (kind == "timeout"), ended + (kind != "timeout")
        what = "the check does not end" if kind == "timeout" else "the process ends in this check"
        remedy = "the operator must return or raise an exception; run its calls in a debugger to see where it stops"
        result = Result(name, i, "fail", f"{report.operator}: {what}: {message}", remedy)
        result.seconds = round(time.perf_counter() - start, 4)
        report.results.append(result)
        if name == "runs":
            stopped[i] = f"{report.operator} does not return for this sample"
        if ended == ENDS or hung == WAITS:
            why = f"earlier checks {'did not end' if hung == WAITS else 'ended the process'}, so this one was not run"
            stopped = dict.fromkeys(range(len(report.samples)), why)


>>>>>>> d4d9a9f (Checker: calls in other orders, generators, devices and launches)
def _generated(report: Report, arguments: argparse.Namespace) -> None:
    """Add what generated calls find, in child processes that import the operator's module.

    Raises:
        Wrong: hypothesis is not installed.
    """
    from openreg_tools.generate import search

    _asked(arguments)  # which imports the operator here, too
    named = [
        text.partition(":")[0] for text in (arguments.op, arguments.samples or "") if ":" in text and "::" not in text
    ]
    asked = argparse.Namespace(
        device=report.device, generate=arguments.generate, seed=arguments.seed or 0, jobs=1, threads=1,
        timeout=min(60, arguments.timeout),
        modules=[*arguments.modules, *named], given={"samples": arguments.samples, "inputs": arguments.input},
        quiet=arguments.quiet,
    )  # fmt: skip
    found = search.search(asked, [report.operator], {report.operator: "own"})
    report.about["generated"] = "generated calls give the same results as on the CPU"
    report.seconds += found.seconds
    for finding in found.findings:
        again = f"To run it again:\n{finding.command(report.device, asked.modules)}"
        report.results.append(
            Result(
                "generated", 0, "fail", f"{report.operator}: {finding.kind}: {finding.message} {finding.call}", again
            )
        )
    (of,) = found.operators
    if found.passed:
        report.results.append(
            Result(
                "generated", 0, "pass" if of.reached else "skip", "" if of.reached else of.never, seconds=found.seconds
            )
        )
    report.notes.append(found.summary())
    report.notes += [f"Allowed in {n} generated calls: {note}" for note, n in of.notes.most_common() if note != "unfit"]


def _abi(arguments: argparse.Namespace) -> int:
    """0 unless --require-stable is given and a symbol may change. The library is read, not loaded."""
    from openreg_tools.abi import audit

    given = {"OP": arguments.op, "--import": arguments.modules, "--samples": arguments.samples, "--input": arguments.input,
             "--reference": arguments.reference, "--device": arguments.device, "--only": arguments.only,
             "--skip": arguments.skip, "--html": arguments.html}  # fmt: skip
    if others := [name for name, value in given.items() if value]:
        raise Wrong(f"--abi takes a library, --require-stable and --json alone: leave out {' and '.join(others)}")
    report = audit(arguments.abi)
    forms.write(report, arguments)
    return 1 if arguments.require_stable and not report.is_stable else 0


def explanation(check: str) -> str:
    """The section of docs/checker.md about a check.

    Raises:
        Wrong: there is no such check.
    """
    page = Path(__file__).with_name("checker.md").read_text()
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    if check not in sections:
        raise Wrong(f"there is no check {check}; there are {', '.join(sections)}")
    return sections[check].rstrip()


def _names(given: list[str]) -> list[str]:
    """Also split at commas."""
    return [name for each in given for name in each.split(",") if name]


def _asked(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The operator and the samples."""
    dispatch.load(arguments.modules, arguments.device)
    by_name = "::" in arguments.op or ":" not in arguments.op
    op = arguments.op if by_name else _named(arguments.op)
    if arguments.samples and arguments.input:
        raise Wrong("give --samples or --input, not both")
    if arguments.samples:
        return op, _named(arguments.samples)
    return op, [parse(text) for text in arguments.input] or None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise Wrong(f"importing {name} failed: {error}") from error
        raise Wrong(f"there is no module {name} in the current folder or on the path") from error
    except Exception as error:
        raise Wrong(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _named(text: str) -> Any:
    """Resolve ``module:name.name``."""
    module_name, _, path = text.partition(":")
    if not path:
        raise Wrong(f"expected MODULE:NAME, but got {text!r}")
    found = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise Wrong(f"{module_name} has no {path}" + (f"; it has {', '.join(public[:20])}" if public else ""))
        found = getattr(found, part)
    return found
