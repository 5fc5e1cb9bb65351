"""`python -m openreg_ops explain`: the path it gives is the one that kernels see."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import command as run

import openreg_ops
from openreg_tools import dispatch
from openreg_tools.core.options import Wrong
from openreg_tools.explain import explain

log = []


@pytest.fixture(scope="module")
def library():
    """Operators whose kernels write down that they ran."""
    library = torch.library.Library("test_explain", "DEF")

    def logs(name, key, below=None):
        def kernel(*args):
            log.append(f"{name} {key}")
            if below is None:
                return args[0].clone()
            with torch._C._ExcludeDispatchKeyGuard(below):
                return getattr(torch.ops.test_explain, name)(*args)

        return kernel

    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse1)
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    for name in ("own", "fallen", "cast", "bare"):
        library.define(f"{name}(Tensor x) -> Tensor")
    library.define("parts(Tensor x) -> Tensor")
    library.define("part(Tensor x) -> Tensor")
    for name in ("own", "cast"):
        library.impl(name, logs(name, "PrivateUse1"), "PrivateUse1")
        library.impl(name, logs(name, "AutogradPrivateUse1", autograd), "AutogradPrivateUse1")
    library.impl("cast", logs("cast", "AutocastPrivateUse1", autocast), "AutocastPrivateUse1")
    library.impl("fallen", logs("fallen", "CPU"), "CPU")
    library.impl(
        "parts", lambda x: torch.ops.test_explain.own(torch.ops.test_explain.part(x)), "CompositeImplicitAutograd"
    )
    library.impl("part", logs("part", "CompositeExplicitAutograd"), "CompositeExplicitAutograd")
    yield library
    library._destroy()


@pytest.fixture
def x():
    log.clear()
    return torch.ones(2, 3, device="openreg")


def keys(explanation):
    return [step.key for step in explanation.steps]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ["own", "cast"])
def test_the_kernels_run_in_the_order_given(library, x, name, autocast, inference):
    with torch.inference_mode(inference), torch.autocast("openreg", enabled=autocast):
        x = torch.ones(2, 3, device="openreg")  # an inference tensor has no autograd keys
        explained = explain(f"test_explain::{name}", x)
        getattr(torch.ops.test_explain, name)(x)
    assert [f"{name} {key}" for key in keys(explained)] == log
    assert len(log) == 1 + (not inference) + (autocast and name == "cast")


def test_implicit_composite_decomposes_at_autograd(library, x):
    explained = explain("test_explain::parts", x, run=True)
    assert keys(explained) == ["AutogradPrivateUse1"]
    assert [call.name for call in explained.calls if call.name.startswith("test")] == [
        "test_explain::part",
        "test_explain::own",
    ]
    assert "decomposes at AutogradPrivateUse1" in explained.conclusion()
    assert log[0] == "part CompositeExplicitAutograd" and log[-1] == "own PrivateUse1"


@pytest.mark.parametrize(
    "op, dtype, tree",
    [
        # Two casts, and then the call that the kernel makes.
        ("mm", torch.float32, ["mm Autocast", " _to_copy own", " _to_copy own", " mm Autograd", "  mm shared"]),
        ("mm", torch.bfloat16, ["mm Autocast", " mm Autograd", "  mm shared"]),
        # The parts of a CompositeImplicit are shown instead of it.
        ("matmul", torch.float32,
         ["matmul Autocast", " _to_copy own", " _to_copy own", " mm Autograd", "  mm shared"]),
        # Autocast sets the dtype argument, and softmax itself casts.
        ("softmax", torch.float16, ["softmax Autocast", " _to_copy own", " _softmax Autograd", "  _softmax own"]),
    ],
)  # fmt: skip
def test_the_autocast_kernel_makes_a_call_of_its_own(op, dtype, tree):
    x = torch.ones(3, 3, dtype=dtype, device="openreg")
    with torch.autocast("openreg", torch.bfloat16):
        explained = explain(op, x, 1 if op == "softmax" else x, run=True)
    short = []
    for line in explained.trace():
        margin, kind, name, key, has = re.fullmatch(
            r"( *)\[(\w+)\] op=\[aten::(\w+)\S*\], key=\[(\w+?)(?:PrivateUse1)?\](?:  (\w+))?", line
        ).groups()
        assert kind == ("call" if key == "Autocast" or key == "Autograd" else "redispatch")
        if name != "_to_copy" or has:  # it passes three keys
            short.append(f"{margin[: len(margin) - 2 * (name == '_to_copy')]}{name} {has or key}")
    assert short == tree
    assert explained.steps[0].does.endswith("the next steps are in the call that it makes")


def test_refused_by_autocast():
    x = torch.ones(3, device="openreg")
    with torch.autocast("openreg", torch.bfloat16):
        explained = explain("binary_cross_entropy", x, x, run=True)
    assert explained.outcome.startswith("raised RuntimeError: binary_cross_entropy: unsafe to autocast")
    assert explained.trace() == ["[call] op=[aten::binary_cross_entropy], key=[AutocastPrivateUse1]"]


def test_fallback_and_refusal(library, x):
    explained = explain("test_explain::fallen", x, run=True)
    assert (explained.has.kind, log) == ("fallback", ["fallen CPU"])
    assert 'TORCH_LIBRARY_IMPL(test_explain, PrivateUse1, m) { m.impl("fallen", kernel); }' in explained.conclusion()
    with openreg_ops.fallback.policy("error"):
        explained = explain("test_explain::fallen", x, run=True)
        assert explained.has.kind == "refused" and explained.outcome.startswith("raised NotImplementedError")
    explained = explain("test_explain::bare", x, run=True)
    assert explained.has.kind == "refused" and explained.outcome.startswith("raised NotImplementedError")


@pytest.mark.parametrize(
    "op, does",
    [
        ("test_explain::own", "a kernel for PrivateUse1"),
        ("test_explain::fallen", "fallback: copies to the CPU and back"),
        ("test_explain::bare", "refused: it has no kernel for openreg and none for the CPU to fall back to"),
        ("test_explain::part", "composite: decomposes (CompositeExplicitAutograd)"),
        ("aten::exp", "shared: runs the CPU's kernel on device memory"),
    ],
    ids=["own", "fallback", "refused", "composite", "shared"],
)
def test_the_last_step_says_what_the_device_has(library, x, op, does):
    """Its kind comes first, unless it is the device's own kernel."""
    step = explain(op, x).steps[-1]
    assert (step.key, step.does) == ("PrivateUse1", does)


