"""Docstrings as the package writes them, turned into what Sphinx reads."""

from __future__ import annotations

import re
from typing import Any

import formulas

__all__ = ["process"]

SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
ITEM = re.compile(r"    (\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)")


def inline(text: str) -> str:
    """One backtick is code, as in Markdown; what reStructuredText takes for markup is escaped elsewhere."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            after = parts[i + 1]
            parts[i] = f"``{part.strip('`')}``" + ("\\ " if re.match(r"\w", after) else "")
        else:
            words = re.split(r"((?<![\w*])\*\w[\w ]*\*(?![\w*]))", part)  # *emphasis* stays
            words[::2] = [re.sub(r"([*|])|(?<=\w)_(?!\w)", lambda m: "\\" + m[0], word) for word in words[::2]]
            parts[i] = "".join(words)
    return "".join(parts)


def _section(lines: list[str]) -> list[str]:
    """A bullet for each item; text without a name is a paragraph after them."""
    items: list[list[str]] = []
    for line in lines:
        if match := ITEM.fullmatch(line):
            items.append([f"- ``{match[1]}``: {match[2]}"])
        elif re.match(r"    \S", line) or not items:
            items.append([f"- {line.strip()}"])
        else:
            items[-1].append(line.strip())
    out = []
    for item in items:
        head, sep, rest = " ".join(item).partition("``: ")
        out.append(head + sep + inline(rest) if sep else inline(head))
    return out


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Handler of autodoc-process-docstring."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).rstrip())
    out: list[str] = []
    above_sections = True
    for number, block in enumerate(blocks):
        rows = block.splitlines()
        if rows and rows[0] == "Example:":
            out += ["**Example:**", "", *(row.removeprefix("    ") for row in rows[1:])]
        elif any(row in [f"{section}:" for section in SECTIONS] for row in rows):
            above_sections = False
            current: list[str] = []
            for row in [*rows, ""]:
                if row.rstrip(":") in SECTIONS and row.endswith(":") or not row:
                    out += [*_section(current), ""] if current else []
                    current = []
                    out += [f"**{row}**", ""] if row else []
                elif not row.startswith(" "):  # text behind the section
                    out += [*_section(current), ""] if current else []
                    current = []
                    out.append(inline(row))
                else:
                    current.append(row)
        elif above_sections and number and any(re.search(r"\w = ", row) for row in rows) and "``" not in block:
            out += formulas.block(rows, inline)
        elif rows and re.match(r"=+ =", rows[0]):
            out += rows
        else:
            text, source, rest = re.match(r"(.*?)(?:^(Sources?): (.*))?\Z", block, re.M | re.S).groups()
            out += inline(text).splitlines()
            out += ["", *f"**{source}:** {inline(rest)}".splitlines()] if source else []
        out.append("")
    lines[:] = out
