"""Reads the source of the program for code that works on CUDA only."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from openreg_tools.core import place
from openreg_tools.pytest_plugin.misuse import Misuse
from openreg_tools.pytest_plugin.watch import is_tests

__all__ = ["asks_for_cuda", "misuses"]

_DEVICES = {"cpu", "cuda", "hpu", "mps", "mtia", "npu", "xla", "xpu"}
# Functions that mean CUDA if they get this many arguments.
_MEANS_CUDA = {
    "GradScaler": 0, "get_autocast_gpu_dtype": 0, "is_autocast_enabled": 0, "set_autocast_enabled": 1,
    "set_autocast_gpu_dtype": 1,
}  # fmt: skip
# Strings that name CUDA: a device, a type of tensors, a column of the profiler's table, a backend of collectives.
_NAMES_CUDA = re.compile(r"cuda(:\d*)?$|torch\.cuda\.\w+$|(self_)?cuda_(time|memory)\w*$|(\w+:\w+,)*(cuda:)?nccl$")


def misuses(root: Path, types: set[str]) -> list[Misuse]:
    """What the program's files say about CUDA and not about these types of devices.

    The program is what the run has imported from below `root`, and the packages whose source is there and which are
    installed elsewhere.
    """
    out = []
    for path, own in sorted(_files(root)):
        try:
            with tokenize.open(path) as file:
                asks = [*asks_for_cuda(file.read(), types)]
        except (OSError, SyntaxError, ValueError):
            continue
        out += [Misuse("cuda", what, f"{place.relative(path, str(root))}:{line}", "", own) for line, what in asks]
    return out


def _files(root: Path) -> Iterator[tuple[str, bool]]:
    sources = {path.parent.name for folder in (root, root / "src") for path in folder.glob("*/__init__.py")}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(place.libraries()):
            continue
        installed = "site-packages" in Path(file).parts or "dist-packages" in Path(file).parts
        if name.partition(".")[0] in sources if installed else Path(file).is_relative_to(root):
            yield file, is_tests(root, vars(module), file)


def asks_for_cuda(source: str, types: set[str]) -> Iterator[tuple[int, str]]:
    """The lines of a module that name CUDA, or list devices without these types, and what they say.

    A comment "cuda only" at the end of a line says that CUDA is meant.
    """
    tree, lines = ast.parse(source), source.splitlines()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    said = lambda node: " ".join((ast.get_source_segment(source, node) or ast.unparse(node)).split())  # noqa: E731
    parameters = {  # of tests
        part
        for node in ast.walk(tree)
        for decorator in getattr(node, "decorator_list", ())
        if "parametrize" in said(decorator)
        for part in ast.walk(decorator)
    }
    found = set()
    for node in ast.walk(tree):
        if node not in parameters and (what := _what(node, parents, types, said)):
            line = node.lineno  # type: ignore[attr-defined]
            if (line, what) not in found and not lines[line - 1].endswith("# cuda only"):
                found.add((line, what))
                yield line, what


def _what(node: ast.AST, parents: dict[ast.AST, ast.AST], types: set[str], said: Callable[[ast.AST], str]) -> str:
    """What a node says about CUDA, without the nodes in it."""
    parent = parents.get(node)
    if isinstance(node, ast.Attribute):
        if _dotted(node).startswith("torch.cuda") and not isinstance(parent, ast.Attribute):
            return _dotted(node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return "is_cuda"
        listed = {other.attr for other in getattr(parent, "elts", ()) if isinstance(other, ast.Attribute)}
        others = listed - {"CPU", "CUDA"}
        return "ProfilerActivity.CUDA" if said(node).endswith("ProfilerActivity.CUDA") and not others else ""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
        return ", ".join(f"{node.module}.{alias.name}" for alias in node.names)
    if isinstance(node, ast.Call):
        name, given = _dotted(node.func).rpartition(".")[2], len(node.args) + len(node.keywords)
        if name == "cuda" and not _dotted(node.func).startswith("torch."):
            return ".cuda()"
        of_torch = _dotted(node.func).startswith("torch.") or isinstance(node.func, ast.Name)
        pins = name == "save_on_cpu" and given == 1 and "True" in said(node)
        return said(node) if of_torch and (_MEANS_CUDA.get(name) == given or pins) else ""
    if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
        if not _leaves_out(node, types) or isinstance(parent, ast.Subscript):
            return ""
        return said(parent) if isinstance(parent, ast.Compare) else f"allow-list {said(node)}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMES_CUDA.match(node.value):
        return _of_string(node, parents, said)
    return ""


def _of_string(node: ast.Constant, parents: dict[ast.AST, ast.AST], said: Callable[[ast.AST], str]) -> str:
    """What the expression around a string that names CUDA says."""
    parent = parents[node]
    if isinstance(parent, ast.Call):
        return f"{said(parent.func)}({said(node)})"
    if isinstance(parent, ast.keyword):
        call = parents[parent]
        return f"{said(call.func)}({said(parent)})" if isinstance(call, ast.Call) else said(parent)
    if isinstance(parent, ast.Compare):
        member = parent.left is node and isinstance(parent.ops[0], (ast.In, ast.NotIn))
        return said(parent) if not member or "device" in said(parent.comparators[0]) else ""  # "cuda" in str(device)
    if isinstance(parent, ast.MatchValue):
        return f"case {said(node)}"
    if isinstance(parent, (ast.AnnAssign, ast.Assign, ast.BoolOp, ast.IfExp, ast.JoinedStr, ast.Return, ast.arguments)):
        return said(parent if isinstance(parent, ast.JoinedStr) else node)
    return ""  # in a list, a dict, a type, or alone in a line


def _leaves_out(node: ast.List | ast.Set | ast.Tuple, types: set[str]) -> bool:
    """Returns true if a collection lists devices, "cuda" among them, and none of `types`."""
    values = (part.value if isinstance(part, ast.Constant) else None for part in node.elts)
    names = [value if isinstance(value, str) else "" for value in values]
    types_listed = [name.partition(":")[0] for name in names]
    known = _DEVICES | types
    return len(names) > 1 and "cuda" in types_listed and known.issuperset(types_listed) and not types & {*types_listed}


def _dotted(node: ast.AST) -> str:
    """A name with its attributes: "torch.cuda.Stream"; "?" stands for what is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