def test_what_the_other_keys_would_do(library, x):
    def others(name):
        return {step.key: step.does for step in explain(f"test_explain::{name}", x).others}

    assert others("cast") == {
        "AutocastPrivateUse1": "not in this call; casts, by autocast's policy",
        "ADInplaceOrView": "falls through",
        "Functionalize": "not in this call; replaces writes and views by copies",
        "BackendSelect": "falls through",
    }
    assert others("own") == {**others("cast"), "AutocastPrivateUse1": "falls through"}
    assert others("parts") == {**others("own"), "PrivateUse1": "not reached"}


def test_where(x):
    explained = explain("openreg::rms_norm", x, torch.ones(3, device="openreg"))
    places = [step.where.partition(":")[0] for step in explained.steps]  # of an installed copy absolute
    assert len(places) == 2 and all(place.endswith("csrc/ops/rms_norm.cpp") for place in places)
    root = Path(openreg_ops.__file__).parents[1]
    if (root / "csrc").exists():
        source, _, line = explained.steps[-1].where.partition(":")
        assert "OPENREG_LIBRARY_IMPL(openreg, dense" in (root / source).read_text().splitlines()[int(line) - 1]


def test_the_page_begins_with_the_conclusion(x):
    page = explain("aten::linear", x, x, run=True).html()
    start = '<main><p class="verdict pass">aten::linear decomposes at Autograd'
    assert start in page and "It returned float32[2, 2]" in page.partition("</p>")[0] and page.count("<h2>") == 2
    assert '<td class="pass number">1</td>' in page and "<th>what happens there</th>" in page


def test_views_writes_factories_conjugates(x):
    assert keys(explain("t", x)) == ["AutogradPrivateUse1", "ADInplaceOrView", "PrivateUse1"]
    assert keys(explain("add_", x, x)) == ["AutogradPrivateUse1", "ADInplaceOrView", "PrivateUse1"]
    assert keys(explain("empty", [2], device="openreg")) == ["BackendSelect", "PrivateUse1"]
    assert "Conjugate" in keys(explain("exp", torch.ones(2, dtype=torch.cfloat, device="openreg").conj()))
    assert keys(explain("add", torch._to_functional_tensor(x), 1))[1] == "Functionalize"
    assert keys(explain("relu", x.cpu()))[-1] == "CPU"
    assert keys(explain("sum", x.to_sparse()))[-1] == "SparsePrivateUse1"


def test_the_input_decides_the_device(capsys):
    """What --device names is where tensors lie that name none."""
    status, said = command(capsys, "abs", "--device", "openreg", "--input", "f32[3]@cpu")
    assert status == 0 and "key=[CPU]" in said.out and "PrivateUse1" not in said.out
    status, said = command(capsys, "logical_not", "--input", "bool[3]", "--json", "-")
    assert status == 0 and "bool[3]" in json.loads(said.out)["called"]


