"""`python -m openreg_ops operators`: its table agrees with what happens when the operators are called."""

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import command
from processes import python

import openreg_ops
from openreg_tools import manifest
from openreg_tools.operators import CLASSES, TRAITS, operators

ROOT = Path(__file__).parents[2]


def one(name):
    (entry,) = operators(namespaces=(), pattern=f"^{name}$").entries
    return entry


# ---- classes and traits ----


@pytest.mark.parametrize(
    "name, kind, traits",
    [
        ("aten::add.out", "required", ["out"]),
        ("aten::add.Tensor", "structured", []),
        ("aten::gelu", "structured", ["backward"]),
        ("aten::add_.Tensor", "structured", ["inplace"]),
        ("aten::relu", "required", ["backward"]),
        ("aten::abs", "explicit", []),
        ("aten::square", "implicit", []),
        ("aten::transpose.int", "explicit", ["view"]),
        ("aten::normal_", "required", ["inplace", "random"]),
        ("aten::nonzero", "required", ["data"]),
        ("aten::_local_scalar_dense", "required", ["data"]),
        ("aten::native_dropout", "required", ["backward", "random"]),
        ("aten::_cudnn_rnn", "elsewhere", ["backward", "random"]),
        ("aten::_indices", "elsewhere", ["view"]),
        ("aten::q_scale", "elsewhere", []),
    ],
)
def test_class_and_traits(name, kind, traits):
    entry = one(name)
    assert (entry.kind, list(entry.traits)) == (kind, traits)
    needs = {"aten::add.Tensor": ("aten::add.out",), "aten::gelu": ("aten::gelu.out", "aten::gelu_backward")}
    assert entry.needs == needs.get(name, entry.needs)


def test_the_to_do_list_has_what_a_backend_writes():
    """None is of a layout or a library, all have a kernel for a dense device, and the device's own tensors need none."""
    layouts = re.compile("sparse|quantized|nested|cudnn|miopen|mkldnn|mps")
    todo = {entry.name for entry in operators("cuda", kinds=["required"], missing=True).entries}
    assert {"aten::mm.out", "aten::batch_norm_stats", "aten::record_stream"} <= todo or torch.version.cuda
    # Those on the list that name a layout make it from, or take it with, a dense tensor.
    named = {name for name in todo if layouts.search(name)}
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in named)
    elsewhere = {entry.name for entry in operators("openreg", kinds=["elsewhere"]).entries}
    assert len(elsewhere) > 100
    sparse = operators(key="SparsePrivateUse1", pattern="^aten::_(indices|values)$").entries
    assert {entry.kind for entry in sparse} == {"required"}


def test_classes_agree_with_torchgen_and_the_dispatcher():
    """Two sources: torch's generated list, and what is registered for every device in the running process."""
    differ = []
    for entry in operators().entries:
        composite = any(
            torch._C._dispatch_has_kernel_for_dispatch_key(entry.name, key)
            for key in (
                "CompositeImplicitAutograd",
                "CompositeExplicitAutograd",
                "CompositeExplicitAutogradNonFunctional",
            )
        )
        if composite != (entry.kind not in ("required", "elsewhere")):
            differ.append(entry.name)
    assert not differ


# ---- agreement with calls ----


