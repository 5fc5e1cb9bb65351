"""docs/pytorch-internals.md lists each place where the source patches PyTorch, and every name on it exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/pytorch-internals.md"
FOLDERS = ("openreg_ops", "meta", "openreg_tools")

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")


def rows() -> list[list[str]]:
    """The cells of every row: what, where, if PyTorch changes it, test."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| What |")
    ]


def places() -> dict[str, set[str]]:
    """The names that the page gives in each file."""
    found: dict[str, set[str]] = {}
    for _, where, *_ in rows():
        path = ""
        for word in re.findall(r"`([^`]+)`", where):
            if word.endswith((".py", ".cpp", ".h")):
                path = word
                found.setdefault(path, set())
            else:
                found[path].add(word)
    return found


def sources() -> Iterator[tuple[str, str]]:
    """Every module of the package, by its path."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            # The template is a package of its own, which its user changes.
            if not name.startswith(("openreg_ops/meta/", "openreg_tools/new_backend/template/")):
                yield name, path.read_text()


class Patches(ast.NodeVisitor):
    """Finds where a module changes PyTorch's objects: `found` has the outermost function or class, and the line.

    PyTorch's objects are what is imported from torch, what ``sys.modules["torch…"]`` is, their attributes and items, and
    names for any of these.
    """

    def __init__(self) -> None:
        self.scopes: list[tuple[str, set[str]]] = [("", set())]
        self.found: list[tuple[str, int]] = []

    def is_torchs(self, node: ast.expr) -> bool:
        while True:
            match node:
                case ast.Name():
                    return any(node.id in names for _, names in self.scopes)
                case ast.Subscript(value=ast.Attribute(value=ast.Name(id="sys"), attr="modules"), slice=key):
                    return isinstance(key, ast.Constant) and str(key.value).startswith("torch")
                case ast.Call(func=ast.Name(id="getattr"), args=[node, *_]):
                    pass
                case ast.Call(func=ast.Attribute(value=node, attr="values" | "items")):
                    pass
                case ast.Attribute(value=node) | ast.Subscript(value=node):
                    pass
                case _:
                    return False

    def report(self, node: ast.AST) -> None:
        names = [name for name, _ in self.scopes if name]
        self.found.append((names[0] if names else "", node.lineno))

    def name(self, target: ast.expr, value: ast.expr) -> None:
        """Take in that `target` is now another name for `value`."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self.name(one, other)
        elif isinstance(target, ast.Name):
            (set.add if self.is_torchs(value) else set.discard)(self.scopes[-1][1], target.id)

    def visit_scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "replaces":
                self.found.append((node.name, node.lineno))
        self.scopes.append((node.name, set()))
        self.generic_visit(node)
        self.scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_scope

    def visit_Import(self, node: ast.Import) -> None:
        names = (alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name.startswith("torch"))
        self.scopes[-1][1].update(names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "torch":
            self.scopes[-1][1].update(alias.asname or alias.name for alias in node.names)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute | ast.Subscript) and self.is_torchs(each.value):
                    self.report(node)
            self.name(target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute | ast.Subscript) and self.is_torchs(node.target.value):
            self.report(node)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        for each in node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]:
            self.name(each, node.iter)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "f_locals":  # of a caller in PyTorch
            self.report(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        changes = called in ("setattr", "delattr", "patch.object", "mock.patch.object") and self.is_torchs(node.args[0])
        grows = isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "insert", "extend", "update")
        if changes or (grows and self.is_torchs(node.func.value)):
            self.report(node)
        self.generic_visit(node)


def patches(source: str) -> list[tuple[str, int]]:
    visitor = Patches()
    visitor.visit(ast.parse(source))
    return visitor.found


# Names that everyone uses, including operators with such names, do not count.
USED = r"check|ops\b|neg_view|(fused|flash|efficient)_|convert_|dyn_|sobol_|wrapped_"
PRIVATE = re.compile(
    rf"\btorch(\.(?!utils\b)\w+)*\._(?!C\b|_|{USED})\w|\btorch\._C\.[_A-Z]|(from|import) torch\.(?!utils\.)(\w+\.)*_(?!ops\b)\w"
)
IN_CPP = re.compile(r"functorchTLSAccessor|deregisterFallback_|impl::cow::|register_stub\(at::|\"comm\"")


def test_every_row_is_whole():
    assert len(rows()) > 50
    for row in rows():
        assert len(row) == 4 and all(row), row


def test_what_is_named_exists():
    for path, names in places().items():
        source = (ROOT / path).read_text()
        missing = {name for name in names if not re.search(rf"\b{name}\b", source)}
        assert not missing, f"{path} has no {missing}"
    for *_, tests in rows():
        for path, _, name in (each.partition("::") for each in re.findall(r"`(tests/[^`]+)`", tests)):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"


def test_every_row_has_a_test():
    assert all(re.search(r"`tests/[^`]+::test_\w+`", tests) for *_, tests in rows())


def test_every_patch_is_listed():
    listed = places()
    missing = {
        f"{path}, line {line}, {function}"
        for path, source in sources()
        for function, line in patches(source)
        if function not in listed.get(path, ())
    }
    assert not missing, "docs/pytorch-internals.md lacks " + "; ".join(sorted(missing))


def test_every_module_that_uses_private_names_is_listed():
    private = {path for path, source in sources() if PRIVATE.search(re.sub(r"`[^`]*`", "", source))}
    private |= {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cpp") and IN_CPP.search(path.read_text())
    }
    missing = private - places().keys()
    assert not missing, missing
