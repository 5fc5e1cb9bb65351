"""A report as one HTML page, light and dark, without scripts or references; page.css is its style.

Every function escapes the text that it is given.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openreg_tools.core.blocks import Block, Box, Cell, Lines, PageOnly, Section, Table, Text

__all__ = ["facts", "legend", "page", "verdict"]

_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ([num]?s|B|[KMGT]iB))?")


def page(title: str, blocks: Iterable[Block]) -> str:
    """The blocks under a title."""
    heading, style = html.escape(title), Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{heading}</title>'
        f"<style>\n{style}</style></head>\n<body><h1>{heading}</h1>\n<main>{_joined(blocks)}</main></body></html>\n"
    )


def verdict(sentence: str, passed: bool) -> PageOnly:
    """The sentence that a page begins with, green or red."""
    return PageOnly(f'<p class="verdict {"pass" if passed else "fail"}">{html.escape(sentence)}</p>')


def facts(values: Mapping[str, Any]) -> PageOnly:
    """Numbers that matter most, by their names."""
    cells = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(v))}</dd></div>" for name, v in values.items())
    return PageOnly(f'<dl class="facts">{"".join(cells)}</dl>')


def legend(styles: Mapping[str, tuple[str, str]]) -> PageOnly:
    """What colors and marks mean: for each style of page.css, the mark and its meaning."""
    keys = (
        f'<span><b class="{style}">{html.escape(mark) or "&nbsp;"}</b> {html.escape(meaning)}</span>'
        for style, (mark, meaning) in styles.items()
    )
    return PageOnly(f'<p class="legend">{" ".join(keys)}</p>')


def _joined(blocks: Iterable[Block]) -> str:
    return "".join(map(_block, blocks))


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{html.escape(block.words)}</p>"
        case Lines():
            return f'<pre class="wrapped">{html.escape(chr(10).join(block.content))}</pre>' if block.content else ""
        case Table():
            return _table(block)
        case Section():
            heading = f"<h2>{html.escape(block.title.removesuffix(':'))}</h2>" if block.title else ""
            return f"<section>{heading}{_joined(block.blocks)}</section>\n"
        case Box():
            attributes = (f' class="{html.escape(block.style)}"' if block.style else "") + " open" * block.is_open
            return (
                f"<details{attributes}><summary>{html.escape(block.title)}</summary>{_joined(block.blocks)}</details>"
            )
        case PageOnly():
            return block.html


def _table(block: Table) -> str:
    numbers = [all(map(_is_number, column)) for column in zip(*block.rows[1:], strict=True)] or [False] * len(
        block.rows[0]
    )
    class_number = ' class="number"'
    head = "".join(
        f"<th{class_number if number and i >= block.left else ''}>{html.escape(str(cell))}</th>"
        for i, (cell, number) in enumerate(zip(block.rows[0], numbers, strict=True))
    )
    lines = "".join(f"<tr>{_row(row, block.left)}</tr>\n" for row in block.rows[1:])
    found = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>"
    return f'<div class="scroll{" map" * block.marks}">{found}</div>'


def _row(row: Sequence[Any], left: int) -> str:
    return "".join(_cell(cell, "th" if i < left else "td") for i, cell in enumerate(row))


def _is_number(value: Any) -> bool:
    return bool(_NUMBER.fullmatch(str(value)))


def _cell(value: Any, tag: str) -> str:
    cell = value if isinstance(value, Cell) else Cell(value)
    words = str(cell)
    style = f"{cell.style} {'number' * (tag == 'td' and cell.style != 'words' and _is_number(words))}".strip()
    names = "".join(f' {name}="{html.escape(v)}"' for name, v in (("class", style), ("title", cell.hint)) if v)
    return f"<{tag}{names}>{html.escape(words)}</{tag}>"
