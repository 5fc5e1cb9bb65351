"""`python -m openreg_ops operators`: its table agrees with what happens when the operators are called."""

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from processes import python
from torch.utils._python_dispatch import TorchDispatchMode

import openreg_ops
from openreg_tools import dispatch, manifest
from openreg_tools.conformance import opinfo
from openreg_tools.operators import CLASSES, TRAITS, main, operators

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


def test_needs():
    assert one("aten::add.Tensor").needs == ("aten::add.out",)
    assert one("aten::gelu").needs == ("aten::gelu.out", "aten::gelu_backward")


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
    counts = {
        v: sum(op.kind in ("required", "elsewhere") for op in manifest.read(v).operators.values())
        for v in ("2.13.0", "2.14.0", "2.15.0")
    }
    assert counts == {"2.13.0": 858, "2.14.0": 858, "2.15.0": 861}  # as `grep -c '"True", "default": "False"'` says


# ---- agreement with calls ----


def argument(wanted):
    """Some value for an argument of a schema; a refusal comes before any of them is looked at."""
    kind = str(wanted.type)
    x = torch.ones(2, 2, device="openreg")
    if kind.startswith("Optional"):
        return None
    for start, value in (
        ("Tensor", x), ("List[Tensor", [x]), ("List[Optional[Tensor", [x]), ("number", 1), ("List[int", [1, 1]),
        ("int", 1), ("float", 1.0), ("bool", True), ("str", "none"), ("List[bool", [True]), ("List[float", [1.0]),
        ("List[number", [1]), ("Device", "openreg"), ("Generator", torch.Generator("openreg")), ("List[SymInt", [1]),
        ("Stream", torch.Stream("openreg")), ("SymInt", 1), ("Layout", 0), ("ScalarType", 6), ("List[str", ["x"]),
        ("complex", 1j),
    ):  # fmt: skip
        if kind.startswith(start):
            return value * (wanted.N or 1) if isinstance(value, list) else value
    raise AssertionError(f"no value of {kind}")


def call(name):
    operator, _, overload = name.partition(".")
    schema = dispatch.schema(name)
    packet = getattr(getattr(torch.ops, operator.partition("::")[0]), operator.partition("::")[2])
    positional = [argument(a) for a in schema.arguments if not a.kwarg_only]
    return getattr(packet, overload or "default")(
        *positional, **{a.name: argument(a) for a in schema.arguments if a.kwarg_only}
    )


def reached_by_a_tensor(name):
    return any(
        "Tensor" in str(a.type) and not str(a.type).startswith("Optional") for a in dispatch.schema(name).arguments
    )


def test_what_is_refused_raises():
    refused = [e for e in operators(has=["refused"]).entries if reached_by_a_tensor(e.name)]
    assert len(refused) > 100
    wrong = []
    for entry in refused:
        try:
            call(entry.name)
        except NotImplementedError as error:
            if entry.name.partition(".")[0] not in str(error):
                wrong.append((entry.name, error))
        except Exception as error:
            wrong.append((entry.name, error))
        else:
            wrong.append((entry.name, "returned"))
    assert not wrong


class Seen(TorchDispatchMode):
    """The operators that reach the device below autograd."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def run_samples(every):
    seen = Seen()
    for op in list(opinfo.database().values())[::every]:
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 1):
            mover = opinfo.Mover("openreg")
            try:
                arguments = mover(sample.input), mover(tuple(sample.args)), mover(sample.kwargs)
                with seen:
                    op(arguments[0], *arguments[1], **arguments[2])
            except RuntimeError:
                pass  # which samples the CPU refuses too is tests/aten/test_opinfo.py's matter
    return seen.names


@pytest.mark.parametrize(
    "forced", [(), ("aten::add.out", "aten::mul.out", "aten::mm.out", "aten::clone", "aten::exp.out")]
)
def test_what_falls_back_is_what_the_report_lists(forced):
    """Over a tenth of OpInfo: an operator is in the fallback's report if and only if the table says fallback."""
    with openreg_ops.fallback.force(*forced):
        openreg_ops.fallback.reset()
        seen = run_samples(10)
        fell = {record.operator for record in openreg_ops.fallback.report()}
        table = {entry.name: entry.has for entry in operators(namespaces=()).entries}
    assert len(seen) > 80
    assert {name for name in seen if table[name] == "fallback"} <= fell
    assert all(table[name] == "fallback" for name in fell)
    assert set(forced) & fell or not forced


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


def test_filters():
    every = operators().entries
    assert len(operators(missing=True).entries) == sum(e.has in ("fallback", "refused") for e in every)
    for trait in TRAITS:
        found = operators(traits=[trait]).entries
        assert found == [e for e in every if trait in e.traits] and found
    required = operators(kinds=["required"], missing=True)
    assert all(e.kind == "required" and e.missing for e in required.entries)
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


def _operators_of_toy(tmp_path, package, name):
    (tmp_path / "toy_backend.py").write_text(textwrap.dedent(BACKEND.replace("NAME", name)))
    command = (package, "operators", "--import", "toy_backend", "--device", name, "--ops", "^aten::(relu|mm.out)$")
    path = os.pathsep.join([str(tmp_path), str(Path(openreg_ops.__file__).parents[1])])
    return python("-m", *command, "--json", "-", cwd=tmp_path, PYTHONPATH=path)


