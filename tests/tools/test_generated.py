"""Generated inputs: `conformance --generate` finds and shrinks injected faults, and a right operator gives no report."""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import ctypes
import functools
import io
import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from processes import forking, python

from openreg_tools import dispatch
from openreg_tools.conformance import calls, opinfo, worker
from openreg_tools.conformance.calls import Call, Stays
from openreg_tools.forms import Wrong
from openreg_tools.generate import (
    aliasing,
    allowed,
    changes,
    child,
    contiguous,
    draw,
    numerics,
    report,
    search,
    snippet,
    tables,
)

# A pool of threads does not survive the forks in which the CPU's kernels are tried.
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]
HERE = Path(__file__).parent
CASES = 100  # of each operator


def tool(*words: str) -> subprocess.CompletedProcess:
    return python("-m", "openreg_tools", *words, cwd=HERE, opinfo=True, nested=True, timeout=500)


def generate(pattern: str, count: int, path: Path, *words: str) -> tuple[dict, subprocess.CompletedProcess]:
    modules = ("--import", "openreg_ops", "--import", "generated_faults")
    done = tool("conformance", *modules, "--device", "openreg", "--generate", str(count), "--ops", pattern, "--jobs", "1",
                "--json", str(path), *words)  # fmt: skip
    assert path.exists(), done.stderr
    return json.loads(path.read_text()), done


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The report of every operator of generated_faults.py."""
    found, done = generate("^faulty::", 11 * CASES, tmp_path_factory.mktemp("generated") / "faulty.json")
    assert done.returncode == 1
    return found


# What a finding of each operator's fault shrinks to: one change of this kind, and how it ends.
FAULTS = {
    "empty": ({"sizes", "shape"}, "shape"),
    "permuted": ({"layout"}, "value"),
    "offset": ({"offset"}, "value"),
    "nan": ({"values"}, "value"),
    "host_scalar": ({"host"}, "value"),
    "alias_": ({"alias"}, "value"),
    "permuted_out.out": ({"layout"}, "value"),
    "shared_out.out": ({"layout"}, "value"),
    "wide_out.out": ({"layout"}, "value"),
    "crash": ({"dtypes", "dtype"}, "crash"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_shrunk(faulty, name):
    kinds, ends = FAULTS[name]
    cases = [f["case"] for f in faulty["findings"] if f["operator"] == f"faulty::{name}" and f["kind"] == ends]
    assert len(cases) == 1
    (change,) = cases[0]["changes"]
    assert change[0] in kinds


def test_the_first_calls_are_the_widest_with_reversed_strides(faulty):
    (found,) = [f for f in faulty["findings"] if f["operator"] == "faulty::wide_out.out"]
    assert found["case"]["changes"][0][2] == "reversed"
    profile = [
        [{"kind": "tensor", "at": 0, "shape": [3], "out": False}, {"kind": "int", "at": 1}],
        [
            {"kind": "tensor", "at": 0, "shape": [2, 1, 3], "out": False},
            {"kind": "tensor", "at": 1, "shape": [3], "out": False},
            {"kind": "tensor", "at": 2, "shape": [2, 3, 4], "out": True},
        ],
    ]
    assert draw.first("aten::x", profile) == [
        {"op": "aten::x", "base": 1, "changes": [["layout", at, "reversed"]]} for at in (2, 0)
    ]
    assert not draw.first("aten::x", profile[:1])


def test_a_base_call_without_arguments_is_the_narrowest():
    wide = {"kind": "tensor", "at": 0, "shape": [2, 3], "out": False}
    expected = [{"op": "aten::x", "base": 1, "changes": [["layout", 0, "reversed"]]}]
    assert draw.first("aten::x", [[], [wide], []]) == expected and not draw.first("aten::x", [[]])


def test_a_right_operator_gives_no_report(faulty):
    assert not [f for f in faulty["findings"] if f["operator"] == "faulty::right"]
    (right,) = [of for of in faulty["operators"] if of["name"] == "faulty::right"]
    assert right["cases"] >= CASES // 2 and right["reached"] >= right["cases"] // 3 and not right["never"]


def test_the_same_seed_gives_the_same_cases(faulty, tmp_path):
    again, done = generate("^faulty::right$", CASES, tmp_path / "again.json")
    assert done.returncode == 0 and "0 findings" in done.stdout
    (first,) = [of for of in faulty["operators"] if of["name"] == "faulty::right"]
    assert again["operators"][0]["digest"] == first["digest"]


def test_a_finding_can_be_run_again(faulty):
    (offset,) = [f for f in faulty["findings"] if f["operator"] == "faulty::offset"]
    done = tool("conformance", "--device", "openreg", "--import", "openreg_ops", "--import", "generated_faults",
                "--case", json.dumps(offset["case"]))  # fmt: skip
    assert done.returncode == 1 and "FAIL faulty::offset [value]" in done.stdout
    assert "--case" in offset["command"] and "offset" in offset["command"]
    ran = python("-c", offset["source"], cwd=HERE, PYTHONPATH=str(HERE), timeout=100)
    contiguous, cpu, device = ran.stdout.split("tensor(")[1::2]
    assert "-7.0000" not in contiguous + cpu and "-7.0000" in device  # the filler in front of the view


def test_a_huge_size_is_an_error():
    case = {"op": "aten::hamming_window.periodic_out", "base": 1, "changes": [["number", 0, 2**31]]}
    done = tool("conformance", "--device", "openreg", "--import", "openreg_ops", "--case", json.dumps(case))
    assert done.returncode == 0 and "both raised" in done.stdout, done.stdout


def test_check_takes_generated_calls_into_its_table():
    words = ("--import", "openreg_ops", "--device", "openreg", "--generate", "40", "--only", "schema", "--quiet")
    done = tool("check", "faulty::offset", "--import", "generated_faults", "--input", "f32[3,4]", *words)
    assert done.returncode == 1 and "FAIL generated" in done.stdout and '["offset", 0, 1]' in done.stdout
    done = tool("check", "faulty::right", "--import", "generated_faults", "--input", "f32[3,4]", *words)
    assert done.returncode == 0 and "40 cases of seed 0" in done.stdout
    done = tool("check", "faulty::right", "--import", "generated_faults", "--generate", "-1")
    assert done.returncode == 2 and "--generate: expected a number above 0, but got '-1'" in done.stderr


LONE = """
import os, sys, torch
print("imported")
def operator(function):
    torch.library.custom_op(f"lone::{function.__name__}", mutates_args=())(function)
@operator
def strided(x: torch.Tensor) -> torch.Tensor:
    return -x if x.is_contiguous() else x.clone()
@operator
def shaped(x: torch.Tensor) -> torch.Tensor:
    return -x if x.is_contiguous() else (-x).flatten()
@operator
def aborts(x: torch.Tensor) -> torch.Tensor:
    return -x if x.numel() else os.abort()
@operator
def right(x: torch.Tensor) -> torch.Tensor:
    return -x
@operator
def named(x: torch.Tensor) -> torch.Tensor:
    return -x
if "openreg" in sys.argv:  # a module may name the device that it is for
    torch.library.register_kernel("lone::named", "openreg")(lambda x: -x if x.is_contiguous() else x.clone())
@operator
def random(x: torch.Tensor) -> torch.Tensor:
    return x + torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8).reshape(x.shape).to(x) if x.numel() else -x
