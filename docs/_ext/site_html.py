"""What the site does with pages beyond Markdown: figures inside of the page, links to notes, and links to the source."""

from __future__ import annotations

import html
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

__all__ = ["InlineFigures", "WrapCpp", "link_notes", "name_owner", "omit_edit_link", "slug", "source_link", "wrap_cpp"]


def slug(title: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def name_owner(urls: dict[str, str]) -> Callable[..., None]:
    """OWNER/openreg_ops in a page, and the address of OWNER's pages, become those of `urls`."""

    def replace(app: Any, name: str, source: list[str]) -> None:
        text = source[0].replace("https://OWNER.github.io/openreg_ops/", urls["Documentation"])
        source[0] = text.replace("OWNER/openreg_ops", urls["Repository"].removeprefix("https://github.com/"))

    return replace


def link_notes(app: Any, name: str, source: list[str]) -> None:
    """``Note [Title]`` outside code becomes a link to the page of notes."""
    if name == "notes":
        return
    page = "../" * name.count("/") + "notes.md"
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", source[0], flags=re.M | re.S)
    parts[::2] = [re.sub(r"\bNote \[([^\]]+)\](?!\()", rf"[Note \\[\1\\]]({page}#", part) for part in parts[::2]]
    text = "".join(parts)
    source[0] = re.sub(
        r"\[Note \\\[([^\]]+)\\\]\]\((\S+)#", lambda m: f"[Note \\[{m[1]}\\]]({m[2]}#{slug(m[1])})", text
    )


def omit_edit_link(app: Any, name: str, template: str, context: dict[str, Any], document: Any) -> None:
    """A page that comes from the source has no file of its own to edit."""
    if f"{name}.md" in pages.GENERATED:
        context["page_source_suffix"] = ""


def source_link(root: Path, repository: str) -> Callable[[str, dict[str, str]], str | None]:
    """The function that gives linkcode the address of a name's source, in the commit that the site is built from."""
    commit = os.environ.get("GITHUB_SHA", "main")

    def resolve(domain: str, info: dict[str, str]) -> str | None:
        value: Any = sys.modules.get(info["module"])
        try:
            for part in info["fullname"].split("."):
                value = getattr(value, part)
            value = inspect.unwrap(value.fget if isinstance(value, property) else value)
            path = Path(inspect.getsourcefile(value) or "").resolve().relative_to(root)
            lines, first = inspect.getsourcelines(value)
        except (AttributeError, OSError, TypeError, ValueError):
            return None  # it has no source in this repository
        return f"{repository}/blob/{commit}/{path}#L{first}-L{first + len(lines) - 1}"

    return resolve


def wrap_cpp(line: str, width: int = 90) -> str:
    """A line of C++ as several of at most a width, which are the same to a compiler."""
    start = line[: len(line) - len(line.lstrip())]
    lines = [line]
    while len(line := lines[-1]) > width and not line.lstrip().startswith("#") and not line.endswith("\\"):
        spaces = [i for i in range(len(start) + 8, width) if line[i] == " " and line[:i].count('"') % 2 == 0]
        cut = max((i for i in spaces if line[i - 1] in ",;{&|"), default=0)
        if cut < width // 2 or "//" in line[:cut]:
            cut = max(spaces, default=0)
        if not cut:
            break
        lines[-1:] = [line[:cut], start + ("// " if "//" in line[:cut] else "    ") + line[cut + 1 :]]
    return "\n".join(lines)


class WrapCpp(SphinxPostTransform):
    """Breaks the lines of C++ that a page quotes from a file, where the file's column is wider than the page's."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "cpp":
                text = "\n".join(wrap_cpp(line) for line in block.astext().split("\n"))
                block.replace_self(nodes.literal_block(text, text, **block.attributes))


class InlineFigures(SphinxPostTransform):
    """Puts an SVG of docs/figures into the page itself, where it follows the page's light and dark mode."""

    default_priority = 5
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            if not uri.endswith(".svg") or "figures/" not in uri:
                continue
            text = (Path(self.app.srcdir) / "figures" / Path(uri).name).read_text()
            text = re.sub(r"<\?xml.*?\?>\s*", "", text)
            label = html.escape(image.get("alt", ""), quote=True)
            figure = f'<figure class="drawing" role="img" aria-label="{label}">{text}</figure>'
            image.replace_self(nodes.raw("", figure, format="html"))