@pytest.mark.parametrize("name", ["toy", "openreg"])
def test_another_backend_of_private_use_1(tmp_path, name):
    """In openreg's place; also one that bears openreg's name."""
    result = _operators_of_toy(tmp_path, "openreg_tools", name)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {e["name"]: e["has"] for e in report["operators"]} == {"aten::relu": "own", "aten::mm.out": "refused"}
    assert "toy_backend.py" in report["operators"][1]["where"]


NEEDY = """
import torch
print("imported")
library = torch.library.Library("needy", "DEF")
library.define("f(Tensor x) -> Tensor")
library.impl("f", lambda x: x + ones, "CompositeExplicitAutograd")
ones = torch.ones(2, device="openreg")
"""


def test_a_module_that_uses_the_device_at_import(tmp_path):
    """`python -m openreg_tools` loads the installed device first, and what the module prints is not in the report."""
    (tmp_path / "needy.py").write_text(NEEDY)
    words = ("operators", "--import", "needy", "--device", "openreg", "--ops", "^aten::relu$", "--json", "-")
    result = python("-m", "openreg_tools", *words, cwd=tmp_path)
    assert [each["name"] for each in json.loads(result.stdout)["operators"]] == ["aten::relu"]
    assert result.stderr.count("imported") == 1
    (tmp_path / "needy.py").write_text(NEEDY + 'raise ValueError("the reason")')
    result = python("-m", "openreg_tools", *words, cwd=tmp_path)
    assert result.returncode == 2 and "importing needy failed: ValueError: the reason\n" in result.stderr


@pytest.mark.parametrize(
    "then, words, reason",
    [
        ('raise ValueError("the reason")', [], "importing toy_backend failed: ValueError: the reason"),
        ("", ["--import", "missing"], "importing missing failed: ModuleNotFoundError: No module named 'missing'"),
        ("raise SystemExit(0)", [], "importing toy_backend failed: SystemExit: 0"),
    ],
)
def test_a_backend_that_fails_after_it_has_registered_its_device(tmp_path, then, words, reason):
    (tmp_path / "toy_backend.py").write_text(BACKEND.replace("NAME", "toy") + then)
    command = ("openreg_tools", "operators", "--import", "toy_backend", *words, "--device", "toy")
    result = python("-m", *command, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"operators: {reason}\n")


def test_imports_with_a_closed_stdout(tmp_path):
    (tmp_path / "module.py").write_text("")
    words = "-m openreg_tools operators --import module --device cpu --ops ^aten::relu$ --json found.json >&-"
    subprocess.run(f"{sys.executable} {words}", shell=True, cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "found.json").read_text()


def test_the_device_has_the_place_of_another_backend(tmp_path):
    """`python -m openreg_ops` has registered openreg, and says which command runs without it."""
    result = _operators_of_toy(tmp_path, "openreg_ops", "toy")
    assert (result.returncode, result.stdout) == (2, "")
    words = "operators --import toy_backend --device toy"
    assert "a process has one PrivateUse1 backend, here openreg" in result.stderr
    assert f"run `python -m openreg_tools {words} " in result.stderr


def command(capsys, monkeypatch, *words):
    import argparse

    from openreg_tools.operators import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    status = main(parser.parse_args(words))
    return status, capsys.readouterr()


def test_command(capsys, monkeypatch, tmp_path):
    status, said = command(capsys, monkeypatch, "--required", "--missing", "--html", str(tmp_path / "page.html"))
    assert status == 0 and "aten::_resize_output_ " in said.out and "cudnn" not in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())
    assert said.out.splitlines()[-3].split() == ["own", "shared", "composite", "fallback", "refused", "all"]
    assert said.out.splitlines()[-1].startswith("all  ")
    assert "aten::_resize_output_</th>" in (tmp_path / "page.html").read_text()
    status, said = command(capsys, monkeypatch, "--elsewhere", "--ops", "rnn")
    assert status == 0 and "aten::_cudnn_rnn " in said.out
    status, said = command(capsys, monkeypatch, "--ops", "^aten::(add|square)", "--optional", "--json", "-")
    found = {entry["name"]: entry["kind"] for entry in json.loads(said.out)["operators"]}
    assert found["aten::add.Scalar"] == "explicit" and found["aten::square"] == "implicit"
    assert status == 0 and set(found.values()) == {"explicit", "implicit"}
    status, said = command(capsys, monkeypatch, "--ops", "zzzz")
    assert status == 2 and said.err == "operators: nothing matches --ops 'zzzz'\n"
    assert command(capsys, monkeypatch, "--ops", "cudnn_rnn", "--optional")[0] == 0  # matches, and none is left
    with pytest.raises(SystemExit):
        command(capsys, monkeypatch, "--ops", "(")
    assert "argument --ops: '(' is not a regular expression: missing )" in capsys.readouterr().err
    status, said = command(capsys, monkeypatch, "--device", "nope")
    assert status == 2 and "there is no device nope" in said.err
    status, said = command(capsys, monkeypatch, "--key", "PrivatUse1")
    assert status == 2 and "there is no dispatch key PrivatUse1" in said.err
    status, said = command(capsys, monkeypatch, "--namespaces", "aten", "nope")
    assert status == 2 and "there are no operators of nope" in said.err


def test_manifest_of_this_torch_ships():
    assert manifest.read(torch.__version__.partition("+")[0]) == manifest.installed()
    assert set(CLASSES) == {op.kind for op in manifest.installed().operators.values()}