@operator
def right_random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)
library = torch.library.Library("lone", "FRAGMENT")
library.define("right_view(Tensor(a) x) -> Tensor(a)")
library.impl("right_view", lambda x: x.transpose(0, -1) if x.dim() else x.view(x.shape), "CompositeExplicitAutograd")
library.define("right_in_place_(Tensor(a!) x) -> Tensor(a!)")
library.impl("right_in_place_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
"""


def lone(folder: Path, command: list[str]) -> subprocess.CompletedProcess:
    (folder / "lone.py").write_text(LONE)
    path = {"PYTHONPATH": str(folder)} if command[0] == "-c" else {}
    return python(*command, cwd=folder, opinfo=True, nested=True, timeout=300, **path)


@pytest.mark.parametrize("device", ["cpu", "openreg"])
@pytest.mark.parametrize("name, found", [("strided", "value"), ("shaped", "shape"), ("aborts", "crash")])
def test_an_operator_that_is_wrong_on_every_device(tmp_path, name, found, device):
    """Its CPU kernel is not a reference."""
    finds_and_repeats(tmp_path, name, found, device)


def test_a_kernel_that_a_module_registers_for_the_device_by_name(tmp_path):
    finds_and_repeats(tmp_path, "named", "value", "openreg")


def finds_and_repeats(tmp_path, name, found, device):
    """The command that a finding prints makes the call again."""
    words = ["--input", "f32[3,4]", "--generate", "60", "--only", "schema", "--quiet", "--import", "lone"]
    done = lone(tmp_path, ["-m", "openreg_tools", "check", f"lone::{name}", *words, "--device", device])
    assert done.returncode == 1 and f"lone::{name}: {found}: " in done.stdout, done.stdout + done.stderr
    (again,) = re.findall(r"^ *python (-m openreg_tools conformance .*)$", done.stdout, re.MULTILINE)
    done = lone(tmp_path, shlex.split(again))
    assert done.returncode == 1 and f"FAIL lone::{name} [{found}]" in done.stdout, done.stdout + done.stderr
    program = textwrap.dedent("\n".join(re.findall(r"^    .*$", done.stdout.partition("    import torch")[2], re.M)))
    shown = lone(tmp_path, ["-c", f"import torch\n{program}", device]).stdout.replace(", device='openreg:0'", "")
    _, *printed = re.split("imported|tensor", shown)  # each call prints its result and its argument
    assert found == "crash" or printed[1] != printed[-2], program


@pytest.mark.parametrize("device", ["cpu", "openreg"])
@pytest.mark.parametrize("name", ["right", "random"])
def test_an_operator_without_a_fault_on_any_device(tmp_path, name, device):
    """What varies from call to call is allowed, and counted."""
    words = ["--input", "f32[3,4]", "--generate", "30", "--only", "schema", "--quiet", "--import", "lone"]
    done = lone(tmp_path, ["-m", "openreg_tools", "check", f"lone::{name}", *words, "--device", device, "--verbose"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("the results vary from call to call" in " ".join(done.stdout.split())) == (name == "random")


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_right_operators_of_an_imported_module(tmp_path, device):
    words = ["--import", "lone", "--device", device, "--generate", "600", "--jobs", "1", "--ops", "^lone::right"]
    done = lone(tmp_path, ["-m", "openreg_tools", "conformance", *words, "--json", "found.json"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0 and len(found["operators"]) == 4, done.stdout + done.stderr
    assert ("random numbers are drawn in the order of memory" in done.stdout) == (device == "cpu")


def test_operators_of_an_imported_module_are_listed(tmp_path):
    words = ["--import", "lone", "--device", "openreg", "--generate", "100", "--jobs", "1", "--ops", "^lone::[^r]"]
    done = lone(tmp_path, ["-m", "openreg_tools", "conformance", *words, "--json", "found.json"])
    found = json.loads((tmp_path / "found.json").read_text())
    names = [f"lone::{each}" for each in ("aborts", "named", "shaped", "strided")]
    assert [each["name"] for each in found["operators"]] == names, done.stderr
    assert {each["operator"] for each in found["findings"]} == {*names}


def test_without_hypothesis_the_command_says_what_to_install(tmp_path):
    (tmp_path / "hypothesis.py").write_text("raise ImportError('not here')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from openreg_tools.__main__ import main; sys.exit(main())"
    words = ["conformance", "--device", "openreg", "--generate", "5", "--ops", "aten::neg$"]
    command = [sys.executable, "-P", "-c", code, str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "pip install 'openreg_tools[generate]'" in done.stderr


# ---- what is drawn, in this process ----


class Stub:
    """In place of a child: an operator of two tensors that fails where `fails` says."""

    PROFILE = [
        {"at": i, "kind": "tensor", "shape": [3, 3], "dtype": "float32", "out": False, "written": False} for i in (0, 1)
    ]

    def __init__(self, fails=lambda case: ""):
        self.fails, self.seen = fails, []

    def bases(self, name):
        return [self.PROFILE] * 3, True, ""

    def case(self, case):
        self.seen.append(case)
        kind = self.fails(case)
        return {"end": "failed", "kind": kind, "message": "", "call": ""} if kind else {"end": "equal"}

    def whole(self, case):
        return case

    def source(self, case):
        return ""


def test_operators_of_pytorch_are_not_custom():
    defines = re.compile(r"(?:Library|custom_op|define)\(\s*[\"'][a-z_]\w*(?:::|[\"'])")
    namespaces = set()
    for path in Path(torch.__file__).parent.rglob("*.py"):
        if defines.search(text := path.read_text(encoding="utf-8", errors="ignore")):
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Call(
                        func=ast.Name(id=made) | ast.Attribute(attr=made), args=[ast.Constant(value=str(name)), *_]
                    ) if made in ("Library", "custom_op", "define"):
                        namespaces.add(name.partition("::")[0])
    assert {"aten", "quantized_decomposed", "torch_attn"} <= namespaces
    examples = {"_", "testlib"}  # a library without a namespace, and one in a test database
    assert {each for each in namespaces if each.isidentifier() and dispatch.is_custom(f"{each}::x")} <= examples


def test_every_kind_of_change_is_drawn():
    stub = Stub()
    of = search.explore("x::y", 400, 0, stub, "own", aliases=True)
    drawn = {change[0] for case in stub.seen for change in case["changes"]}
    assert drawn == {
        "layout",
        "offset",
        "sizes",
        "shape",
        "values",
        "dtypes",
        "dtype",
        "host",
        "bit",
        "alias",
        "garbage",
    }
    assert of.digest != search.explore("x::y", 400, 1, Stub(), "own", aliases=True).digest
    assert of.ends.total() == len({json.dumps(case) for case in stub.seen}) == 400


class Mixed(Stub):
    """An operator with an out= tensor and numbers, too."""

    PROFILE = [
        *Stub.PROFILE,
        {**Stub.PROFILE[0], "at": 2, "out": True, "written": True},
        *({"at": i, "kind": kind} for i, kind in enumerate(("int", "float", "bool", "str"), 3)),
    ]


def test_every_change_that_is_drawn_can_be_given_again():
    """A case in a report is one that `--case` takes."""
    stub = Mixed()
    search.explore("x::y", 200, 0, stub, "own", aliases=True)
    made = [change for case in stub.seen for change in json.loads(json.dumps(case["changes"]))]
    assert not {said for change in made if (said := changes.wrong(change))}
    assert {"out", "number"} <= {change[0] for change in made}


def test_a_tensor_gets_its_layout_before_it_is_shared():
    stub = Stub()
    search.explore("x::y", 400, 0, stub, "own", aliases=True)
    kinds = [[change[0] for change in case["changes"]] for case in stub.seen]
    assert any("layout" in each and "alias" in each for each in kinds)
    assert not [each for each in kinds if "layout" in each[each.index("alias") if "alias" in each else len(each) :]]


def test_each_kind_of_failure_is_shrunk_by_itself():
    def fails(case):
        kinds = {change[0] for change in case["changes"]}
        return "value" if "bit" in kinds else "crash" if "alias" in kinds else ""

    found = [
        f for seed in range(4) for f in search.explore("x::y", 100, seed, Stub(fails), "own", aliases=True).findings
    ]
    shrunk = {"value": "bit", "crash": "alias"}
    assert found and all([change[0] for change in f.case["changes"]] == [shrunk[f.kind]] for f in found)


@pytest.mark.parametrize(
    ("end", "limit"),
    [
        ({"end": "failed", "kind": "crash", "message": "", "call": ""}, "CRASHES"),
        ({"end": "allowed", "note": "the CPU's kernel ends the process"}, "CRASHES"),
        ({"end": "failed", "kind": "timeout", "message": "", "call": ""}, "WAITS"),
        ({"end": "allowed", "note": "the CPU's kernel hangs"}, "WAITS"),
    ],
    ids=["crash", "crash of the cpu", "timeout", "hang of the cpu"],
)
def test_an_operator_that_ends_or_stops_every_process_is_given_up(monkeypatch, end, limit):
    """Each such case costs a new process, or the time limit."""

    class Costs(Stub):
        def case(self, case):
            super().case(case)
            return dict(end) if len(case["changes"]) > 1 else {"end": "equal"}

    monkeypatch.setattr(search, limit, 3)
    tried = []
    for seed in range(8):
        stub = Costs()
        search.explore("x::y", 400, seed, stub, "own", aliases=True)
        tried.append(len({json.dumps(case) for case in stub.seen if len(case["changes"]) > 1}))
    assert 3 <= max(tried) <= 5  # the smallest failure is tried without each of its changes


def test_shares_add_up_and_prefer_own_kernels():
    names = [f"x::{i}" for i in range(50)]
    is_own = {name: i < 10 for i, name in enumerate(names)}
    few, many = search.shares(names, 100, 0, is_own), search.shares(names, 7001, 0, is_own)
    assert sum(few.values()) == 100 and min(few.values()) >= 4 and few != search.shares(names, 100, 1, is_own)
    assert sum(many.values()) == 7001 and len(many) == 50 and many["x::3"] > 2 * many["x::30"]


# ---- the changes ----

X = torch.arange(1.0, 13.0).view(3, 4)


def changed(*made):
    """aten::add.Tensor of X and X + 1 with changes: the two tensors and alpha."""
    call = Call([X.clone(), X + 1], {"alpha": 1})
    after = changes.changed("aten::add.Tensor", call, [list(each) for each in made])
    return [*after.args, *after.kwargs.values()]


@pytest.mark.parametrize("how", [each for each in changes.LAYOUTS if each not in ("channels last", "transposed batch")])
def test_layouts(how):
    x, y, _ = changed(("layout", 0, how))
    assert x.shape == X.shape and not x.is_contiguous() and torch.equal(y, X + 1)
    if how not in ("expanded", "overlapping"):
        assert torch.equal(x, X)
    else:
        assert x.untyped_storage().nbytes() < 4 * (X.numel() + 6)  # elements share memory


def test_offsets_bits_and_values_keep_the_elements():
    x, y, _ = changed(("layout", 1, "reversed"), ("offset", 1, 3), ("offset", 0, 1), ("bit", 0, "neg"))
    assert torch.equal(x, X) and x.is_neg() and torch.equal(y, X + 1)
    assert y.storage_offset() == 3 and y.stride() == (1, 3)
    x, y, _ = changed(("values", 0, "mixed"), ("dtype", 1, "int8"), ("values", 1, "extremes"))
    assert x.isnan().any() and x.isinf().any() and y.dtype == torch.int8 and {127, -128} <= set(y.flatten().tolist())


@pytest.mark.parametrize("dtype", changes.DTYPES)
def test_values_of_every_dtype(dtype):
    """Mixed values are not all the same, and the extremes are the dtype's."""
    mixed, extremes = (
        changed(("dtype", 0, dtype), ("values", 0, which))[0].flatten() for which in ("mixed", "extremes")
    )
    assert mixed.dtype == extremes.dtype == getattr(torch, dtype) and len({str(each) for each in mixed.tolist()}) > 1
    if not (mixed.is_complex() or dtype == "bool"):
        info = (torch.finfo if mixed.is_floating_point() else torch.iinfo)(mixed.dtype)
        for values in (mixed, extremes):
            assert {info.min, info.max} <= set(values.tolist())


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_integers_instead_of_fractions(dtype):
    """What is not finite has no integer: each machine would convert it in its own way."""
    x, _, _ = changed(("values", 0, "mixed"), ("dtype", 0, dtype))
    assert x.dtype == getattr(torch, dtype)
    assert x.flatten()[:10].tolist() == [0, 6, 0, 3, 0, 0, 3, 0, -8, 0]  # of nan, 1.5, -0., inf, denormal, -inf, …


def test_sizes_and_aliases():
    x, y, _ = changed(("sizes", 4, 0))
    assert x.shape == y.shape == (3, 0)
    x, y, _ = changed(("alias", 1, 0, "shifted"))
    assert torch.equal(y.flatten()[:-1], x.flatten()[1:]) and x.untyped_storage()._cdata == y.untyped_storage()._cdata
    x, y, _ = changed(("alias", 1, 0, "same"))
    assert x is y
    x, y, alpha = changed(("host", 1), ("number", 2, {"complex": [0, 1]}))
    assert isinstance(y, Stays) and y.tensor.shape == () and alpha == 1j
    move = calls.Move("openreg")
    moved = move(y).fill_(5)
    assert moved.device.type == "cpu" and move(y) is moved and y.tensor != 5  # the other side gets the number as it was


def test_a_program_builds_the_arguments_again():
    call = Call([changed(("layout", 0, "sliced"), ("bit", 0, "neg"))[0], Stays(torch.tensor(2.0))], {"alpha": 3})
    source = snippet.source("aten::add.Tensor", call, "openreg", [])
    done = python("-c", source, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str((X + 6).tolist()[0][0])[0]) and done.stdout.count("device='openreg:0'") == 2
    assert "no short source" in snippet.source("aten::add.Tensor", Call([X.to_sparse(), X], {}), "openreg", [])


WRITTEN = {
    **{
        how: lambda how=how: changed(("layout", 0, how))[0]
        for how in ("sliced", "reversed", "padded", "expanded", "overlapping")
    },
    "conj": lambda: torch.complex(X, -X).conj(),
    "neg": lambda: torch._neg_view(X[:, 1:]),
    "not finite": lambda: torch.tensor([math.nan, math.inf, -math.inf, 0.5]),
    "bool": lambda: X > 5,
    "float8": lambda: X.to(torch.float8_e4m3fn)[1:],
    "no elements": lambda: X[:0],
    "no dimensions": lambda: X[1, 2],
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_program_builds_every_element_again(kind, capsys):
    x = WRITTEN[kind]()
    exec(snippet.source("aten::clone", Call([x], {}), "cpu", []), {})
    assert capsys.readouterr().out == f"{x!r}\n{x!r}\n" * 2  # the result and the argument, also in contiguous memory


def test_a_case_of_given_samples_is_run_again(faulty):
    words = ("--import", "openreg_ops", "--import", "generated_faults", "--device", "openreg")
    done = tool(
        "check", "faulty::offset", *words, "--input", "f64[2,5]", "--generate", "40", "--only", "schema", "--quiet"
    )
    case = json.loads(" ".join(re.search(r"--case '(.*?)'", done.stdout, re.DOTALL)[1].split()))
    assert case["given"] == {"inputs": ["f64[2,5]"]}
    done = tool("conformance", *words, "--case", json.dumps(case))
    assert done.returncode == 1 and "float64[2, 5]" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "aten::neg", "--generate", "0"), "--generate: expected a number above 0, but got '0'"),
        (("check", "aten::neg", "--seed", "1"), "--seed is the seed of generated calls: add --generate N"),
        (("check", "aten::neg", "--only", "generated"), "generated calls are made with --generate N alone"),
        (("conformance", "--seed", "1"), "--seed is the seed of generated calls: add --generate N"),
        (("conformance", "--generate", "1", "--suites", "operators"), "leave out --suites"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(words, message):
    done = tool(*words, "--device", "openreg")
    assert done.returncode == 2 and message in done.stderr, done.stderr


def of_neg(change, more=""):
    return f'{{"op": "aten::neg", "base": 0, "changes": [{change}]{more}}}'


def test_a_wrong_case_is_refused(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", forking())
    for text, message in (
        ("{}", "it has no 'op'"),
        ('{"op": "aten::neg", "base": 0, "changes": [["foo", 1]]}', r"begin with alias, .*, not \['foo', 1\]"),
        ('{"op": "aten::neg", "base": 0, "changes": [[["layout"]]]}', r"begin with alias, .*, not \[\['layout'\]\]"),
        ('{"op": "aten::neg", "base": 0, "changes": ["layout"]}', "begin with alias, .*, not layout"),
        (
            '{"op": "aten::neg", "base": 0, "changes": [["layout", 99, "sliced"]]}',
            "does not fit its argument: IndexError",
        ),
        (of_neg('["layout", 0, "foo"]'), "has 'foo' where one of reversed, .*, overlapping is expected"),
        (of_neg('["layout", 0]'), "is not 'layout' and 2 more"),
        (of_neg('["dtype", 0, "float99"]'), "has 'float99' where one of float64, .* is expected"),
        (of_neg('["dtype", 0, {}]'), "has {} where one of float64, .* is expected"),
        (of_neg('["layout", "0", "sliced"]'), "has '0' where a number from 0 on is expected"),
        (of_neg('["offset", 0, -1]'), "has -1 where a number from 0 on is expected"),
        (of_neg('["number", 0, []]'), r"ends in \[\], and not in a number"),
        (of_neg('["number", 0, "foo"]'), "argument 0 is a tensor, and not a number"),
        (of_neg("", ', "given": {"input": 5}'), r"'given' is .*, not {'input': 5}"),
        (of_neg("", ', "given": {"inputs": "f32[3]"}'), r"'given' is .*, not {'inputs': 'f32"),
        (of_neg("", ', "given": {"inputs": ["f32[3"]}'), r"f32\[3"),
        ('{"op": ["x"], "base": 0, "changes": []}', r"'op' is \['x'\], and not of type str"),
        ('{"op": "aten::neg", "base": 1e400, "changes": []}', "'base' is inf, and not of type int"),
        (
            '{"op": "aten::neg", "base": 0, "changes": [], "given": {"samples": "nothing:f"}}',
            "No module named 'nothing'",
        ),
        ('{"op": "aten::neg", "base": 99, "changes": []}', r"aten::neg has \d+ calls to start from"),
    ):
        arguments = argparse.Namespace(
            device="openreg", case=text, modules=["openreg_ops"], threads=1, timeout=60, quiet=True, given={}
        )
        with pytest.raises(Wrong, match=message):
            search.replay(arguments)
    arguments = argparse.Namespace(device="openreg", case='{"op": "aten::neg"}', modules=[])
    with pytest.raises(Wrong, match="--case takes the JSON that a finding prints"):
        search.replay(arguments)
    arguments.case = '{"op": "aten::no_such", "base": 0, "changes": []}'
    with pytest.raises(Wrong, match="openreg lists no operator aten::no_such"):
        search.replay(arguments)


# ---- how a case ends, in this process ----


def end(op, *made, base=0):
    case = {"op": op, "base": base, "changes": [list(each) for each in made]}
    return child.run(case, "openreg", lambda where: None)["end"]


def test_how_cases_end():
    assert (
        end("aten::add.Tensor") == end("aten::add.Tensor", ("layout", 0, "reversed"), ("values", 1, "mixed")) == "equal"
    )
    assert end("aten::add.Tensor", ("shape", 1, "last longer")) == "both raised"
    assert end("aten::tril.out", ("layout", 2, "reversed")) == "equal"


@pytest.fixture
def defined():
    """Defines operators: the kernel of the CPU, and the device's."""
    library = torch.library.Library("test_generated", "DEF")

    def define(name, right, wrong):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, right, "CPU")
        library.impl(name, wrong, "PrivateUse1")
        return f"test_generated::{name}"

    yield define
    library._destroy()


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (None, lambda x: -x),
        ("value", lambda x: -x + 1),
        ("dtype", lambda x: -x.double()),
        ("rng", lambda x: (torch.rand(1), -x)[1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_beside_a_layout_that_the_cpu_ignores(defined, kind, wrong):
    """The CPU's values are those of contiguous memory then, and what is wrong besides them is still a finding."""
    name = defined("neg", lambda x: -x.as_strided(x.shape, torch.empty(x.shape).stride()), wrong)
    case = {"op": name, "base": 0, "changes": [["layout", 0, "reversed"]]}
    found = child.run(case, "openreg", lambda where: None)
    assert (found["end"], found.get("kind")) == ("failed" if kind else "equal", kind), found


@pytest.mark.parametrize("added, ending", [(0, "equal"), (1, "failed")])
def test_a_fault_beside_a_layout_that_a_kernel_of_pytorch_ignores(added, ending):
    """PyTorch's kernel is no excuse where the device is held to its results in contiguous memory."""

    def wrong(x, weight, bias, *sizes):
        x, weight, bias = (each if each is None else each.cpu().contiguous() for each in (x, weight, bias))
        return tuple((each + added).to("openreg") for each in torch.native_group_norm(x, weight, bias, *sizes))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("native_group_norm", wrong, "PrivateUse1", allow_override=True)
        assert end("aten::native_group_norm", ("layout", 1, "sliced"), base=2) == ending


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("aten::upsample_trilinear3d_backward", ("number", 1, -(2**63))),  # a SymInt on the heap, in a list
        ("aten::_softmax", ("number", 1, 2**62)),
    ],
)
def test_both_sides_raise(name, change):
    assert end(name, change) == "both raised"


def test_of_two_wrong_arguments_either_may_be_reported():
    wrong = ("number", 12, 0), ("garbage", 55)
    assert end("aten::rnn_relu.data", *wrong) == "both raised"
    assert not child._may_raise({"op": "aten::add.Tensor", "base": 0, "changes": [["host", 1]]}, "IndexError", print)


@pytest.mark.parametrize(
    ("name", "change", "base"),
    [
        ("aten::native_group_norm", ("layout", 1, "sliced"), 2),  # kernels that read an input as contiguous
        ("aten::_slow_conv2d_backward.output_mask", ("layout", 1, "reversed"), 0),
        ("aten::fractional_max_pool3d_backward.grad_input", ("layout", 8, "padded"), 0),
        ("aten::_nested_view_from_buffer", ("bit", 0, "neg"), 0),
        ("aten::embedding_backward", ("garbage", 85), 0),  # a sparse size that SymInt keeps on the heap
    ],
)
def test_what_the_long_runs_found(name, change, base):
    assert end(name, change, base=base) == "equal"


GRID = "both raised" if torch.__version__ >= "2.15" else "allowed"  # torch 2.15 checks the gradient's shape


@pytest.mark.parametrize(
    ("name", "changes", "base", "ends"),
    [
        ("aten::fft_hfftn.out", [("dtype", 4, "float64"), ("layout", 0, "reversed")], 2, "equal"),  # rounds in float32
        ("aten::_euclidean_dist", [("layout", 0, "reversed"), ("alias", 1, 0, "same")], 3, "equal"),  # roots near zero
        ("aten::tensor_split.sections", [("garbage", 28)], 0, "equal"),  # quantized columns, which .cpu() leaves
        ("aten::select.int", [("garbage", 67)], 0, "equal"),  # a nested result with uninitialized offsets
        ("aten::_lazy_clone", [("garbage", 0)], 0, "equal"),  # a quantized result without a quantizer
        ("aten::view.dtype", [("garbage", 49)], 0, "equal"),  # the same
        ("aten::_grouped_mm", [("offset", 0, 1)], 0, "allowed"),
        ("aten::max_pool1d", [("garbage", 13)], 0, "allowed"),
        ("aten::set_data", [("garbage", 59)], 0, "equal"),
        ("aten::addr_", [("shape", 0, "first of size 1")], 0, "allowed"),
        ("aten::full.out", [("number", 0, -1), ("sizes", 3, 0)], 0, "allowed"),
        ("aten::_weight_norm_interface_backward.out", [("layout", 2, "reversed"), ("garbage", 10)], 0, "both raised"),
        ("aten::_weight_norm_interface_backward", [("shape", 0, "first of size 1"), ("layout", 1, "channels last")], 4, "both raised"),
        ("aten::grid_sampler_3d_backward.out", [("shape", 0, "first of size 1"), ("layout", 0, "reversed")], 0, GRID),
        ("aten::adaptive_avg_pool3d.out", [("layout", 0, "overlapping"), ("alias", 4, 0, "transposed")], 1, "allowed"),
        ("aten::avg_pool3d.out", [("layout", 0, "reversed"), ("bit", 0, "neg"), ("alias", 10, 0, "same")], 0, "allowed"),
        ("aten::_ctc_loss_backward", [("number", 37, -1)], 0, "allowed"),  # blank, of which only the forward pass checks
        ("aten::_ctc_loss_backward", [("number", 5, -1)], 0, "allowed"),  # a length, likewise
        ("aten::_ctc_loss_backward", [], 0, "equal"),
        ("aten::ldexp_", [("dtypes", "float32", "int64"), ("garbage", 4)], 0, "allowed"),  # self is sparse
        ("aten::_fft_c2r.out", [("number", 1, 9223372036854775807)], 0, "allowed"),  # a dimension, likewise
        ("aten::_fft_c2r.out", [("number", 1, 0)], 0, "equal"),
        ("aten::fft_hfftn", [("sizes", 2, 5), ("layout", 0, "reversed")], 5, "allowed"),  # rounds in another order
        ("aten::_batch_norm_with_update", [("number", 5, 1e308), ("layout", 0, "reversed")], 0, "equal"),  # 1 - momentum overflows
        ("aten::embedding_backward", [], 3, "allowed"),  # counts an index beyond the weight
        ("aten::embedding_backward", [], 0, "equal"),
        # Two rows of batch sizes, which the CPU refuses from 2.15 on.
        ("aten::rnn_relu.data", [("garbage", 89), ("garbage", 0)], 0, "both raised" if torch.__version__ >= (2, 15) else "allowed"),
        ("aten::ctc_loss.IntList", [], 0, "equal"),
        ("aten::ctc_loss.IntList", [("values", 1, "extremes"), ("bit", 0, "neg")], 0, "allowed"),  # reads at any target
        ("aten::convolution_backward_overrideable.out", [("shape", 0, "first of size 0")], 0, "refused alone"),
        ("aten::convolution_backward.out", [("shape", 0, "first of size 0")], 0, "both raised"),
    ],
)  # fmt: skip
def test_what_pytorch_leaves_open_is_not_a_finding(name, changes, base, ends):
    assert end(name, *changes, base=base) == ends


def outcome(name, call, move=contiguous.Plain):
    return opinfo.run(functools.partial(contiguous.called, name, call, move("cpu")), "cpu")


def test_a_wide_out_tensor_is_compared_in_the_dtype_of_the_inputs():
    def differ(difference, dtype, has_out=True):
        name = "aten::add.out" if has_out else "aten::add.Tensor"
        x = torch.ones(3, dtype=dtype)
        call = Call([x, x], {"out": torch.zeros(3, dtype=torch.float64)} if has_out else {})
        other = outcome(name, call)
        (out, _), other.mover = other.value
        other.value = out + difference, {}
        plain = outcome(name, call)
        plain.value = (plain.value[0][0], {}), plain.value[1]
        return contiguous.differences(name, call, plain, other, "cpu")[0]

    assert not differ(1e-6, torch.float32) and differ(1e-4, torch.float32)
    assert differ(1e-6, torch.float64) and not differ(0.0, torch.float64)
    assert not differ(1e-2, torch.bfloat16) and differ(1e-1, torch.bfloat16)
    assert differ(2e-6, torch.float64, has_out=False)
    mixed = Call([torch.ones(3, dtype=torch.float64), torch.tensor(1).bfloat16()], {"out": torch.zeros(3).double()})
    assert contiguous._computed_in("aten::add.out", mixed) == torch.float64


def test_half_types_may_round_terms_that_cancel_in_another_order():
    x = torch.tensor([8.0, 0.25], dtype=torch.bfloat16)

    def differ(difference, dtype):
        call = Call([x.to(dtype)], {})
        plain, other = outcome("aten::neg", call), outcome("aten::neg", call)
        (out, written), other.mover = other.value
        other.value = out + torch.tensor([0, difference], dtype=dtype), written
        return contiguous.differences("aten::neg", call, plain, other, "cpu")[0]

    assert not differ(0.03, torch.bfloat16) and differ(0.3, torch.bfloat16) and differ(0.03, torch.float32)


def test_distances_are_compared_squared():
    x = torch.rand(3, 2)

    def differ(name, change):
        call = Call([x, x], {})  # distances near zero
        plain, other = outcome("aten::_euclidean_dist", call), outcome("aten::_euclidean_dist", call)
        (out, written), other.mover = other.value
        other.value = change(out), written
        return contiguous.differences(name, call, plain, other, "cpu")[0]

    def rounded(distances):
        return (distances.square() + 1e-6).sqrt()

    assert not differ("aten::_euclidean_dist", rounded) and differ("aten::cdist", rounded)
    assert differ("aten::_euclidean_dist", torch.neg) and differ("aten::_euclidean_dist", lambda out: out * 1.001)


def test_a_batch_norm_with_the_right_shapes_is_compared_in_contiguous_memory():
    x, of_channels, one = torch.rand(2, 3, 4), torch.ones(3), torch.ones(1)
    forward, backward = "aten::native_batch_norm", "aten::native_batch_norm_backward"

    def fits(name, *given):
        return contiguous._fits_channels(name, Call(list(given), {}))

    assert fits(forward, x, of_channels, None, of_channels, of_channels, True, 0.1, 1e-5)
    assert not fits(forward, x, one, None, of_channels, of_channels, True, 0.1, 1e-5)
    statistics = (of_channels, None, None, of_channels, of_channels, True, 1e-5, [True] * 3)
    assert fits(backward, x, x, *statistics) and not fits(backward, x[:1], x, *statistics)
    for train in (True, False):  # saved statistics are not used in eval mode
        unsaved = (of_channels, of_channels, of_channels, one[:0], one[:0], train, 1e-5, [True] * 3)
        assert fits(backward, x, x, *unsaved) is not train
    assert not tables.BATCH_NORM.match("aten::batch_norm_backward_reduce") and tables.BATCH_NORM.match(backward)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_the_weight_of_a_convolution_has_the_size_of_its_kernel():
    x, weight = torch.rand(1, 2, 5, 5), torch.rand(2, 2, 3, 4)

    def fits(name, *given):
        return contiguous._fits_kernel(name, Call([x, weight, *given], {}))

    transposed = "aten::slow_conv_transpose2d"
    assert fits(transposed, [3, 4]) and not fits(transposed, [3, 3]) and not fits(transposed, [4])
    assert fits("aten::conv2d", None, [3, 3])  # which takes the size of the weight
    assert contiguous._fits_kernel("aten::thnn_conv2d", Call([x, torch.rand(2, 18), [3, 3]], {}))

    for size, is_compared in ([4, 4], True), ([3, 3], False):
        given = Call([torch.rand(2, 2, 4, 4).transpose(2, 3), torch.rand(2, 2, 4, 4), size], {})
        wrong = outcome(transposed, given)
        (result, written), wrong.mover = wrong.value
        wrong.value = result + 1, written  # as from a kernel that ignores strides
        assert (contiguous.in_plain_memory(transposed, given, wrong) is not None) is is_compared


def test_a_negative_threshold_of_a_loss_has_two_meanings():
    name, target = "aten::smooth_l1_loss_backward", torch.zeros(64)

    def differs(threshold):
        given = Call([torch.ones(128)[::2], torch.linspace(-2, 2, 128)[::2], target, 0, threshold], {})
        cpu = outcome(name, given, calls.Move)
        (result, written), cpu.mover = cpu.value
        cpu.value = -result, written  # as in contiguous memory, where the threshold is negative
        return contiguous.in_plain_memory(name, given, cpu) is not None

    assert differs(0.5) and not differs(-0.5)


def test_antialiased_resizing_to_a_width_of_one_is_wrong_in_channels_last():
    name = "aten::_upsample_bilinear2d_aa"
    x = torch.rand(1, 2, 5, 4).to(memory_format=torch.channels_last)

    def differs(width, added=1):
        given = Call([x, [3, width], False], {})
        cpu = outcome(name, given, calls.Move)
        (result, written), cpu.mover = cpu.value
        cpu.value = result + added, written
        return contiguous.in_plain_memory(name, given, cpu) is not None

    assert differs(2) and not differs(1) and not differs(2, added=0)


@pytest.mark.filterwarnings("ignore:.*fbgemm")
def test_a_kernel_that_ignores_a_negative_view_ignores_it_in_contiguous_memory_too():
    name = "aten::fbgemm_linear_fp16_weight_fp32_activation"
    weight = torch.ops.aten.fbgemm_pack_gemm_matrix_fp16(torch.rand(5, 3))
    given = Call([torch._neg_view(torch.rand(2, 3)), calls.Packed(weight), torch.rand(10)[::2]], {})
    for added, is_compared in (0, False), (1, True):
        cpu = outcome(name, given, calls.Move)
        (result, written), cpu.mover = cpu.value
        cpu.value = result + added, written
        assert (contiguous.in_plain_memory(name, given, cpu) is not None) is is_compared


def test_what_the_tool_cannot_read_is_narrow():
    x, nested = torch.rand(2, 3), torch.nested.nested_tensor([torch.rand(2, 3)])
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    assert allowed.is_unreadable("aten::select.int", nested)
    assert not allowed.is_unreadable("aten::select.int", x)  # a tensor of the list
    assert all(allowed.is_unreadable(f"aten::{name}", quantized) for name in ("_lazy_clone", "view.dtype"))
    assert allowed.is_unreadable("aten::_neg_view", torch._neg_view(quantized))
    for name, result in (
        ("_lazy_clone", x),
        ("view.dtype", x),
        ("select.int", quantized),
        ("_neg_view", quantized),
        ("_neg_view", torch._neg_view(x)),
        ("neg", nested),
        ("neg", [nested]),
    ):
        assert not allowed.is_unreadable(f"aten::{name}", result)


def test_rules_about_arguments_are_narrow():
    x, out = torch.rand(2, 3), torch.empty(0)
    assert allowed.lacks_tensor("aten::add.Tensor", Call([x, None], {}))
    assert not allowed.lacks_tensor("aten::clamp", Call([x, None, 1], {}))  # None where the schema allows it
    assert aliasing.has_shared_memory("aten::neg.out", Call([x], {"out": x.t()}))
    assert aliasing.has_shared_memory("aten::neg.out", Call([x], {"out": torch.zeros(1).expand(2, 3)}))
    assert not aliasing.has_shared_memory("aten::neg.out", Call([x], {"out": out}))
    assert not aliasing.has_shared_memory("aten::neg", Call([torch.zeros(1).expand(2, 3)], {}))  # it is only read
    assert allowed.is_elsewhere("aten::empty.memory_format", Call([[2]], {}))  # nothing says where
    assert allowed.is_elsewhere("aten::block_diag.out", Call([[]], {"out": out}))  # nothing but out= does
    assert not allowed.is_elsewhere("aten::block_diag.out", Call([[x]], {"out": out}))
    assert allowed.is_elsewhere("aten::add.Tensor", Call([x, Stays(x)], {}))
    assert allowed.is_elsewhere("aten::neg", Call([x], {}, alone=True))
    assert not allowed.is_elsewhere("aten::neg", Call([x], {}))
    assert aliasing.is_read_and_written("aten::neg.out", Call([shared := x[:1].expand(2, 3)], {"out": shared}))
    assert not aliasing.is_read_and_written("aten::neg.out", Call([x], {"out": x}))
    assert aliasing.writes_an_input("aten::neg.out", Call([x], {"out": x}))
    assert not aliasing.writes_an_input("aten::neg.out", Call([x], {"out": out}))


def test_rules_about_the_cpu_are_narrow():
    x = torch.rand(3, 4)
    assert contiguous.takes_it_plain("aten::neg", Call([x], {})) and not contiguous.takes_it_plain(
        "aten::neg", Call([None], {})
    )
    assert contiguous.plain_error("aten::add.Tensor", Call([x, torch.rand(5)], {}))
    assert contiguous.plain_error("aten::neg", Call([x], {})) is None
    for size, grown in ((9, True), (2, False)):  # of a source of 3, whatever the first argument had
        call = Call([torch.zeros(99), torch.zeros(3), 0, [size]], {})
        ran = outcome("aten::set_.source_Tensor_storage_offset", call)
        ran.value, ran.mover = ran.value
        assert aliasing.grows(ran, call) is grown
    call = Call([torch.zeros(1), torch.zeros(3)], {"out": torch.zeros(0)})  # out= grows, and its source does not
    ran = outcome("aten::set.source_Tensor_out", call)
    ran.value, ran.mover = ran.value
    assert ran.mover.tensors[id(call.kwargs["out"])].untyped_storage().nbytes() and not aliasing.grows(ran, call)
    assert aliasing.returns_another("aten::neg.out", (x, {"out": x.clone()}))
    assert not aliasing.returns_another("aten::neg.out", (x, {"out": x}))
    assert not aliasing.returns_another("aten::neg.out", (x, {}))


def test_an_operator_in_place_returns_its_argument():
    # Where the CPU returns a tensor of float64.
    assert end("aten::_add_relu_.Tensor", ("dtype", 1, "float64")) == "allowed"
    assert end("aten::_add_relu_.Tensor") == "equal"
    assert end("aten::_add_relu.out", ("dtype", 0, "float64"), ("bit", 0, "neg")) == "allowed"
    assert end("aten::_add_relu.out", ("bit", 0, "neg")) == "equal"


@pytest.mark.parametrize(
    "views", [lambda x: [x.t(), x[:2]], lambda x: [x[:, ::2], torch._neg_view(x)], lambda x: [[x.t(), x], x[1:]]]
)
def test_contiguous_memory_of_its_own(views):
    """Of each tensor, also of those in lists; what the call is given stays as it is."""
    call = Call(views(X.clone()), {"other": X.t(), "alpha": 2}, alone=True)
    plain = contiguous._plain(call)
    before, after = (contiguous._tensors(each) for each in (call, plain))
    assert len(after) == len(before) == len({each.untyped_storage().data_ptr() for each in after})
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y) and y.is_contiguous() and not y.is_neg() and y.untyped_storage().nbytes() == y.nbytes
    assert plain.kwargs["alpha"] == 2 and plain.alone


