"""The tools' report formats: text for a terminal of 80 columns, JSON, and one self-contained HTML page (pages/).

A report has `text()`, `dict()` and, if a picture helps, `html()`; `add_arguments` and `write` provide the options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 80


class Wrong(Exception):  # noqa: N818 -- the request is wrong, in one sentence
    pass


def regex(text: str) -> str:
    """A regular expression, as the type of an argument."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def file(text: str) -> str:
    """A file that can be written, or -, as the type of an argument."""
    path = Path(text)
    if text == "-":
        return text
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, but got ''")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable; name another file")
    return text


def count(text: str) -> int:
    """A number above 0, as the type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, but got {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Seconds above 0, as the type of an argument."""
    try:
        if 0 < (found := float(text)) < math.inf:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected seconds above 0, but got {text!r}")


def say(text: str) -> None:
    """Print a line to stderr. If it is closed or full, the program that a tool watches goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def wrapped(texts: Iterable[str], indent: int = 4) -> list[str]:
    """The texts as lines of at most 80 columns."""
    margin = " " * indent
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
        )
    ]


def table(rows: Sequence[Sequence[Any]], left: int = 0, fit: bool = False) -> list[str]:
    """Rows as lines: columns of equal width two spaces apart, the first `left` of them flush left, the others right.

    With `fit`, the first column's cells are cut to the space that the others leave.
    """
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    if fit:
        widths[0] = min(widths[0], WIDTH - sum(2 + width for width in widths[1:]))
        rows = [[cut(str(row[0]), widths[0]), *row[1:]] for row in rows]
    return [
        "  ".join(
            f"{cell!s:{'<' if i < left else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def cut(text: str, width: int) -> str:
    """The text, or its beginning, three dots and its end, which often distinguishes operators."""
    end = (width - 3) // 3
    return text if len(text) <= width else f"{text[: width - 3 - end]}...{text[-end:]}"


def size(count: float) -> str:
    """A number of bytes: 12.3 GiB."""
    power = next((p for p in range(4) if float(f"{abs(count) / 1024**p:.4g}") < 1024), 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def seconds(value: float) -> str:
    """12.3 ns, us, ms or s."""
    units = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3))
    unit, scale = next(((u, s) for u, s in units if float(f"{value / s:.4g}") < 1000), ("s", 1.0))
    return f"{value / scale:.4g} {unit}"


def add_arguments(parser: argparse.ArgumentParser, page: bool = True) -> None:
    """The options --json and --html."""
    parser.add_argument(
        "--json", type=file, metavar="FILE", help="write the report as JSON; - writes it to stdout instead of the table"
    )
    if page:
        parser.add_argument("--html", type=file, metavar="FILE", help="write the report as one HTML page")


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


def write_file(path: str, text: str) -> None:
    """Write a file that an option names.

    Raises:
        Wrong: it cannot be written.
    """
    try:
        # A file name that is not valid Unicode appears in a page with its bytes escaped.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise Wrong(f"{path} cannot be written: {error.strerror}; name another file") from None
