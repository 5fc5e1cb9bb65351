"""The symbols of libtorch that a binary uses outside torch's stable C interface: ``openreg-tools check --abi``.

The library is read with binutils, not loaded. Header code that is compiled into it and calls nothing leaves no symbol.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openreg_tools.core.blocks import Block, Lines, Section, Text, counted, cut
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Report

__all__ = ["Symbols", "audit", "declared"]

# The folders of headers that declare torch's stable C interface.
_STABLE = ("torch/csrc/stable/c", "torch/csrc/inductor/aoti_torch/c", "torch/csrc/inductor/aoti_torch/generated")
# A C++ symbol with a name of at, c10, caffe2 or torch, except torch::stable and torch::headeronly.
_OF_TORCH = re.compile(r"_Z\w*?(2at|3c10|6caffe2|5torch(?!6stable|10headeronly))[\dCDIE]")


@dataclasses.dataclass
class Symbols(Report):
    """What a library uses of libtorch.

    unstable: the C++ names of symbols that may change in the next release, by the library of torch that has them.
    stable: the functions of torch's stable C interface that it calls.
    """

    path: str
    torch: str  # the installed release, in which the symbols were looked up
    unstable: dict[str, list[str]]
    stable: list[str]

    @property
    def is_stable(self) -> bool:
        """True if the library uses no unstable symbol of torch."""
        return not self.unstable

    def blocks(self, page: bool = False) -> Iterator[Block]:
        yield Text(f"{self.path}, looked up in torch {self.torch}")
        for library, names in self.unstable.items():
            title = f"{counted(len(names), 'unstable symbol')} of {library}"
            yield Section(title, [Lines([f"  {cut(name, 78)}" for name in names])])

    def summary(self) -> str:
        stable = f"{counted(len(self.stable), 'function')} of torch's stable interface"
        if self.is_stable:
            return f"stable: no unstable symbols of torch, {stable}"
        number = counted(sum(map(len, self.unstable.values())), "unstable symbol")
        return f"not stable, build it again for each release of torch: {number}, {stable}"

    def dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_stable": self.is_stable}


def audit(path: str | Path) -> Symbols:
    """Find the symbols of libtorch that a shared library uses and that the next release may change.

    Args:
        path: a shared library of Linux (ELF), such as ``mypkg/_C.abi3.so``.
    Raises:
        Wrong: `path` is not such a file or does not use torch, or torch or binutils are not installed.
    """
    if not Path(path).is_file():
        raise Wrong(f"{path} is {'a folder' if Path(path).is_dir() else 'not there'}: expected a library such as _C.so")
    used = [name for name in _symbols(Path(path), "--undefined-only") if "@" not in name]  # with one: of the C library
    folder, release = _torch()
    exported: dict[str, str] = {}
    for library in sorted((folder / "lib").glob("lib*.so")):
        if library.name.startswith(("libc10", "libtorch", "libshm")):
            exported |= dict.fromkeys(_symbols(library, "--defined-only"), library.name.removesuffix(".so"))
    stable_names = declared(folder / "include")
    unstable: dict[str, list[str]] = {}
    for name in used:
        if name not in stable_names and (_OF_TORCH.match(name) or name in exported and not name.startswith("_Z")):
            unstable.setdefault(exported.get(name, "another release of torch"), []).append(name)
    stable = sorted(set(used) & stable_names)
    if not unstable and not stable:
        raise Wrong(f"{path} uses no symbol of libtorch: name the library of the package that has the kernels")
    found = {library: sorted(_demangled(names)) for library, names in sorted(unstable.items())}
    return Symbols(str(path), release, found, stable)


def _torch() -> tuple[Path, str]:
    """The folder of the installed torch and its release, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Wrong("symbols are looked up in the installed torch, but torch is not installed: pip install torch")
    folder = Path(spec.origin).parent
    version = re.search(r"__version__ = '([^']+)", (folder / "version.py").read_text())
    return folder, version[1] if version else "unknown"


def declared(include: Path) -> set[str]:
    """The functions that the headers of torch's stable C interface in the folder `include` declare."""
    texts = (path.read_text() for folder in _STABLE for path in (include / folder).glob("*shim*.h"))
    return {name for text in texts for name in re.findall(r"AOTI_TORCH_EXPORT[\w\s*\\]*?\b(\w+)\s*\(", text)}


def _symbols(path: Path, which: str) -> list[str]:
    """The dynamic symbols of a library; one of another library has its version, as in ``malloc@GLIBC_2.2.5``."""
    lines = _run(["nm", "-D", "--format=posix", which, str(path)]).splitlines()
    return [line.partition(" ")[0] for line in lines if not re.search(r" [wv]\b", line)]  # weak ones may be missing


def _demangled(names: list[str]) -> list[str]:
    return _run(["c++filt"], "\n".join(names)).splitlines()


def _run(command: list[str], given: str = "") -> str:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise Wrong(f"reading a library needs {command[0]}: install binutils") from None
    if done.returncode:
        raise Wrong(f"{command[-1]} cannot be read as a shared library of Linux (ELF): {done.stderr.strip()}")
    return done.stdout
