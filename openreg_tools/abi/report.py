"""The report of ``check --abi``: unstable symbols by library and header, and the lowest torch, Python and C library."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from openreg_tools import forms
from openreg_tools.abi import declarations, shims
from openreg_tools.abi.binary import Binary, demangled, numbers
from openreg_tools.forms import Wrong

__all__ = ["Report", "Symbol", "audit"]

_TORCH_LIBRARIES = ("libc10", "libtorch_cpu", "libtorch_python", "libc10_cuda", "libtorch_cuda", "libc10_hip",
                    "libtorch_hip", "libc10_xpu", "libtorch_xpu", "libtorch", "libshm")  # fmt: skip
# Names, vtables, guards and thunks in at, c10, caffe2 and torch, except torch::stable and torch::headeronly.
_OF_TORCH = re.compile(
    r"_Z(T[VTISC]|GV|GR|T[hvc][n\d_]*_)?N[rVK]*[RO]?(2at|3c10|6caffe2|5torch(?!6stable|10headeronly))[\dCDI]"
)
# The C++ library's symbols, which torch's libraries export too; a symbol with a torch type counts as torch's.
_OF_STD = re.compile(r"_Z(T[VTISC]|GV|GR)?N?[rVK]*[RO]?S[a-z](?!.*(2at|3c10|6caffe2|5torch(?!6stable|10headeronly))\d)")
_IN_C = re.compile(r"THP[A-Z_]\w*|torch_\w+|aoti_\w+")
_PYTHON = re.compile(r"_?Py[A-Z_]\w*|_?PY_\w+")


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One unstable symbol."""

    symbol: str  # as in the linker
    name: str  # as in C++ source
    library: str  # "libc10", "libtorch_cpu", "CPython", or "libtorch" if the installed torch does not have it
    header: str  # the header that declares it; "" if unknown
    operator: str = ""  # "aten::add.Tensor", for the kernel behind a function of ATen
    call: str = ""  # "at::add"
    instead: str = ""  # what is stable


@dataclasses.dataclass(frozen=True)
class Report:
    """What a library uses from other libraries.

    unstable: what may change in the next release of torch or Python.
    stable: the functions of torch's C interface that it calls, each with the first release of torch that has it.
    torch, python: the lowest releases with all stable symbols that it uses; "" if it uses none.
    floors: the lowest C and C++ library versions: {"GLIBC": "2.34", …}; torch_floors: what the installed torch itself
    needs.
    installed: the release of torch that the symbols were looked up in.
    absent: the stable functions that the installed torch does not have.
    """

    path: str
    unstable: list[Symbol]
    stable: dict[str, str]
    torch: str
    python_stable: dict[str, str]
    python: str
    floors: dict[str, str]
    torch_floors: dict[str, str]
    installed: str
    absent: list[str]

    @property
    def is_stable(self) -> bool:
        """Whether the library uses no unstable symbol."""
        return not self.unstable

    def dict(self) -> dict:
        """What `--json` writes."""
        return {**dataclasses.asdict(self), "is_stable": self.is_stable}

    def text(self) -> str:
        """The report for a terminal of 80 columns."""
        lines = [f"{self.path}, looked up in torch {self.installed}"]
        of_torch = [each for each in self.unstable if each.library != "CPython"]
        of_python = [each for each in self.unstable if each.library == "CPython"]
        used = _count(of_torch, "unstable symbol") if of_torch or self.stable else "not used by this library"
        lines += ["", f"torch: {used}"]
        for library in dict.fromkeys(each.library for each in of_torch):
            here = [each for each in of_torch if each.library == library]
            lines.append(
                f"  {library}" + (f" (torch {self.installed} does not have these)" if library == "libtorch" else "")
            )
            lines += _by_header(here)
        if self.stable:
            newest = [name for name, release in self.stable.items() if release == self.torch]
            lines += forms.wrapped(
                [f"{_count(self.stable, 'stable function')}, which torch {self.torch} and later have"], 2
            )
            if numbers(self.torch) > (2, 9, 0):
                lines += forms.wrapped([f"needs {self.torch}: {_some(newest)}"])
        if self.absent:
            lines += forms.wrapped(
                [f"torch {self.installed} here does not have {_some(self.absent)}: a later release, or one built for "
                 "another device, does"], 2)  # fmt: skip
        lines += ["", f"CPython: {_count(of_python, 'unstable symbol')}", *_by_header(of_python)]
        if of_python and ".abi3." in Path(self.path).name:
            lines += forms.wrapped(["its name says .abi3, so all of them should be stable"], 2)
        if self.python_stable:
            text = f"{_count(self.python_stable, 'symbol')} stable since Python {self.python} at the latest"
            lines += forms.wrapped([text], 2)
        lines += ["", "lowest versions"]
        rows = [("torch", self.torch + (" for its stable symbols" if of_torch else ""))] if self.stable else []
        rows += [("Python", self.python)] if self.python and not of_python else []
        for name, floor in self.floors.items():
            rows.append((name, floor + (f" (torch: {self.torch_floors[name]})" if name in self.torch_floors else "")))
        lines += [f"  {line}" for line in forms.table(rows, left=2)]
        found = [name for name, some in (("torch", of_torch), ("Python", of_python)) if some]
        verdict = f"not stable: build it again for each release of {' and '.join(found)}" if found else "stable"
        return "\n".join([*lines, "", verdict])


