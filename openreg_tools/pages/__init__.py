"""The HTML pages of the tools: one skeleton and one style, light and dark, in a single file without references.

style.css is the style of every page, page.js its theme switch, hints, and tables that sort and filter. Every function
here escapes the text that it is given.
"""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["data", "details", "facts", "legend", "page", "section", "table", "text"]

FILTERED = 30  # rows from which a table has a field to filter them
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ([num]?s|B|[KMGT]iB))?")


@functools.cache
def _file(name: str) -> str:
    core = Path(__file__).parents[1] / "core"
    path = {"style.css": core / "page.css", "page.js": core / "page.js"}.get(name, Path(__file__).with_name(name))
    return path.read_text(encoding="utf-8").strip()


def page(title: str, heading: str, body: str, scripts: Iterable[str] = ()) -> str:
    """One self-contained page.

    Args:
        title: of the window.
        heading: above the body.
        body: HTML.
        scripts: files of this folder that run after page.js.
    """
    code = "".join(f"<script>\n{_file(name)}\n</script>" for name in ("page.js", *scripts))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>\n{_file('style.css')}\n</style></head>\n"
        f'<body><header><h1>{html.escape(heading)}</h1><button id="theme" type="button" hidden></button></header>\n'
        f"<main>{body}</main>\n{code}</body></html>\n"
    )


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
    filtered = ' class="filtered"' if len(rows) > FILTERED else ""
    return f'<div class="scroll"><table{filtered}><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _cell(cell: Any, tag: str) -> str:
    value, attributes = cell if isinstance(cell, tuple) else (cell, {})
    words = str(value)
    if tag == "td" and "class" not in attributes and _NUMBER.fullmatch(words):
        attributes = {**attributes, "class": "number"}
    names = "".join(f' {name}="{html.escape(str(each))}"' for name, each in attributes.items() if each)
    return f"<{tag}{names}>{html.escape(words)}</{tag}>"


def data(name: str, value: Any) -> str:
    """A value as JSON for the page's scripts, which find it by `name`."""
    words = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{words}</script>'
