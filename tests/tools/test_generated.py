"""Generated calls: `conformance --generate` finds and shrinks injected faults, and a right operator gives no report."""

from __future__ import annotations

import argparse
import ast
import ctypes
import itertools
import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from processes import forking, python

from openreg_tools import dispatch
from openreg_tools.conformance import close_enough, draw, generate, generated_calls, guarded, schemas
from openreg_tools.conformance.outcomes import Outcome
from openreg_tools.core import variations
from openreg_tools.core.attempts import Attempt
from openreg_tools.core.move import Move, Stays
from openreg_tools.core.options import Wrong
from openreg_tools.core.samples import Sample

# A pool of threads does not survive the forks in which the CPU's kernels are tried.
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]
HERE = Path(__file__).parent


def tool(*words: str) -> subprocess.CompletedProcess:
    return python("-m", "openreg_tools", *words, cwd=HERE, opinfo=True, nested=True, timeout=500)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The report of every operator of generated_faults.py."""
    path = tmp_path_factory.mktemp("generated") / "faulty.json"
    words = ("--import", "openreg_ops", "--import", "generated_faults", "--device", "openreg", "--ops", "^faulty::")
    done = tool("conformance", *words, "--generate", "990", "--jobs", "1", "--json", str(path))
    assert done.returncode == 1, done.stderr
    return json.loads(path.read_text())


# What a finding of each operator's fault shrinks to: one change of this kind, and how it ends.
FAULTS = {
    "empty": ({"sizes", "shape"}, "shape"),
    "permuted": ({"layout"}, "value"),
    "offset": ({"layout"}, "value"),
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
    (found,) = [f for f in faulty["findings"] if f["operator"] == f"faulty::{name}"]
    (change,) = found["case"]["changes"]
    assert change[0] in kinds and found["kind"] == ends and found["message"]
    assert f"--case {shlex.quote(json.dumps(found['case']))}" in found["command"]


def test_a_right_operator_gives_no_report(faulty):
    (right,) = [of for of in faulty["operators"] if of["name"] == "faulty::right"]
    assert not right["finding"] and right["reached"] > right["cases"] / 3 > 10 and not right["never"]


def test_a_finding_can_be_run_again(faulty):
    (offset,) = [f for f in faulty["findings"] if f["operator"] == "faulty::offset"]
    done = tool(*shlex.split(offset["command"])[3:])
    assert done.returncode == 1 and "FAIL faulty::offset [value] values differ" in done.stdout, done.stdout
    assert "1 findings" in done.stdout


def test_check_takes_generated_calls_into_its_table():
    words = ("--import", "openreg_ops", "--device", "openreg", "--generate", "40", "--only", "schema", "--quiet")
    done = tool("check", "faulty::permuted", "--import", "generated_faults", "--input", "f64[2,5]", *words)
    assert done.returncode == 1 and "FAIL generated" in done.stdout and "float64[2, 5]" in done.stdout
    case = json.loads(" ".join(re.search(r"--case '(.*?)'", done.stdout, re.DOTALL)[1].split()))
    assert case["given"] == {"inputs": ["f64[2,5]"]} and [kind for kind, *_ in case["changes"]] == ["layout"]
    done = tool("check", "faulty::right", "--import", "generated_faults", "--input", "f32[3,4]", *words)
    assert done.returncode == 0 and "40 cases of seed 0" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--generate", "0"), "--generate: expected a number above 0, but got '0'"),
        (("--seed", "1"), "--seed is the seed of generated calls: add --generate N"),
        (("--only", "generated"), "generated calls are made with --generate N alone"),
    ],
)  # fmt: skip
def test_options_of_check_that_do_not_go_together(words, message):
    done = tool("check", "aten::neg", *words, "--device", "openreg")
    assert done.returncode == 2 and message in done.stderr, done.stderr


# An operator of a module, wrong or right on every device: its CPU kernel is not a reference.
LONE = """
import os, torch
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
def right_random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)
@operator
def right_varying(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*os.urandom(x.numel())]).reshape(x.shape).to(x.device)
library = torch.library.Library("lone", "FRAGMENT")
library.define("right_in_place_(Tensor(a!) x) -> Tensor(a!)")
library.impl("right_in_place_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
"""


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_operators_of_an_imported_module(tmp_path, device):
    (tmp_path / "lone.py").write_text(LONE)
    words = ["--import", "lone", "--device", device, "--generate", "280", "--jobs", "1", "--ops", "^lone::"]
    done = python("-m", "openreg_tools", "conformance", *words, "--json", "found.json", cwd=tmp_path, opinfo=True,
                  nested=True, timeout=300)  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1 and len(found["operators"]) == 7, done.stderr
    kinds = {f["operator"].removeprefix("lone::"): f["kind"] for f in found["findings"]}
    assert kinds == {"strided": "value", "shaped": "shape", "aborts": "crash"}
    assert "the results vary from call to call" in found["notes"]
    assert ("random numbers are drawn in the order of memory" in found["notes"]) == (device == "cpu")


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
    assert {
        namespace for namespace in namespaces if namespace.isidentifier() and dispatch.is_custom(f"{namespace}::x")
    } <= examples


# ---- what is drawn ----

X = torch.arange(1.0, 13.0).view(3, 4)
ADD = [Sample(X.clone(), X + 1, alpha=1), Sample(torch.rand(2, 3, 4), torch.rand(4), alpha=2)]


def drawn(name="aten::add.out", count=400, seed=0, aliases=True):
    bases = [Sample(*sample.args, **sample.kwargs, out=torch.zeros(sample.args[0].shape)) for sample in ADD]
    return list(draw.cases(name, bases, count, seed, aliases))


def test_every_kind_of_change_is_drawn():
    cases = drawn()
    kinds = {change[0] for case in cases for change in case["changes"]}
    assert kinds == {"layout", "sizes", "shape", "values", "dtypes", "dtype", "host", "bit", "alias", "garbage", "out",
                     "number"}  # fmt: skip
    assert len({json.dumps(case) for case in cases}) == 400 and {case["base"] for case in cases} == {0, 1}
    assert max(len(case["changes"]) for case in cases) == 4
    of_out = {change[0] for case in cases for change in case["changes"] if change[1] == 3}  # with "sizes" of size 3
    assert {"out", "layout", "dtype", "shape", "alias"} <= of_out and not {"values", "host", "bit"} & of_out
    assert {change[1] for case in cases for change in case["changes"] if change[0] == "host"} == {1}
    assert drawn() == cases != drawn(seed=1)
    assert "alias" not in {change[0] for case in drawn(aliases=False) for change in case["changes"]}


def test_the_first_calls_are_the_widest_with_permuted_strides():
    assert drawn()[:2] == [{"op": "aten::add.out", "base": 1, "changes": [["layout", at, "permuted"]]} for at in (3, 0)]


def test_a_tensor_gets_its_layout_before_it_is_shared():
    kinds = [[change[0] for change in case["changes"]] for case in drawn()]
    assert any("layout" in of_case and "alias" in of_case for of_case in kinds)
    assert not [of_case for of_case in kinds if "alias" in of_case and "layout" in of_case[of_case.index("alias") :]]


def test_shares_add_up_and_prefer_own_kernels():
    names = [f"x::{i}" for i in range(50)]
    few, many = (generate.shares(names, count, 0, lambda name: name < "x::2") for count in (100, 7001))
    assert sum(few.values()) == 100 and min(few.values()) >= 4
    assert few != generate.shares(names, 100, 1, lambda name: name < "x::2")
    assert sum(many.values()) == 7001 and len(many) == 50 and many["x::1"] > 2 * many["x::30"]


# ---- the changes ----


def changed(*changes):
    """The two tensors and alpha of aten::add.Tensor of X and X + 1, with changes."""
    after = variations.changed(ADD[0], ["self", "other", "alpha"], [list(change) for change in changes])
    return [*after.args, *after.kwargs.values()]


@pytest.mark.parametrize(
    "how", [layout for layout in variations.LAYOUTS if layout not in ("channels-last", "batch-swapped")]
)
@pytest.mark.parametrize("at", [0, 1])
def test_layouts(how, at):
    made = changed(("layout", at, how))
    x, other = made[at], made[1 - at]
    assert x.shape == X.shape and torch.equal(other, X + 1 - at)
    assert x.is_contiguous() == (how in ("offset", "unaligned"))
    assert torch.equal(x, X[:1].expand(3, 4) + at if how == "expanded" else X + at)
    assert (x.storage_offset() > 0) == (how in ("offset", "unaligned", "padded", "stepped"))


def test_layouts_of_more_dimensions():
    x = torch.rand(2, 3, 4, 5)
    for how, strides in (
        ("batch-swapped", (20, 40, 5, 1)),
        ("channels-last", (60, 1, 15, 3)),
        ("stepped", (240, 40, 10, 2)),
    ):
        assert torch.equal(variations.LAYOUTS[how](x), x) and variations.LAYOUTS[how](x).stride() == strides
        assert variations.strides_of(how, x.shape) == [*strides]
    assert variations.strides_of("offset", (3, 4)) is variations.strides_of("channels-last", (3, 4)) is None


def test_slices_share_one_buffer():
    x, y, z = variations.slices([X, X + 1, X.long()])
    assert torch.equal(x, X) and torch.equal(y, X + 1) and torch.equal(z, X.long())
    assert x.untyped_storage()._cdata == y.untyped_storage()._cdata != z.untyped_storage()._cdata


def test_bits_and_values_keep_the_elements():
    x, y, _ = changed(("layout", 1, "permuted"), ("bit", 0, "neg"))
    assert torch.equal(x, X) and x.is_neg() and torch.equal(y, X + 1) and y.stride() == (1, 3)
    x, y, _ = changed(("dtype", 1, "complex64"), ("bit", 1, "conj"))
    assert y.is_conj() and torch.equal(y, (X + 1).cfloat()) and not x.is_conj()


@pytest.mark.parametrize("dtype", variations.DTYPES)
def test_values_of_every_dtype(dtype):
    """Mixed values are not all the same, and the extremes are the dtype's."""
    mixed, extremes = (
        changed(("dtype", 0, dtype), ("values", 0, which))[0].flatten() for which in ("mixed", "extremes")
    )
    assert (
        mixed.dtype == extremes.dtype == getattr(torch, dtype) and len({str(number) for number in mixed.tolist()}) > 1
    )
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


def test_sizes_shapes_and_aliases():
    x, y, _ = changed(("sizes", 4, 0))
    assert x.shape == y.shape == (3, 0)
    x, y, _ = changed(("sizes", 3, 5))
    assert torch.equal(x[3:], X[:2]) and y.shape == (5, 4)
    assert variations.of_sizes([torch.tensor([0, 2, 7])], {3: 5})[0].tolist() == [
        0,
        0,
        2,
        2,
        7,
    ]  # still offsets of rows
    shapes = {how: tuple(changed(("shape", 1, how))[1].shape) for how in variations.SHAPES}
    assert shapes == {
        "first of size 1": (1, 4), "last of size 1": (3, 1), "one dimension less": (4,), "one dimension more": (1, 3, 4),
        "0-dim": (), "empty": (0,), "last longer": (3, 5), "first longer": (4, 4), "transposed": (4, 3),
    }  # fmt: skip
    x, y, _ = changed(("alias", 1, 0, "shifted"))
    assert torch.equal(y.flatten()[:-1], x.flatten()[1:]) and x.untyped_storage()._cdata == y.untyped_storage()._cdata
    x, y, _ = changed(("alias", 1, 0, "same"))
    assert x is y and torch.equal(x, X)
    x, y, _ = changed(("alias", 1, 0, "transposed"))
    assert torch.equal(y, x.t()) and y.data_ptr() == x.data_ptr()
    x, y, alpha = changed(("host", 1), ("number", 2, {"complex": [0, 1]}))
    assert isinstance(y, Stays) and y.tensor.shape == () and alpha == 1j


def test_out_tensors_get_the_shapes_that_are_written():
    """Those in lists too."""
    one = draw._with_whole_outs("aten::gt.Scalar_out", Sample(X, 2, out=torch.empty(0, dtype=torch.uint8)))
    assert one.kwargs["out"].shape == (3, 4) and one.kwargs["out"].dtype == torch.uint8
    several = draw._with_whole_outs("aten::unbind_copy.int_out", Sample(X, out=[torch.empty(0) for _ in range(3)]))
    assert [x.shape for x in several.kwargs["out"]] == [(4,)] * 3


def test_a_wrong_case_is_refused(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", forking())
    neg = '{"op": "aten::neg", "base": %s, "changes": [%s]%s}'
    for text, message in (
        ("{}", "it is not an operator, a base and changes"),
        ("[1]", "--case takes the JSON that a finding prints, but got '.1.': "),
        ("{", "--case takes the JSON that a finding prints, but got '{': "),
        (neg % ('"0"', "", ""), "it is not an operator, a base and changes"),
        (neg % (0, '["foo", 0]', ""), "a change does not fit: KeyError: 'foo'"),
        (neg % (0, '["layout", 99, "stepped"]', ""), "a change does not fit: IndexError"),
        (
            neg % (0, '["number", 0, 1]', ""),
            "a change does not fit: TypeError: argument 0 is a tensor and not a number",
        ),
        (neg % (99, "", ""), r"aten::neg has \d+ calls to start from, from 0 on"),
        (neg % (0, "", ', "given": {"samples": "nothing:f"}'), "there is no module nothing"),
        ('{"op": "aten::no_such", "base": 0, "changes": []}', "openreg lists no operator aten::no_such"),
    ):
        arguments = argparse.Namespace(device="openreg", case=text, modules=["openreg_ops"], threads=1, timeout=60)
        with pytest.raises(Wrong) as raised:
            generate.replay(arguments)
        assert re.search(message, str(raised.value)), (text, raised.value)


# ---- how a case ends, in this process ----


@pytest.fixture(scope="module")
def calls():
    yield generated_calls.Calls("openreg", {}, lambda answer: None)
    torch.openreg.set_per_process_memory_fraction(1.0)  # the fixture has limited it, as in a worker process


@pytest.fixture
def end(calls):
    """How a case of an operator ends, and the kind and the message of its failure."""

    def end(op, *changes, bases=None):
        case = {"op": op, "base": 0, "changes": [list(change) for change in changes]}
        found = calls.run_cases(op, bases or calls.bases(op)[:1], [case])
        (ended,) = found["ends"]
        failure = found.get("failure", {})
        return ended, failure.get("kind"), failure.get("message") or [*found["notes"], ""][0]

    return end


def test_how_cases_end(end):
    add = "aten::add.Tensor"
    assert end(add)[0] == end(add, ("layout", 0, "permuted"), ("values", 1, "mixed"))[0] == "equal"
    assert end(add, ("shape", 1, "last longer"), bases=ADD)[0] == "both raised"
    huge = end("aten::hamming_window.periodic_out", ("number", 0, 2**31))
    assert huge[0] == "both raised", "a huge size is an error on both sides"


@pytest.fixture
def defined():
    """Defines operators of PyTorch's kind and of an author's: the kernel of the CPU, and the device's."""
    made = {
        space: torch.library.Library(space, kind) for space, kind in (("test_generated", "DEF"), ("aten", "FRAGMENT"))
    }
    numbers = itertools.count()

    def define(right, wrong, schema="(Tensor x) -> Tensor", space="test_generated"):
        name = f"made_{next(numbers)}"
        made[space].define(name + schema)
        made[space].impl(name, right, "CPU")
        made[space].impl(name, wrong, "PrivateUse1")
        return f"{space}::{name}"

    yield define
    for library in made.values():
        library._destroy()


def refuse(*_, **__):
    raise RuntimeError("refused")


def fail_inside(*_, **__):
    raise RuntimeError("x INTERNAL ASSERT FAILED")


def rule(x):
    raise RuntimeError("expected a contiguous tensor")


def of_memory(x):
    raise RuntimeError("out of memory")


def lacks(x):
    raise RuntimeError("\"neg\" not implemented for 'Half'")


def dense(x):
    return -x if x.is_contiguous() else refuse()


def beyond(x):
    ctypes.memset(x.data_ptr() + x.nbytes, 1, 1)
    return -x


def crashes(x):
    signal.raise_signal(signal.SIGSEGV)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (None, lambda x: -x),
        ("value", lambda x: -x + 1),
        ("dtype", lambda x: -x.double()),
        ("shape", lambda x: -x[:1]),
        ("device", lambda x: -x.cpu()),
        ("alias", lambda x: x.neg_()),
        ("structure", lambda x: None),
        ("error", refuse),
        ("internal", fail_inside),
        ("rng", lambda x: (torch.rand(1), -x)[1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_device(defined, end, kind, wrong):
    """Also beside a layout that the CPU's kernel ignores: its values are those of contiguous memory then."""
    ignores = defined(lambda x: -x.as_strided(x.shape, torch.empty(x.shape).stride()), wrong)
    for name, change in ((defined(torch.neg, wrong), []), (ignores, [("layout", 0, "permuted")])):
        assert end(name, *change, bases=[Sample(X)])[:2] == (("failed", kind) if kind else ("equal", None))


neg, WIDE, WRONG = torch.neg, [("layout", 0, "permuted")], [("shape", 0, "last longer")]
TAKES, STATES = "the device takes a layout that the CPU refuses", "the device states a rule, and the CPU does not"
REFUSES = "one side refuses a call that is wrong"


@pytest.mark.parametrize(
    "cpu, there, changes, custom, of_pytorch",
    [
        (neg, rule, WIDE, "error", STATES),
        (neg, refuse, WIDE, "error", "error"),
        (neg, refuse, WRONG, "error", REFUSES),
        (refuse, neg, WRONG, "no error", REFUSES),
        (refuse, refuse, [], "both raised", "both raised"),
        (neg, of_memory, [], "memory", "memory"),
        (lacks, neg, [], "a dtype that the CPU lacks", "a dtype that the CPU lacks"),
        (dense, neg, WIDE, TAKES, TAKES),
        (dense, torch.abs, WIDE, "value", "value"),  # it is compared with the CPU in contiguous memory
        (crashes, neg, [], "crash", "the CPU's kernel ends the process"),
        (beyond, neg, [], None, "the CPU's kernel writes beyond its arguments"),
    ],
)
def test_who_may_refuse(defined, end, cpu, there, changes, custom, of_pytorch):
    """An author's operator refuses on both devices or on none; one of PyTorch's may be stricter, if it says why.

    What ends the process, or writes beyond the arguments, is not run beside the device.
    """
    for space, expected in (("test_generated", custom), ("aten", of_pytorch)):
        if expected:
            ended, kind, note = end(defined(cpu, there, space=space), *changes, bases=[Sample(X)])
            assert (kind or note or ended) == expected and (ended == "failed") == bool(kind)


def test_memory_beside_a_result(defined, end):
    def right(x, *, out):
        return out.copy_(-x)

    def spills(x, *, out):
        out.as_strided((1,), (1,), 0).fill_(0.5)
        return out.copy_(-x)

    name = defined(right, spills, "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    padded = [("layout", 1, "padded")]
    assert end(name, *padded, bases=[Sample(X, out=torch.zeros(3, 4))])[:2] == ("failed", "guard")
    name = defined(right, right, "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    assert end(name, *padded, bases=[Sample(X, out=torch.zeros(3, 4))])[0] == "equal"


def test_memory_that_arguments_share(defined, end):
    """An author's operator may read and write one tensor; other overlaps have no defined result."""

    def copies(x, y):
        return x.copy_(y.clone())

    def clears(x, y):
        return copies(x.zero_(), y)

    name = defined(copies, clears, "(Tensor(a!) x, Tensor y) -> Tensor(a!)")
    for how, ended in (("same", "failed"), ("shifted", "allowed")):
        assert end(name, ("alias", 1, 0, how), bases=[Sample(X.clone(), X + 1)])[0] == ended
    of_pytorch = defined(copies, clears, "(Tensor(a!) x, Tensor y) -> Tensor(a!)", space="aten")
    assert end(of_pytorch, ("alias", 1, 0, "same"), bases=[Sample(X.clone(), X + 1)])[0] == "allowed"


def test_what_is_elsewhere():
    x, out = torch.rand(2, 3), torch.empty(0)
    elsewhere = generated_calls._is_elsewhere
    assert elsewhere("aten::empty.memory_format", Sample([2]))  # nothing says where
    assert elsewhere("aten::block_diag.out", Sample([], out=out))  # nothing but out= does
    assert elsewhere("aten::add.Tensor", Sample(x, Stays(x))) and elsewhere("aten::add.Tensor", Sample(x, None))
    assert elsewhere("aten::neg", Sample(x.to("meta")))
    for name, sample in (("neg", Sample(x)), ("block_diag.out", Sample([x], out=out)), ("clamp", Sample(x, None, 1))):
        assert not elsewhere(f"aten::{name}", sample)


# ---- differences that say nothing about the device ----


def test_results_after_an_overflow():
    large, nan = Sample(torch.tensor([3e38])), torch.tensor([torch.nan])
    inf = Sample(torch.tensor([torch.inf]))
    assert close_enough.overflows(large, [(nan, torch.ones(1))]) and close_enough.overflows(inf, [(nan, torch.ones(1))])
    assert not close_enough.overflows(large, [(torch.zeros(2), torch.tensor([torch.nan, 1.0]))])
    rounded = torch.tensor([1.0, 0.0026367])
    assert close_enough.overflows(large, [(rounded, torch.tensor([torch.inf, 0.0026368]))])
    assert not close_enough.overflows(large, [(rounded, torch.tensor([torch.inf, 0.0028]))])
    assert not close_enough.overflows(Sample(torch.ones(1)), [(nan, torch.ones(1))])
    assert not close_enough.overflows(large, [])


@pytest.mark.parametrize("value, size", [(2.0, 2.0), (torch.nan, 2.0), (torch.inf, 2.0), (1e30, 1.0)])
def test_terms_that_cancel_are_rounded_at_their_own_size(value, size):
    """What is not finite has no size. A large argument would excuse every result."""
    assert close_enough.size_of(Sample(torch.tensor([value, 2.0]).bfloat16())) == size
    assert close_enough.size_of(Sample(torch.ones(2, dtype=torch.int64))) == 1.0


def test_float64_decides_about_terms_that_cancel():
    def outcome_of(sample, move):
        return schemas.outcome_of("aten::sum", sample, move)

    sample = Sample(torch.tensor([1e7, 1.3, -1e7]))
    cpu = outcome_of(sample, Move("cpu"))
    x = cpu.value[0]
    assert x != 1.3  # and so far from float64 as the CPU is
    assert close_enough.as_exact(outcome_of, sample, cpu, [(x, torch.tensor(1.5))])
    assert not close_enough.as_exact(outcome_of, sample, cpu, [(x, torch.tensor(30.0))])
    assert not close_enough.as_exact(outcome_of, sample, cpu, [])
    well = Sample(torch.tensor([1.0, 2.0]))
    cpu = outcome_of(well, Move("cpu"))
    assert not close_enough.as_exact(outcome_of, well, cpu, [(cpu.value[0], cpu.value[0] + 0.01)])


@pytest.mark.parametrize("views", [lambda x: [x.t(), x[:2]], lambda x: [x[:, ::2], torch._neg_view(x)]])
def test_contiguous_memory_of_its_own(views):
    given = views(X.clone())
    plain = close_enough.Plain("cpu")(given)
    assert len({x.untyped_storage().data_ptr() for x in plain}) == len(given)
    for x, y in zip(given, plain, strict=True):
        assert torch.equal(x, y) and y.is_contiguous() and not y.is_neg() and y.untyped_storage().nbytes() == y.nbytes


# ---- the memory around arguments ----


@pytest.mark.parametrize("does", ["reads", "writes", "raises what it read", "nothing"])
def test_a_kernel_that_leaves_the_memory_of_its_arguments(does):
    def call(move):
        x = move(Stays(torch.zeros(2)) if does == "reads" else torch.zeros(2))
        beyond = x.data_ptr() + x.nbytes
        if does == "writes":
            ctypes.memset(beyond, 1, 1)
        if does.startswith("r"):
            read = ctypes.string_at(beyond, 1)
            if does == "reads":
                return torch.tensor(read[0])
            raise ValueError(read)
        return x

    assert guarded.stays_within(call, resizes=True) is (does == "nothing")


def test_where_each_call_is(calls):
    """If the process ends, this says which call ended it, and on which side."""
    told = []
    samples = [Sample(X, X.t()), Sample(X, X)]
    found = generated_calls.ends("aten::mm", samples, [set()] * 2, "openreg", lambda *at: told.append(at))
    assert [(i, end.kind) for i, end in found] == [(0, "equal"), (1, "both raised")]
    assert told == [(0, "the CPU alone"), *((i, at) for i in (0, 1) for at in ("cpu", "device", "comparison"))]


def test_calls_that_vary():
    assert guarded.stays_within(refuse, resizes=True) and not guarded.stays_within(refuse)
    assert guarded.stays_within(lambda move: torch.zeros(100))
    assert not guarded.stays_within(lambda move: torch.empty(100)), "new memory that is not written"


def test_a_read_that_no_guard_shows_ends_the_process():
    unpack, lu = "aten::lu_unpack", torch.rand(5, 5)  # each guard is an invalid pivot
    short, whole = (torch.full((count,), 5, dtype=torch.int32) for count in (1, 5))
    reads_on = torch.__version__ < "2.15"  # which refuses pivots of another shape
    assert bool(generated_calls.GeneratedCall(unpack, Sample(lu, short), "openreg").doubt()) is reads_on
    assert not generated_calls.GeneratedCall(unpack, Sample(lu, whole), "openreg").doubt()


# ---- the parent ----


class Stub:
    """In place of a worker: each case fails where `fails` says, or ends the process there."""

    arguments = argparse.Namespace(modules=[])

    def __init__(self, fails, ended=""):
        self.fails, self.ended, self.asked = fails, ended, []

    def stop(self):
        self.asked.append("stop")

    def ask(self, request, steps):
        self.asked.append(request)
        case = request.get("case") or {
            "op": "x::y",
            "base": 0,
            "changes": [["layout", 0, "a"], ["bit", 1, "b"], ["host", 2]],
        }
        if not self.fails(case["changes"], len(self.asked)):
            return {"ends": {"equal": 3}, "notes": {}, "reached": 3}
        if self.ended:
            return {"at": self.ended, "case": case, "ended": "crash", "message": "signal 11"}
        failure = {"kind": "value", "message": "differ", "call": "(x)", "case": case}
        return {"ends": {"equal": 2, "failed": 1}, "notes": {}, "reached": 3, "failure": failure}


@pytest.mark.parametrize("ended", ["", "device"])
@pytest.mark.parametrize("needed", [[["bit", 1, "b"]], [["layout", 0, "a"], ["host", 2]], []], ids=str)
def test_a_failure_is_shrunk_to_the_changes_that_it_needs(needed, ended):
    stub = Stub(lambda changes, time: all(change in changes for change in needed), ended)
    tested = generate.explore(stub, "x::y", 3, 7, {"inputs": ["f32[2]"]})
    assert tested.finding.case == {"op": "x::y", "base": 0, "changes": needed, "given": {"inputs": ["f32[2]"]}}
    assert tested.finding.kind == ("crash" if ended else "value")
    assert stub.asked[0] == {"generate": "x::y", "count": 3, "seed": 7, "given": {"inputs": ["f32[2]"]}}
    assert stub.asked[1] == "stop", "the failure is run again in a new process"


def test_a_failure_that_does_not_repeat_is_counted():
    tested = generate.explore(Stub(lambda changes, time: time == 1), "x::y", 3, 0, {})
    assert tested.finding is None and [*tested.notes] == ["a failure that did not repeat in a new process"]


def test_a_process_that_ends_on_the_side_of_the_cpu():
    tested = generate.explore(Stub(lambda changes, time: True, "cpu"), "aten::neg", 3, 0, {})
    assert tested.finding is None and tested.never == "cpu: crash, signal 11"


def test_what_is_not_called():
    stub = Stub(lambda changes, time: True)
    for name in (*generate.UNCHECKED, "aten::from_file"):
        tested = generate.explore(stub, name, 3, 0, {})
        assert tested.never and not stub.asked


def test_what_is_listed_reaches_the_device():
    listed = generate.listed("openreg")
    assert {"aten::add.Tensor", "aten::tril.out", "openreg::rms_norm"} <= set(listed) and "prims::add" not in listed


def test_the_report():
    finding = generate.GeneratedFinding("a::b", "value", "differs", "(x)", {"op": "a::b", "base": 0, "changes": []})
    called, failed, never = generate.Tested("a::a"), generate.Tested("a::b", finding=finding), generate.Tested("a::c")
    called.add({"ends": {"equal": 2, "allowed": 1}, "notes": {"memory": 1}, "reached": 2})
    failed.add({"ended": "crash"})
    never.never = "takes a stream"
    report = generate.GeneratedReport("openreg", 5, ["mine"], [called, failed, never], 1.0)
    text = " ".join(report.text().split())
    assert not report.passed and "FAIL a::b [value] values differ differs (x) python -m openreg_tools" in text
    assert "--device openreg --import mine --case" in text and "1: takes a stream a::c" in text and "1: memory" in text
    assert text.endswith(
        "3 operators: 2 called, the device's kernel reached in 1; 4 cases of seed 5 in 1 s, "
        "1 differences allowed; 1 findings"
    )
    found = json.loads(report.json())
    assert found["never"] == {"takes a stream": ["a::c"]} and found["ends"] == {"equal": 2, "allowed": 1, "failed": 1}
    assert found["findings"][0]["command"] in report.text() and "a::c" in report.html()
    report.operators = [called, never]
    assert report.passed and "FAIL" not in report.text()


def test_so_many_calls_that_hang(calls, monkeypatch):
    """The others are not tried on the CPU, and so do not count for the device."""
    monkeypatch.setattr(generated_calls, "attempts", lambda count, attempt: [(0, Attempt("hung", "no result"))])
    cases = [{"op": "aten::neg", "base": 0, "changes": []}] * 3
    found = calls.run_cases("aten::neg", [Sample(X)], cases)
    assert found["ends"] == {"allowed": 3} and [*found["notes"]] == ["the CPU's kernel hangs"]


def test_an_assertion_before_the_kernel_is_pytorchs():
    boxed, large = Outcome(error=RuntimeError("isIntList() INTERNAL ASSERT FAILED")), Sample(X, [-(2**63), 1])
    assert generated_calls._is_boxing(large, boxed) and not generated_calls._is_boxing(Sample(X, [1]), boxed)
    assert generated_calls._is_boxing(Sample(X), Outcome(error=RuntimeError("MathBitsFallback")))
