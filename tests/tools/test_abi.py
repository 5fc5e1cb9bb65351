"""`check --abi`: real binaries, stable and not, and what the report says of each."""

import json
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch
from processes import python

import openreg_ops
from openreg_ops.tools.new import new_package
from openreg_tools.abi import audit, shims
from openreg_tools.abi.binary import Binary, demangled, numbers
from openreg_tools.abi.declarations import path_of, torch_headers
from openreg_tools.forms import Wrong

TORCH = Path(torch.__file__).parent
RELEASE = torch.__version__.partition("+")[0]
PYTHON = Path(sysconfig.get_path("include"))
DOCUMENT = Path(__file__).parents[2] / "docs/packages.md"
UNSTABLE = """
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <Python.h>

extern PyTypeObject* THPVariableClass;

at::Tensor make(int64_t n, PyObject* object) {
  TORCH_CHECK(n > 0, "n is ", n);
  TORCH_CHECK(_PyObject_GetDictPtr(object) && PyList_Size(object) && THPVariableClass, "no");
  const at::Tensor x = at::empty({n}, at::TensorOptions().device(c10::Device("cpu")));
  return at::add(x, x);
}
"""
# Of 2.9, and of 2.15.
SHIMS = """
#include <stdint.h>
int32_t aoti_torch_get_data_ptr(void*, void**);
int32_t torch_is_tensor_pyobject(void*, _Bool*);
int32_t LATER(void);
int32_t use(void* p) { _Bool b; return aoti_torch_get_data_ptr(p, &p) + torch_is_tensor_pyobject(p, &b) + LATER(); }
"""


def compiled(folder, name, code, *options):
    source = folder / f"{name}.{'c' if 'stdint.h' in code else 'cpp'}"
    source.write_text(code)
    library = folder / f"{name}.so"
    command = ["gcc" if source.suffix == ".c" else "g++", "-shared", "-fPIC", *options, source, "-o", library]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return library


