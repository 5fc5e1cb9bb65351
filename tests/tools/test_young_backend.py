"""The tools on a backend that has eight kernels, and no generator, streams, events, hooks or synchronize."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest
from processes import python
from torch.utils import cpp_extension

import openreg_ops

pytestmark = [pytest.mark.processes, pytest.mark.compiles]
LIBRARY = Path(__file__).with_name("young_backend.cpp")
MODULE = """
import types
import torch

torch.utils.rename_privateuse1_backend("young")
module = types.ModuleType("torch.young")
module.is_available, module.is_initialized, module._is_in_bad_fork = lambda: True, lambda: True, lambda: False
module.device_count, module.current_device = lambda: 1, lambda: 0
torch._register_device_module("young", module)
torch.ops.load_library({library!r})
torch.library.register_fake("young::twice", lambda x: x.new_empty(x.shape))
"""
PROGRAM = """
import torch

x = torch.ones(3, device="young")
for _ in range(3):
    x = x + x
print(torch.ops.young.twice(x).tolist())
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """A function that runs a command of the tools with the backend, and returns its exit status and what it prints."""
    folder = tmp_path_factory.mktemp("young")
    library = folder / "libyoung.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    subprocess.run(
        ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, LIBRARY, *linked, "-o", library], check=True
    )
    (folder / "young.py").write_text(MODULE.format(library=str(library)))
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(folder), str(Path(openreg_ops.__file__).parents[1])])

    def run(command, *words):
        words = ("-m", "openreg_tools", command, "--import", "young", "--device", "young", *words)
        done = python(*words, cwd=folder, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, " ".join(f"{done.stdout} {done.stderr}".split())

    return run


def test_check(tool):
    status, said = tool("check", "young::twice", "--input", "f32[4,6]", "--quiet")
    assert status == 0, said
    assert "The package of the device lacks aten::" in said
    assert "the checks that need them were skipped" in said and "young::twice passes" in said


def test_trace(tool):
    status, said = tool("trace", "program.py")
    assert status == 0 and "[16.0, 16.0, 16.0]" in said, said
    assert "aten::add.Tensor own" in said and "(host clock around the call)" in said


def test_compare(tool):
    status, said = tool("compare", "program.py")
    assert status == 0 and "Nothing differs beyond its tolerance." in said, said
    assert "young has no synchronize()" in said


def test_conformance(tool):
    status, said = tool("conformance", "--ops", "^aten::(add|mul).Tensor$")
    assert status == 1 and "2 operators: 1 passed, 1 failed" in said and "worker process died" not in said, said
    assert "Could not run 'aten::mul.out' with arguments from the 'young' backend" in said


def test_ladder(tool):
    status, said = tool("ladder", "--rungs", "3", "--json", "-")
    found, _ = json.JSONDecoder().raw_decode(said)
    assert (status, found["reached"], found["first"]["rung"]) == (1, 0, 1)
    assert found["first"]["said"] == "torch.young lacks set_device, synchronize"
    assert found["first"]["file"] == "torch_young/device.py"
    checks = [check for rung in found["rungs"] for check in rung["checks"]]
    passed = [check["name"] for check in checks if check["verdict"] == "pass"]
    assert "torch.device knows the name" in passed and "Live tensors do not share memory" in passed
    failed = [check for check in checks if check["verdict"] == "fail"]
    assert any(check["said"].startswith("the process ended: signal 11") for check in failed)
    assert all(check["said"] and check["next"] for check in failed)
