"""Puts a built site into the folder of the project's pages, as one of the versions that the site's switch offers.

    python release/publish.py build/docs PAGES v0.1.0

PAGES is what GitHub Pages serves: a folder for each version, versions.json, which lists them with the newest first, and
index.html, which leads to the newest release, or to main before there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

REDIRECT = '<!DOCTYPE html>\n<meta charset="utf-8"><title>openreg_ops</title>\n<meta http-equiv="refresh" content="0; url={0}/">\n<a href="{0}/">{0}</a>\n'


def _order(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def add(site: Path, pages: Path, name: str) -> list[str]:
    """Add or replace a version; returns the names of all versions."""
    if not re.fullmatch(r"main|v\d+\.\d+\.\d+\w*", name):
        raise SystemExit(f"expected main or a tag such as v0.1.0, but got {name!r}")
    shutil.rmtree(pages / name, ignore_errors=True)
    shutil.copytree(site, pages / name)
    names = sorted((path.parent.name for path in pages.glob("*/index.html")), key=_order, reverse=True)
    names = [name for name in names if name != "wheels"]
    (pages / "versions.json").write_text(json.dumps(names) + "\n")
    (pages / "index.html").write_text(REDIRECT.format(names[0]))
    (pages / ".nojekyll").touch()  # or GitHub omits _static
    return names


if __name__ == "__main__":
    print(", ".join(add(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