def test_a_strided_result_is_held_to_the_one_in_contiguous_memory():
    x = torch.rand(3, 4)
    call = Call([x.t()], {})
    plain, same, other = outcome("aten::neg", call), outcome("aten::neg", call), outcome("aten::abs", call)
    assert not contiguous.differs_when_plain("aten::neg", call, plain, same, "cpu")
    assert contiguous.differs_when_plain("aten::neg", call, plain, other, "cpu")
    wrong = opinfo.Outcome(other.value[0], mover=other.value[1])
    found, [(expected, actual)] = contiguous.differences("aten::neg", call, plain, wrong, "cpu")
    assert (
        found and torch.equal(expected, -x.t()) and torch.equal(actual, x.t())
    )  # not what the CPU gave for the strides
    shared = Call([x, x.t()], {})
    assert not contiguous.differs_when_plain("aten::add_.Tensor", shared, plain, other, "cpu")  # its order decides


@pytest.mark.parametrize(
    ("pattern", "allows", "refuses"),
    [
        (allowed.MEMORY, "DefaultCPUAllocator: can't allocate memory", "expected 2 dimensions"),
        (allowed.LACKS_MEMORY, "CPU out of memory", "Storage size calculation overflowed"),
        (allowed.OUT_OF_BOUNDS, "index 4 is out of bounds for dimension 0", "Dimension out of range"),
        (tables.CHECKED_BY_DEVICE["aten::quantile"][0], "quantile() q values must be in [0, 1]", "quantile() input"),
        (tables.CHECKED_BY_DEVICE["aten::scalar_tensor"][0], "a sparse layout", "an empty tensor"),
        (tables.CHECKED_BY_DEVICE["aten::quantize_per_channel.out"][0], "cannot be resized", "scales"),
    ],
)
def test_errors_that_rules_allow(pattern, allows, refuses):
    assert pattern.search(allows) and not pattern.search(refuses)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_kernel_that_does_not_write_to_out_is_refused():
    x = torch.quantize_per_tensor(torch.tensor([2.0]), 0.1, 0, torch.qint8).to("openreg")
    with pytest.raises(NotImplementedError, match="hardtanh: PyTorch's kernel does not write to this out= tensor"):
        torch.ops.aten.hardtanh.out(x, out=torch.zeros(1, device="openreg"))


