"""Which module imports which: no cycles, and openreg_tools needs no simulated device.

Every import statement counts, those in functions too, but not those under TYPE_CHECKING, which never run.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"openreg_ops": "openreg_ops", "openreg_ops.meta": "meta", "openreg_tools": "openreg_tools"}

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


def modules() -> dict[str, str]:
    """The source of every module of our packages, by name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "openreg_ops" and parts[0] == "meta":  # a link
                continue
            found[".".join((package, *parts)).removesuffix(".__init__")] = path.read_text()
    return found


def imports(name: str, source: str, known: set[str]) -> set[str]:
    """The modules that a module imports, of `known` and of packages elsewhere.

    ``from package import name`` imports the module ``package.name`` if there is one, else the package.
    """
    found = set()
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}, line {node.lineno}: expected an absolute import, but got a relative one"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in known else node.module)
    return found


def cycles(sources: dict[str, str]) -> list[list[str]]:
    """The import cycles, one for each module that begins one; each is to be broken at one of its arrows."""
    extensions = {"openreg_ops._C", "openreg_ops._build"}  # which the build makes
    graph = {name: imports(name, source, {*sources, *extensions}) & set(sources) for name, source in sources.items()}
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found
        except CycleError as error:
            cycle = error.args[1][::-1]  # each imports the next
            found.append(cycle)
            graph[cycle[0]].discard(cycle[1])


def test_no_import_is_circular():
    found = cycles(modules())
    assert not found, "\n".join(["modules import each other:", *(" -> ".join(cycle) for cycle in found)])


def test_the_tools_import_no_device():
    sources = {name: source for name, source in modules().items() if name.partition(".")[0] == "openreg_tools"}
    wrong = {
        f"{name} imports {each}"
        for name, source in sources.items()
        for each in imports(name, source, set(sources))
        if each.partition(".")[0] == "openreg_ops"
    }
    assert not wrong
