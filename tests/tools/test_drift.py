"""`python -m openreg_ops drift`: every kind of change is found, and what breaks of a backend is named with its line."""

import json
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from commands import command as run

from openreg_tools import drift, manifest
from openreg_tools.core.options import Wrong
from openreg_tools.manifest import Manifest, Operator

OLD = Manifest(
    "1.0",
    {
        "kept": Operator("kept(Tensor self) -> Tensor", "required"),
        "gone": Operator("gone(Tensor self) -> Tensor", "required"),
        "wider": Operator("wider(Tensor self) -> Tensor", "required"),
        "renamed": Operator("renamed(Tensor self, int n=1) -> Tensor", "required"),
        "made.out": Operator("made.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)", "required"),
        "composed": Operator("composed(Tensor self) -> Tensor", "implicit"),
        "curved": Operator("curved(Tensor self) -> Tensor", "required", derivative="self: grad"),
    },
)
NEW = Manifest(
    "2.0",
    {
        "kept": Operator("kept(Tensor self) -> Tensor", "required"),
        "wider": Operator("wider(Tensor self, float p=0.5) -> Tensor", "required"),
        "renamed": Operator("renamed(Tensor input, int n=2) -> Tensor", "required"),
        "made.out": Operator("made.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)", "implicit"),
        "composed": Operator("composed(Tensor self) -> Tensor", "required"),
        "curved": Operator("curved(Tensor self) -> Tensor", "required", derivative="self: grad * 2"),
        "fresh": Operator("fresh(Tensor self) -> Tensor", "structured", "fresh.out"),
        "fresh.out": Operator("fresh.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)", "required"),
    },
)

BACKEND = """
#include <torch/library.h>
// "kept" in a comment, and in a block of another key:
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("kept", f); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  if (true) { m.impl("kept", f); }
  m.impl("gone", f);
  m.impl("wider", f); m.impl("aten::renamed", f);
  m.impl("made.out", f);
}
"""
PYTHON = """
library.impl("curved", f, "PrivateUse1")
library.impl("kept", f, "CPU")
"""


@pytest.fixture
def backend(tmp_path):
    folder = tmp_path / "backend"
    folder.mkdir()
    (folder / "kernels.cpp").write_text(BACKEND)
    (folder / "kernels.py").write_text(PYTHON)
    return folder


@pytest.fixture
def saved(tmp_path):
    paths = tmp_path / "old.json", tmp_path / "new.json.gz"
    for each, path in zip((OLD, NEW), paths, strict=True):
        manifest.save(each, path)
        assert manifest.read(str(path)) == each
    return [str(path) for path in paths]


def test_every_kind_of_change():
    found = drift.compare(OLD, NEW)
    assert [*found.added] == ["fresh", "fresh.out"] and found.added["fresh"].startswith("structured: fresh(")
    assert [*found.removed] == ["gone"]
    assert [*found.signatures] == ["wider"] and [*found.schemas] == ["renamed"]
    assert found.required == ["composed", "fresh.out"] and found.optional == ["made.out"]
    assert found.derivatives == {"curved": ("self: grad", "self: grad * 2")}
    assert drift.compare(NEW, NEW).summary_of_changes() == "torch 2.0 to 2.0: no difference"


def test_scan_finds_registrations_with_their_lines(backend):
    found = {r.operator: r.where for r in drift.scan(backend, "PrivateUse1", OLD)[0]}
    assert found == {
        "kept": f"{backend}/kernels.cpp:6",
        "gone": f"{backend}/kernels.cpp:7",
        "wider": f"{backend}/kernels.cpp:8",
        "renamed": f"{backend}/kernels.cpp:8",
        "made.out": f"{backend}/kernels.cpp:9",
        "curved": f"{backend}/kernels.py:2",
    }
    assert [r.where for r in drift.scan(backend, "CUDA", OLD)[0]] == [f"{backend}/kernels.cpp:4"]
    own = (
        (backend / "kernels.cpp")
        .read_text()
        .replace("TORCH_LIBRARY_IMPL(aten, PrivateUse1", "MY_LIBRARY_IMPL(aten, dense")
    )
    (backend / "kernels.cpp").write_text(own)
    assert {r.operator: r.where for r in drift.scan(backend, "PrivateUse1", OLD, role="dense")[0]} == found


