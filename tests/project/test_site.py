"""The site builds without a warning, has every page, and its generated pages match the source."""

import html
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def words(path):
    """The text of a page, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", path.read_text())).split())


@pytest.mark.slow
@pytest.mark.processes
def test_the_site(site):
    """In one test, so that one process builds it."""
    built = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    assert {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} <= built
    front = (site / "index.html").read_text()
    assert 'role="search"' in front and "openreg_ops 0." in front and "whats-new.html" in front

    # A figure is part of its page, so it follows the page's light and dark mode.
    page = (site / "architecture.html").read_text()
    assert page.count('class="drawing-svg"') == (DOCS / "architecture.md").read_text().count("](figures/") > 1
    assert "<img" not in re.sub(r"<nav.*?</nav>|<header.*?</header>|<aside.*?</aside>", "", page, flags=re.S)

    # A link inside of the site leads to an anchor that exists.
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', path.read_text())) for path in site.rglob("*.html")}
    wrong = []
    for path in anchors:
        for link in re.findall(r'<a [^>]*href="([^"]+)"', path.read_text()):
            name, _, anchor = html.unescape(link).partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong

    # The reference has every public name, option and note.
    import torch

    import openreg_ops
    from openreg_ops.__main__ import COMMANDS

    reference = words(site / "reference/operators.html") + words(site / "reference/openreg-ops.html")
    assert [name for name in openreg_ops.meta.__all__ if f"openreg_ops.{name}" not in reference] == []
    device = words(site / "reference/torch-openreg.html")
    assert [name for name in torch.openreg.__all__ if f"torch.openreg.{name}" not in device] == []
    commands = words(site / "reference/commands.html")
    assert [name for name in COMMANDS if f"{name}¶" not in commands] == []
    assert "--required" in commands and "--device-misuse" in commands and "--against" in commands
    notes = words(site / "notes.html")
    source = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.h"))
    titles = re.findall(r"^// Note \[([^\]]+)\]$", source, re.M)
    assert len(titles) > 20 and [title for title in titles if f"{title}¶" not in notes] == []

    # The page of errors has a sentence of C++, one of Python, and what each says to do.
    errors = words(site / "reference/errors.html")
    assert "empty …: expected a strided layout" in errors or ": expected a strided layout, but got …" in errors
    assert "openreg_ops needs openreg_tools, which is not installed" in errors
    assert "convert it with .to(torch.int32)" in errors

    # Formulas of docstrings are mathematics, names lead to their source, and a written page to its file.
    operators = (site / "reference/operators.html").read_text()
    assert operators.count("<math") > 30 and "\\frac" not in operators
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    source = re.findall(rf'href="{urls["Repository"]}/blob/\w+/(meta/rms_norm\.py)#L(\d+)-L\d+"', operators)
    lines = (ROOT / "meta/rms_norm.py").read_text().splitlines()
    assert {name.split("(")[0] for path, line in source for name in lines[int(line) - 1 : int(line) + 1]} >= {
        "def rms_norm",
        "def rms_norm_backward",
    }
    edit = f"{urls['Repository']}/edit/main/docs/"
    assert f"{edit}checker.md" in (site / "checker.html").read_text() and edit not in operators
    assert ">// the half types, as the kernel.<" in (site / "writing-an-operator.html").read_text()  # a broken line
    assert "copybutton.js" in front and "sidebar-project" in front and "logo-dark.svg" in front


def test_the_figures_are_what_their_source_draws():
    drawn = runpy.run_path(str(DOCS / "figures/draw.py"))["draw"]()
    there = {path.name: path.read_text() for path in (DOCS / "figures").glob("*.svg")}
    assert there == drawn, "run `python docs/figures/draw.py`"
