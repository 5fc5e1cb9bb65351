"""What a report consists of: paragraphs, lines, tables, sections and boxes, each as lines for a terminal of 80 columns.

page.py has the same blocks as HTML.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Block", "Box", "Cell", "Lines", "PageOnly", "Section", "Table", "Text",
           "all_lines", "counted", "cut", "first_line", "hanging", "joined", "seconds", "size", "table", "wrapped"]  # fmt: skip

WIDTH = 80


# ---- words and numbers ----


def wrapped(texts: str | Iterable[str], indent: int = 4) -> list[str]:
    """A text, or several, as lines of at most 80 columns."""
    return [line for text in ([texts] if isinstance(texts, str) else texts) for line in hanging(text, " " * indent)]


def hanging(text: str, first: str, rest: str | None = None) -> list[str]:
    """A text as lines of at most 80 columns that begin with `first`, and then with `rest` or as much space."""
    rest = first if rest is None and first.isspace() else " " * len(first) if rest is None else rest
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def cut(text: str, width: int) -> str:
    """The text, or its beginning, three dots and its end, which often distinguishes operators."""
    end = (width - 3) // 3
    return text if len(text) <= width else f"{text[: width - 3 - end]}...{text[-end:]}"


def first_line(error: BaseException) -> str:
    """``Type: message`` of an exception, with the first line of its message, or 300 characters of it."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def all_lines(error: BaseException) -> str:
    """``Type: message`` of an exception, with all lines of its message as one, or 300 characters of it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1: "no problems", "1 problem", "2 problems"."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """A number of bytes: 12.3 GiB."""
    power = next((p for p in range(4) if float(f"{abs(count) / 1024**p:.4g}") < 1024), 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def seconds(value: float) -> str:
    """12.3 ns, us, ms or s."""
    units = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3))
    unit, scale = next(((u, s) for u, s in units if float(f"{value / s:.4g}") < 1000), ("s", 1.0))
    return f"{value / scale:.4g} {unit}"


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


# ---- blocks ----


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table that has a style of page.css, such as "fail", or a hint that the page shows."""

    value: Any
    style: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return str(self.value)


@dataclasses.dataclass
class Text:
    """A paragraph."""

    words: str
    indent: int = 0

    def lines(self) -> list[str]:
        return wrapped(self.words, self.indent)


@dataclasses.dataclass
class Lines:
    """Lines that stay as they are, such as a program."""

    content: Sequence[str]

    def lines(self) -> list[str]:
        return list(self.content)


@dataclasses.dataclass
class Table:
    """Rows of values and `Cell`s, the head first.

    Args:
        left: how many columns hold names, flush left.
        fit: cut the first column on a terminal, so that the rows fit.
        top: the most rows on a terminal; None for all.
        rest: of the rows beyond `top`, what to say besides their number.
        marks: the cells are single marks, which a page shows close together.
    """

    rows: Sequence[Sequence[Any]]
    left: int = 1
    fit: bool = False
    top: int | None = None
    rest: str = ""
    marks: bool = False

    def lines(self) -> list[str]:
        if self.top is None or len(self.rows) - 1 <= self.top:
            return table(self.rows, self.left, self.fit)
        more = len(self.rows) - 1 - self.top
        end = f"and {more} more{self.rest and f', {self.rest}'} (--top {len(self.rows) - 1})"
        return [*table(self.rows[: self.top + 1], self.left, self.fit), end]


@dataclasses.dataclass
class Section:
    """Blocks under a heading; without a title, blocks that stand apart."""

    title: str
    blocks: Sequence[Block]

    def lines(self) -> list[str]:
        return [*wrapped(self.title, 0), *joined(self.blocks, apart=False)]


@dataclasses.dataclass
class Box:
    """Blocks under a line, which a page opens and closes. The blocks are indented by 4 columns on a terminal.

    Args:
        style: of page.css, such as "fail".
        is_open: whether the page shows the blocks at first.
    """

    title: str
    blocks: Sequence[Block]
    style: str = ""
    is_open: bool = False

    def lines(self) -> list[str]:
        return [self.title, *(f"    {line}".rstrip() for line in joined(self.blocks, apart=False, width=WIDTH - 4))]


@dataclasses.dataclass
class PageOnly:
    """HTML that only a page shows, such as a legend."""

    html: str

    def lines(self) -> list[str]:
        return []


Block = Text | Lines | Table | Section | Box | PageOnly


def joined(blocks: Iterable[Block], apart: bool = True, width: int = WIDTH) -> list[str]:
    """The blocks as lines. With `apart`, an empty line separates tables, sections and boxes from text and each other."""
    found: list[str] = []
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Text) and not block.indent:
            lines = textwrap.wrap(block.words, width, break_on_hyphens=False, break_long_words=False)
        else:
            lines = block.lines()
        if lines:
            close = (Text, Lines), (Box,)
            together = any(isinstance(before, kinds) and isinstance(block, kinds) for kinds in close)
            found += [""] * (apart and before is not None and not together) + lines
            before = block
    return found
