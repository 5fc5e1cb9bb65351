"""Reads the program's source for what no watcher can see: code that asks whether a device is CUDA."""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from openreg_tools.core import place
from openreg_tools.pytest_plugin.findings import Finding
from openreg_tools.pytest_plugin.misuse import is_tests, may_name_cuda

_DEVICES = {"cpu", "cuda", "hpu", "mps", "mtia", "npu", "xla", "xpu"}
# Functions that no watcher sees: they mean CUDA if they get "cuda", or this many arguments.
_UNSEEN = {
    "Event": None, "Generator": None, "Stream": None, "startswith": None,
    "is_autocast_available": None, "get_autocast_dtype": None, "set_autocast_dtype": None,
    "is_autocast_enabled": 0, "set_autocast_enabled": 1, "get_autocast_gpu_dtype": 0, "set_autocast_gpu_dtype": 1,
}  # fmt: skip


def findings(root: Path, types: set[str]) -> list[Finding]:
    """What the program's files say about CUDA and not about these types of devices.

    The program is what the run has imported from below `root`, without installed packages.
    """
    out = []
    for path, own in sorted(_files(root)):
        try:
            with tokenize.open(path) as file:
                asks = [*asks_for_cuda(file.read(), types)]
        except (OSError, SyntaxError, ValueError):
            continue
        out += [Finding("cuda", what, f"{place.relative(path, str(root))}:{line}", "", own) for line, what in asks]
    return out


def _files(root: Path) -> Iterator[tuple[str, bool]]:
    for module in {id(module): module for module in sys.modules.values()}.values():
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and Path(file).is_relative_to(root):
            installed = {"site-packages", "dist-packages"} & {*Path(file).relative_to(root).parts}
            if not (installed or file.startswith(may_name_cuda())):
                yield file, is_tests(root, vars(module), file)


def asks_for_cuda(source: str, types: set[str]) -> Iterator[tuple[int, str]]:
    """The lines of a module that ask whether a device is CUDA, or list devices without these types, and what they say.

    A comment "cuda only" at the end of a line says that CUDA is meant.
    """
    devices, lines = _DEVICES | types, source.splitlines()

    def device(node: ast.AST) -> str:
        """The type of device that a node names: "cuda:0" or torch.device("cuda")."""
        if isinstance(node, ast.Call) and _called(node) == "device" and node.args:
            node = node.args[0]
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        return text.partition(":")[0] if text.partition(":")[0] in devices else ""

    def said(node: ast.AST) -> str:
        return " ".join((ast.get_source_segment(source, node) or ast.unparse(node)).split())

    def allows(node: ast.AST) -> bool:
        """Whether a node lists devices, "cuda" among them, and none of `types`."""
        names = [device(each) for each in getattr(node, "elts", ())]
        return "cuda" in names and all(names) and not types & {*names}

    def compares(node: ast.Compare) -> bool:
        (how, *more), left, right = node.ops, node.left, node.comparators[0]
        if isinstance(how, (ast.Eq, ast.NotEq)):
            return not more and "cuda" in (device(left), device(right))
        if device(left) == "cuda":  # in str(device)
            return isinstance(how, (ast.In, ast.NotIn)) and "device" in said(right)
        return isinstance(how, (ast.In, ast.NotIn)) and allows(right)

    reported = set()  # lists that are part of what is reported, of a type, or of a decorator
    for node in ast.walk(ast.parse(source)):  # the outer nodes first
        what = ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):  # parameters of a test
            reported |= {each for decorator in node.decorator_list for each in ast.walk(decorator)}
        elif isinstance(node, ast.Subscript):
            reported.add(node.slice)
        elif isinstance(node, ast.Compare) and compares(node):
            reported |= {*node.comparators}
            what = said(node)
        elif isinstance(node, ast.Attribute) and node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            what = "is_cuda"
        elif isinstance(node, ast.Call):
            given = [device(each) for each in (*node.args, *(keyword.value for keyword in node.keywords))]
            name = _called(node)
            means_cuda = len(given) == _UNSEEN.get(name) and said(node.func) in (name, f"torch.{name}")
            if means_cuda or (name in _UNSEEN and "cuda" in given):
                what = said(node)
        elif isinstance(node, ast.MatchValue) and device(node.value) == "cuda":
            what, node = f"case {said(node)}", node.value
        elif isinstance(node, (ast.List, ast.Set, ast.Tuple)) and len(node.elts) > 1 and node not in reported:
            what = f"allow-list {said(node)}" * allows(node)
        if what and not lines[node.lineno - 1].endswith("# cuda only"):
            yield node.lineno, what


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))
