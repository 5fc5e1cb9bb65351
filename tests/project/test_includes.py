"""The folders of csrc/: which may include which, and that a header declares what its own .cpp defines."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
MAY_INCLUDE = {
    "runtime": set(),
    "backend": {"runtime"},
    "kernels": {"runtime", "backend"},
    "aten": {"runtime", "backend", "kernels"},
    "ops": {"runtime", "backend", "kernels"},
    "bindings": {"runtime", "backend", "aten", "ops"},
}
# The folders of the runtime, from below: each includes only those before it.
RUNTIME = ["device", "process", "stream", "memory", "graph", "explore", "interface"]


def files(room: str) -> list[Path]:
    return sorted(path for path in (CSRC / room).rglob("*") if path.suffix in (".h", ".cpp"))


def test_every_folder_is_a_room():
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(MAY_INCLUDE)


@pytest.mark.parametrize("room", MAY_INCLUDE)
def test_a_room_includes_only_those_below_it(room):
    wrong = []
    for path in files(room):
        for included in re.findall(r'^#include "(.+)"', path.read_text(), flags=re.M):
            allowed = MAY_INCLUDE[room] | {room} | ({"compat.h"} if room != "runtime" else set())
            if included.split("/")[0] not in allowed:
                wrong.append(f"{path.relative_to(CSRC)} includes {included}")
    assert not wrong


def modules(room: str) -> dict[str, set[str]]:
    """What each module, a header with its .cpp, includes of the others in its room."""
    found: dict[str, set[str]] = {}
    for path in files(room):
        name = str(path.relative_to(CSRC).with_suffix(""))
        included = re.findall(rf'^#include "({room}/.+)\.h"', path.read_text(), flags=re.M)
        found.setdefault(name, set()).update(each for each in included if each != name)
    return found


def test_the_runtimes_modules_form_no_circle():
    left = modules("runtime")
    while free := [name for name, included in left.items() if not included & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_the_runtimes_folders_have_one_direction():
    wrong = []
    for name, included in modules("runtime").items():
        for other in included:
            if RUNTIME.index(name.split("/")[1]) < RUNTIME.index(other.split("/")[1]):
                wrong.append(f"{name} includes {other}")
    assert not wrong


def test_runtime_includes_no_torch_header():
    for path in files("runtime"):
        assert not re.findall(r"^#include <(?:torch|ATen|c10|caffe2|pybind11|Python)\b.*", path.read_text(), flags=re.M)


def test_only_the_identity_names_the_device():
    naming = []
    for path in sorted(CSRC.rglob("*.*")):
        code = re.sub(r"//.*", "", path.read_text())
        if re.search("PrivateUse1", code) and path.parent != CSRC / "backend/identity":
            naming.append(str(path.relative_to(CSRC)))
    assert not naming


def functions(text: str, inside: str = "") -> Iterator[tuple[str, bool]]:
    """The functions at namespace level and of classes, each with whether it has a body. Enough of C++ for our files."""
    text = re.sub(r"//.*|/\*.*?\*/|^#(?:.*\\\n)*.*", "", text, flags=re.M)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    text = re.sub(r"__attribute__\(\(.*?\)\)+|\b(?:public|private|protected):", "", text)
    start = at = 0
    while at < len(text):
        if text[at] not in ";{}":
            at += 1
            continue
        head = text[start:at].strip()
        if text[at] == "{" and head.count("(") > head.count(")"):  # a default argument or a braced value
            at = closing(text, at)
            continue
        if text[at] == "{":
            kind = re.search(r"\b(?:class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^()]*)?$", head)
            if kind:
                yield from functions(text[at + 1 : closing(text, at) - 1], f"{kind[1]}::")
            if kind or not re.match(r'(?:inline\s+)?namespace\b|extern ""$', head):
                body, at = True, closing(text, at) - 1
            else:
                head = ""
        else:
            body = False
        name = re.match(r"[^=(]*?([\w:~]+)\s*\((?!\*)", head)
        if name and not re.match(r"(?:using|friend|static_assert)\b", head):
            if not re.search(r"=\s*(?:default|delete|0)$", head):
                yield inside + name[1], body
        at += 1
        start = at


def closing(text: str, at: int) -> int:
    depth = 0
    while True:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


@pytest.mark.parametrize("header", [p for room in ("runtime", "backend", "aten", "bindings") for p in files(room) if p.suffix == ".h"],
                         ids=lambda path: str(path.relative_to(CSRC)))  # fmt: skip
def test_a_header_declares_what_its_own_cpp_defines(header):
    source = header.with_suffix(".cpp")
    code = source.read_text() if source.exists() else ""
    defined = set()
    for name, body in functions(code):
        parts = name.split("::")
        defined |= {"::".join(parts[i:]) for i in range(len(parts)) if body}
    inline = {name for name, body in functions(header.read_text()) if body}
    missing = {name for name, body in functions(header.read_text()) if not body} - defined - inline
    assert not missing, f"{source.relative_to(CSRC)} does not define {sorted(missing)}"
    assert not code or f'#include "{header.relative_to(CSRC)}"' in code
