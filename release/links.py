"""Finds dead links in HTML pages and in README.md: files, pictures and anchors that are not there. Needs no network.

    python release/links.py build/docs README.md

A link to the repository on GitHub (`project.urls` in pyproject.toml) is looked up in this checkout. Links to other sites
are counted only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
ROBOTS = ("search.html", "genindex.html")  # written by JavaScript, or without content of ours


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


@cache
def _page(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


def markdown_links(text: str) -> list[str]:
    """The links and pictures of a Markdown text, without its code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:href|src|srcset)="([^"]+)"', text)


def dead(link: str, page: Path, site: Path) -> str:
    """Why a link of a page does not lead anywhere, "" if it does or is on another site."""
    if link.startswith(f"{REPOSITORY}/"):
        kind, _, rest = urlparse(link).path.removeprefix(f"{urlparse(REPOSITORY).path}/").partition("/")
        path = unquote(rest.partition("/")[2])
        in_checkout = kind in ("blob", "raw", "edit", "tree")
        return f"the repository has no {path}" if in_checkout and not (ROOT / path).exists() else ""
    if urlparse(link).scheme or link.startswith("//"):
        return ""
    name, anchor = urlparse(link).path, urlparse(link).fragment
    target = (
        page
        if not name
        else (site / unquote(name).lstrip("/") if name.startswith("/") else page.parent / unquote(name))
    )
    if target.is_dir():
        target = target / "index.html"
    if not target.resolve().exists():
        return "there is no such file"
    if anchor and target.suffix == ".html" and unquote(anchor) not in _page(target.resolve()).anchors:
        return f"{target.name} has no anchor {unquote(anchor)}"
    return ""


def check(site: Path) -> tuple[list[str], int, int]:
    """Dead links of a site, each with its page; how many links there are, and how many lead to other sites."""
    found, count, elsewhere = [], 0, 0
    for page in sorted(site.rglob("*.html")):
        if page.name in ROBOTS:
            continue
        for link in dict.fromkeys(_page(page.resolve()).links):
            count += 1
            elsewhere += bool(urlparse(link).scheme) and not link.startswith(REPOSITORY)
            if why := dead(link, page, site):
                found.append(f"{page.relative_to(site)}: {link}: {why}")
    return found, count, elsewhere


def check_markdown(path: Path) -> Iterator[str]:
    """Dead links of a Markdown file whose relative links start at its folder."""
    for link in markdown_links(path.read_text()):
        if not link.startswith(("#", "../../")) and (
            why := dead(link, path, path.parent)
        ):  # ../../ leads out of GitHub's page
            yield f"{path.name}: {link}: {why}"


def main(site: str, *files: str) -> int:
    found, count, elsewhere = check(Path(site))
    for name in files:
        found += check_markdown(Path(name))
    print(
        "\n".join([*found, f"{len(found)} dead of {count} links in {site}; {elsewhere} lead to other sites, unchecked"])
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
