"""The functions of torch's stable C interface, each with the first release that has it.

../manifests/shims.txt covers 2.9.0 to 2.15.0 and lists each function under the first release whose headers declare it.
For later releases, the headers of the installed torch say it. ``python -m openreg_tools.abi.shims FOLDER…`` writes the
file
again from the `torch/include` of one release after the other; each release's wheel has it.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

__all__ = ["declared", "releases", "since"]

FILE = Path(__file__).parents[1] / "manifests/shims.txt"
HEADERS = ("torch/csrc/stable/c", "torch/csrc/inductor/aoti_torch/c", "torch/csrc/inductor/aoti_torch/generated")


def declared(include: Path) -> dict[str, tuple[str, str]]:
    """The functions that one torch's headers declare: by name, the release that they are for ("" for all) and the
    header."""
    found: dict[str, tuple[str, str]] = {}
    for folder in HEADERS:
        for path in sorted((include / folder).glob("*shim*.h")):
            text = re.sub(r"//.*|\\\n", " ", path.read_text())
            guards: list[str] = []
            for line in re.split(r"\n(?=#)|(?<=\n)(?=AOTI)|(?<=;)\n", text):
                if word := re.match(r"\s*#\s*(if|endif)", line):
                    if word[1] == "endif":
                        guards.pop()
                    else:
                        of = re.match(r".*TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_(\d+)", line)
                        guards.append(".".join(of.groups()) if of else "")
                for name in re.findall(r"AOTI_TORCH_EXPORT[\w\s*]*?\b(\w+)\s*\(", line):
                    release = next((guard for guard in reversed(guards) if guard), "")
                    found.setdefault(name, (release, str(path.relative_to(include))))
    return found


@functools.cache
def releases() -> dict[str, str]:
    """The first release that has each function, according to the file."""
    found, release = {}, ""
    for line in FILE.read_text().splitlines():
        if line.startswith("  "):
            found[line.strip()] = release
        else:
            release = line
    return found


def since(name: str, installed: dict[str, tuple[str, str]]) -> str | None:
    """The first release that has this function, or None if it is not in torch's stable interface.

    Args:
        installed: what the installed torch declares.
    """
    if name in releases():
        return releases()[name]
    return (installed[name][0] or None) if name in installed else None


def main(folders: list[str]) -> None:
    first: dict[str, str] = {}
    for folder in folders:
        version = re.search(r"__version__ = '([\d.]+)", (Path(folder).parent / "version.py").read_text())[1]
        for name in declared(Path(folder)):
            first.setdefault(name, version)
    lines = []
    for version in dict.fromkeys(first.values()):
        lines += [version, *sorted(f"  {name}" for name, release in first.items() if release == version)]
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
