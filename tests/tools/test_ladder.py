"""The ladder: what it says of a finished backend, and of faults in each check's subject."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
import torch.openreg._sanitizer as sanitizer
from commands import command
from processes import python
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import openreg_ops
from openreg_tools.core import options
from openreg_tools.ladder.command import _said, recorded
from openreg_tools.ladder.command import climb as climbed
from openreg_tools.ladder.report import Checked, Ladder, Program
from openreg_tools.ladder.rung import RUNGS, Skip, address
from openreg_tools.trace import trace

ROOT = Path(__file__).parents[2]
DEVICE = "openreg"


# ---- whole runs ----


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.compiles
def test_a_finished_backend_reaches_the_top(tmp_path):
    (file := tmp_path / "trace.json").write_text('{"name": "", "operators": [{"operator": "aten::_cudnn_rnn"}]}')
    words = ("ladder", "--import", "openreg_ops", "--device", DEVICE, "--trace", str(file), "--json", "-")
    path = str(Path(openreg_ops.__file__).parents[1])
    done = python("-m", "openreg_tools", *words, opinfo=True, nested=True, PYTHONPATH=path)
    found = json.loads(done.stdout)
    verdicts = {(check["name"], check["verdict"], check["said"]) for rung in found["rungs"] for check in rung["checks"]}
    assert {verdict for verdict in verdicts if verdict[1] != "pass"} == set()
    assert (found["reached"], found["first"], done.returncode) == (12, None, 0)
    assert found["operators"]["structured"]["kernel"] == "385 (100%)" or not torch.__version__.startswith("2.13")
    assert [(program["name"], program["missing"]) for program in found["programs"]] == [
        ("trace.json", ["aten::_cudnn_rnn (refused)"])
    ]


# ---- the report ----


def report(require: int = 12, **verdicts: str) -> Ladder:
    """A report in which the first check of a rung such as r3 has another verdict than "pass"."""
    outcomes = {
        rung.number: [
            Checked(check, verdicts.get(f"r{rung.number}", "pass") if not i else "pass", "says it", 1.0)
            for i, check in enumerate(rung.checks())
        ]
        for rung in RUNGS
    }
    return Ladder(DEVICE, outcomes, require)


@pytest.mark.parametrize(
    "verdicts, reached, first",
    [({}, 12, None), ({"r3": "fail", "r5": "fail"}, 2, 3), ({"r1": "fail"}, 0, 1), ({"r12": "fail"}, 11, 12),
     ({"r4": "skip"}, 12, None), ({"r4": "skip", "r9": "fail"}, 8, 9)],
)  # fmt: skip
def test_reached_is_the_last_rung_of_an_unbroken_row(verdicts, reached, first):
    found = report(**verdicts)
    assert found.reached == reached == found.dict()["reached"] and found.passed is (reached == 12)
    assert found.summary().startswith(f"openreg reaches rung {reached} of 12")
    text = " ".join(found.text().split())
    if first is None:
        assert "first check that fails" not in text
    else:
        check = RUNGS[first - 1].checks()[0]
        assert f"rung {first}: {check.name} says it" in text
        for said in (check.file.replace("acme", DEVICE), check.todo, address(check.section), check.key):
            assert said in text, said


def test_require_decides_the_exit_status():
    assert report(2, r3="fail").passed and not report(3, r3="fail").passed
    assert "; 3 required" in report(3, r3="fail").summary() and "required" not in report(2, r3="fail").summary()


def test_the_rungs_that_run_are_required(monkeypatch):
    monkeypatch.setattr(
        "openreg_tools.ladder.command.run", lambda rung, arguments, progress: []
    )  # every rung is reached
    options = dict(device=DEVICE, jobs=1, require=12, trace=())
    assert climbed(argparse.Namespace(rungs=4, **options)).summary() == f"{DEVICE} reaches rung 4 of 12"


def test_the_page_draws_the_rungs():
    page = report(r3="fail").html()
    assert page.count('<g class="pass">') == 11 and page.count('<g class="fail">') == 1
    assert all(f"{rung.number} {rung.title}" in page for rung in RUNGS)


def test_the_operators_of_a_program(tmp_path):
    library = torch.library.Library("test_ladder", "DEF")
    library.define("planted(Tensor x) -> Tensor")
    library.impl("planted", torch.clone, "CPU")  # and no kernel for the device
    with trace(DEVICE, name="train.py") as recording:
        torch.ops.test_ladder.planted(torch.ones(2, device=DEVICE).t())
    (file := tmp_path / "train.json").write_text(recording.json())
    found = Ladder(DEVICE, {}, programs=(recorded(str(file)), Program("other.py", ("aten::add.Tensor",))))
    used, other = found.dict()["programs"]
    assert used.pop("name") == "train.py" and used.pop("missing") == ["test_ladder::planted (fallback)"]
    assert used["fallback"] == "1 (20%)" and other["kernel"] == "1 (100%)", (used, other)
    for text in (found.text(), found.html()):
        assert "train.py uses 1 operator without a kernel: test_ladder::planted (fallback)." in " ".join(text.split())
        assert "other.py uses no operators without a kernel." in text
    assert re.search(r"used by train.py +2 \(40%\) +2 \(40%\) +1 \(20%\) +0 \(0%\)\n", found.text()), found.text()


def test_a_structured_operator_is_as_good_as_its_out_variant():
    found = Program("", ("aten::add.out", "aten::add.Tensor", "aten::t", "aten::abs")).by_kind("MPS")
    assert found["refused"] == ["aten::add.out"] and found["composite"] == ["aten::t", "aten::abs"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": "", "operators": [1]}', "\0\udcff"])
def test_what_trace_did_not_write(text, tmp_path):
    (file := tmp_path / "other.json").write_text(text, errors="surrogateescape")
    with pytest.raises(
        options.Wrong, match="expected a file that `openreg-tools trace --json` wrote, but got .*other.json"
    ):
        recorded(str(file))


# The sections of PyTorch's documents; the fourth document is a translation of the first.
SECTIONS = {
    "Extending dispatcher": [
        "What's a new backend?", "Get a dispatch key for your backend", "Get the full list of PyTorch operators",
        "Register kernels for the new backend", "Autograd support for the new backend", "Build an extension",
        "Custom operator support", "JIT support", "Testing your backend against native PyTorch backends",
        "Backward Compatibility", "Known issues & additional notes", "Future Work", "Stay in touch",
    ],
    "PrivateUse1": [
        "Why is it PrivateUse1?", "Register kernels for the new backend", "Register generator for the new backend",
        "Register device guard for the new backend", "Rename privateuse1 to a custom name for the new backend",
        "Register serialization/deserialization functions for new backend metadata",
        "Generate methods and properties related to the new backend",
    ],
    "Accelerator": [
        "Operator Set", "Step 1", "Step 2", "Selective Fallback", "PyTorch STUB", "Custom Operators", "Forward Only",
        "Commands", "Environment Variables",
    ],
}  # fmt: skip


def test_every_section_of_the_documents_has_a_rung():
    expected = {f"{document}: {title}" for document, titles in SECTIONS.items() for title in titles}
    linked = {section for rung in RUNGS for section in rung.sections}
    assert expected <= linked, expected - linked
    named = {check.section for rung in RUNGS for check in rung.checks()}
    assert named <= expected, named - expected
    assert address("PrivateUse1: Why is it PrivateUse1?").endswith("/privateuseone.html#why-is-it-privateuse1")


# ---- faults ----


class Wrong(TorchDispatchMode):
    """Operators whose name matches a pattern are wrong on the device."""

    def __init__(self, pattern: str, change) -> None:
        self.pattern, self.change = pattern, change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        devices = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices += [str(kwargs["device"]).partition(":")[0]] if kwargs.get("device") else []
        if DEVICE in devices and re.fullmatch(self.pattern, str(func)):
            return self.change(func, *args, **kwargs)
        return func(*args, **kwargs)


def more(func, *args, **kwargs):
    """Adds one to a result."""
    found = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor + 1, found)


def shifted(func, x, *args, **kwargs):
    """Starts a view one element later, where there is one."""
    found = func(x, *args, **kwargs)
    return found.roll(1) if found.numel() > 1 else found


def nothing(func, x, *args, **kwargs):
    """Does not write its argument."""
    return x


def on_cpu(func, *args, **kwargs):
    """Accepts tensors of several devices."""
    host = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
    found = func(*host, **kwargs)
    return found.to(DEVICE)


def stored(x):
    """What a kernel sees that ignores the conjugate bit."""
    return torch._conj(x) if x.is_conj() else x


def unconjugated(func, *args):
    return func(*map(stored, args))


def seedless(func, *args, **kwargs):
    """Ignores the generator."""
    kwargs.pop("generator", None)
    return func(*args, **kwargs)


def float32(func, *args, **kwargs):
    """Computes in float32."""
    args = [arg.float() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
    return func(*args, **kwargs)


# The checks by rung and name of their function, with operators that are wrong and what is said of them.
FAULTS = [
    (2, "filled", r"aten\.fill_\..*|aten\.arange.*", more, "differs from the CPU"),
    (2, "views", r"aten\.(as_strided|view)\..*", shifted, "view copies"),
    (2, "items", r"aten\._local_scalar_dense\..*", lambda *_, **__: 7, "item() of 0 as torch.float32 gives 7"),
    (2, "resized", r"aten\.resize_\..*", nothing, "resize_ does not enlarge the storage"),
    (3, "round_trip", r"aten\._to_copy\..*", more, "a contiguous tensor of torch.float32"),
    (3, "into", r"aten\.copy_\..*", nothing, "after copy_ from cpu into its contiguous view"),
    (4, "values", r"aten\.topk\..*", more, "topk differs from the CPU"),
    (4, "values", r"aten\.histc\..*", more, "histc differs from the CPU"),
    (4, "writes", r"aten\.cumsum_\..*", nothing, "the tensor that cumsum_ writes"),
    (4, "writes", r"aten\.index_put_\..*", nothing, "the tensor that index_put_ writes"),
    (4, "views", r"aten\.cumsum_\..*", lambda func, x, *a: x.copy_(x.cumsum(*a) + 1), "every second row"),
    (4, "conjugates", r"aten\.mm\..*", unconjugated, "mm with a conjugate view (first) differs from the CPU"),
    (4, "conjugates", r"aten\.bmm\..*", lambda func, a, b: func(a, stored(b)), "bmm with a conjugate view (second)"),
    (4, "lists", r"aten\._foreach_mul\..*", more, "_foreach_mul"),
    (4, "lists", r"aten\.linalg_qr\..*", lambda func, *a, **k: (func(*a, **k)[0], more(func, *a, **k)[1]), "qr"),
    (4, "mixed", r"aten\.mul\..*", on_cpu, "mul of a device tensor and a host tensor raises no error"),
    (4, "gradients", r"aten\.convolution_backward\..*", more, "the gradient of convolution's first argument"),
    (4, "gradients", r"aten\.cumprod\..*", more, "cumprod"),
    (4, "trains", r"aten\.native_layer_norm_backward\..*", more, "the loss of five steps"),
    (5, "order", r"aten\.add_\..*", nothing, "50 additions on a stream"),
    (6, "seeds", r"aten\.randperm\..*", lambda func, *a, **k: torch.arange(100), "randperm gives the same numbers"),
    (6, "generators", r"aten\.normal_\..*", seedless, "normal_ does not use the generator"),
    (6, "distributions", r"aten\.exponential_\..*", lambda func, x, *a, **k: func(x, 1.0), "exponential_(2)"),
    (6, "distributions", r"aten\.native_dropout\..*", lambda func, x, *a, **k: (x, x > 0), "dropout(0.25) is not scaled"),
    (7, "lower", r"aten\.convolution\..*", float32, "{'conv2d': 'torch.float32'}"),
    (7, "precise", r"aten\._softmax\..*", lambda func, x, *a, **k: func(x, *a, **k).half(), "'softmax'"),
    (7, "scaler", r"aten\._amp_update_scale_\..*", nothing, "the scale is"),
    (7, "scaler", r"aten\._amp_foreach_non_finite_check_and_unscale_\..*", lambda *_: None, "a weight after a step"),
    (8, "mapped", r"aten\._to_copy\..*", more, "loaded to"),
]  # fmt: skip


@pytest.mark.parametrize(
    "rung, name, pattern, change, said", FAULTS, ids=[f"{f[0]}-{f[1]}-{f[4][:20]}" for f in FAULTS]
)
def test_a_wrong_operator_is_blamed(rung, name, pattern, change, said):
    check = next(check for check in RUNGS[rung - 1].checks() if check.run.__name__ == name)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)) as error, Wrong(pattern, change):
        check.run(DEVICE)
    assert said in str(error.value), error.value


@pytest.mark.parametrize("check", RUNGS[4].checks(), ids=lambda check: check.run.__name__)
def test_the_checks_of_streams_have_no_race(check):
    with torch.openreg.launch_mode("async"), sanitizer.sanitize():
        check.run(DEVICE)


PATCHES = [
    ("name", torch._C, "_get_privateuse1_backend_name", lambda: "other", "PrivateUse1 is called 'other'"),
    ("module", torch.openreg, "device_count", lambda: 0, ""),
    ("accelerator", torch.accelerator, "device_count", lambda: 9, ""),
    ("selects", torch.accelerator, "set_device_index", lambda index: None, "set_device_index(1) selects another device"),
    ("methods", torch.Tensor, "is_openreg", False, ""),
    ("statistics", torch.accelerator, "memory_allocated", lambda index=None: 5, "rises by 0"),
    ("pinned", torch.Tensor, "is_pinned", lambda self: True, "wrong for a view or ordinary memory"),
    ("waits", torch, "Event", type("Late", (torch.Event,), {"query": lambda self: False}), "that was never recorded"),
    ("times", torch, "Event", type("Early", (torch.Event,), {"elapsed_time": lambda *_: -1.0}), "take -1.0 ms"),
    ("states", torch.openreg, "set_rng_state", lambda *_: None, "set_rng_state does not restore the numbers"),
    ("supported", torch.openreg, "get_amp_supported_dtype", lambda: [], "is empty"),
    ("history", torch.openreg.memory, "_snapshot", lambda: {"segments": [], "device_traces": []}, "is not in the snapshot"),
]  # fmt: skip


@pytest.mark.parametrize("name, owner, attribute, value, said", PATCHES, ids=[patch[0] for patch in PATCHES])
def test_a_wrong_function_is_blamed(name, owner, attribute, value, said, monkeypatch):
    check = next(check for rung in RUNGS for check in rung.checks() if check.run.__name__ == name)
    monkeypatch.setattr(owner, attribute, value)
    with pytest.raises(AssertionError) as error:
        check.run(DEVICE)
    assert said in str(error.value)


def test_an_assertion_without_a_message_says_what_it_expects():
    with pytest.raises(AssertionError) as error:
        assert torch.device("cpu").index == 1
    error.value.args = ()
    assert _said(error.value) == 'expected torch.device("cpu").index == 1'
    assert _said(AssertionError("so")) == "so" and _said(ValueError("so")) == "ValueError: so"


def test_what_does_not_apply_is_skipped(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    check = next(check for check in RUNGS[2].checks() if check.run.__name__ == "peers")
    with pytest.raises(Skip, match="there is only one device"):
        check.run(DEVICE)


@pytest.mark.parametrize("words, said", [
    (("--require", "13"), "expected the number of a rung, 1 to 12, but got '13'"),
    (("--require", "0"), "expected the number of a rung, 1 to 12, but got '0'"),
    (("--timeout", "0"), "expected seconds above 0, but got '0'"),
    (("--device", "nosuch"), "unknown device 'nosuch'"),
    (("--trace", "nosuch.json"), "nosuch.json cannot be read: No such file or directory; write it with"),
])  # fmt: skip
def test_bad_options(words, said, capsys):
    assert command("ladder", *words) == 2 and said in " ".join(capsys.readouterr().err.split())
