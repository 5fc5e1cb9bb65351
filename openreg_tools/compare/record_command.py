"""``openreg-tools record --out A.trace SCRIPT.py``: a fingerprint of each operator's results, for `compare`."""

from __future__ import annotations

import argparse
import os

from openreg_tools import dispatch, forms
from openreg_tools.compare import record
from openreg_tools.forms import Wrong
from openreg_tools.script import add_program, program, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="the device (default: the accelerator of this process)")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="a module to import first: another backend, or a library of operators")  # fmt: skip
    parser.add_argument("--out", type=forms.file, metavar="FILE", help="the trace to write")
    parser.add_argument("--values", action="store_true", help="also save the results, in the folder FILE.values")
    add_program(parser)


def main(arguments: argparse.Namespace) -> int:
    """The program's exit status, 1 if it raised or the trace is incomplete, 2 if the file cannot be written."""
    words = program(arguments)
    try:
        dispatch.load(arguments.modules, arguments.device)
        if arguments.out in (None, "-"):
            raise Wrong("a trace is a file; name it with --out")
        if not os.path.isfile(words[0]):
            raise Wrong(f"there is no file {words[0]}")
        context = record(
            arguments.out,
            values=arguments.values,
            device=arguments.device,
            name=os.path.basename(words[0]),
            progress=True,
        )
        status = run(words, context)
    except RuntimeError as error:
        raise Wrong(str(error).splitlines()[0]) from None
    if context.incomplete:  # which the context has said
        return status or (1 if context.is_open else 2)
    forms.say(f"record: {context.operators:,} operators in {context.path}")
    return status
