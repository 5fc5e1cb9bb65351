"""Every block of code in README.md and docs/ runs alone, beside the files that its page names.

Pages in ELSEWHERE have a test of their own. So have the examples of the checks in docs/checker.md, in
tests/tools/test_checker_page.py. tests/clients/test_docs.py runs "Training frameworks" of docs/integration.md,
which needs libraries that the tests' environment does not have.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from processes import python
from torch.utils import cpp_extension

import openreg_ops
from openreg_tools.check.checks import CHECKS

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")]

ELSEWHERE = {
    "docs/tools.md": ("test_documented_commands.py", {"console", "cpp"}),
    "docs/testing-your-library.md": ("test_pytest_plugin.py", {"console"}),
    "docs/writing-an-operator.md": ("test_writing_an_operator.py", {"cpp", "python"}),
}
COLUMN = 90
WRAPPED = {"console", "cpp", "output"}  # docs/_static/site.css, docs/_ext/site_html.py: WrapCpp
GENERATED = {"docs/notes.md", "docs/source.md"}
INSTALLED = str(Path(openreg_ops.__file__).parents[1])  # the checkout, or a copy where it is not built
# These appear without this package too: the first where torch 2.13 starts and stops a profile, the others from torch
# with CUDA's libraries on a machine without a GPU, the last one only if CUDA's compiler is installed.
KNOWN = ("USDT:", "gpuGetDeviceCount failed", "No CUDA runtime is found")


def pages():
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if name not in GENERATED and not name.startswith("docs/reference/")]


def blocks():
    """Each block of code: page, heading, language and text."""
    for page in pages():
        headings = [""] * 5
        for level, title, language, text in re.findall(
            r"^(#+) ([^\n]+)$|^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S
        ):
            if level:
                headings[len(level) - 1 :] = [title] + [""] * (5 - len(level))
                continue
            heading = next(title for title in reversed(headings) if title)
            if page == "docs/integration.md" and "Training frameworks" in headings:
                continue
            if page == "docs/checker.md" and language == "python" and heading in CHECKS:
                continue
            yield page, heading, language, text


def named(page, block=""):
    """The files of a page as they are at `block`: blocks that begin with their name, changed by the diffs before it."""
    files, past = {}, False
    for where, _, language, text in blocks():
        if where != page:
            continue
        past |= text == block
        if match := re.match(r"(?:#|//) ([\w/]+\.\w+)\n", text):
            files.setdefault(match[1], text)
        elif language == "diff" and not past:
            files |= changed(files, text)
    return files


def changed(files, diff):
    """The file that a diff names, with its hunks applied; each finds its place by its lines alone."""
    name, *hunks = re.split(r"^@@\n", diff.removeprefix("--- "), flags=re.M)
    name = name.split()[0]
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] or line for line in lines if line[0] != sign) for sign in "+-")
        assert files[name].count(old) == 1, f"{name} has these lines not once: {old}"
        files = files | {name: files[name].replace(old, new)}
    return {name: files[name]}


def run(language):
    """The blocks of a language that no page's own test runs."""
    for page, heading, of, text in blocks():
        if (page, language) == ("docs/symptoms.md", "python"):
            continue  # the commands of the page run its files
        if of == language and language not in ELSEWHERE.get(page, ("", ()))[1]:
            yield pytest.param(page, heading, text, id=f"{page.removeprefix('docs/')}-{heading}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to run in, with the package on the path, which loads itself as it does for a user."""
    path = os.pathsep.join(p for p in (str(tmp_path), INSTALLED, os.environ.get("PYTHONPATH")) if p)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    return tmp_path


@pytest.mark.parametrize("page, heading, code", list(run("python")))
def test_a_block_runs(page, heading, code, folder):
    for name, text in named(page, code).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    code = code.replace('device="cuda"', 'device="cpu"')  # the one block that shows another device
    if re.search(r"^def test_|^@pytest", code, re.M):
        (folder / "test_block.py").write_text(code)
        done = python(
            "-m", "pytest", "-q", "-p", "openreg_ops", "--device=openreg", "test_block.py", cwd=folder, dynamo=True
        )
        assert done.returncode == 0, done.stdout
        return
    (folder / "program.py").write_text("import openreg_ops\n" + code)
    done = python("program.py", cwd=folder, dynamo=True)
    errors = [line for line in done.stderr.splitlines() if not any(text in line for text in KNOWN)]
    if page == "docs/checker.md":  # says what it checks
        errors = [line for line in errors if not line.startswith("checking ")]
    assert (done.returncode, errors) == (0, [])


@pytest.mark.parametrize("page, heading, shown", list(run("console")))
def test_a_command_prints_what_the_page_shows(page, heading, shown, folder):
    """But for the time that it took, and for what an … leaves out."""
    for name, text in named(page, shown).items():
        (folder / name).write_text(text)
    command, _, expected = shown.removeprefix("$ ").partition("\n")
    words = shlex.split(command)
    module = {"openreg-tools": "openreg_tools", "torchrun": "torch.distributed.run"}.get(words[0], words[0])
    words = words[1:] if module == "python" else ["-m", module, *words[1:]]
    if "pytest" in words:  # in a new process, because pytest warns of a plugin that is imported already
        words = [sys.executable, "-P", *words]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    else:
        done = python(*words, cwd=folder, timeout=300, dynamo=True)
    plain = lambda text: [re.sub(r" in [\d.]+s$", "", line) for line in text.splitlines()]  # noqa: E731
    printed = "\n".join(plain(done.stdout))
    for part in re.split(r"^…\n", expected, flags=re.M):
        assert "\n".join(plain(part)) in printed, done.stdout + done.stderr


def test_the_operator_of_the_readme_passes_opcheck(folder):
    """As the README says of it; what `check` finds is in the test of its command."""
    code = named("README.md")["my_ops.py"]
    code += "torch.library.opcheck(scale, (torch.randn(3, 4), 2.0))\n"
    (folder / "program.py").write_text(code)
    done = python("program.py", cwd=folder, dynamo=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("page, heading, code", list(run("cpp")))
def test_a_block_compiles(page, heading, code, folder):
    """A program runs too, on the device's library alone; a fragment stands in a function of tensors x and y."""
    headers = [f"-I{path}" for path in openreg_ops.include_paths()]
    if "int main()" in code:
        (folder / "main.cpp").write_text(code)
        library = openreg_ops.library_paths()[0]
        link = [f"-L{library}", "-lopenreg_ops", f"-Wl,-rpath,{library}", "-DOPENREG_LINKED"]
        words = ["g++", "-std=c++20", "main.cpp", *headers, *link, "-o", "main"]
        subprocess.run(words, cwd=folder, check=True, timeout=300)
        assert subprocess.run(["./main"], cwd=folder, timeout=60).returncode == 0
        return
    includes = "".join(re.findall(r"^#include.*\n", code, re.M))
    rest = re.sub(r"^#include.*\n", "", code, flags=re.M)
    if not re.search(r"^(TORCH_LIBRARY|\w[\w: &*<>]* \w+\(.*\) \{$)", rest, re.M):
        rest = f"void f(const at::Tensor& x, at::Tensor& y) {{\n{rest}\n}}\n"
    tensors = "#include <ATen/ATen.h>\n" * ("at::" in rest)  # which take seconds
    (folder / "fragment.cpp").write_text(f"#include <cstdint>\n{tensors}{includes}{rest}")
    headers += [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", "fragment.cpp", *headers], cwd=folder, check=True, timeout=300
    )


# ---- the pages as text ----


def slug(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    return {slug(title) for title in re.findall(r"^#+ ([^\n]+)", text, re.M)}


@pytest.mark.parametrize("page", [*pages(), "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    """To a file of the repository, a page that `make docs` writes, a heading, or a workflow on GitHub."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.M | re.S)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        if workflow := re.match(r"\.\./\.\./actions/workflows/([\w.]+)", link):
            link, path, anchor = link, ROOT / ".github/workflows" / workflow[1], ""
        else:
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() and str(path.relative_to(ROOT)) not in GENERATED:
            wrong.append(link)
        elif anchor and path.exists() and anchor not in anchors(path.relative_to(ROOT)):
            wrong.append(link)
    assert not wrong, f"{page}: these links lead nowhere: {wrong}"


def test_the_diff_of_the_backend_tutorial_applies():
    template = (ROOT / "openreg_tools/new_backend/template/csrc/kernels.cpp").read_text()
    (diff,) = (text for page, _, of, text in blocks() if page == "docs/tutorial-backend.md" and of == "diff")
    assert (
        'm.impl("relu", relu);'
        in changed({"torch_acme/csrc/kernels.cpp": template}, diff)["torch_acme/csrc/kernels.cpp"]
    )


def test_pages_of_their_own_tests_exist():
    for page, (name, _) in ELSEWHERE.items():
        assert (ROOT / page).exists() and (ROOT / "tests/tools" / name).read_text().count(page) >= 1


@pytest.mark.parametrize("page", [page for page in pages() if page != "README.md"])
def test_code_fits_its_column(page):
    """On a screen of 1280 pixels, 90 characters fit into the site's column, which wraps WRAPPED."""
    text = (ROOT / page).read_text()
    wide = [
        line
        for language, block in re.findall(r"^ *```(.*)\n((?s:.*?))^ *```", text, re.M)
        if language not in WRAPPED
        for line in block.splitlines()
        if len(line) > COLUMN
    ]
    assert not wide, "\n".join(wide)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