@pytest.fixture(scope="module")
def unstable(tmp_path_factory):
    include = [f"-isystem{path}" for path in (TORCH / "include", PYTHON)]
    return compiled(tmp_path_factory.mktemp("unstable"), "_C.abi3", UNSTABLE, "-std=c++20", *include)


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    """What `new --package --style stable` builds."""
    folder = tmp_path_factory.mktemp("stable")
    new_package("trial_abi", "stable", ["weigh"], folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder / "trial_abi", capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next((folder / "trial_abi").rglob("_C.abi3.so"))


def command(*arguments):
    return python("-m", "openreg_tools", "check", *arguments, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.compiles
def test_stable_package(stable):
    report = audit(stable)
    assert report.is_stable and report.torch and not report.absent
    assert numbers(report.torch) <= (2, 13, 0)  # for which it is built, TORCH_TARGET_VERSION
    assert "torch_call_dispatcher" in report.stable or "torch_library_impl" in report.stable
    assert numbers(report.python) <= (3, 11)  # Py_LIMITED_API
    done = command("--abi", stable, "--require-stable")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "stable"
    shown = re.search(r"\$ openreg-tools check --abi .*?\n(.*?)```", DOCUMENT.read_text(), re.S)[1].splitlines()
    assert not {re.sub("[0-9.]+", "#", line) for line in shown if line != "…"} - {
        re.sub("[0-9.]+", "#", line) for line in done.stdout.splitlines()
    }
    assert "torch: no unstable symbols" in done.stdout and "CPython: no unstable symbols" in done.stdout


@pytest.mark.compiles
def test_unstable_library(unstable):
    report = audit(unstable)
    found = {each.name: each for each in report.unstable}
    empty = next(each for each in report.unstable if each.operator == "aten::empty.memory_format")
    assert (empty.library, empty.header, empty.call) == ("libtorch_cpu", "ATen/ops/empty.h", "at::empty")
    assert empty.instead == "torch::stable::empty of torch/csrc/stable/ops.h"
    add = next(each for each in report.unstable if each.operator == "aten::add.Tensor")
    assert (add.header, add.instead) == ("ATen/ops/add.h", 'torch_call_dispatcher("aten::add", "Tensor", …)')
    check = next(each for name, each in found.items() if name.startswith("c10::detail::torchCheckFail("))
    assert (check.library, check.header) == ("libc10", "c10/util/Exception.h")
    assert check.instead.startswith("STD_TORCH_CHECK")
    device = next(each for name, each in found.items() if name.startswith("c10::Device::Device("))
    assert device.header == "c10/core/Device.h"
    variable = found["THPVariableClass"]
    assert (variable.library, variable.header) == ("libtorch_python", "torch/csrc/autograd/python_variable.h")
    private = found["_PyObject_GetDictPtr"]
    assert (private.library, private.header) == ("CPython", "cpython/object.h")
    assert report.python_stable == {"PyList_Size": "3.2"}
    assert not report.stable and report.torch == ""
    assert all(each.library in ("libc10", "libtorch_cpu", "libtorch_python", "CPython") for each in report.unstable)
    assert not [name for name in found if name.startswith("std::")]

    done = command("--abi", unstable, "--require-stable", "--json", unstable.with_suffix(".json"))
    assert done.returncode == 1, done.stderr
    assert command("--abi", unstable).returncode == 0
    assert done.stdout.splitlines()[-1] == "not stable: build it again for each release of torch and Python"
    assert "its name says .abi3" in done.stdout
    assert "    at::empty of ATen/ops/empty.h, the operator aten::empty.memory_format;" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[1:])
    said = json.loads(unstable.with_suffix(".json").read_text())
    assert not said["is_stable"] and {each["symbol"] for each in said["unstable"]} == {
        e.symbol for e in report.unstable
    }


@pytest.mark.compiles
def test_library_without_torch(tmp_path):
    source = 'struct o; extern "C" long PyList_Size(o*); extern "C" long f(o* x) { return PyList_Size(x); }'
    report = audit(compiled(tmp_path, "of_python", source))
    assert report.python_stable == {"PyList_Size": "3.2"} and report.is_stable and not report.torch
    assert "torch: not used by this library" in report.text()


@pytest.mark.compiles
def test_lowest_torch(tmp_path):
    report = audit(compiled(tmp_path, "later", SHIMS, "-DLATER=torch_list_size"))
    assert report.stable == {
        "aoti_torch_get_data_ptr": "2.9.0", "torch_is_tensor_pyobject": "2.15.0", "torch_list_size": "2.10.0"
    }  # fmt: skip
    assert report.torch == "2.15.0" and report.is_stable
    assert report.absent == (["torch_is_tensor_pyobject"] if numbers(RELEASE) < (2, 15) else [])
    text = report.text()
    assert "which torch 2.15.0 and later have" in text and "needs 2.15.0: torch_is_tensor_pyobject" in text
    report = audit(compiled(tmp_path, "unknown", SHIMS, "-DLATER=torch_of_the_future"))
    assert [(each.name, each.library) for each in report.unstable] == [("torch_of_the_future", "libtorch")]
    assert "torch 2.15.0 and later" in report.text() and "does not have these" in report.text()


@pytest.mark.compiles
def test_floors(unstable):
    """As binutils read them."""
    said = subprocess.run(["readelf", "-V", "-W", unstable], capture_output=True, text=True, check=True).stdout
    for kind in ("GLIBC", "GLIBCXX", "CXXABI"):
        versions = re.findall(rf"Name: {kind}_([\d.]+)", said)
        assert audit(unstable).floors.get(kind, "") == max(versions, key=numbers, default="")
    assert {"GLIBC", "GLIBCXX"} <= set(audit(unstable).floors)


def test_floor_of_packed_relocations(monkeypatch):
    """They need a glibc that reads them, even where each function that is called is of an older one."""
    names = ["GLIBC_2.2.5", "GLIBC_ABI_DT_RELR", "GLIBC_2.17", "GLIBC_PRIVATE", "CXXABI_1.3.9", "CXXABI_1.3.13"]
    monkeypatch.setattr(Binary, "_needed", lambda self: [types.SimpleNamespace(name=name) for name in names])
    library = Binary(next(Path(openreg_ops.__file__).parent.glob("_C.*.so")))
    assert library.floors() == {"GLIBC": "2.36", "CXXABI": "1.3.13"}


def test_our_own_library():
    """It is built for one release of torch, and takes hundreds of symbols of it."""
    report = audit(next(Path(openreg_ops.__file__).parent.glob("_C.*.so")))
    of_torch = [each for each in report.unstable if each.library != "CPython"]
    assert len(of_torch) > 300 and {"libc10", "libtorch_cpu", "libtorch_python"} == {each.library for each in of_torch}
    assert len([each for each in of_torch if each.header]) > 0.95 * len(of_torch)
    headers = {each.name.partition("(")[0]: each.header for each in of_torch}
    for name, header in {
        "at::native::mul_stub": "ATen/native/BinaryOps.h",  # declared by a macro
        "at::native::clamp_min_scalar_stub": "ATen/native/TensorCompare.h",  # of a function type with a comma
        "at::cpu::add_": "ATen/ops/add_cpu_dispatch.h",
        "at::meta::structured_add_Tensor::meta": "ATen/ops/add_meta.h",
    }.items():
        assert headers[name] == header, name
    for each in of_torch:
        assert not each.header or (TORCH / "include" / each.header).is_file(), each
    assert not [each.name for each in of_torch if each.name.startswith("_Z")]


def test_every_function_of_the_stable_interface_is_known():
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", TORCH / "lib/libtorch_cpu.so"], capture_output=True, text=True
    )
    exported = set(re.findall(r" [TW] ((?:torch|aoti)_\w+)$", listed.stdout, re.M))
    declared = shims.declared(TORCH / "include")
    assert len(exported) > 300
    assert not {name for name in exported if shims.since(name, declared) is None}
    if numbers(RELEASE) <= (2, 15, 0):
        assert not {name for name in declared if numbers(shims.releases()[name]) > numbers(RELEASE)}
        late = {name for name, first in shims.releases().items() if numbers(first) > numbers(RELEASE)}
        assert not late & exported


