"""Builds openreg_ops: one C++ extension, openreg_ops._C, from every file in csrc/.

Most of a file's time goes to PyTorch's headers and what their templates make. So csrc/precompiled.h is compiled first, and
the compiler sees the files of a folder some at a time, as one: a name in an anonymous namespace is unique in its folder.
"""

import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

# An openreg_ops that is installed already must not be loaded: it may be for another torch, and this build is how to fix that.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
# Without it ccache, which torch's build uses where it is installed, passes by what includes a precompiled header.
os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")

import torch  # noqa: E402
from setuptools import setup  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler, include_paths  # noqa: E402

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
# Objects for different versions of torch never meet; relative, as setuptools wants it.
BUILD = f"build/torch-{torch.__version__}"


def vector_capability() -> str:
    """The widest vectors of the building machine that at::vec knows; it is chosen when a file is compiled."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"} <= set(flags):
        return "AVX512"
    return "AVX2" if {"avx2", "fma", "f16c"} <= set(flags) else "DEFAULT"


CAPABILITY = vector_capability()
VECTORS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
    "DEFAULT": [],
}[CAPABILITY] + [f"-DCPU_CAPABILITY={CAPABILITY}"] * (CAPABILITY != "DEFAULT")


def host_scalars() -> dict[str, int]:
    """How many CPU scalars CUDA's operators of several tensors take, 0 or 1: Note [CPU scalars]."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}, which torch {torch.__version__} should have brought: reinstall torch")
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    entries = {each[: each.index("(")]: each for each in re.split(r"^- func: ", text, flags=re.M)[1:]}
    checks: dict[str, set[bool]] = {}
    for name, entry in entries.items():
        delegate = re.search(r"structured_delegate: ([\w.]+)", entry)
        dispatch = re.findall(r"^    ([\w, ]+):", entries[delegate[1]] if delegate else entry, flags=re.M)
        keys = {key.strip() for line in dispatch for key in line.split(",")}
        if any("ufunc_inner_loop:" in each for each in (entry, entries[delegate[1]] if delegate else "")):
            keys |= {"CPU", "CUDA"}
        inputs = re.findall(r"\bTensor[^\s,]* \w+", re.split(r"\*, |\) ->", entry)[0])
        several = len(inputs) > 1 or any("[]" in each for each in inputs)
        if several and {"CPU", "CUDA"} <= keys and not name.startswith("_foreach_"):
            checks.setdefault(f"aten::{name.split('.')[0]}", set()).add("device_check: NoCheck" not in entry)
    return {name: 0 if any(every) else 1 for name, every in sorted(checks.items())}


def openreg_tools() -> str:
    """The requirement of openreg_tools: this source's own, or with OPENREG_RELEASE=1, for an index, the same version."""
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    if os.environ.get("OPENREG_RELEASE") == "1":
        return f"openreg_tools=={version}"
    return f"openreg_tools @ {(ROOT / 'openreg_tools').resolve().as_uri()}"


# How many files of a folder the compiler sees as one: of operators few, so that a change to one is built soon.
TOGETHER = {"csrc/ops": 3, "csrc/runtime": 20}
APART = {"csrc/ops/nms.cpp"}  # has options of its own for all that follows


def units(sources: list[str]) -> dict[str, list[str]]:
    """The files to be compiled as one, by name."""
    found = {source.replace("/", "_"): [source] for source in APART}
    for folder in sorted({os.path.dirname(source) for source in sources}):
        files = [source for source in sources if os.path.dirname(source) == folder and source not in APART]
        count = TOGETHER.get(folder, 5)
        for first in range(0, len(files), count):
            found[f"{folder.replace('/', '_')}_{first // count}.cpp"] = files[first : first + count]
    return found


