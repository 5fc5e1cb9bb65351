"""Everything that a release does, without publishing anything: ``make release-check``.

Each step writes its output to build/release/. A failed step does not end the run, unless later steps need it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import index
import links
import publish

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "release"
VERSION = tomllib.loads((ROOT / "openreg_tools" / "pyproject.toml").read_text())["project"]["version"]


class Failed(Exception):  # noqa: N818 -- a step failed, in one line
    pass


class Steps:
    """Runs steps, and says what became of each."""

    def __init__(self) -> None:
        self.results: list[tuple[str, str]] = []

    def run(self, name: str, step: Callable[[Path], str]) -> bool:
        """Run a step, which returns what it found or raises Failed; it may write to the log that it is given."""
        log, began = LOGS / f"{name.replace(' ', '_')}.log", time.monotonic()
        print(f"[{time.strftime('%H:%M:%S')}] {name} ({log.relative_to(ROOT)})", flush=True)
        try:
            result, passed = step(log), True
        except Failed as error:
            result, passed = f"FAILED: {error}", False
        print(f"           {result}, {time.monotonic() - began:.0f} s", flush=True)
        self.results.append((name, result))
        return passed


def command(log: Path, *words: str | Path) -> str:
    """Run a command, with its output in the log; returns the last line of it."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, words))}\n")
        file.flush()
        status = subprocess.run(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ).returncode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if status:
        print("\n".join(f"           | {line}" for line in lines[-12:]))
        raise Failed(f"{Path(words[0]).name} {words[1]} ended with {status}")
    return lines[-1].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="the version of torch to build for")
    parser.add_argument("--python", required=True, help="the Python to build with")
    options = parser.parse_args()
    make = ["make", "--no-print-directory", f"TORCH={options.torch}", f"PYTHON={options.python}"]
    dist = ROOT / "dist"
    shutil.rmtree(LOGS, ignore_errors=True)
    shutil.rmtree(dist, ignore_errors=True)
    LOGS.mkdir(parents=True)
    steps = Steps()

    def built(log: Path) -> str:
        command(log, *make, "wheel")
        command(log, *make, "sdist")
        return f"{len(list(dist.iterdir()))} files in dist"

    def metadata(log: Path) -> str:
        command(log, sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
        return "twine accepts all files"

    def found(log: Path) -> str:
        index.write(index.described(dist), LOGS / "wheels")
        wheel = f"openreg_ops=={VERSION}+torch{options.torch}"
        address = (LOGS / "wheels").as_uri()
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-cache-dir",
            "--dest",
            LOGS / "downloaded",
        ]
        command(log, *download, "--index-url", address, wheel, f"openreg_tools=={VERSION}")
        return f"pip finds {wheel} in the index"

    def site(log: Path) -> str:
        command(log, *make, "docs")
        publish.add(ROOT / "build" / "docs", LOGS / "pages", f"v{VERSION}")
        return f"{len(list((ROOT / 'build' / 'docs').rglob('*.html')))} pages"

    def linked(log: Path) -> str:
        dead, count, elsewhere = links.check(ROOT / "build" / "docs")
        dead += links.check_markdown(ROOT / "README.md")
        log.write_text("\n".join(dead) + "\n")
        if dead:
            print("\n".join(f"           | {line}" for line in dead[:12]))
            raise Failed(f"{len(dead)} of {count} links are dead")
        return f"{count} links, of which {elsewhere} lead to other sites and were not tried"

    if steps.run("wheels", built):
        steps.run("metadata", metadata)
        steps.run("index", found)
        steps.run("try the wheel", lambda log: command(log, *make, "try-wheel"))
        if steps.run("site", site):
            steps.run("links", linked)
    failed = sum(result.startswith("FAILED") for _, result in steps.results)
    print("\n" + "\n".join(f"{name:<14} {result}" for name, result in steps.results))
    print(
        f"{failed} of {len(steps.results)} steps failed" if failed else f"{VERSION} is ready: push the tag v{VERSION}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