def test_headers_of_a_later_torch(tmp_path):
    """A function that the table does not have is as old as the header's guard."""
    path = tmp_path / "torch/csrc/stable/c/shim.h"
    path.parent.mkdir(parents=True)
    path.write_text("""
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_16_0
AOTI_TORCH_EXPORT AOTITorchError
torch_first_of_2_16(void* py_obj, bool* ret);  // torch_not(this)
#ifdef USE_CUDA
AOTI_TORCH_EXPORT AOTITorchError torch_second_of_2_16(int32_t a);
#endif
#endif // TORCH_FEATURE_VERSION >= TORCH_VERSION_2_16_0
AOTI_TORCH_EXPORT AOTITorchError torch_list_size(StableListHandle list_handle, size_t* size);
""")
    declared = shims.declared(tmp_path)
    assert set(declared) == {"torch_first_of_2_16", "torch_second_of_2_16", "torch_list_size"}
    assert shims.since("torch_first_of_2_16", declared) == shims.since("torch_second_of_2_16", declared) == "2.16.0"
    assert shims.since("torch_list_size", declared) == "2.10.0"
    assert shims.since("torch_not", declared) is None


def test_where_headers_declare_it(tmp_path):
    """Members too, where only one of the headers with the class has them; not what only a function's body mentions."""
    (tmp_path / "c10").mkdir()
    (tmp_path / "c10" / "one.h").write_text("""
class C10_API Outer final : public Base {
  int first();
  struct Nested {
    enum class Kind : int { small };
    int second();
  };
  int third() { struct Local { int hidden(); }; return called(); }
  int fourth();
};
namespace c10::inner {
struct Shared { int here(); };
inline int free_one() { return elsewhere(); }
extern int variable;
}
extern "C" {
int of_c();
}
""")
    (tmp_path / "c10" / "other.h").write_text("namespace c10::inner { struct Shared { int there(); }; }")
    wanted = {
        "Outer": "one", "Outer::first": "one", "Outer::Nested": "one", "Outer::Nested::Kind": "one",
        "Outer::Nested::second": "one", "Outer::third": "one", "Outer::fourth": "one", "c10::inner::Shared::here": "one",
        "c10::inner::Shared::there": "other", "c10::inner::free_one": "one", "c10::inner::variable": "one", "of_c": "one",
        "called": "", "elsewhere": "", "hidden": "", "Local::hidden": "",
        "c10::inner::elsewhere": "", "fourth": "", "Nested::second": "",
    }  # fmt: skip
    found = torch_headers([path_of(name) for name in wanted], tmp_path)
    assert {"::".join(path): where for path, where in found.items()} == {
        name: f"c10/{header}.h" for name, header in wanted.items() if header
    }