@pytest.fixture
def library():
    library = torch.library.Library("test_operators", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.define("part(Tensor(a) x) -> Tensor(a)")
        library.define("nowhere(Tensor x) -> Tensor")
        library.define("parts(Tensor x) -> Tensor")
        library.define("ours(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("part", lambda x: x[0], "CPU")
        library.impl("parts", lambda x: x + x, "CompositeExplicitAutograd")
        library.impl("ours", lambda x: x, "PrivateUse1")
        yield library
    finally:
        library._destroy()


def test_every_answer_of_the_table(library):
    """One operator for each answer, and the policies that change it."""
    x = torch.ones(2, device="openreg")

    def happens(name):
        openreg_ops.fallback.reset()
        try:
            getattr(torch.ops.test_operators, name)(x)
        except NotImplementedError:
            return "refused"
        return "fallback" if openreg_ops.fallback.report() else "runs"

    def said(name):
        return one(f"test_operators::{name}").has

    for name, has in (("twice", "fallback"), ("part", "refused"), ("nowhere", "refused")):
        assert (happens(name), said(name)) == (has, has)
    for name, has in (("parts", "composite"), ("ours", "own")):
        assert (happens(name), said(name)) == ("runs", has)
    with openreg_ops.fallback.policy("error"):
        assert (happens("twice"), said("twice")) == ("refused", "refused")
        with openreg_ops.fallback.allow("test_operators::twice"):
            assert (happens("twice"), said("twice")) == ("fallback", "fallback")
    with openreg_ops.fallback.deny("test_operators::twice", "test_operators::ours"):
        assert (happens("twice"), said("twice")) == ("refused", "refused")
        assert (happens("ours"), said("ours")) == ("refused", "refused")
    with openreg_ops.fallback.share("test_operators::twice"):
        assert (happens("twice"), said("twice")) == ("runs", "shared")
    assert "tests/tools/test_operators_command.py:" in one("test_operators::ours").where


# ---- filters, other devices, the command ----


@pytest.mark.slow
def test_filters():
    some = functools.partial(operators, pattern="^aten::(_|[bcr])")
    every = some().entries
    assert len(some(missing=True).entries) == sum(e.has in ("fallback", "refused") for e in every)
    for trait in TRAITS:
        found = some(traits=[trait]).entries
        assert found == [e for e in every if trait in e.traits] and found
    required = some(kinds=["required"], missing=True)
    assert required.entries and all(e.kind == "required" and e.missing for e in required.entries)
    assert required.totals()["required"] == Counter(e.has for e in required.entries)


def test_another_device():
    """A CUDA key on a CPU build: composites and nothing else."""
    cuda = {e.name: e.has for e in operators("cuda", pattern="^aten::(relu|abs|add.Tensor|mm.out)$").entries}
    assert cuda == {"aten::relu": "refused", "aten::abs": "composite", "aten::add.Tensor": "composite", "aten::mm.out": "refused"} or torch.version.cuda  # fmt: skip
    assert {e.has for e in operators("cpu", pattern="^aten::(relu|mm.out)$").entries} == {"own"}


BACKEND = """
import torch
torch.utils.rename_privateuse1_backend("NAME")
library = torch.library.Library("aten", "IMPL")
library.impl("relu", lambda x: x, "PrivateUse1")
"""
NEEDY = """
import torch
print("imported")
ones = torch.ones(2, device="openreg")
"""


def run_with_module(tmp_path, text, *words, package="openreg_tools", device="openreg"):
    """What `operators` says in a process of its own with the module ``its_backend``."""
    (tmp_path / "its_backend.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(Path(openreg_ops.__file__).parents[1])])
    words = (*words, "--import", "its_backend", "--device", device, "--ops", "^aten::(relu|mm.out)$", "--json", "-")
    return python("-m", package, "operators", *words, cwd=tmp_path, PYTHONPATH=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy", "openreg"])
def test_another_backend_of_private_use_1(tmp_path, name):
    """In openreg's place; also one that has openreg's name."""
    result = run_with_module(tmp_path, BACKEND.replace("NAME", name), device=name)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {e["name"]: e["has"] for e in report["operators"]} == {"aten::relu": "own", "aten::mm.out": "refused"}
    assert "its_backend.py" in report["operators"][1]["where"]


@pytest.mark.parametrize(
    "text, words, sentence",
    [
        (
            BACKEND.replace("NAME", "toy") + "raise ValueError('why')",
            [],
            "importing its_backend failed: ValueError: why",
        ),
        (BACKEND.replace("NAME", "toy") + "raise SystemExit(0)", [], "importing its_backend failed: SystemExit: 0"),
        (NEEDY, [], "; openreg is a device that is not loaded yet: --import openreg_ops before it"),
    ],
    ids=["raises", "exits", "needs a device"],
)
def test_a_module_that_cannot_be_imported(tmp_path, text, words, sentence):
    result = run_with_module(tmp_path, text, *words, device="toy")
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.splitlines()[-1].endswith(sentence)


def test_a_module_that_uses_the_device_at_import(tmp_path):
    """What it prints is not in the report."""
    result = run_with_module(tmp_path, NEEDY, "--import", "openreg_ops")
    assert len(json.loads(result.stdout)["operators"]) == 2 and result.stderr.count("imported") == 1


def test_the_device_has_the_place_of_another_backend(tmp_path):
    """`python -m openreg_ops` has registered openreg, and says which command runs without it."""
    result = run_with_module(tmp_path, BACKEND.replace("NAME", "toy"), package="openreg_ops", device="toy")
    assert (result.returncode, result.stdout) == (2, "")
    assert "openreg_ops has registered openreg as PrivateUse1, which a process can have once" in result.stderr
    assert result.stderr.endswith("`python -m openreg_tools` runs the tools without it\n")


@pytest.mark.slow
def test_imports_with_a_closed_stdout(tmp_path):
    (tmp_path / "module.py").write_text("")
    words = "-m openreg_tools operators --import module --device cpu --ops ^aten::relu$ --json found.json >&-"
    subprocess.run(f"{sys.executable} {words}", shell=True, cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "found.json").read_text()


def test_command(capsys, tmp_path):
    def said(status, *words):
        assert command("operators", *words) == status
        return capsys.readouterr().out

    out = said(0, "--required", "--missing", "--html", tmp_path / "page.html")
    assert "aten::_resize_output_ " in out and "cudnn" not in out and all(len(line) <= 80 for line in out.splitlines())
    assert out.splitlines()[-3].split() == ["own", "shared", "composite", "fallback", "refused", "all"]
    assert out.splitlines()[-1].startswith("all  ")
    page = (tmp_path / "page.html").read_text()
    assert page.index("operators of torch") < page.index("aten::_resize_output_</th>")
    assert "aten::_cudnn_rnn " in said(0, "--elsewhere", "--ops", "rnn")
    report = json.loads(said(0, "--ops", "^aten::(add|square)", "--optional", "--json", "-"))
    found = {entry["name"]: entry["kind"] for entry in report["operators"]}
    assert found["aten::add.Scalar"] == "explicit" and found["aten::square"] == "implicit"
    assert set(found.values()) == {"explicit", "implicit"}
    assert "aten::add" not in said(0, "--ops", "^aten::add", "--totals")
    assert "\nopenreg::rms_norm " in said(0, "--namespaces", "all", "--ops", "rms_norm")
    said(0, "--ops", "cudnn_rnn", "--optional")  # matches, and none is left
    assert command("operators", "--ops", "(") == 2
    assert "argument --ops: '(' is not a regular expression: missing )" in capsys.readouterr().err


def test_manifest_of_this_torch_ships():
    assert manifest.read(torch.__version__.partition("+")[0]) == manifest.installed()
    assert set(CLASSES) == {op.kind for op in manifest.installed().operators.values()}
