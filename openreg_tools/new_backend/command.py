"""``openreg-tools new-backend NAME``: writes the package ``torch_NAME``, a backend for a new PrivateUse1 device.

template/ is that package for a device called acme. The command copies it, with the user's name in place of acme.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from openreg_tools.core.options import Wrong, check_name

TEMPLATE = Path(__file__).parent / "template"


def files() -> list[Path]:
    """The files of the template, relative to its folder."""
    found = (path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(TEMPLATE) for path in found)


def named(text: str, name: str) -> str:
    """A text of the template, for the device `name`."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    return text.replace("acme", name).replace("Acme", camel).replace("ACME", name.upper())


def check_device(name: str) -> None:
    """Raise Wrong if the device cannot be called `name`."""
    import torch

    check_name(name)
    try:
        torch.device(name)
    except RuntimeError:  # no device has this name
        pass
    else:
        raise Wrong(f"PyTorch already has a device type {name}; choose another name")
    if hasattr(torch, name) or hasattr(torch.Tensor, name):
        raise Wrong(f"PyTorch already has torch.{name} or Tensor.{name}, which the device needs; choose another name")
    code = "".join((TEMPLATE / path).read_text() for path in files() if path.suffix in (".py", ".cpp", ".h"))
    if name != "acme" and re.search(rf"\b{name}\b", code):
        raise Wrong(f"{name} already has another meaning in the code of the package; choose another name")


def write(name: str, folder: Path) -> list[Path]:
    """Write the package for the device `name` into `folder`; returns its files.

    Raises:
        Wrong: the device cannot have this name, or the folder exists and is not empty.
    """
    check_device(name)
    if folder.exists() and not folder.is_dir():
        raise Wrong(f"{folder} is a file; name another folder with --into")
    if folder.is_dir() and any(folder.iterdir()):
        raise Wrong(f"{folder} exists and is not empty; name another folder with --into, or empty it")
    written = []
    for path in files():
        target = folder / named(str(path), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(named((TEMPLATE / path).read_text(), name))
        written.append(target)
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the device's name, as in torch.device(NAME): lower case")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="the package's folder (default: ./torch_NAME)")


def main(arguments: argparse.Namespace) -> int:
    """0 if the package is written, 2 if the request is wrong."""
    name = arguments.name
    folder = arguments.into or Path(f"torch_{name}")
    try:
        written = write(name, folder)
    except OSError as error:
        raise Wrong(f"cannot write {error.filename}: {error.strerror}; name another folder with --into") from error
    path = shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")  # without ./, pip looks on PyPI
    lines = sum(len(file.read_text().splitlines()) for file in written)
    print(f"{folder}: {len(written)} files, {lines} lines. README.md says what each is. Next:")
    print(f"    pip install '{path}[test]'" if path == f"./{folder}" else f"    pip install {path}")
    print(f"    pytest {path}")
    print(f"    openreg-tools ladder --import torch_{name} --device {name}")
    print(f"Then replace csrc/runtime/{name}_cpu.cpp, which stands in for the hardware, by calls of your driver.")
    return 0
