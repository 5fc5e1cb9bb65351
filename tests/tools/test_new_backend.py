"""openreg-tools new-backend: names, folders, and what is written. tests/project/test_packaging.py has the wheel.

The package that it writes has tests of its own; `make new-backend` builds it and runs them.
"""

from __future__ import annotations

import re

import pytest
from processes import python

from openreg_tools.core.options import Wrong
from openreg_tools.new_backend import command


def test_the_package_is_small_enough_to_read():
    lines = {path: len((command.TEMPLATE / path).read_text().splitlines()) for path in command.files()}
    assert sum(lines.values()) <= 3450, lines  # a quarter of them are comments and blank lines


def test_files_name_their_rung_and_document():
    for path in command.files():
        head = "\n".join((command.TEMPLATE / path).read_text().splitlines()[:14])
        if path.suffix in (".cpp", ".h") or path.parts[0] in ("torch_acme", "tests") and path.suffix == ".py":
            assert re.search(r"[Rr]ungs? \d|Every rung|One file a rung", head), path
        if path.suffix == ".cpp" and path.name != "inductor.cpp" and "runtime" not in path.parts:
            assert re.search(r"Documents?: ", head), path


def test_runtime_is_at_most_30_functions():
    text = (command.TEMPLATE / "csrc/runtime/acme.h").read_text()
    assert 20 < len(re.findall(r"^[a-z].*\bacme_\w+\(.*\);", text, re.M)) <= 30


@pytest.mark.parametrize("name", ["npu", "my_chip2"])
def test_writes_the_package(name, tmp_path, capsys):
    folder = tmp_path / "somewhere" / "package"
    written = command.write(name, folder)
    assert len(written) == len(command.files()) and folder / f"torch_{name}/__init__.py" in written
    for path in written:
        assert "acme" not in f"{path.relative_to(folder)}{path.read_text()}".lower(), path
        if path.suffix == ".py":
            compile(path.read_text(), path, "exec")
    assert "torch::autograd::Function" in (folder / "csrc/kernels.cpp").read_text()


@pytest.mark.parametrize(
    "name, message",
    [
        ("2fast", "expected a name of lower-case words"),
        ("My-Chip", "expected a name of lower-case words"),
        ("lambda", "reserved word"),
        ("namespace", "reserved word"),
        ("cuda", "already has a device type cuda"),
        ("meta", "already has a device type meta"),
        ("nn", "already has torch.nn"),
        ("numpy", "already has torch.numpy or Tensor.numpy"),
        ("allocate_on", "already has another meaning"),
    ],
)
def test_rejects_names(name, message, tmp_path):
    with pytest.raises(Wrong, match=message):
        command.write(name, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_rejects_folders(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Wrong, match="exists and is not empty; name another folder with --into"):
        command.write("acme", tmp_path)
    with pytest.raises(Wrong, match="is a file; name another folder with --into"):
        command.write("acme", tmp_path / "file")


@pytest.mark.processes
def test_command(tmp_path):
    words = ("-m", "openreg_tools", "new-backend", "npu")
    done = python(*words, cwd=tmp_path)
    assert done.returncode == 0 and "pip install './torch_npu[test]'" in done.stdout, done.stderr
    assert "openreg-tools ladder --import torch_npu --device npu" in done.stdout
    again = python(*words, cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("new-backend: torch_npu exists and is not empty")
