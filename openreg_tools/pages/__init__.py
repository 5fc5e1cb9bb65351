"""The old functions of `core.page`, until every report consists of blocks. Every one escapes the text that it is given."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from openreg_tools.core.blocks import PageOnly
from openreg_tools.core.page import page as _page

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ([num]?s|B|[KMGT]iB))?")


def page(title: str, heading: str, body: str) -> str:
    """One self-contained page."""
    return _page(heading, [PageOnly(body)])


def text(words: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(words)}</p>"


def section(title: str, body: str) -> str:
    """HTML under a heading."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>\n"


def facts(values: Mapping[str, Any]) -> str:
    """Numbers that matter most, by their names."""
    cells = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in values.items()
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def legend(kinds: Mapping[str, tuple[str, str]]) -> str:
    """What colors and marks mean: by class of style.css, the mark and its meaning."""
    keys = (
        f'<span><b class="{kind}">{html.escape(mark) or "&nbsp;"}</b> {html.escape(meaning)}</span>'
        for kind, (mark, meaning) in kinds.items()
    )
    return f'<p class="legend">{" ".join(keys)}</p>'


def details(summary: str, body: str, kind: str = "", is_open: bool = False) -> str:
    """A box that opens. `kind` is a class of style.css, `body` HTML."""
    names = (f' class="{html.escape(kind)}"' if kind else "") + (" open" if is_open else "")
    return f"<details{names}><summary>{html.escape(summary)}</summary>{body}</details>"


def table(rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """Rows as a table; the first is its head, and the first `left` columns are names.

    A cell is a value, or (value, attributes) with attributes of the HTML element, such as its class.
    """
    head = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in rows[0])
    lines = "".join(
        f"<tr>{''.join(_cell(cell, 'th' if i < left else 'td') for i, cell in enumerate(row))}</tr>\n"
        for row in rows[1:]
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _cell(cell: Any, tag: str) -> str:
    value, attributes = cell if isinstance(cell, tuple) else (cell, {})
    words = str(value)
    if tag == "td" and "class" not in attributes and _NUMBER.fullmatch(words):
        attributes = {**attributes, "class": "number"}
    names = "".join(f' {name}="{html.escape(str(each))}"' for name, each in attributes.items() if each)
    return f"<{tag}{names}>{html.escape(words)}</{tag}>"