def test_strided_weights_of_group_norm_have_the_right_gradient():
    x, weight = torch.randn(2, 4, 6), torch.randn(8)
    gradients = []
    for device in ("cpu", "openreg"):
        mine, w = x.to(device, copy=True).requires_grad_(), weight.to(device)[::2]
        w = w.contiguous() if device == "cpu" else w
        torch.group_norm(mine, 2, w).pow(2).sum().backward()
        gradients.append(mine.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_a_number_that_is_no_dtype():  # which the CPU reads a table by
    with pytest.raises(RuntimeError, match="empty: expected a dtype, but got the number -2"):
        torch.ops.aten.empty.memory_format([2], dtype=-2, device="openreg")


def test_a_result_beyond_its_storage_is_not_read():
    assert end("aten::_reshape_alias", ("shape", 0, "first of size 0")) == "equal"


def test_an_out_tensor_that_is_an_input():
    assert end("aten::_softmax_backward_data.out", ("layout", 0, "reversed"), ("alias", 4, 0, "same")) == "equal"
    assert end("aten::addmm.out", ("layout", 1, "reversed"), ("alias", 5, 1, "same")) == "equal"
    assert end("aten::svd.U", ("layout", 0, "reversed"), ("alias", 3, 0, "same"), base=1) == "equal"


def test_what_the_cpu_leaves_undefined_is_allowed():
    x = torch.rand(2, 3)
    overlaps = Call([x], {"out": x.t()})
    assert aliasing.is_read_and_written("aten::neg.out", Call([x], {"out": torch.zeros(4).as_strided((2, 3), (1, 1))}))
    assert aliasing.is_read_and_written("aten::neg.out", overlaps)
    assert not aliasing.is_read_and_written("aten::neg.out", Call([x], {"out": x}))
    legendre, nan = "aten::special_legendre_polynomial_p", x.clone()
    nan[0] = torch.nan
    pairs = [(torch.zeros(2, 3), torch.stack([x[0], torch.zeros(3)]))]
    assert numerics.is_undefined_for_nan(legendre, Call([nan, 2], {}), pairs)
    assert not numerics.is_undefined_for_nan(legendre, Call([nan.flip(0), 2], {}), pairs)  # other elements differ
    assert not numerics.is_undefined_for_nan(legendre, Call([x, 2], {}), pairs)
    assert not numerics.is_undefined_for_nan("aten::add.Tensor", Call([nan, 2], {}), pairs)


def test_infinite_arguments_may_give_inf_or_nan():
    call, inf, nan = (
        Call([torch.tensor([torch.inf])], {}),
        torch.tensor([torch.inf, 1.0]),
        torch.tensor([torch.nan, 1.0]),
    )
    assert numerics.is_infinite_on_both_sides(call, [(inf, nan)])
    assert not numerics.is_infinite_on_both_sides(call, [(inf, nan.flip(0))])
    assert not numerics.is_infinite_on_both_sides(call, [(inf, torch.tensor([-torch.inf, 1.0]))])
    assert not numerics.is_infinite_on_both_sides(Call([torch.ones(1)], {}), [(inf, nan)])


def test_terms_that_cancel_are_rounded_at_their_own_size():
    def pair(difference, dtype=torch.bfloat16):
        return [(torch.zeros(2).to(dtype), torch.tensor([difference, 0]).to(dtype))]

    call = Call([torch.tensor([2.0]).bfloat16()], {})
    assert numerics.rounds(call, pair(0.01)) and not numerics.rounds(call, pair(0.1))
    assert not numerics.rounds(call, pair(0.01, torch.float32)) and not numerics.rounds(call, [])
    assert not numerics.rounds(Call([torch.tensor([1e30]).bfloat16()], {}), pair(1.0))  # or every value would pass


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_has_no_size(value):
    """Nor does it make a wrong result a rounded one, or hide the size of the finite arguments."""
    given, none = torch.tensor([value, 2.0]).bfloat16(), torch.zeros(2).bfloat16()
    small, large = (torch.tensor([wrong, 0.0]).bfloat16() for wrong in (0.01, 0.1))
    call = Call([given], {})
    assert numerics.rounds(call, [(none, small)]) and not numerics.rounds(call, [(none, large)])
    result = torch.tensor([2.0, value]).bfloat16()
    assert not numerics.rounds(Call([], {}), [(result, torch.tensor([1.0, 2.0]).bfloat16())])


def test_results_of_a_transform_differ_by_roundings_of_the_largest():
    large = torch.tensor([200.0, 0.6])
    for wrong, differs in ((2e-5, False), (2e-3, True), (float("nan"), True)):
        pair = [(large, large + torch.tensor([0.0, wrong]))]
        assert numerics.transforms("aten::fft_hfftn", pair) is not differs
        assert numerics.transforms("aten::_fft_c2c.out", [(x.cfloat(), y.cfloat()) for x, y in pair]) is not differs
        assert not numerics.transforms("aten::sum", pair)
    assert not numerics.transforms("aten::fft_hfftn", [])
    assert not numerics.transforms("aten::fft_fft", [(torch.tensor([1, torch.inf]), torch.tensor([1.0, 2.0]))])


def test_float64_decides_about_terms_that_cancel():
    name = "openreg::fused_add_rms_norm_backward"
    numbers = torch.tensor([0.5548185110092163, -1.0480875968933105, 3.4028234663852886e38]).unbind()
    grad_y, sum, weight = (each.reshape(1) for each in numbers)
    call = Call([grad_y, None, sum, weight, 1e-3], {})
    cpu = outcome(name, call)
    cpu.value, _ = cpu.value
    x = cpu.value[0][0]  # of 1.6e35: its terms have 1.8e38
    assert contiguous.is_as_exact(name, call, cpu, [(x, x * (1 - 6e-5))])
    assert not contiguous.is_as_exact(name, call, cpu, [(x, x * (1 + 1e-2))])
    assert not contiguous.is_as_exact(name, call, cpu, []) and not contiguous.is_as_exact(
        name, call, cpu, [(x.bfloat16(), x.bfloat16() * 1.1)]
    )
    assert not contiguous.is_as_exact(name, call, cpu, [(torch.full_like(x, torch.inf), -x)])
    well = Call([torch.tensor([0.5, 0.1]), None, torch.tensor([-1.0, 2.0]), torch.ones(2), 1e-3], {})
    cpu = outcome(name, well)
    cpu.value, _ = cpu.value
    x = cpu.value[0][0]
    assert not contiguous.is_as_exact(name, well, cpu, [(x, x * (1 + 1e-4))])


def test_a_kernel_that_writes_beyond_its_arguments_is_the_cause_of_a_crash():
    a, b = torch.eye(5), torch.rand(1, 2, 5, 5)
    assert contiguous.doubtful(
        "aten::_cholesky_solve_helper.out", Call([a, b, True], {"out": b.clone()}), is_plain=True
    )
    assert not contiguous.doubtful("aten::neg", Call([a], {}), is_plain=True)
    assert not contiguous.doubtful("aten::neg.out", Call([a.t()], {"out": a.clone()}), is_plain=True)


def test_which_calls_damage_the_memory_around_their_arguments(monkeypatch):
    def write_beyond(name, call, move):
        x = move(call.args[0])
        ctypes.memset(x.data_ptr() + x.nbytes, 1, 1)

    a = torch.eye(5)
    assert not aliasing.damages("aten::neg.out", Call([a], {"out": a.clone()}))
    assert not aliasing.damages("aten::mm", Call([a, a[None]], {}))  # which raises
    monkeypatch.setattr(aliasing.schemas, "_call", write_beyond)
    assert aliasing.damages("aten::neg", Call([a], {}))


def test_a_kernel_that_resizes_its_input_reads_new_memory():
    convert, x = "aten::_convert_indices_from_coo_to_csr.out", torch.tensor(1)
    assert contiguous.doubtful(convert, Call([x, 1], {"out": x}), is_plain=True)
    assert not contiguous.doubtful(
        convert, Call([torch.tensor([0, 0]), 1], {"out": torch.zeros((), dtype=torch.long)}), True
    )
    fits = torch.tensor([0, 1])
    assert not contiguous.doubtful("aten::neg.out", Call([fits], {"out": fits}), is_plain=True)


def test_a_kernel_whose_errors_change_with_the_memory_around_its_arguments_reads_beyond_them():
    def call(move):
        x = move(torch.zeros(2))
        beyond = ctypes.string_at(x.data_ptr() + x.nbytes, 1)
        raise ValueError(beyond if reads else "the same error")

    for reads in (True, False):
        assert calls.stays_within(call, resizes=True) is not reads
    assert not calls.stays_within(call)


def test_a_kernel_that_writes_beyond_its_arguments_is_told_from_one_that_reads_beyond_them():
    def call(move):
        x = move(torch.zeros(2))
        beyond = x.data_ptr() + x.nbytes
        return ctypes.memset(beyond, 1, 1) if writes else ctypes.string_at(beyond, 1)

    for writes in (True, False):
        assert calls.writes_beyond(call) is writes


def test_new_memory_that_a_kernel_does_not_write_changes_from_call_to_call():
    assert not calls.stays_within(lambda move: torch.empty(100))
    assert calls.stays_within(lambda move: torch.zeros(100))


def test_a_read_that_no_guard_shows_ends_the_process():
    unpack, lu = "aten::lu_unpack", torch.rand(5, 5)  # each guard is an invalid pivot
    short, whole = (torch.full((count,), 5, dtype=torch.int32) for count in (1, 5))
    reads_on = torch.__version__ < "2.15"  # which refuses pivots of another shape
    assert bool(contiguous.doubtful(unpack, Call([lu, short], {}), is_plain=False, emptied=False)) is reads_on
    assert not contiguous.doubtful(unpack, Call([lu, whole], {}), is_plain=False, emptied=False)


def test_a_tensor_that_stays_on_the_cpu_is_guarded_too():
    def call(move):
        x = move(Stays(torch.zeros(())))
        return torch.tensor(ctypes.string_at(x.data_ptr() + x.nbytes, 1)[0])

    assert not calls.stays_within(call)


def test_errors_that_depend_on_the_call_are_allowed_for_that_call_only():
    negative, x, out = "trying to create a tensor with negative dimension -1", torch.rand(4, 8), torch.empty(0)
    assert allowed.takes_negative_size("aten::full.out", Call([[-1, 0], 2], {"out": out}), negative)
    for count, accepted in ((0, True), (1, False)):
        call = Call([torch.rand(count, 2, 5, 5), [-1, 1, 1]], {"out": out})
        assert allowed.takes_negative_size("aten::_adaptive_avg_pool3d.out", call, negative) is accepted
    for name, sizes, message in (
        ("full.out", [-1, 2], negative),
        ("full", [-1, 0], negative),
        ("full.out", [-1, 0], ""),
    ):
        assert not allowed.takes_negative_size(f"aten::{name}", Call([sizes, 2], {"out": out}), message)

    refused = "convolution_backward: expected a gradient of shape"
    image, weight = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 2, 2)
    numbers = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3]
    for batch, differs in ((1, False), (2, True)):
        call = Call([torch.rand(batch, 3, 4, 4), image, weight, None, *numbers], {})
        assert allowed.refuses_gradient("aten::convolution_backward", call, refused) is differs
        assert not allowed.refuses_gradient("aten::convolution_backward", call, "another error")
        assert not allowed.refuses_gradient("aten::neg", call, refused)
    call.args[4], call.args[7] = [2**62, 1], True  # the output of this transposed convolution has a size that overflows
    assert allowed.refuses_gradient("aten::convolution_backward", call, refused)

    refused, weights = (
        "lstm_cell: expected hx of two dimensions, but got shape [1, 5, 1]",
        [torch.rand(20, 3), torch.rand(20, 5)],
    )
    for shape, differs in (((1, 5), False), ((1, 5, 1), True)):
        call = Call([torch.rand(1, 3), [torch.rand(1, 5), torch.rand(shape)], *weights], {})
        assert allowed.refuses_state("aten::lstm_cell", call, refused) is differs
        assert not allowed.refuses_state("aten::lstm_cell", call, "another error")
    assert not allowed.refuses_state("aten::neg", call, refused)

    call = Call([x, torch.rand(5)], {})
    message = opinfo.first_line(contiguous.plain_error("aten::add.Tensor", call))
    assert allowed.raises_when_plain("aten::add.Tensor", call, message)
    assert not allowed.raises_when_plain("aten::add.Tensor", call, "RuntimeError: the device cannot do this")
    assert not allowed.raises_when_plain("aten::as_strided", Call([x[:, :4], [4, 6], [8, 1]], {}), message)

    strided = opinfo.Outcome((None, {}))  # the CPU takes it with strides
    for error, end in ((message, "allowed"), ("RuntimeError: the device cannot do this", "failed")):
        there = opinfo.Outcome(error=RuntimeError(error.removeprefix("RuntimeError: ")))
        assert child._raised("aten::add.Tensor", call, strided, there, "openreg")["end"] == end

    boxed, large = "isIntList() INTERNAL ASSERT FAILED", Call([x, [-(2**63), 1]], {})
    assert allowed.is_pytorchs_assert(large, boxed) and not allowed.is_pytorchs_assert(Call([x, [1]], {}), boxed)
    assert allowed.is_pytorchs_assert(Call([x], {}), "MathBitsFallback") and not allowed.is_pytorchs_assert(large, "")


