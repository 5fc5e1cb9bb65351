"""Writes a package index of wheels (PEP 503): a page of packages, and for each package a page of links to its files.

Reads what GitHub knows of the files of every release, one JSON object in a line:

    gh api --paginate repos/OWNER/NAME/releases --jq '.[].assets[] | {name, url: .browser_download_url, digest}' |
        python release/index.py build/docs/wheels

Here, `--wheels dist` describes a folder's files instead.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{0}</title></head>\n<body>\n{1}\n</body>\n</html>\n'


def normalized(name: str) -> str:
    """The package's name in an address, as PEP 503 defines it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pages(files: Iterable[dict[str, str]]) -> dict[str, str]:
    """Each page of the index, by its path, for files that have "name", "url" and maybe "digest": sha256:…"""
    links: dict[str, list[str]] = {}
    for file in sorted(files, key=lambda file: file["name"]):
        if not file["name"].endswith((".whl", ".tar.gz")):
            continue
        digest = (file.get("digest") or "").replace("sha256:", "#sha256=")
        link = f'<a href="{html.escape(file["url"] + digest)}">{html.escape(file["name"])}</a><br>'
        links.setdefault(normalized(file["name"].partition("-")[0]), []).append(link)
    top = "\n".join(f'<a href="{name}/">{name}</a><br>' for name in sorted(links))
    found = {f"{name}/index.html": PAGE.format(name, "\n".join(lines)) for name, lines in links.items()}
    return {"index.html": PAGE.format("Wheels", top), **found}


def described(folder: Path) -> list[dict[str, str]]:
    """What GitHub would say about a folder's files, at their addresses on this machine."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [
        {
            "name": path.name,
            "url": path.resolve().as_uri(),
            "digest": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        }
        for path in files
    ]


def write(files: Iterable[dict[str, str]], target: Path) -> None:
    """Write the index into a folder."""
    for path, text in pages(files).items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder of the index")
    parser.add_argument("--wheels", type=Path, help="the folder of the files, instead of standard input")
    arguments = parser.parse_args()
    files = (
        described(arguments.wheels) if arguments.wheels else [json.loads(line) for line in sys.stdin if line.strip()]
    )
    write(files, arguments.target)
    print(f"{arguments.target}: {len(files)} files")


if __name__ == "__main__":
    main()
