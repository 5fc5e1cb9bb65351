"""The folders of csrc/: which may include which."""

import re
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