@pytest.mark.parametrize(
    ("symbol", "path"),
    [
        ("_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", "c10 Error Error"),
        ("_ZTVN3c105ErrorE", "c10 Error"),
        ("_ZN3c10lsERSoRKNS_6DeviceE", "c10 operator<<"),
        ("_ZNK2at10TensorBase8data_ptrIfEEPT_v", "at TensorBase data_ptr"),
        ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "THPVariable_Wrap"),
        ("THPVariableClass", "THPVariableClass"),
        ("_ZNK3c106SymIntcvlEv", "c10 SymInt operator long"),
    ],
)  # fmt: skip
def test_names(symbol, path):
    assert path_of(demangled(symbol)) == tuple(path.split(" ", 2 if "operator long" in path else -1))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in {
        "text": b"not a library", "empty": b"", "pe": b"MZ\x90\0" * 20, "mach-o": b"\xcf\xfa\xed\xfe" * 20,
        "wheel": b"PK\x03\x04....", "archive": b"!<arch>\n" * 3, "cut": b"\x7fELF\x02\x01\x01" + bytes(20),
        "shortened": next((TORCH / "lib").glob("libc10.so")).read_bytes()[:5000],
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "is of another kind: expected a shared library of Linux"),
        ("empty", "is of another kind: expected a shared library of Linux"),
        ("pe", "is a Windows library (PE): expected a shared library of Linux"),
        ("mach-o", "is a macOS library (Mach-O): expected"),
        ("wheel", "unzip it and name the library in it"),
        ("cut", "cannot be read as ELF, it may be cut off"),
        ("shortened", "cannot be read as ELF, it may be cut off"),
        ("missing", "is not there: expected a library such as _C.so"),
        (".", "is a folder: expected a library such as _C.so"),
        (
            openreg_ops.library_paths()[0] + "/libopenreg_ops.so",
            "uses no symbol of libtorch, libc10 or CPython: name the library",
        ),
        ("archive", "is a static library: expected a shared library"),
    ],
    ids=lambda value: Path(value).name,
)
def test_refused(files, name, message):
    with pytest.raises(Wrong, match=re.escape(message)):
        audit(files / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--abi", "missing.so"], "check: missing.so is not there: expected a library such as _C.so"),
        (
            ["--abi", "x.so", "aten::add", "--input", "f32[1]"],
            "check: --abi takes a library, --require-stable and --json",
        ),
        (["aten::add", "--require-stable"], "check: --require-stable applies to a library: give --abi LIBRARY too"),
        ([], "check: expected an operator, --explain CHECK or --abi LIBRARY"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(message), done.stderr


@pytest.mark.parametrize("module", ["elftools", "abi3info"])
def test_without_what_it_needs(module):
    code = (
        f"import sys; sys.modules[{module!r}] = None\nfrom openreg_tools.abi import audit\n"
        f"audit({str(TORCH / 'lib/libc10.so')!r})"
    )
    done = python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "pip install 'openreg_tools[abi]'" in done.stderr.splitlines()[-1]
