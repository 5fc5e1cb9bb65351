"""``openreg-tools compare --device D --against cpu SCRIPT.py``."""

from __future__ import annotations

import argparse
import contextlib
import os

from openreg_tools.compare import compare
from openreg_tools.core.device import add_device, load, to_stderr
from openreg_tools.core.options import Wrong, count
from openreg_tools.core.program import add_program, of_rank, program, rank, run
from openreg_tools.core.report import add_output, write

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
    add_device(parser, key=False)
    parser.add_argument("--against", default="cpu", metavar="DEVICE", help="the reference device (default cpu)")
    parser.add_argument("--tolerance", type=_tolerance, action="append", default=[], metavar="OPERATOR=ULPS",
                        help="allow this many ulps for an operator or a pattern such as 'aten::*softmax*'")  # fmt: skip
    parser.add_argument("--factor", type=float, default=1.0, help="multiply every default tolerance (default 1)")
    parser.add_argument("--top", type=count, default=15, metavar="N", help="lines of each table (default 15)")
    add_output(parser)
    add_program(parser)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing differs; 1 if something does, or the program raised; else the program's exit status."""
    words = program(arguments)
    try:
        load(arguments.modules, arguments.device)
        context = compare(
            device=arguments.device, against=arguments.against, tolerances=dict(arguments.tolerance),
            factor=arguments.factor, name=os.path.basename(words[0]), progress=True,
        )  # fmt: skip
        with to_stderr() if arguments.json == "-" else contextlib.nullcontext():
            status = run(words, context)
    except RuntimeError as error:
        raise Wrong(str(error).splitlines()[0]) from None
    result, (number, ranks) = context.result, rank()
    if ranks > 1:
        result.name += f" (rank {number} of {ranks})"
    for name in ("json", "html"):
        setattr(arguments, name, of_rank(getattr(arguments, name), number, ranks))
    differs = write(result, arguments, top=arguments.top)
    return status or differs