def test_what_breaks(saved, backend):
    found = drift.drift(*saved, sources=[backend], key="CUDA")
    assert {t.operator: t.mark for t in found.troubles} == {"composed": "MISSING", "fresh.out": "MISSING"}
    found = drift.drift(*saved, sources=[backend])
    assert {t.operator: t.mark for t in found.troubles} == {
        "gone": "BREAKS", "wider": "BREAKS", "made.out": "BREAKS", "renamed": "look at", "curved": "look at",
        "composed": "MISSING", "fresh.out": "MISSING",
    }  # fmt: skip
    (gone,) = (t for t in found.troubles if t.operator == "gone")
    assert gone.where.endswith("kernels.cpp:7") and gone.why == "torch 2.0 has no such operator"


@pytest.mark.parametrize(
    "file, text, line",
    [
        ("a.cpp", "\nTORCH_LIBRARY_IMPL(_, PrivateUse1, m) {\n  m.fallback(f);\n}", 3),
        ("a.cpp", "TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(f); }", 0),
        ("a.cpp", "/* \n */ // TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(f); }", 0),
        ("a.cpp", "TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }", 0),
        ("a.py", "from torch.library import Library\nl = Library('_', 'IMPL')\nl.fallback(f, 'PrivateUse1')", 3),
        ("a.py", "torch.library.Library('_', 'IMPL', 'PrivateUse1').fallback(f)", 1),
        ("a.py", "l = torch.library.Library('_', 'IMPL')\nl.fallback(f, 'CUDA')\n# l.fallback(f, 'PrivateUse1')", 0),
        ("a.py", "l = torch.library.Library('aten', 'IMPL')\nl.fallback(f, 'PrivateUse1')", 0),
        ("a.py", "if", 0),
    ],
)
def test_the_fallback_counted_is_the_one_in_the_sources(saved, backend, file, text, line):
    """This process has a fallback, which is openreg's."""
    (backend / file).write_text(text)
    found = drift.drift(*saved, sources=[backend])
    missing = {t.operator: t.breaks for t in found.troubles if not t.where}
    assert missing == {"composed": not line, "fresh.out": not line}
    said = f"the fallback in {backend}/{file}:{line}" if line else "no fallback"
    assert found.verdict().startswith(f"{backend}, 6 registrations, {said}: 3 registrations break, ")


def test_a_registration_in_a_comment_is_none(backend):
    (backend / "kernels.cpp").write_text(
        'TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {\n // m.impl("gone", f);\n url("http://", R"(")"); m.impl("kept", f);\n'
        ' // m.impl("gone", f);\n}'
    )
    assert {r.operator: r.where for r in drift.scan(backend, "PrivateUse1", OLD)[0]} == {
        "kept": f"{backend}/kernels.cpp:3",
        "curved": f"{backend}/kernels.py:2",
    }


def test_elsewhere_is_not_required():
    """The classes are the same as in `operators`."""
    name = "_cudnn_attention_forward_no_dropout_inplace"
    found = drift.compare(manifest.read("2.13"), manifest.read("2.15"))
    assert found.added[name].startswith("elsewhere: ") and name not in found.required and found.required
    of = lambda kind: {name: Operator(f"{name}() -> ()", kind) for name in ("one", "other")}  # noqa: E731
    old, new = Manifest("1", of("implicit")), Manifest("2", of("elsewhere"))
    assert not drift.compare(old, new).required and not drift.compare(new, old).optional
    assert drift.compare(old, new, "SparsePrivateUse1").required == ["one", "other"]


def test_what_a_derivative_calls():
    """A backend must write the operators of its name or of its out= form, unless PyTorch makes them from others."""

    def of(name, kind, derivative=""):
        return {name: Operator(f"{name}(Tensor self) -> Tensor", kind, derivative=derivative)}

    found = Manifest("1", {
        **of("plain", "required", "self: plain_backward(grad)"), **of("plain_backward", "required"),
        **of("sized.x", "required", "self: mul(grad, sized_backward_symint(grad))"), **of("sized_backward", "explicit"),
        **of("sized_backward.out", "required"),
        **of("library", "elsewhere", "self: library_backward(grad)"), **of("library_backward", "elsewhere"),
        **of("split", "explicit", "self: split_backward(grad)"), **of("split_backward", "structured"),
        **of("made", "required", "self: made_backward(grad)"), **of("made_backward", "implicit"),
        **of("double", "required", "self: double(grad)"), **of("double.backward", "required"),
        **of("mul", "required"),
    })  # fmt: skip
    assert found.backward == {
        "plain": ("plain_backward",),
        "sized.x": ("sized_backward",),
        "library": ("library_backward",),
        "split": ("split_backward",),
    }