def test_indices_out_of_range_are_not_written_with():
    name, gradient = "aten::embedding_dense_backward", torch.rand(3, 4)
    for indices, anywhere in (([0, 1, 4], False), ([0, 1, 5], True), ([-1, 1, 2], True)):
        call = Call([gradient, torch.tensor(indices), 5, -1, False], {})
        assert allowed.indexes_anywhere(name, call) is anywhere
        assert not allowed.indexes_anywhere("aten::embedding_backward", call)
    for dim, anywhere in (([0, 1], False), ([2], True), ([0, -1], True)):
        call = Call([torch.rand(3, 4).cfloat(), dim, 0, 4], {})
        assert allowed.indexes_anywhere("aten::_fft_c2r", call) is anywhere
        assert allowed.indexes_anywhere("aten::_fft_c2r.out", call) is anywhere
        assert not allowed.indexes_anywhere("aten::fft_irfft", call)


def test_results_of_sparse_tensors_are_those_of_dense_ones():
    x, y = torch.eye(3).to_sparse(), torch.ones(3, 3)
    call = Call([x, y], {})
    right = outcome("aten::mul.Tensor", call, calls.Move)
    assert contiguous.is_as_dense("aten::mul.Tensor", call, right)
    wrong = outcome("aten::mul.Tensor", Call([x, y * 2], {}), calls.Move)
    assert not contiguous.is_as_dense("aten::mul.Tensor", call, wrong)
    assert not contiguous.is_as_dense("aten::mul.Tensor", Call([x.to_dense(), y], {}), right)


