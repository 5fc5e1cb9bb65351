"""What the site does with pages beyond Markdown: figures inside of the page, and links to notes."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

__all__ = ["InlineFigures", "link_notes", "slug"]


def slug(title: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def link_notes(app: Any, name: str, source: list[str]) -> None:
    """``Note [Title]`` outside code becomes a link to the page of notes."""
    if name == "notes":
        return
    page = "../" * name.count("/") + "notes.md"
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", source[0], flags=re.M | re.S)
    parts[::2] = [re.sub(r"\bNote \[([^\]]+)\](?!\()", rf"[Note \\[\1\\]]({page}#", each) for each in parts[::2]]
    text = "".join(parts)
    source[0] = re.sub(
        r"\[Note \\\[([^\]]+)\\\]\]\((\S+)#", lambda m: f"[Note \\[{m[1]}\\]]({m[2]}#{slug(m[1])})", text
    )


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
