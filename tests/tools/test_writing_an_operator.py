"""`python -m openreg_ops new`, and the code of docs/writing-an-operator.md.

The operators are built into a copy of the package: their own files are compiled, all others' objects are taken from the
last build.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import openreg_ops
from openreg_ops import __main__ as command_line
from openreg_ops import kernel_library
from openreg_ops.tools import new as new_command
from openreg_ops.tools.new import FILES, HEADERS, STYLES, Wrong, new, render

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/writing-an-operator.md"
NO_TENSOR, OUTSIDE = "## A non-tensor argument", "## Outside this repository"
BUILD = ROOT / f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}"
NAMES = {"weigh_only": "forward-only", "weigh": "separate", "weigh_by_function": "function"}

# An installed wheel has no objects to link new operators with.
needs_build = pytest.mark.skipif(
    not (ROOT / "build").exists(), reason=f"there is no {ROOT / 'build'}, which `make install` writes"
)


def checkout(root):
    """What an operator's files meet, copied from here."""
    shutil.copytree(ROOT / "csrc", root / "csrc")
    shutil.copytree(ROOT / "meta", root / "meta", ignore=shutil.ignore_patterns("__pycache__"))
    package = shutil.ignore_patterns("__pycache__", "*.so", "meta")
    shutil.copytree(Path(openreg_ops.__file__).parent, root / "openreg_ops", ignore=package)
    (root / "openreg_ops/meta").symlink_to("../meta")
    (root / "tests").mkdir()
    shutil.copytree(ROOT / "tests/ops", root / "tests/ops", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    return root


def build(root, names):
    """Compiles the operators as the last build did, as one, and links them with its objects into root's package."""
    capability, module = kernel_library.capability(), Path(openreg_ops._C.__file__)
    rules, *edges = (BUILD / "build.ninja").read_text().split("\nbuild ")
    library = kernel_library.library(capability)
    objects = next(
        re.findall(r"\S+\.o", edge) for edge in edges if edge.startswith(f"{BUILD.relative_to(ROOT)}/{library}")
    )
    flags = next(re.search(r"\n  flags = .*", edge)[0] for edge in edges if edge.startswith(objects[0]))
    unit = [BUILD / capability / "precompiled.h", *(root / f"csrc/ops/{name}.cpp" for name in names)]
    (root / "new.cpp").write_text("".join(f'#include "{path}"\n' for path in unit))
    (root / "build.ninja").write_text(
        f"builddir = .\n{rules.partition(chr(10))[2]}\nbuild new.o: compile new.cpp{flags}\n"
    )
    run(sys.executable, "-m", "ninja", cwd=root)
    package = root / "openreg_ops"
    shutil.copy(module, package)
    (package / "lib").mkdir(exist_ok=True)
    shutil.copy(Path(*openreg_ops.library_paths(), "libopenreg_ops.so"), package / "lib")
    linked = [*(str(ROOT / each) for each in objects), "new.o", str(module)]
    paths = [f"-L{path}" for path in cpp_extension.library_paths()]
    run("c++", "-shared", *linked, *paths, "-lc10", "-ltorch_cpu", "-o", str(package / library), cwd=root)


def run(*command, cwd, **environment):
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = checkout(tmp_path_factory.mktemp("checkout"))
    for name, style in NAMES.items():
        new(name, style, root)
    build(root, NAMES)
    return root


@pytest.mark.compiles
@needs_build
def test_new_operators_pass_their_tests(built):
    """And the tests of every operator, including the checker."""

    def pytest_of(*arguments):
        return run(sys.executable, "-m", "pytest", "-W", "ignore", *arguments, cwd=built, PYTHONPATH=str(built))

    every = ["tests/ops/test_every_operator.py", "-k"]
    runs = [["tests/ops/test_files.py", *(f"tests/ops/test_{name}.py" for name in NAMES)]]
    runs += [[*every, "weigh and not weigh_"], [*every, "weigh_"]]
    with ThreadPoolExecutor() as pool:
        for out in pool.map(lambda arguments: pytest_of(*arguments), runs):
            assert "[100%]" in out


# ---- the command ----


@pytest.fixture
def fresh(tmp_path):
    """A checkout with no more than the command looks at."""
    for file in (*HEADERS, "csrc/ops/rms_norm.cpp", "meta/op.py", "tests/ops/kit.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "openreg_ops").mkdir()
    (tmp_path / "openreg_ops/streams.py").touch()
    return tmp_path


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["openreg_ops", "new", *arguments])
    return command_line.main()


def test_command_writes_into_the_current_directory(fresh, monkeypatch, capsys):
    monkeypatch.chdir(fresh)
    assert command(monkeypatch, "abc_norm", "--style", "separate") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert written == [Path(each.format("abc_norm")) for each in FILES.values()]
    assert all(path.exists() for path in written)


@pytest.mark.parametrize("style", STYLES)
def test_nothing_of_the_template_is_left(style):
    for template in FILES:
        text = render(template, style, "foo_bar")
        assert not re.search(r"NAME|ClassName|\[(end|separate|function|forward-only)", text)
        assert "\n\n\n\n" not in text and text.endswith("\n") and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("mark", ["//", "#"])
def test_lines_of_some_styles(monkeypatch, tmp_path, mark):
    """A template's lines between marks are those of each style that the mark names."""
    monkeypatch.setattr(new_command, "TEMPLATES", tmp_path)
    marked = {"one": "[function]", "two": "[separate, function]", "three": "[forward-only, separate, function]"}
    lines = [f"  {mark} {styles}\n{word}\n{mark} [end]\n" for word, styles in marked.items()]
    (tmp_path / "it.in").write_text(f"first\n{''.join(lines)}{mark} [sic\nlast\n")
    for style in ("forward-only", "separate", "function"):
        expected = ["first", *(word for word, styles in marked.items() if style in styles), f"{mark} [sic", "last"]
        assert render("it.in", style, "foo_bar").splitlines() == expected


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("Foo", "expected a name of lower-case words with underscores between, such as my_name, but got 'Foo'"),
        ("../foo", "expected a name of lower-case words"),
        ("foo__bar", "expected a name of lower-case words"),
        ("rms_norm", "the operator rms_norm already exists; choose another name"),
        ("rms_norm_backward", "the operator rms_norm_backward already exists"),
        ("sum", "sum already has another meaning in C++, Python, csrc/ops or openreg_ops; choose another name"),
        ("lambda", "lambda is a reserved word"),
        ("switch", "switch is a reserved word"),
        ("sigmoid", "sigmoid already has another meaning"),
        ("streams", "streams already has another meaning"),
    ],
)
def test_refuses_names(fresh, name, sentence):
    before = {path: path.read_text() for path in fresh.rglob("*") if path.is_file()}
    with pytest.raises(Wrong, match=re.escape(sentence)):
        new(name, "separate", fresh)
    assert before == {path: path.read_text() for path in fresh.rglob("*") if path.is_file()}


