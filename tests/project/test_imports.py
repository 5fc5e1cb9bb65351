"""Which module imports which: no cycles, and openreg_tools needs no simulated device.

Every import statement counts, those in functions and those under TYPE_CHECKING too.
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
    for node in ast.walk(ast.parse(source)):
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
        f"{name} imports {module}"
        for name, source in sources.items()
        for module in imports(name, source, set(sources))
        if module.partition(".")[0] == "openreg_ops"
    }
    assert not wrong


def private_uses(source: str, known: set[str]) -> list[str]:
    """The private names of other modules of `known` that a module imports, or reads as `module._name`."""
    found, local = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in FOLDERS:
            for alias in node.names:
                if f"{node.module}.{alias.name}" in known:
                    local.add(alias.asname or alias.name)
                elif alias.name.startswith("_") and node.module in known and alias.name not in ("_C", "_build"):
                    found.append(f"line {node.lineno}: {node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                found.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    return found


def test_private_names_stay_in_their_module():
    """openreg_ops may read `module._name`: torch.openreg has private names because torch.cuda has them."""
    sources = modules()
    found = {name: private_uses(source, set(sources)) for name, source in sources.items()}
    wrong = {
        f"{name}, {use}"
        for name, uses in found.items()
        for use in uses
        if name.startswith("openreg_tools") or use.split(": ")[1].startswith("openreg")
    }
    assert not wrong


def test_private_uses_are_seen():
    known = {"openreg_tools.one", "openreg_tools.two"}
    source = "from openreg_tools.one import _private, public\nfrom openreg_tools import two\ntwo._hidden, two.__name__"
    assert private_uses(source, known) == ["line 1: openreg_tools.one._private", "line 3: two._hidden"]