def test_what_a_kernel_uses_without_a_check_is_within_its_bounds():
    x = torch.rand(2, 3, 4, 4)
    y, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    weight, offsets, bags = torch.rand(5, 4), torch.tensor([0, 2]), torch.tensor([0, 0, 1])
    product = torch.eye(2).to_sparse_csr()
    chosen = torch.tensor([[0] * 4, [1] * 4])
    numbers = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    for name, args, kwargs, which, bounds in (
        ("adaptive_max_pool2d_backward", [y, x, indices], {}, 2, (0, 15)),
        ("adaptive_max_pool3d_backward.grad_input", [y, x, indices], {"grad_input": x.clone()}, 2, (0, 47)),
        ("max_pool2d_with_indices_backward", [y, x, *numbers, indices], {}, 7, (0, 15)),
        ("_embedding_bag", [weight, torch.arange(3), offsets], {}, 2, (0, 3)),
        ("_embedding_bag_per_sample_weights_backward", [y, weight, torch.arange(3), offsets, bags, 0], {}, 2, (0, 4)),
        ("_embedding_bag_per_sample_weights_backward", [y, weight, torch.arange(3), offsets, bags, 0], {}, 4, (0, 1)),
        ("_embedding_bag_dense_backward", [y, torch.arange(3), bags, bags, bags, 5, False, 0, None], {}, 1, (0, 4)),
        ("_sparse_mm_reduce_impl_backward", [product, weight[:2], weight[:2], "amax", chosen, [True] * 2], {}, 4, (0, 2)),
        ("segment_reduce", [weight, "sum"], {"lengths": torch.tensor([2, 3])}, "lengths", (0, 5)),
        ("_segment_reduce_backward", [y, y, weight, "sum"], {"offsets": torch.tensor([0, 5])}, "offsets", (0, 5)),
        ("reflection_pad1d_backward", [y, x, [1, 1]], {}, 0, (-100, 100)),
    ):  # fmt: skip
        for number, anywhere in zip((*bounds, bounds[0] - 1, bounds[1] + 1), (False, False, True, True), strict=True):
            call = Call([*args], {**kwargs})
            given = call.kwargs if isinstance(which, str) else call.args
            given[which] = given[which].clone()
            given[which].view(-1)[-1] = number
            ruled_out = anywhere and name != "reflection_pad1d_backward"
            assert allowed.indexes_anywhere(f"aten::{name}", call) is ruled_out, (name, number)