def test_refuses_to_overwrite(fresh, monkeypatch, capsys):
    (fresh / "tests/ops/test_foo.py").write_text("mine")
    assert command(monkeypatch, "foo", "--style", "function", "--root", str(fresh)) == 2
    assert "test_foo.py already exists; choose another name, or remove it" in capsys.readouterr().err
    assert not (fresh / "csrc/ops/foo.cpp").exists() and (fresh / "tests/ops/test_foo.py").read_text() == "mine"


def test_refuses_a_directory_that_is_no_checkout(tmp_path):
    with pytest.raises(
        Wrong, match=r"is not an openreg_ops checkout: csrc/ops/autograd.h is missing; name one with --root"
    ):
        new("foo", "function", tmp_path)


# ---- the guide ----


def blocks(text, *languages):
    return [block for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.S) if language in languages]


def test_guide_shows_what_the_command_writes():
    inside, _ = GUIDE.read_text().split(NO_TENSOR)
    written = [render(template, style, "weigh") for template in FILES for style in STYLES]
    shown = blocks(inside, "cpp", "python")
    assert len(shown) > 8
    for block in shown:
        assert any(block in text for text in written), block
    assert blocks(inside, "") == ["python -m openreg_ops new weigh --style separate\n"]


def test_guide_quotes_operators_with_an_argument_that_is_no_tensor():
    section = GUIDE.read_text().split(NO_TENSOR)[1].split(OUTSIDE)[0]
    names = ("scale_gradient", "dropout_add")
    quoted = [(ROOT / file).read_text() for name in names for file in (f"csrc/ops/{name}.cpp", f"meta/{name}.py")]
    shown = blocks(section, "cpp", "python")
    assert len(shown) == 4
    for block in shown:
        assert any(block in text for text in quoted), block


@pytest.mark.compiles
@needs_build
def test_guide_for_authors_outside_runs(tmp_path):
    _, outside = GUIDE.read_text().split(OUTSIDE)
    for block in blocks(outside, "cpp", "python"):
        (tmp_path / block.split(maxsplit=2)[1]).write_text(block)
    path = os.pathsep.join([str(tmp_path), str(Path(openreg_ops.__file__).parents[1])])
    extensions = str(tmp_path / "extensions")
    (tmp_path / "extensions").mkdir()
    for program in ("use_my_ops.py", "my_python_ops.py"):
        out = run(sys.executable, program, cwd=tmp_path, PYTHONPATH=path, TORCH_EXTENSIONS_DIR=extensions, MAX_JOBS="1")
        if program == "use_my_ops.py":  # the remarks that the guide explains
            remarks = ["refused dtensor", "refused half_precision", "warn forward_ad"]
            assert re.findall(r"^(?:warn|refused) \w+", out, re.M) == remarks
            assert re.search(r"PyTorch's own limits.* func_grad,\s+vmap_grad", out)
