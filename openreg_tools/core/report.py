"""One report for every command: it prints for a terminal of 80 columns, and is written as JSON and as an HTML page.

A report describes its content once, as blocks:

    class Operators(Report):
        title = "operators on openreg"

        def blocks(self, page: bool = False, totals: bool = False) -> Iterator[Block]:
            yield Table([["operator", "class"], *rows], left=2)
            yield Section("Totals", [Table(counts)])

        def dict(self):
            return {"operators": ...}

`add_output` adds --json and --html to a command. `write` prints the report, writes the files, and returns the exit
status of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openreg_tools.core.blocks import Block, joined, wrapped
from openreg_tools.core.options import Wrong, file
from openreg_tools.core.page import page, verdict

__all__ = ["Progress", "Report", "add_output", "say", "write", "write_file"]


class Report:
    """What a command found.

    A subclass has `title`, `blocks` and `dict`, and may have `summary`, `opening` and `passed`.
    """

    title = ""

    def blocks(self, page: bool = False, **options: Any) -> Iterable[Block]:
        """The content; `page` asks for everything, and `options` are those of the command line for a terminal."""
        raise NotImplementedError

    def dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        raise NotImplementedError

    def summary(self) -> str:
        """One line with the verdict: a terminal shows it last, a page first."""
        return ""

    def opening(self) -> str:
        """The sentence that a page begins with: the summary, unless another one says more about what was found."""
        return self.summary()

    @property
    def passed(self) -> bool:
        """True if the command found no problem, so that it exits with 0."""
        return True

    def text(self, **options: Any) -> str:
        """The report for a terminal of 80 columns."""
        lines = joined(self.blocks(**options))
        return "\n".join([*lines, "", *wrapped(self.summary(), 0)] if self.summary() else lines)

    def __str__(self) -> str:
        return self.text()

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.dict(), indent=1) + "\n"

    def html(self) -> str:
        """The report as one self-contained page."""
        start = [verdict(self.opening(), self.passed)] if self.opening() else []
        return page(self.title, [*start, *self.blocks(page=True)])


# ---- writing ----


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options --json and --html."""
    parser.add_argument(
        "--json", type=file, metavar="FILE", help="write the report as JSON; - writes it to stdout instead of the table"
    )
    parser.add_argument("--html", type=file, metavar="FILE", help="write the report as one HTML page")


def write(report: Report, arguments: argparse.Namespace, **options: Any) -> int:
    """Print the report, write the files that the options ask for, and return the exit status: 1 if it did not pass."""
    if arguments.json == "-":
        print(report.json(), end="")
    else:
        print(report.text(**options))  # first, for a file that cannot be written loses nothing then
    if arguments.json not in (None, "-"):
        write_file(arguments.json, report.json())
    if arguments.html:
        write_file(arguments.html, report.html())
    return 0 if report.passed else 1


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


def say(text: str) -> None:
    """Print a line to stderr. If it is closed or full, the program that a tool watches goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Progress:
    """What a command is doing, on stderr: one line that changes on a terminal, a line every 30 seconds elsewhere.

    Args:
        total: how many steps there are; 0 if that is unknown.
        noun: what some steps find: "differ", "findings".
        quiet: print nothing.
        every: seconds between two lines where stderr is not a terminal; 0 for every step, on a terminal too.
    """

    def __init__(self, total: int = 0, noun: str = "", quiet: bool = False, every: float = 30) -> None:
        self.total, self.noun, self.quiet, self.done, self.found = total, noun, quiet, 0, 0
        self.live = sys.stderr is not None and sys.stderr.isatty()
        self.start = self._shown = time.monotonic()
        self._every = min(0.1, every) if self.live else every

    def step(self, name: str, count: int = 1, found: int = 0) -> None:
        """`count` more steps, of `name`, are done, and `found` something."""
        self.done += count
        self.found += found
        if self._is_due() or self.done >= self.total > 0:
            passed = time.monotonic() - self.start
            left = passed / max(1, self.done) * (self.total - self.done)
            filled = 20 * self.done // max(1, self.total)
            bar = f"[{'#' * filled}{'.' * (20 - filled)}] {self.done}/{self.total}"
            self._print(f"{bar} {self.found} {self.noun}, {left / 60:.0f} min left  {name}")

    def show(self, words: str) -> None:
        """Say what is going on, unless something was said just now."""
        if self._is_due():
            self._print(words)

    def end(self) -> None:
        """Remove the line from the terminal."""
        if self.live and not self.quiet:
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)

    def _is_due(self) -> bool:
        return not self.quiet and time.monotonic() - self._shown >= self._every

    def _print(self, words: str) -> None:
        self._shown = time.monotonic()
        if not self.quiet:
            with contextlib.suppress(OSError, ValueError):
                text, end = (f"\r{words:<79.79}", "") if self.live else (words, "\n")
                print(text, end=end, file=sys.stderr, flush=True)