def test_a_device_may_refuse_batch_sizes_that_are_not_one_row():
    name, refused = "aten::rnn_relu.data", "RuntimeError: rnn: expected batch_sizes to be a contiguous int64 tensor of"
    row = torch.tensor([2, 2, 1])
    for sizes, differs in ((row, False), (row[None], True), (row[::2], True), (row.int(), True), (row[:0], True)):
        call = Call([torch.rand(5, 3), sizes, torch.rand(2, 2, 5), [torch.rand(5, 3)], True, 1, 0.0, True, True], {})
        assert allowed.refuses_batch_sizes(name, call, refused) is differs
        assert not allowed.refuses_batch_sizes(name, call, "RuntimeError: another error")


def test_the_operators_whose_checks_the_cpu_lacks_are_those_that_the_device_checks():
    source = Path(__file__).parents[2] / "csrc/aten/traits/traits.cpp"
    rows = re.split(r'^ {6}\{"(\w+::\w+)(?:\.\w+)?",', source.read_text(), flags=re.M)[1:]
    checked = {
        name for name, row in zip(rows[::2], rows[1::2], strict=True) if re.search(r"\.check_(shapes|values) =", row)
    }
    # Composite operators pass these arguments on unchanged.
    of_composites = {"aten::ctc_loss", "aten::embedding_bag"}
    assert len(checked) > 50
    assert checked | of_composites == {*allowed._UNCHECKED, *allowed._ALSO_UNCHECKED}


def test_a_device_may_refuse_shapes_that_a_kernel_does_not_check():
    refused = "adaptive_max_pool2d_backward: expected indices of shape [2], but got [3]"
    assert allowed.refuses_unchecked(f"RuntimeError: {refused}") and allowed.refuses_unchecked(f"IndexError: {refused}")
    assert not allowed.refuses_unchecked("RuntimeError: expected indices of shape [2], but got [3]")
    assert not allowed.refuses_unchecked(
        "RuntimeError: adaptive_max_pool2d: expected indices of shape [2], but got [3]"
    )
    assert not allowed.refuses_unchecked("RuntimeError: adaptive_max_pool2d_backward: the device has no memory")
    x, labels = torch.rand(6, 2, 4), torch.tensor([[1, 2, 3], [1, 2, 3]])
    for targets, anywhere in ((labels.cfloat(), False), (labels.cfloat() + torch.inf, True)):
        call = Call([x, targets, torch.tensor([6, 6]), torch.tensor([3, 2])], {})
        assert allowed.indexes_anywhere("aten::ctc_loss.Tensor", call) is anywhere


def test_lengths_out_of_range_are_left_to_the_forward_pass():
    name = "aten::_ctc_loss_backward"
    for lengths, targets, ruled_out in (
        ([6, 0], [3, 2], False),
        ([6, 7], [3, 2], True),
        ([6, 6], [3, -1], True),
        ([6, 6], [4, 2], True),
    ):
        for given, suffix in ((list, ""), (torch.tensor, ".Tensor")):
            log_probs, log_alpha = torch.rand(6, 2, 4), torch.rand(2, 6, 7)
            call = Call(
                [
                    torch.rand(2),
                    log_probs,
                    torch.ones(2, 3),
                    given(lengths),
                    given(targets),
                    torch.rand(2),
                    log_alpha,
                    0,
                ],
                {},
            )
            assert allowed.indexes_anywhere(name + suffix, call) is ruled_out
    assert not allowed.indexes_anywhere("aten::ctc_loss.Tensor", call)


def test_a_number_that_overflows_in_float32_does_not_depend_on_the_layout():
    """The running statistics of a reversed input are infinite, and those of a contiguous one NaN."""
    statistics = [torch.rand(5) for _ in range(4)]
    for momentum, compared in ((1e308, False), (0.1, True)):
        call = Call([torch.rand(5, 5, 5).permute(2, 1, 0), *statistics, momentum, 0.6], {})
        cpu = outcome("aten::_batch_norm_with_update", call, calls.Move)
        cpu.value, cpu.mover = cpu.value
        running = cpu.value[1][0]
        running.add_(1)  # as if the kernel ignored the strides
        assert (contiguous.in_plain_memory("aten::_batch_norm_with_update", call, cpu) is not None) is compared


def pooled(dtype):
    x = torch.arange(192).remainder(4).to(dtype).view(1, 2, 3, 4, 8).contiguous(memory_format=torch.channels_last_3d)
    call = Call([x, [1] * 3, [], [0] * 3, [1] * 3], {})
    cpu = outcome("aten::max_pool3d_with_indices", call, calls.Move)
    cpu.value, cpu.mover = cpu.value
    return call, cpu


def test_indices_of_a_pool_that_pytorch_gets_wrong(monkeypatch):
    name = "aten::max_pool3d_with_indices"
    assert contiguous.in_plain_memory(name, *pooled(torch.float32)) is None  # they do not depend on the layout
    assert contiguous.in_plain_memory(name, *pooled(torch.uint8)) is None
    monkeypatch.setattr(tables, "WRONG_FOR_UINT8", re.compile("none"))
    assert contiguous.in_plain_memory(name, *pooled(torch.uint8)) is not None


def test_lists_that_are_too_short():
    x, backward = torch.rand(1, 2, 5, 5), "aten::reflection_pad2d_backward"
    assert allowed.has_short_list(backward, Call([x, x, [0, 0, 0]], {}))
    assert not allowed.has_short_list(backward, Call([x, x, [0, 0, 0, 0]], {}))
    for checks in ("reflection_pad2d", "replication_pad2d_backward", "reflection_pad3d_backward"):
        assert not allowed.has_short_list(
            f"aten::{checks}", Call([x, x, [0, 0, 0]][checks == "reflection_pad2d" :], {})
        )
    convolution = Call([x, x, torch.rand(2, 2, 3, 3), [3, 3], [1, 1], [0], [True] * 3], {})
    assert allowed.has_short_list("aten::_slow_conv2d_backward.output_mask", convolution)
    convolution.args[5] = [0, 0]
    assert not allowed.has_short_list("aten::_slow_conv2d_backward.output_mask", convolution)
    zeros = "aten::_new_zeros_with_same_feature_meta"
    assert allowed.has_short_list(zeros, Call([x, x], {"self_num_batch_dims": -1}))
    assert allowed.has_short_list(zeros, Call([x, x], {"self_num_batch_dims": 5}))
    assert not allowed.has_short_list(zeros, Call([x, x], {"self_num_batch_dims": 4}))


def test_values_that_depend_on_the_layout_are_allowed_for_those_values_only():
    assert contiguous._has_denormals(torch.tensor([1e-40])) and not contiguous._has_denormals(torch.tensor([0.0, 1.0]))
    equal_rows = torch.tensor([[0.3, 0.6], [0.3, 0.6]])
    assert contiguous._is_singular(equal_rows) and contiguous._is_singular(equal_rows.expand(3, 2, 2).cfloat())
    assert not contiguous._is_singular(equal_rows + 0.1 * torch.eye(2)) and not contiguous._is_singular(equal_rows[:1])
    assert tables.DETERMINANTS.match("aten::linalg_slogdet") and not tables.DETERMINANTS.match("aten::detach")


