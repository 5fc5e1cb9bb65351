"""The old names of `core.options`, `core.blocks` and `core.report`, until every tool imports them from there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from openreg_tools.core.blocks import WIDTH, cut, seconds, size, table, wrapped  # noqa: F401
from openreg_tools.core.options import Wrong, count, duration, file, regex  # noqa: F401
from openreg_tools.core.report import add_output as add_arguments  # noqa: F401
from openreg_tools.core.report import say, write_file  # noqa: F401


def write(report: Any, arguments: argparse.Namespace, **options: Any) -> None:
    """Print the report and write the requested formats; `options` are passed to `text()`."""
    if arguments.json == "-":
        print(json.dumps(report.dict(), indent=1))
    else:
        print(report.text(**options))  # first, for a file that cannot be written loses nothing then
    if arguments.json not in (None, "-"):
        write_file(arguments.json, json.dumps(report.dict(), indent=1) + "\n")
    if getattr(arguments, "html", None):
        write_file(arguments.html, report.html())