def test_overloads():
    x = torch.ones(2, device="openreg")
    assert explain("add", x, 1).operator == explain("aten::add", x, x).operator == "aten::add.Tensor"
    assert explain("sum", x, [0]).operator == "aten::sum.dim_IntList"
    assert explain("aten::relu.default").operator == "aten::relu"
    assert explain("add").operator == "aten::add.Tensor" and explain("sum").operator == "aten::sum"
    assert explain("sum.default").overloads == explain("add.Scalar").overloads == []
    assert explain("pow").operator == "aten::pow.Tensor_Tensor"  # the most tensors
    assert explain("clamp").overloads == ["Tensor", "Tensor_out", "out"]  # those that return new tensors first
    assert explain("max").operator == "aten::max" and "dim" in explain("max").overloads
    assert (
        "\nother overloads: Scalar, out, Scalar_out\nnot called (no --input); showing the path of a plain openreg"
        in explain("add").text()
    )
    with pytest.raises(Wrong, match=r"no overload of aten::mm takes float32\[2\]@openreg:0"):
        explain("mm", x)


def test_eighty_columns(library, capsys):
    _, said = command(capsys, "add.Tensor", "--key", "CUDA")
    assert all(len(line) <= 80 for line in said.out.splitlines()), said.out
    place = "CUDA" if torch.version.cuda else "CompositeExplicitAutogradNonFunctional"
    assert re.search(rf"ATen/Register{place}\S*:\d+$", said.out, re.M)
    status, said = command(capsys, "test_explain::bare", "--input", "f32[3]@openreg")
    assert all(len(line) <= 80 for line in said.out.splitlines()), said.out
    last = " ".join(said.out.partition("\nIt ")[2].split())
    assert status == 1 and last.startswith("raised NotImplementedError: ") and last.endswith("CPU.")
    assert " ".join(said.out.split()).count(last) == 2  # below the call, too


def command(capsys, *words):
    return run("explain", *words), capsys.readouterr()


def test_command(capsys):
    status, said = command(capsys, "linear", "--input", "f32[2,3], f32[4,3]@cpu", "--grad", "--autocast", "bf16")
    assert status == 1 and "raised RuntimeError" in said.out  # two devices
    status, said = command(
        capsys, "linear", "--input", "f32[2,3], f32[4,3]@(1,4)@openreg:0", "--grad", "--autocast", "bf16"
    )
    assert status == 0, said
    assert "[call] op=[aten::linear], key=[AutocastPrivateUse1]" in said.out
    assert "\n [call] op=[aten::mm], key=[AutogradPrivateUse1]" in said.out or "addmm" in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())
    status, said = command(capsys, "_cudnn_rnn", "--json", "-")
    assert status == 1 and json.loads(said.out)["has"] == "refused"
    status, said = command(capsys, "abs", "--device", "cuda")
    assert status == 0 and "CUDA" in said.out
    for words in (["--input", "f32[3], f32[3]", "--device", "maia"], ["--input", "f32[3]@maia, f32[3]"]):
        status, said = command(capsys, "add", *words)
        assert status == 2 and said.err.startswith("explain: cannot use device 'maia': ") and not said.out
        assert said.err.endswith("; `operators` and `explain` without --input need no device\n")


@pytest.mark.parametrize(
    "op, arguments, why",
    [
        ("aten::mm.out", "f32[3,4], f32[5,4]", "aten::mm() is missing value for argument 'out'."),
        ("aten::add.Tensor", "f32[3], 'x', 1, 2", "aten::add() "),
        ("aten::relu.default", "'x'", "aten::relu() Expected a value of type 'Tensor' for argument 'self'"),
        ("aten::clamp.default", "f32[3], nosuch=1", "Unknown keyword argument 'nosuch' for operator 'aten::clamp'."),
    ],
)
def test_arguments_that_do_not_bind_are_no_call(capsys, op, arguments, why):
    status, said = command(capsys, op, "--device", "cpu", "--input", arguments)
    assert status == 2 and not said.out
    assert said.err.startswith(f"explain: {op.removesuffix('.default')} does not take these arguments: {why}")
    assert said.err.endswith(f"Its schema is {dispatch.schema(op.removesuffix('.default'))}\n")


def test_a_structured_operator_ends_as_its_out_variant_does(capsys):
    for op, missing in (("gelu", "gelu.out"), ("nonzero_static", "nonzero_static")):
        status, said = command(capsys, op, "--key", "XPU")  # which this build has no kernels of
        told = " ".join(said.out.split())
        assert status == 1 and f"aten::{op} raises NotImplementedError: " in told
        assert f'TORCH_LIBRARY_IMPL(aten, XPU, m) {{ m.impl("{missing}", kernel); }}' in told
    for namespace, status_then, then in (
        ("aten", 0, "has no kernel for XPU: it runs aten::gelu.out, which is own here."),
        ("_", 1, "falls back: it runs aten::gelu.out; the fallback of XPU."),
    ):
        library = torch.library.Library(namespace, "IMPL", "XPU")
        try:
            library.impl("gelu.out", print) if namespace == "aten" else library.fallback(print)
            status, said = command(capsys, "gelu", "--key", "XPU")
            assert status == status_then and f"aten::gelu {then}" in " ".join(said.out.split())
        finally:
            library._destroy()
