"""``openreg-tools compare --device D --against cpu SCRIPT.py`` and ``openreg-tools compare A.trace B.trace``."""

from __future__ import annotations

import argparse
import glob
import math
import os
import sys
from pathlib import Path

from openreg_tools import dispatch, forms
from openreg_tools.compare import Result, compare
from openreg_tools.compare.parting import Parting
from openreg_tools.forms import Wrong
from openreg_tools.script import Rank, add_program, apart, of_rank, program, run

__all__ = ["add_arguments", "main"]


def _tolerance(text: str) -> tuple[str, float]:
    pattern, _, ulps = text.rpartition("=")
    try:
        if not pattern or not float(ulps) >= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected OPERATOR=ULPS, such as 'aten::mm=32', but got {text!r}") from None
    return pattern, float(ulps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="the device under test (default: the accelerator of this process)")
    parser.add_argument("--against", default="cpu", metavar="DEVICE", help="the reference device (default cpu)")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="a module to import first: another backend, or a library of operators")  # fmt: skip
    parser.add_argument("--tolerance", type=_tolerance, action="append", default=[], metavar="OPERATOR=ULPS",
                        help="allow this many ulps for an operator or a pattern such as 'aten::*softmax*'")  # fmt: skip
    parser.add_argument("--factor", type=float, default=1.0, help="multiply every default tolerance (default 1)")
    parser.add_argument("--test", type=forms.file, metavar="FILE",
                        help="write a pytest test of the first operator that differs, with shrunk inputs")  # fmt: skip
    parser.add_argument("--top", type=forms.count, default=15, metavar="N", help="lines of each table (default 15)")
    forms.add_arguments(parser)
    add_program(parser, "SCRIPT.py | A.trace B.trace", "two traces of `record`, or the program")


def _traces(a: str, b: str) -> tuple[dict[int, tuple[str, str]], list[str]]:
    """The two files, or the ranks' of two runs, by rank; and the files of ranks that only one run has.

    Raises:
        Wrong: no rank is in both runs.
    """
    of_a, of_b = ({} if Path(each).exists() else _ranks(each) for each in (a, b))
    pairs = {rank: (of_a[rank], of_b[rank]) for rank in sorted(of_a.keys() & of_b.keys())}
    if not pairs:
        if of_a or of_b:
            found = (f"{each} {_listed(of)}" for each, of in ((a, of_a), (b, of_b)))
            raise Wrong(f"no rank is in both runs: {' and '.join(found)}; name two files")
        return {0: (a, b)}, []
    return pairs, [(of_a | of_b)[rank] for rank in sorted(of_a.keys() ^ of_b.keys())]


def _ranks(path: str) -> dict[int, str]:
    start = f"{Path(path).name}.rank"
    names = [each.name.removeprefix(start) for each in Path(path).parent.glob(f"{glob.escape(start)}*")]
    return {int(number): f"{path}.rank{number}" for number in names if number.isdecimal()}


def _listed(ranks: dict[int, str]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"has the rank{'s' * (len(ranks) > 1)} {numbers}" if ranks else "is not a run of several ranks"


def _starts(of: Parting) -> float:
    """The operator at which two runs part; the last of all if it is only that a trace is not complete."""
    if of.first:
        return of.first.a.index
    return math.inf if of.common else -1


def _of_ranks(results: dict[int, Parting]) -> list[str]:
    """A line for each rank, where there are several."""
    lines = ["", f"{len(results)} ranks:"]
    for rank, each in results.items():
        if not each.common:
            found = "has no operator in common"
        elif each.first is None:
            found = "is not complete" if each.parted else "does not part"
        else:
            found = f"parts at operator {each.first.a.index}: {each.first.a.name}"
        lines.append(f"  rank {rank} {found}")
    return lines


def _write_test(result: Result, path: Path, suffix: str) -> None:
    path = path.with_name(f"{path.stem}{suffix}{path.suffix}")
    try:
        result.write_test(path)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
    except OSError as error:
        print(f"compare: {path} cannot be written: {error.strerror}; name another file", file=sys.stderr)
    else:
        passes = ", which passes: the operator is correct when it runs again" if result.transient else ""
        print(f"compare: {path} has a test of {result.first.operator}{passes}", file=sys.stderr)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing differs; 1 if something does, the program raised, or two traces have no operator in common or cannot
    be read to their end; else the program's exit status."""
    tolerances, words = dict(arguments.tolerance), program(arguments)
    try:
        dispatch.load(arguments.modules, arguments.device)
        if not words[0].endswith(".py"):
            if len(words) != 2:
                raise Wrong(f"expected a script (.py) or two traces, but got {' '.join(words)}")
            pairs, alone = _traces(*words)
            results = {
                rank: compare(*pair, tolerances=tolerances, factor=arguments.factor) for rank, pair in pairs.items()
            }
            if arguments.test:
                raise Wrong("--test needs a program: a trace keeps no inputs")
            parted = [r for r in results.values() if r.parted]
            # Ranks run the same program, and a wrong result reaches the others with the next collective.
            first = min(parted, key=_starts, default=next(iter(results.values())))
            forms.write(first, arguments, top=arguments.top)
            if len(results) > 1 and arguments.json != "-":
                print(*_of_ranks(results), sep="\n")
            for each in alone:
                print(f"compare: {each} has no counterpart, so this rank is not compared", file=sys.stderr)
            return int(bool(parted or alone))
        if not os.path.isfile(words[0]):
            raise Wrong(f"there is no file {words[0]}")
        context = compare(
            device=arguments.device, against=arguments.against, tolerances=tolerances, factor=arguments.factor,
            name=os.path.basename(words[0]), progress=True,
        )  # fmt: skip
        with apart(arguments.json), Rank() as known:
            status = run(words, context)
    except RuntimeError as error:
        raise Wrong(str(error).splitlines()[0]) from None
    result, (rank, ranks) = context.result, known.last()
    if ranks > 1:
        result.name += f" (rank {rank} of {ranks})"
    for name in ("json", "html"):
        setattr(arguments, name, of_rank(getattr(arguments, name), rank, ranks))
    try:
        forms.write(result, arguments, top=arguments.top)
    finally:  # also if a file of the report cannot be written
        if arguments.test:
            _write_test(result, Path(arguments.test), f"_rank{rank}" * (ranks > 1))
    return status or int(result.first is not None)
