"""`check --abi`: which symbols of torch a library uses that may change."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import command

import openreg_ops
from openreg_ops.tools.new import new_package
from openreg_tools.abi import audit, declared
from openreg_tools.core.options import Wrong

TORCH = Path(torch.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs/packages.md"
# Two functions of the stable interface, one of torch that is not in it, and one that no torch has.
SOURCE = """
namespace at { struct Tensor; int get_num_threads(); }
namespace c10 { int of_no_release(at::Tensor&); }
extern "C" int aoti_torch_get_data_ptr(void*, void**);
extern "C" int torch_list_size(void*, void*);
extern "C" long PyList_Size(void*);
int use(at::Tensor& x, void* p) {
  return at::get_num_threads() + c10::of_no_release(x) + aoti_torch_get_data_ptr(p, &p) + torch_list_size(p, p) +
         PyList_Size(p);
}
"""


@pytest.mark.compiles
def test_unstable_library(tmp_path, capsys):
    source, library = tmp_path / "a.cpp", tmp_path / "_C.so"
    source.write_text(SOURCE)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    found = audit(library)
    assert not found.is_stable and found.stable == ["aoti_torch_get_data_ptr", "torch_list_size"]
    assert found.unstable == {
        "another release of torch": ["c10::of_no_release(at::Tensor&)"],
        "libtorch_cpu": ["at::get_num_threads()"],
    }
    assert command("check", "--abi", library, "--json", tmp_path / "found.json", "--html", tmp_path / "found.html") == 0
    assert "at::get_num_threads()" in (tmp_path / "found.html").read_text()
    assert command("check", "--abi", library, "--require-stable") == 1
    said = capsys.readouterr().out
    assert "1 unstable symbol of libtorch_cpu\n  at::get_num_threads()\n" in said
    assert "not stable, build it again for each release of torch: 2 unstable symbols, 2\nfunctions of torch's" in said
    assert json.loads((tmp_path / "found.json").read_text()) == found.dict()


@pytest.mark.compiles
def test_stable_package(tmp_path, capsys):
    """What `new --package --style stable` builds, as docs/packages.md shows."""
    new_package("trial_abi", "stable", ["weigh"], tmp_path)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tmp_path / "trial_abi", check=True)
    library = next((tmp_path / "trial_abi").rglob("_C.abi3.so"))
    assert command("check", "--abi", library, "--require-stable") == 0
    said = capsys.readouterr().out.splitlines()
    shown = re.search(r"\$ openreg-tools check --abi .*?\n(.*?)```", DOCUMENT.read_text(), re.S)[1].splitlines()
    assert re.sub(r"\d+", "#", shown[-1]) == re.sub(r"\d+", "#", said[-1])
    assert {"torch_call_dispatcher", "torch_library_impl"} & set(audit(library).stable)


def test_our_own_library():
    """It is built for one release of torch, and uses hundreds of its symbols."""
    unstable = audit(next(Path(openreg_ops.__file__).parent.glob("_C.*.so"))).unstable
    assert {"libc10", "libtorch_cpu", "libtorch_python"} == set(unstable) and len(unstable["libtorch_cpu"]) > 300
    assert "THPVariableClass" in unstable["libtorch_python"]
    assert not [name for names in unstable.values() for name in names if name.startswith(("_Z", "std::", "Py"))]


def test_every_function_that_the_headers_declare_is_stable():
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", TORCH / "lib/libtorch_cpu.so"], capture_output=True, text=True
    )
    exported = set(re.findall(r" [TW] ((?:torch|aoti)_\w+)$", lines.stdout, re.M))
    assert len(exported) > 300 and exported <= declared(TORCH / "include")


@pytest.mark.parametrize(
    "name, message",
    [
        ("text", "cannot be read as a shared library of Linux (ELF): nm: "),
        ("missing", "is not there: expected a library such as _C.so"),
        (".", "is a folder: expected a library such as _C.so"),
        (openreg_ops.library_paths()[0] + "/libopenreg_ops.so", "uses no symbol of libtorch: name the library of the"),
    ],
    ids=["text", "missing", "folder", "without torch"],
)
def test_refused(tmp_path, name, message):
    (tmp_path / "text").write_text("not a library")
    with pytest.raises(Wrong, match=re.escape(message)):
        audit(tmp_path / name)


def test_without_what_it_needs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Wrong, match="reading a library needs nm: install binutils"):
        audit(TORCH / "lib/libc10.so")
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Wrong, match="torch is not installed: pip install torch"):
        audit(TORCH / "lib/libc10.so")


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--abi", "x.so", "aten::add", "--input", "f32[1]"],
            "check: --abi takes a library, --require-stable, --json and --html alone: leave out OP and --input",
        ),
        (["--abi", "x.so", "--generate", "5"], "check: --abi takes a library, --require-stable, --json and --html"),
        (["aten::add", "--require-stable"], "check: --require-stable applies to a library: give --abi LIBRARY too"),
        ([], "check: expected an operator, --explain CHECK or --abi LIBRARY"),
    ],
    ids=["others", "generated", "no library", "nothing"],
)
def test_wrong_arguments(capsys, words, message):
    assert command("check", *words) == 2 and capsys.readouterr().err.startswith(message)