@pytest.mark.parametrize("doubted", ["a::b", "a::c", "a::d"])
def test_a_crash_after_a_call_that_damaged_memory(doubted):
    class Damaged(search.Child):
        def __init__(self):
            super().__init__(argparse.Namespace())
            self.answers = [{"end": "equal"}, {"end": "equal"}, None, {"end": "equal"}]

        def exchange(self, line, last):
            if "damages" in (request := json.loads(line)):
                return {"damages": request["damages"]["op"] == doubted}, "", "", ""
            answer = self.answers.pop(0)
            return answer, "" if answer else "crash", "signal 11", "device"

        def doubt(self, case):
            return ""

    worker = Damaged()
    for earlier in ("a::b", "a::c"):
        assert worker.case({"op": earlier, "n": 0})["end"] == "equal"
    found = worker.case({"op": "a::b", "n": 1})
    assert found["end"] == ("failed" if doubted == "a::d" else "allowed")
    worker.answers = [None, None]  # it crashes again: this call is the cause
    assert worker.case({"op": "a::b", "n": 2})["end"] == "failed"


@pytest.fixture
def started(monkeypatch):
    """A child process, which the test may kill."""
    monkeypatch.setattr(subprocess, "Popen", forking())
    worker = search.Child(
        argparse.Namespace(device="openreg", timeout=60, threads=1, modules=["openreg_ops"], given={})
    )
    yield worker
    worker.stop()


def test_a_process_that_ends_after_its_answer(started):
    """Its end is a failure that names its last case, and the answers to later requests are theirs."""
    add, neg = ({"op": name, "base": 0, "changes": []} for name in ("aten::add.Tensor", "aten::neg"))
    assert started.bases(add["op"])[1]
    os.kill(started.pid, signal.SIGKILL)  # before any case
    assert started.case(add)["end"] == "equal"
    os.kill(started.pid, signal.SIGKILL)
    assert started.bases(neg["op"])[1]
    found = started.case(neg)
    assert found["kind"] == "crash" and f"answered {json.dumps(add)}: signal 9" in found["message"]
    assert started.case(neg)["end"] == "equal"


def test_code_of_ours_refuses_the_dtypes_that_the_cpu_refuses(started):
    """Also for tensors without elements, which our code may handle before it calls the CPU's kernel."""
    where = {name: dispatch.has(name, "PrivateUse1").where for name in child.listed("openreg")}
    names = [name for name, file in where.items() if file.startswith(("csrc/aten/overrides/", "csrc/aten/attention/"))]
    count, failed = 0, []
    for name in names:
        for base, leaves in enumerate(started.bases(name)[0]):
            tensors = [leaf for leaf in leaves if leaf["kind"] == "tensor"]
            sizes = sorted({size for leaf in tensors for size in leaf["shape"]})
            for emptied in ([], [["sizes", size, 0] for size in sizes]):
                for leaf in tensors:
                    for dtype in {"float32", "float64", "int64"} - {leaf["dtype"]}:
                        case = {"op": name, "base": base, "changes": [*emptied, ["dtype", leaf["at"], dtype]]}
                        found = started.case(case)
                        count += found["end"] in ("equal", "both raised")
                        failed += [(json.dumps(case), found["message"])] if found["end"] == "failed" else []
    assert count > 1000 and not failed


@pytest.mark.parametrize("is_read", [False, True])
def test_a_request_to_a_process_that_ends_goes_to_the_next(started, is_read):
    """Also if the process had read it."""
    assert started.bases("aten::neg")[1]
    os.kill(started.pid, signal.SIGSTOP)
    while "T (stopped)" not in Path(f"/proc/{started.pid}/status").read_text():
        time.sleep(0.01)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        case = pool.submit(started.case, {"op": "aten::neg", "base": 0, "changes": []})
        with open(f"/proc/{started.process.pid}/fd/0", "rb", buffering=0) as requests:
            assert select.select([requests], [], [], 60)[0]
            if is_read:
                assert b"aten::neg" in requests.read(1 << 16)
        os.kill(started.pid, signal.SIGKILL)
        assert case.result()["end"] == "equal"


def test_the_last_words_of_a_process_are_its_error():
    worker = search.Child(argparse.Namespace())
    trace = 'Traceback (most recent call last):\n  File "a.py"\n'
    for said, words in (
        (f'a warning\n{trace}TypeError: of size 3\nframe #0: c10::Error\n"\n', "TypeError: of size 3"),
        (f"{trace}torch.OutOfMemoryError: 4 GiB", "torch.OutOfMemoryError: 4 GiB"),
        ("Fatal Python error: Aborted\nCurrent thread", "Fatal Python error: Aborted"),
        ("a\nb\nc", "b c"),
    ):
        worker.stderr = io.BytesIO(said.encode())
        assert worker.last_words() == words and not worker.stderr.getvalue()


def test_a_process_that_does_not_start():
    class Broken(search.Child):
        def __init__(self):
            super().__init__(argparse.Namespace(timeout=1))
            self.answers = [{"died": 1}, {"ready": True, "pid": 0}] * 9

        def start(self):
            self.process = argparse.Namespace(stdin=io.BytesIO())

        def read(self, deadline):
            return self.answers.pop(0)

        def last_words(self):
            return "RuntimeError: no such device"

    worker = Broken()
    assert worker.bases("aten::neg") == ([], False, "making arguments: crash, exit 1: RuntimeError: no such device")
    found = worker.case({"op": "aten::neg", "base": 0, "changes": []})
    assert found["end"] == "failed" and "no such device" in found["message"]


def test_the_device_has_the_time_limit_to_itself(monkeypatch):
    """A call that takes the CPU nearly the whole limit is not a finding because the device takes as long."""
    clock = [0.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock[0])

    class Slow(search.Child):
        def __init__(self, steps):
            super().__init__(argparse.Namespace(timeout=60))
            self.process, self.steps = argparse.Namespace(stdin=io.BytesIO()), steps

        def read(self, deadline):
            seconds, answer = self.steps.pop(0)
            clock[0] += seconds
            if clock[0] > deadline:
                raise TimeoutError
            return answer

        def stop(self):
            pass

    def end(*seconds):
        marks = [{"at": "cpu"}, {"at": "device"}, {"end": "equal"}]
        return Slow(list(zip(seconds, marks, strict=True))).case({"op": "aten::neg", "base": 0, "changes": []})

    assert end(1, 55, 150)["end"] == "equal"
    assert end(1, 1, 70)["kind"] == "timeout"  # the CPU took a second
    assert end(1, 70, 1) == {"end": "allowed", "note": "the CPU's kernel hangs"}


def test_differences_after_an_overflow_are_allowed():
    large, nan = Call([torch.tensor([3e38])], {}), torch.tensor([torch.nan])
    assert numerics.overflows(large, [(nan, torch.ones(1))])
    assert not numerics.overflows(large, [(torch.zeros(2), torch.tensor([torch.nan, 1.0]))])
    rounded = torch.tensor([1.0, 0.0026367])
    assert numerics.overflows(large, [(rounded, torch.tensor([torch.inf, 0.0026368]))])
    assert not numerics.overflows(large, [(rounded, torch.tensor([torch.inf, 0.0028]))])
    assert not numerics.overflows(large, [(rounded.double(), torch.tensor([torch.inf, 0.0026372]).double())])
    assert not numerics.overflows(Call([torch.ones(1)], {}), [(nan, torch.ones(1))]) and not numerics.overflows(
        large, []
    )


def test_what_is_listed_reaches_the_device():
    listed = child.listed("openreg")
    assert {"aten::add.Tensor", "aten::tril.out", "openreg::rms_norm"} <= set(listed) and "prims::add" not in listed
    assert set(listed.values()) <= {"own", "shared", "composite", "fallback"}


def test_the_report_counts_what_was_never_reached():
    called, never = report.Operator("a::b", "own", 3), report.Operator("a::c", "shared", never="takes a stream")
    for ending in ("equal", "both raised", "unfit"):
        called.count({"end": ending})
    found = report.GeneratedReport("openreg", 0, [called, never], [], 1.0)
    assert found.passed and "takes a stream" in found.text() and "a::c" in found.html()
    assert found.dict()["never"] == {"takes a stream": ["a::c"]} and called.reached == 1


@pytest.mark.parametrize(
    "ending, reached",
    [
        ({"end": "alone"}, 1),
        ({"end": "failed"}, 1),
        ({"end": "allowed", "note": "both draw numbers", "reached": True}, 1),
        ({"end": "allowed", "note": "the device refuses this dtype", "reached": False}, 0),
        ({"end": "allowed", "note": "memory ran out"}, 0),
        ({"end": "refused alone"}, 0),
    ],
)
def test_which_ends_reach_the_kernel(ending, reached):
    """An operator whose cases all end in a difference that is allowed ran on the device."""
    of = report.Operator("a::b", "own", 1)
    of.count(ending)
    found = report.GeneratedReport("openreg", 0, [of], [], 1.0)
    assert of.reached == reached and f"the device's kernel reached in {reached};" in found.summary()
    assert ("Never reached:" in found.text()) is (reached == 0)


def test_the_report_shows_each_finding_after_the_totals():
    def finding(name):
        case = {"op": name, "base": 0, "changes": []}
        return report.Finding(name, "value", "differs", f"{name}(x)", case, "import torch\nprint(torch)", True)

    operators = [report.Operator(name, "own", 3, findings=[finding(name)]) for name in ("a::b", "a::c")]
    found = report.GeneratedReport("openreg", 0, operators, ["mine"], 1.0)
    lines = found.text().splitlines()
    assert not found.passed and lines[0].startswith("generated inputs on openreg")
    assert [line.split()[1] for line in lines if line.startswith("FAIL ")] == ["a::b", "a::c"]
    assert all(f"differs {name}(x)" in found.text() for name in ("a::b", "a::c"))
    assert lines.count("    print(torch)") == sum("--import mine --case" in line for line in lines) == 2
    assert " ".join(found.text().rpartition("\n\n")[2].split()) == found.summary() and not lines[-1].startswith(" ")
