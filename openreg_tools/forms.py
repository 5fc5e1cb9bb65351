"""The tools' report formats: text for a terminal of 80 columns, JSON, and one self-contained HTML page.

A report has `text()`, `dict()` and, if a picture helps, `html()`; `add_arguments` and `write` provide the options.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
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
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written; name another file")
    return text


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
    power = next((p for p in range(4) if abs(count) < 1024 ** (p + 1)), 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def seconds(value: float) -> str:
    """12.3 ns, us, ms or s."""
    units = (("ns", 1e-9, 1e-6), ("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0))
    unit, scale = next(((u, s) for u, s, end in units if value < end), ("s", 1.0))
    return f"{value / scale:.4g} {unit}"


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}h1{font-size:1.3em}"
    "table{border-collapse:collapse}td,th{padding:.1em .6em;border:1px solid #ddd;font-weight:normal;text-align:left}"
    "td{text-align:center}a{color:#035}details{margin:.5em 0;padding:.3em .8em;border-left:4px solid #bbb}"
    ".pass{background:#e6f4e6}.fail{background:#f6c8c4}.warn,.known{background:#fbeebc}.refused{background:#dde6f6}"
    ".skip{color:#888}summary{cursor:pointer}span{padding:0 .3em}"
)


def page(title: str, heading: str, body: str, style: str = "") -> str:
    """One self-contained HTML page."""
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{style}</style><h1>{html.escape(heading)}</h1>{body}</html>\n"
    )


def html_table(rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """Rows as an HTML table; the first is its head, the first `left` columns are flush left."""
    e = html.escape
    head = "".join(f"<th>{e(str(cell))}</th>" for cell in rows[0])
    lines = (
        "".join(
            f"<{'th' if i < left else 'td'}>{e(str(cell))}</{'th' if i < left else 'td'}>" for i, cell in enumerate(row)
        )
        for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def add_arguments(parser: argparse.ArgumentParser, page: bool = True) -> None:
    """The options --json and --html."""
    parser.add_argument(
        "--json", type=file, metavar="FILE", help="write the report as JSON; - is stdout, in the table's place"
    )
    if page:
        parser.add_argument("--html", type=file, metavar="FILE", help="write the report as one HTML page")


def write(report: Any, arguments: argparse.Namespace, **options: Any) -> None:
    """Print the report and write the requested formats; `options` are passed to `text()`."""
    if arguments.json:
        text = json.dumps(report.dict(), indent=1)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
    if getattr(arguments, "html", None):
        Path(arguments.html).write_text(report.html())
    if arguments.json != "-":
        print(report.text(**options))