def test_registrations_of_this_process():
    found = {r.operator: r for r in drift.registered("PrivateUse1")}
    assert "csrc/aten/factory.cpp:" in found["empty.memory_format"].where and not found["mm"].boxed
    assert "softmax.int_out" not in found, "shared kernels follow torch by themselves"
    if (Path(__file__).parents[2] / "csrc").exists():
        file, _, line = found["view"].where.partition(":")
        assert '"view"' in (Path(__file__).parents[2] / file).read_text().splitlines()[int(line) - 1]
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("frexp.Tensor", lambda x: (x, x), "XPU")
        (one,) = (r for r in drift.registered("XPU") if r.operator == "frexp.Tensor")
        assert one.boxed and "test_drift.py:" in one.where
        assert '"frexp.Tensor"' in Path(__file__).read_text().splitlines()[int(one.where.rpartition(":")[2]) - 1]
    finally:
        library._destroy()


def test_the_fallback_counted_is_that_of_the_process(saved):
    found = drift.drift(*saved, key="PrivateUse1")
    assert "the fallback of this process" in found.verdict() or found.fallback
    library = torch.library.Library("_", "IMPL", "XPU")
    try:
        assert not drift.drift(*saved, key="XPU").fallback
        library.fallback(lambda *_: None)
        assert drift.drift(*saved, key="XPU").fallback
    finally:
        library._destroy()


def test_wheel_and_environment(tmp_path):
    site = Path(torch.__file__).parents[1]
    with zipfile.ZipFile(tmp_path / "torch-9.whl", "w") as wheel:
        for name in manifest.FILES:
            wheel.write(site / name, name)
    environment = tmp_path / "lib/python3.99/site-packages"
    for name in manifest.FILES:
        (environment / name).parent.mkdir(parents=True, exist_ok=True)
        (environment / name).write_bytes((site / name).read_bytes())
    installed = manifest.installed()
    assert manifest.read(str(tmp_path / "torch-9.whl")) == manifest.read(str(tmp_path)) == installed
    assert installed.torch == torch.__version__.partition("+")[0]


def test_the_shipped_manifests():
    found = drift.compare(manifest.read("2.13"), manifest.read("2.15.0"))
    assert "cholesky" in found.removed and "linalg_polar.out" in found.required
    assert found.derivatives["clamp_max"][1].startswith("self: where(self < max, grad")  # which changed at a bound


@pytest.mark.parametrize(
    "what, sentence",
    [
        (
            "2.0",
            r"there is no 2.0: expected a version that ships with this package \(2.10.0, 2.11.0, 2.12.0, 2.13.0, 2.14.0, 2.15.0\)",
        ),
        (".", "there is no torch in .: "),
        ("empty.whl", "empty.whl is not a wheel of torch: torch/include/ATen/RegistrationDeclarations.h is missing"),
        ("list.json", "list.json is not a manifest"),
    ],
)
def test_refuses(tmp_path, monkeypatch, what, sentence):
    monkeypatch.chdir(tmp_path)
    zipfile.ZipFile("empty.whl", "w").close()
    Path("list.json").write_text("[]")
    with pytest.raises(Wrong, match=sentence):
        manifest.read(what)


def test_command(saved, backend, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run("drift", *saved, "--sources", backend, "--html", page, "--verbose") == 1
    said = capsys.readouterr().out
    assert (
        textwrap.dedent(
            """
        Changed derivatives
          curved
            - self: grad
            + self: grad * 2
        """
        )
        in said
    )
    said_once = " ".join(said.split())
    assert "no fallback: 3 registrations break, 2 newly required are missing, 2 to look at" in said_once
    assert "  MISSING composed\n    newly required\n" in said and "BREAKS gone" in said
    assert all(len(line) <= 80 for line in said.splitlines() if str(backend) not in line)
    assert "- wider(Tensor self) -&gt; Tensor\n" in page.read_text()
    assert run("drift", saved[1], saved[1], "--sources", backend, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["breaks"] is False
    assert run("drift", "2.13.0", "2.15.0") == 0  # openreg itself
    said = " ".join(capsys.readouterr().out.split())
    assert "the fallback of this process or a shared kernel: no registrations break, " in said
    run("drift", "2.13.0", "2.15.0", "--verbose")
    said = capsys.readouterr().out
    titles = ["Added", "Removed", "Newly required", "No longer required", "Changed signatures", "Changed derivatives"]
    assert [line for line in said.splitlines() if line in titles] == titles
    for words in ([], ["--verbose"]):
        run("drift", "2.13.0", "2.15.0", *words)
        assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    assert run("drift", "2.13.0") == 2 and run("drift", "2.13.0", "2.15.0", "--sources", tmp_path / "none") == 2
    assert run("drift", "2.13.0", "--save", tmp_path / "copy.json.gz") == 0
    assert manifest.read(str(tmp_path / "copy.json.gz")) == manifest.read("2.13.0")