def _count(items: Iterable, noun: str) -> str:
    number = len(list(items))
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _by_header(symbols: list[Symbol]) -> list[str]:
    """The symbols grouped by origin and by what to write instead of them."""
    groups: dict[tuple[str, ...], list[Symbol]] = {}
    for each in symbols:
        groups.setdefault((each.header, each.operator, each.call, each.instead), []).append(each)
    lines = []
    for (header, operator, call, instead), some in groups.items():
        text = f"{call} of {header}" if call else header or "no header was found"
        text += f", the operator {operator}" if operator else ""
        lines += forms.wrapped([text + (f"; instead: {instead}" if instead else "")])
        lines += [f"      {forms.cut(each.name, forms.WIDTH - 6)}" for each in some]
    return lines


@functools.cache
def _torch() -> tuple[Path, str]:
    """The folder of the installed torch and its release, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Wrong("symbols are looked up in the installed torch, but torch is not installed: pip install torch")
    folder = Path(spec.origin).parent
    version = re.search(r"__version__ = '([^']+)", (folder / "version.py").read_text())
    return folder, version[1] if version else "unknown"


def _libraries(folder: Path) -> dict[str, Binary]:
    paths = {name: folder / f"lib/{name}.so" for name in _TORCH_LIBRARIES}
    return {name: Binary(path) for name, path in paths.items() if path.is_file()}


def _limited_api() -> dict[str, tuple[int, int]]:
    """The symbols of CPython's stable ABI, each with the first Python that has it."""
    try:
        import abi3info
    except ImportError as error:
        raise Wrong(
            f"CPython's stable symbols are a list of abi3info: pip install 'openreg_tools[abi]' ({error})"
        ) from None
    every = {**abi3info.FUNCTIONS, **abi3info.DATAS}
    return {symbol.name: (each.added.major, each.added.minor) for symbol, each in every.items()}


def audit(path: str | Path) -> Report:
    """Find the unstable symbols that a shared library uses from libtorch, CPython and the C library.

    Args:
        path: an ELF file, for any processor.
    Raises:
        Wrong: `path` is not such a file, or does not use torch; or pyelftools or abi3info is not installed.
    """
    binary = Binary(Path(path))
    limited = _limited_api()
    folder, installed = _torch()
    libraries = _libraries(folder)
    declared = shims.declared(folder / "include")
    unstable: dict[str, str] = {}  # symbol: library
    stable: dict[str, str] = {}
    of_python: dict[str, str] = {}
    absent = []
    for name, version in binary.taken():
        if version or _OF_STD.match(name):  # of the C or C++ library, or of a vendor's
            continue
        library = next((library for library, each in libraries.items() if each.exports(name)), "")
        release = shims.since(name, declared) if not name.startswith("_Z") else None
        if release:
            stable[name] = release
            if not library:
                absent.append(name)
        elif library or _OF_TORCH.match(name) or _IN_C.fullmatch(name):
            unstable[name] = library or "libtorch"
        elif _PYTHON.fullmatch(name):
            if name in limited:
                of_python[name] = ".".join(map(str, limited[name]))
            else:
                unstable[name] = "CPython"
    if not (stable or unstable or of_python):
        raise Wrong(
            f"{path} uses no symbol of libtorch, libc10 or CPython: name the library of the package that has the kernels"
        )
    return Report(
        path=str(path),
        unstable=_explained(unstable, folder / "include"),
        stable=stable,
        torch=max(stable.values(), key=numbers, default=""),
        python_stable=of_python,
        python=max(of_python.values(), key=numbers, default=""),
        floors=binary.floors(),
        torch_floors=_highest(libraries.values()),
        installed=installed,
        absent=absent,
    )


def _highest(libraries: Iterable[Binary]) -> dict[str, str]:
    out: dict[str, str] = {}
    for each in libraries:
        for name, floor in each.floors().items():
            out[name] = max(floor, out.get(name, "0"), key=numbers)
    return out


def _explained(unstable: dict[str, str], include: Path) -> list[Symbol]:
    """Each symbol with its header, the operator and call behind it, and its replacement."""
    names = {symbol: demangled(symbol) for symbol in unstable}
    paths = {symbol: declarations.path_of(name) for symbol, name in names.items()}
    of_torch = {symbol: path for symbol, path in paths.items() if unstable[symbol] != "CPython"}
    headers = declarations.torch_headers({p for p in of_torch.values() if p[:2] != ("at", "_ops")}, include)
    of_python = declarations.python_header(
        [symbol for symbol, library in unstable.items() if library == "CPython"], Path(sysconfig.get_path("include"))
    )
    functions = include / "torch/csrc/stable/ops.h"
    stable_ops = (
        set(re.findall(r"^inline [^;(]*?\b(\w+)\(", functions.read_text(), re.M)) if functions.exists() else set()
    )
    found = []
    for symbol, library in sorted(unstable.items(), key=lambda item: (item[1], names[item[0]])):
        path = paths[symbol]
        if path[:2] == ("at", "_ops") and (known := declarations.operator(path[2], include)):
            operator, overload, header, call = known
            function = operator.removeprefix("aten::")
            instead = f"torch::stable::{function} of torch/csrc/stable/ops.h" if function in stable_ops else (
                f'torch_call_dispatcher("{operator}", "{overload}", …)')  # fmt: skip
            name = f"{operator}.{overload}".rstrip(".")
            found.append(Symbol(symbol, names[symbol], library, header, name, call, instead))
            continue
        header = of_python.get(symbol, "") if library == "CPython" else headers.get(path, "")
        instead = "" if library == "CPython" else declarations.replacement("::".join(path))
        found.append(Symbol(symbol, names[symbol], library, header, instead=instead))
    return found
