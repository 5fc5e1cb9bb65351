"""``python -m openreg_ops new NAME``: the three files of a new operator, which build and pass their tests as written.

With ``--package``, NAME is the name of a pip-installable package outside this repository.

They implement a real operator, x * sigmoid(x), for you to edit. The templates contain all styles: the lines after a
comment such as ``// [separate, function]`` are for these styles only, up to the next such comment; the lines after
``[end]`` are for all styles.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

from openreg_ops import _build
from openreg_tools import dispatch
from openreg_tools.core import about
from openreg_tools.core.options import Wrong, check_name

TEMPLATES = Path(__file__).parent / "templates"
STYLES = {
    "forward-only": "no derivative: asking for one is an error",
    "separate": "the derivative is a separate operator, with its own kernel",
    "function": "a torch::autograd::Function whose backward is made of PyTorch's operators",
    "stable": "for a package: like separate, in C++ whose one binary runs with many versions of torch",
}
FILES = {"NAME.cpp.in": "csrc/ops/{}.cpp", "NAME.py.in": "meta/{}.py", "test_NAME.py.in": "tests/ops/test_{}.py"}
PACKAGE_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "setup.py.in": "setup.py",
    "README.md.in": "README.md",
    "tests.yml.in": ".github/workflows/tests.yml",
    "__init__.py.in": "src/{package}/__init__.py",
    "conftest.py.in": "tests/conftest.py",
    "NAME.cpp.in": "csrc/{name}.cpp",
    "NAME.py.in": "src/{package}/{name}.py",
    "test_NAME.py.in": "tests/test_{name}.py",
}
HEADERS = ("csrc/ops/autograd.h", "csrc/ops/checks.h", "csrc/kernels/loops.h")


def render(template: str, style: str, name: str, package: str = "") -> str:
    """A template's lines for one style, with the names of the operator and its package."""
    lines, wanted = [], True
    for line in (TEMPLATES / template).read_text().splitlines(keepends=True):
        if mark := re.fullmatch(r"\s*(?://|#) \[(.*)\]\n", line):
            styles = mark[1].split(", ")
            wanted = styles == ["end"] or style in styles
        elif wanted:
            lines.append(line)
    text = "".join(lines).replace("ClassName", _class_name(name)).replace("PKG", package).replace("STYLE", style)
    torch = _build.TORCH_VERSION.split("+")[0]
    text = text.replace("OPENREG_OPS==VERSION", f"openreg_ops=={_build.VERSION}+torch{torch}")
    text = text.replace("WHEELS", f"{about.address('Documentation')}wheels/")
    return text.replace("TORCH==VERSION", f"torch=={torch}").replace("NAME", name)


def new(name: str, style: str, root: Path) -> list[Path]:
    """Write the files of operator `name` into the checkout at `root`; returns them. meta/ exports it automatically."""
    for part in (*HEADERS, "meta/op.py", "tests/ops/kit.py"):
        if not (root / part).is_file():
            raise Wrong(f"{root} is not an openreg_ops checkout: {part} is missing; name one with --root")
    _check_operator(name, root)
    files = {root / where.format(name): render(template, style, name) for template, where in FILES.items()}
    for path in files:
        if path.exists():
            raise Wrong(f"{path} already exists; choose another name, or remove it")
    for path, content in files.items():
        path.write_text(content)
    return list(files)


