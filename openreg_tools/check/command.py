"""``openreg-tools check MODULE:OP``: the checker on the command line.

The checks run in a child process, so an operator that ends or hangs its process fails one check, and does not end the
report.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from openreg_tools.check.checker import prepare
from openreg_tools.check.checks import CHECKS
from openreg_tools.check.report import Report, Result, explanation
from openreg_tools.check.run import Checks, in_children
from openreg_tools.core import device
from openreg_tools.core.findings import annotate, sarif
from openreg_tools.core.options import Wrong, count, duration, file, named, search_here, split, unknown
from openreg_tools.core.report import Progress, add_output, write, write_file
from openreg_tools.core.samples import dtype_of, parse


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
    parser.add_argument("--intended-gradient", metavar="MODULE:FUNCTION", help="a function of the same arguments that has the "
                        "gradient that the operator should have, if that is not its derivative (straight-through)")  # fmt: skip
    parser.add_argument("--device", help="where to run (default: where the samples are)")
    parser.add_argument("--dtype", default="float32", help="dtype of generated samples (default float32)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK",
                        help=f"checks to run: fast, for those that take a second, or of {', '.join(CHECKS)}")  # fmt: skip
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK", help="checks to leave out")
    parser.add_argument("--explain", metavar="CHECK", help="instead of OP, print what a check tests, with an example")
    parser.add_argument("--generate", type=count, metavar="N",
                        help="also make N random calls, in child processes: layouts, dtypes, special values, aliases")  # fmt: skip
    parser.add_argument(
        "--seed", type=int, help="seed of the generated calls: equal seeds give equal calls (default 0)"
    )
    parser.add_argument(
        "--timeout", type=duration, default=180, help="seconds allowed for one check of one sample (default 180)"
    )
    add_output(parser)
    parser.add_argument("--sarif", type=file, metavar="FILE", help="write the failures and warnings as SARIF")
    parser.add_argument("--verbose", action="store_true", help="also show why checks were skipped, and what passed")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing failed, 1 if something did, 130 if interrupted.

    Raises:
        Wrong: the request is wrong.
    """
    if arguments.explain:
        if arguments.explain not in CHECKS and arguments.explain != "generated":
            raise Wrong(unknown("check", arguments.explain, CHECKS))
        print(explanation(arguments.explain))
        return 0
    if arguments.op is None:
        raise Wrong("expected an operator before the options, such as my_ops:scale, or --explain CHECK")
    if arguments.seed is not None and arguments.generate is None:
        raise Wrong("--seed is the seed of generated calls: add --generate N")
    if "generated" in split([*arguments.only, *arguments.skip]):
        raise Wrong("--only and --skip take checks; generated calls are made with --generate N alone")
    search_here()
    progress = Progress(quiet=arguments.quiet, every=0)
    try:
        # A child imports the operator, so that a library that ends its process there ends a child.
        report = in_children(functools.partial(prepared, arguments), arguments.timeout, progress.show)
        if arguments.generate is not None:
            _generated(report, arguments)
    except ValueError as error:
        raise Wrong(str(error)) from error
    except KeyboardInterrupt:
        print("\ncheck: interrupted", file=sys.stderr)
        return 130
    finally:
        progress.end()
    status = write(report, arguments, verbose=arguments.verbose)
    findings = report.findings()
    annotate(findings)
    if arguments.sarif:
        write_file(
            arguments.sarif, sarif("openreg-tools check", report.operator, report.about, findings, "checker.html#{}")
        )
    return status


def prepared(arguments: argparse.Namespace) -> Checks:
    """The checks that the options ask for.

    Raises:
        Wrong, ValueError: the request is wrong.
    """
    return prepare(
        *_asked(arguments), arguments.device, dtype=dtype_of(arguments.dtype), only=split(arguments.only),
        skip=split(arguments.skip), reference=named(arguments.reference) if arguments.reference else None,
        intended_gradient=named(arguments.intended_gradient) if arguments.intended_gradient else None,
    )  # fmt: skip


def _asked(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The operator and the samples."""
    device.load(arguments.modules, arguments.device)
    by_name = "::" in arguments.op or ":" not in arguments.op
    op = arguments.op if by_name else named(arguments.op)
    if arguments.samples and arguments.input:
        raise Wrong("give --samples or --input, not both")
    if arguments.samples:
        return op, named(arguments.samples)
    return op, [parse(text) for text in arguments.input] or None


def _generated(report: Report, arguments: argparse.Namespace) -> None:
    """Add what generated calls find, in child processes that import the operator's module."""
    from openreg_tools.conformance import generate

    _asked(arguments)  # which imports the operator here, too
    modules = [
        text.partition(":")[0] for text in (arguments.op, arguments.samples or "") if ":" in text and "::" not in text
    ]
    asked = argparse.Namespace(
        device=report.device, generate=arguments.generate, seed=arguments.seed or 0, jobs=1, threads=1,
        timeout=min(60, arguments.timeout), modules=[*arguments.modules, *modules],
        given={"samples": arguments.samples, "inputs": arguments.input}, quiet=arguments.quiet,
    )  # fmt: skip
    found = generate.search(asked, [report.operator])
    report.about["generated"] = "generated calls give the same results as on the CPU"
    report.seconds += found.seconds
    for finding in found.findings:
        said = f"{report.operator}: {finding.kind}: {finding.message} {finding.call}"
        again = f"To run it again:\n{found.command(finding)}"
        report.results.append(Result("generated", 0, "fail", said, again))
    (of,) = found.operators
    if found.passed:
        status, why = ("pass", "") if of.reached else ("skip", of.never)
        report.results.append(Result("generated", 0, status, why, seconds=found.seconds))
    report.notes.append(found.summary())
    report.notes += [f"Allowed in {n} generated calls: {note}" for note, n in of.notes.most_common()]
