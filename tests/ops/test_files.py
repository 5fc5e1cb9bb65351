"""One operator is three files with one name."""

from pathlib import Path

import openreg_ops

ROOT = Path(__file__).parents[2]
SHARED = {
    "autograd",
    "record",
    "op",
    "__init__",
    "files",
    "conventions",
    "every_operator",
    "unbacked",
    "vmap",
    "boundaries",
}


def names(folder: str, pattern: str, prefix: str = "") -> set[str]:
    return {path.stem.removeprefix(prefix) for path in (ROOT / folder).glob(pattern)} - SHARED


def test_every_operator_has_its_three_files():
    files = {
        "csrc/ops/{}.cpp": names("csrc/ops", "*.cpp"),
        "meta/{}.py": names("meta", "*.py"),
        "tests/ops/test_{}.py": names("tests/ops", "test_*.py", "test_"),
    }
    every = set().union(*files.values())
    missing = [where.format(name) for where, have in files.items() for name in sorted(every - have)]
    assert not missing, f"missing: {', '.join(missing)}"
    assert every <= set(openreg_ops.meta.__all__), "meta/__init__.py exports every operator's function"


def test_no_operator_includes_another():
    """An operator includes the headers of csrc/ops and csrc/kernels, which hold what several operators need."""
    headers = {
        str(path.relative_to(ROOT / "csrc"))
        for room in ("ops", "kernels")
        for path in (ROOT / "csrc" / room).glob("*.h")
    }
    headers |= {"backend/functorch.h", "backend/identity/identity.h", "runtime/graph/graph.h"}
    for path in (ROOT / "csrc/ops").glob("*.cpp"):
        if path.stem in SHARED:
            continue
        local = {line.split('"')[1] for line in path.read_text().splitlines() if line.startswith('#include "')}
        assert local and local <= headers, path