def new_package(package: str, style: str, operators: list[str], root: Path) -> list[Path]:
    """Write a package of operators into a new folder of its name in `root`; returns its files."""
    folder = root / package
    for name in (package, *operators):
        check_name(name)
    used = _names_in_code()
    for name in operators:
        if name in used or _class_name(name) in used:
            raise Wrong(f"{name} already has a meaning in the code of a package; choose another name")
    defined = [package, *operators, *(f"{name}_backward" for name in operators)]
    for name in defined:
        if defined.count(name) > 1:
            raise Wrong(f"{name} is needed twice, for the package, an operator or a backward; choose another name")
    if any(name.startswith(f"{package}::") for name in dispatch.names()):
        raise Wrong(f"the namespace {package} already has operators; choose another name")
    if os.path.lexists(folder):
        raise Wrong(f"{folder} already exists; choose another name, or remove it")
    if importlib.util.find_spec(package):
        raise Wrong(f"the Python package {package} already exists; choose another name")
    written = {}
    for name in operators:
        for template, where in PACKAGE_FILES.items():
            path = folder / where.format(package=package, name=name)
            written.setdefault(path, render(f"package/{template}", style, name, package))
    exports = "".join(f"from {package}.{name} import {name}  # noqa: E402\n" for name in operators)
    written[folder / f"src/{package}/__init__.py"] += f"{exports}\n__all__ = {operators!r}\n".replace("'", '"')
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(written)


def _names_in_code() -> set[str]:
    """The names that a package's code uses without a prefix, which an operator of the same name would hide."""
    code = "".join((TEMPLATES / "package" / template).read_text() for template in PACKAGE_FILES if "NAME" in template)
    code = re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|(?://|#).*', "", code)
    return set(re.findall(r"(?<![\w.:>])[a-zA-Z]\w*", code))


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _check_operator(name: str, root: Path) -> None:
    check_name(name)
    sources = "".join(path.read_text() for path in (root / "csrc/ops").glob("*.cpp"))
    for taken in re.findall(r'm\.def\(\s*"(\w+)', sources):
        if taken in (name, f"{name}_backward"):
            raise Wrong(f"the operator {taken} already exists; choose another name")
    # The name becomes a C++ function beside the functions of the headers, and a Python name in the package.
    words = "".join(path.read_text() for path in (*map(root.joinpath, HEADERS), *map(TEMPLATES.joinpath, FILES)))
    files = [root / "openreg_ops" / file for file in (name, f"{name}.py")]
    if re.search(rf"\b(check_)?{name}\b", words) or any(path.exists() for path in files):
        raise Wrong(f"{name} already has another meaning in C++, Python, csrc/ops or openreg_ops; choose another name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the operator's name: lower case, with underscores between words")
    parser.add_argument(
        "--style",
        choices=STYLES,
        default="separate",
        help="; ".join(f"{s}: {t}" for s, t in STYLES.items()) + " (default: separate)",
    )
    parser.add_argument("--package", action="store_true", help="create a package of operators to install with pip")
    parser.add_argument("--ops", metavar="A,B", help="with --package: the names of its operators (default: weigh)")
    parser.add_argument(
        "--root", type=Path, default=Path("."), help="the checkout, or the package's parent folder (default: here)"
    )


def main(arguments: argparse.Namespace) -> int:
    """0 if the files are written, 2 if the request is wrong."""
    try:
        if arguments.package:
            operators = ("weigh" if arguments.ops is None else arguments.ops).split(",")
            written = new_package(arguments.name, arguments.style, operators, arguments.root)
        elif arguments.style == "stable" or arguments.ops is not None:
            raise Wrong("--style stable and --ops are for packages: add --package")
        else:
            written = new(arguments.name, arguments.style, arguments.root)
    except Wrong as error:
        print(f"new: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"new: cannot write {error.filename}: {error.strerror}; choose another --root or name", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    if arguments.package:
        folder = arguments.root / arguments.name
        # Without ./, pip takes the name for a package on PyPI.
        path = shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")
        print(
            f"Run `pip install --no-build-isolation {path}`, `pytest {path}`, and `python -m openreg_ops check "
            f"{arguments.name}:{operators[0]} --device openreg`. docs/packages.md explains each part."
        )
        return 0
    print(
        f'Run `make test ARGS="tests/ops -k {arguments.name}"`, which builds first. docs/writing-an-operator.md explains each part.'
    )
    return 0