def write(path: Path, text: str) -> None:
    """Write a file, unless that is what it says: what is made of it stays as new as it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Build(BuildExtension):
    """Compiles, keeps the objects for the next time, and notes beside the extension which torch it is for."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = f"{BUILD}/objects"  # an editable install would take a temporary directory

    def build_extension(self, extension: CppExtension) -> None:
        header, sources = ROOT / BUILD / "units" / "precompiled.h", []
        write(header, f'#include "{ROOT}/csrc/precompiled.h"\n')
        self.precompile(header, extension)
        for name, together in units(extension.sources).items():
            # The runtime does without PyTorch.
            first = [] if name.startswith("csrc_runtime") else ["precompiled.h"]
            text = "".join(f'#include "{each}"\n' for each in [*first, *(ROOT / source for source in together)])
            write(header.with_name(name), text)
            sources.append(f"{BUILD}/units/{name}")
        extension.sources, extension.depends = sources, [str(path) for path in (ROOT / "csrc").rglob("*.*")]
        super().build_extension(extension)

    def precompile(self, header: Path, extension: CppExtension) -> None:
        """Compile a header, if what it includes or how it is compiled has changed."""
        compiler = shlex.split(get_cxx_compiler())
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        made = header.with_suffix(".h.pch" if "clang" in version else ".h.gch")
        includes = [f"-I{each}" for each in [*self.compiler.include_dirs, *extension.include_dirs]]
        flags = [*self.compiler.compiler_so[1:], *includes, *extension.extra_compile_args]
        command = [*compiler, *flags, "-x", "c++-header", str(header), "-o", str(made)]
        how, needs = made.with_suffix(".txt"), made.with_suffix(".d")
        if made.exists() and how.exists() and how.read_text() == version + shlex.join(command):
            paths = needs.read_text().replace("\\\n", " ").partition(":")[2].split()
            if all(os.path.exists(path) and os.path.getmtime(path) <= made.stat().st_mtime for path in paths):
                return
        print("precompiling PyTorch's headers", flush=True)
        subprocess.run([*command, "-MMD", "-MF", str(needs)], check=True)
        how.write_text(version + shlex.join(command))

    def run(self) -> None:
        super().run()
        target = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        (target / "openreg_ops" / "_build.py").write_text(
            '"""Written by setup.py: what the extension was built with."""\n\n'
            f'TORCH_VERSION = "{torch.__version__}"\nCPU_CAPABILITY = "{CAPABILITY}"\n'
            f"# Note [CPU scalars] in csrc/aten/host_scalars.h\nHOST_SCALARS = {host_scalars()!r}\n"
        )


# DispatchStub's signature depends on what torch itself was built with.
STUBS = ["-DHAVE_AVX512_CPU_DEFINITION", "-DHAVE_AVX2_CPU_DEFINITION"] if platform.machine() == "x86_64" else []

# Warnings of PyTorch's headers are not ours.
SYSTEM = [word for path in include_paths() for word in ("-isystem", path)]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-interference-size",
    "-Wno-unused-parameter",
    "-Wno-unknown-pragmas",
    "-Wno-missing-field-initializers",
    "-Wno-deprecated-declarations",
    "-Wno-uninitialized",  # g++ 12 finds it in its own AVX-512 headers
    "-Wno-maybe-uninitialized",
]

setup(
    packages=[
        "openreg_ops",
        "openreg_ops.inductor",
        "openreg_ops.integrations",
        "openreg_ops.meta",
        "openreg_ops.openreg",
        "openreg_ops.testing",
        "openreg_ops.tools",
    ],
    package_dir={"openreg_ops.meta": "meta"},
    package_data={"openreg_ops.tools": ["templates/*"]},
    py_modules=["pytest_openreg_ops"],
    # PyTorch's C++ interface is not stable between releases, so the built package is for exactly one.
    install_requires=[f"torch=={torch.__version__.split('+')[0]}", openreg_tools()],
    ext_modules=[
        CppExtension(
            "openreg_ops._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc"), str(Path(torch.__file__).parent / "include" / "kineto")],
            extra_compile_args=[
                "-std=c++20",
                "-O2",
                "-g0",  # Python asks for -g, which makes the build slower and the library 16 times as big
                "-fopenmp",
                "-fvisibility=hidden",
                *SYSTEM,
                *WARNINGS,
                *STUBS,
                *VECTORS,
            ],
        )
    ],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
    options={"build": {"build_base": BUILD}},
)
