"""Builds openreg_ops from every file in csrc/: the extension module _C, and the kernel libraries that it loads.

Most of a file's compile time goes to PyTorch's headers and their templates. So csrc/precompiled.h is compiled once, and
the compiler gets several files of a folder at a time, as one: a name in an anonymous namespace is unique in its folder.

Note [Libraries]: csrc/runtime is a library that needs neither PyTorch nor Python, libopenreg_ops.so, whose interface
for everything else is openreg_ops/include. Elementwise code (KERNELS) is a library, _ops_CAPABILITY.so, built for each
set of vector instructions that a processor may have; openreg_ops/kernel_library.py loads the one that fits. A build
for the local machine has one such library; with OPENREG_RELEASE=1, for a wheel, there is one for each. Everything else
is _C.
"""

import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from urllib.parse import urljoin

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


def torch_folder() -> Path:
    """The location of the torch to build with: the importable one. This does not import it, because that takes
    seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("openreg_ops is built with PyTorch's headers, but torch is not installed here")
    return Path(spec.origin).parent


TORCH = torch_folder()
TORCH_VERSION = runpy.run_path(str(TORCH / "version.py"))["__version__"]
RELEASE = os.environ.get("OPENREG_RELEASE") == "1"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


def compiler_says(option: str) -> str:
    return subprocess.run([*COMPILER, option], capture_output=True, text=True, check=True).stdout


MACHINE = compiler_says("-dumpmachine").split("-")[0]
CLANG = "clang" in compiler_says("--version")
# Objects for different versions of torch and Python are kept apart; the path is relative, as setuptools requires.
BUILD = f"build/{sys.implementation.cache_tag}-torch-{TORCH_VERSION}"
if MACHINE != platform.machine():
    BUILD += f"-{MACHINE}"


# The vector capabilities that at::vec supports, the narrowest first. Each compilation of a file uses one.
X86 = MACHINE == "x86_64"
WIDER = {
    "AVX2": ["avx2", "fma", "f16c"],
    "AVX512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"],
}


def capabilities() -> list[str]:
    """The capabilities to build for: the machine's, or with OPENREG_RELEASE=1, for a wheel, all of them."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if X86 else set()
    every = ["DEFAULT", *WIDER] if X86 else ["DEFAULT"]
    if RELEASE:
        return every
    return [capability for capability in every if flags.issuperset(WIDER.get(capability, []))][-1:]


def vectors(capability: str) -> list[str]:
    """The compiler's options for a capability."""
    wider = [f"-m{flag}" for flag in WIDER.get(capability, [])]
    defined = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"] if wider else []
    return ["-march=x86-64-v2"] * X86 + wider + defined


CAPABILITIES = capabilities()


def host_scalars() -> dict[str, int]:
    """How many CPU scalars CUDA's operators of several tensors accept, 0 or 1: see Note [CPU scalars]."""
    path = TORCH.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}, which torch {TORCH_VERSION} should have brought: reinstall torch")
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    entries = {entry[: entry.index("(")]: entry for entry in re.split(r"^- func: ", text, flags=re.M)[1:]}
    checks: dict[str, set[bool]] = {}
    for name, entry in entries.items():
        delegate = re.search(r"structured_delegate: ([\w.]+)", entry)
        dispatch = re.findall(r"^    ([\w, ]+):", entries[delegate[1]] if delegate else entry, flags=re.M)
        keys = {key.strip() for line in dispatch for key in line.split(",")}
        if any("ufunc_inner_loop:" in declared for declared in (entry, entries[delegate[1]] if delegate else "")):
            keys |= {"CPU", "CUDA"}
        inputs = re.findall(r"\bTensor[^\s,]* \w+", re.split(r"\*, |\) ->", entry)[0])
        several = len(inputs) > 1 or any("[]" in tensor for tensor in inputs)
        if several and {"CPU", "CUDA"} <= keys and not name.startswith("_foreach_"):
            checks.setdefault(f"aten::{name.split('.')[0]}", set()).add("device_check: NoCheck" not in entry)
    return {name: 0 if any(every) else 1 for name, every in sorted(checks.items())}


VERSION = tomllib.loads((ROOT / "openreg_tools/pyproject.toml").read_text())["project"]["version"]
# A local version label (PEP 440): a wheel is for one torch, and one index has wheels for several.
LABEL = os.environ.get("OPENREG_LABEL", f"torch{TORCH_VERSION.split('+')[0]}") if RELEASE else ""


def readme() -> str:
    """README.md for a package index: its relative links and pictures lead to the repository at the version's tag."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith((".svg", ".png", ".gif")) else "blob"
        return link[1] + urljoin(f"{address}/{kind}/v{VERSION}/", link[2])

    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    relative = r"""(\]\(|(?:href|src|srcset)=")(?!https?:|#)([^)"\s]+)"""
    parts[::2] = [re.sub(relative, absolute, text) for text in parts[::2]]  # the others are code
    return "".join(parts)


def openreg_tools() -> str:
    """The requirement of openreg_tools: this source's own, or in a wheel the same version."""
    if RELEASE or (ROOT / "PKG-INFO").exists():  # a source archive has it
        return f"openreg_tools=={VERSION}"
    return f"openreg_tools @ {(ROOT / 'openreg_tools').resolve().as_uri()}"


# How many files of a folder the compiler gets as one: few for operators, so that a change to one builds quickly.
TOGETHER = {"csrc/ops": 3}
# Note [Libraries]
RUNTIME = "csrc/runtime/"
KERNELS = ("csrc/kernels", "csrc/ops", "csrc/aten/attention")
RUNTIME_LIBRARY = "libopenreg_ops.so"
APART = {
    "csrc/kernels/attention.cpp",  # takes as long as three others
    "csrc/ops/record.cpp",  # so does this
    "csrc/ops/nms.cpp",  # has its own options for everything that follows
}


def units(sources: list[str]) -> dict[str, list[str]]:
    """The files to compile as one, by name."""
    found = {source.replace("/", "_"): [source] for source in sources if source in APART}
    for folder in sorted({os.path.dirname(source) for source in sources}):
        files = [source for source in sources if os.path.dirname(source) == folder and source not in APART]
        count = TOGETHER.get(folder, 5)
        for first in range(0, len(files), count):
            found[f"{folder.replace('/', '_')}_{first // count}.cpp"] = files[first : first + count]
    return found


def write(path: Path, text: str) -> None:
    """Write a file, unless it already has this content, so that its outputs stay up to date."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# DispatchStub's signature depends on what torch itself was built with.
STUBS = {
    "x86_64": ["-DHAVE_AVX512_CPU_DEFINITION", "-DHAVE_AVX2_CPU_DEFINITION"],
    "aarch64": ["-DHAVE_SVE_CPU_DEFINITION"],
}.get(MACHINE, [])

# Warnings in PyTorch's headers are not ours.
SYSTEM = [
    TORCH / "include",
    TORCH / "include/torch/csrc/api/include",
    TORCH / "include/kineto",
    sysconfig.get_path("include"),
]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-unknown-pragmas",
    "-Wno-missing-field-initializers",
    "-Wno-deprecated-declarations",
]
if not CLANG:  # in g++ 12's own headers
    WARNINGS += ["-Wno-interference-size", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# For code that does not matter at run time, inlining calls is enough: that compiles in three quarters of the time.
COLD = ("csrc/backend", "csrc/bindings")
FULL = ["-O2"]
LIGHT = ["-O1", "-finline-functions", "-finline-small-functions", "-findirect-inlining"]
UNCOLLECTED = ["--param", "ggc-min-heapsize=4000000"]  # g++ spends a tenth of its time on garbage collection
FLAGS = [
    "-std=c++20",
    "-DNDEBUG",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-Icsrc",
    "-Iopenreg_ops/include",
    *(f"-isystem{path}" for path in SYSTEM),
    *WARNINGS,
    *STUBS,
    "-fno-plt",  # a call into torch's libraries jumps once instead of twice
]
# g++'s OpenMP is torch's own, which is already loaded. Clang's is a different one, which torch.set_num_threads() does
# not affect.
LIBRARIES = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", *["-fopenmp"] * CLANG]


def shell(*words: str) -> str:
    """A command, quoted for ninja and the shell."""
    return shlex.join(words).replace("$", "$$")


def library(capability: str) -> str:
    """The file of the kernels for a capability."""
    return f"_ops_{capability.lower()}{sysconfig.get_config_var('EXT_SUFFIX')}"


def rules(sources: list[str], module: str) -> str:
    """The ninja file."""
    compiler = list(COMPILER)
    if shutil.which("ccache") and "ccache" not in compiler[0]:
        compiler.insert(0, "ccache")
    full, light = (FULL, ["-O1"]) if CLANG else (FULL + UNCOLLECTED, LIGHT + UNCOLLECTED)
    options = shlex.split(os.environ.get("CXXFLAGS", ""))
    compile = shell(*compiler, *FLAGS, *options) + " $flags -MMD -MF $out.d -o $out"
    link = shell(*compiler, "-shared", *shlex.split(os.environ.get("LDFLAGS", "")))
    noted = "  depfile = $out.d\n  deps = gcc\n"
    made_with = f"{BUILD}/made_with.txt"  # -MMD does not record system headers
    write(ROOT / made_with, f"{compiler_says('--version')}{TORCH} {TORCH_VERSION}\n")
    lines = [
        f"builddir = {BUILD}",
        f"rule precompile\n  command = {compile} -x c++-header $in\n  description = PyTorch's headers\n{noted}",
        f"rule compile\n  command = {compile} $with -c $in\n  description = $files\n{noted}",
        f"rule link\n  command = {link} $in -o $out $with \n  description = $out\n",
    ]

    every = []
    torch = shell(*LIBRARIES)

    def objects(sources: list[str], capability: str) -> str:
        """Adds rules that compile them for a capability."""
        found = []
        for name, files in units(sources).items():
            unit, folder = f"{BUILD}/{capability}/{name}", os.path.dirname(files[0])
            write(ROOT / unit, "".join(f'#include "{file.removeprefix("csrc/")}"\n' for file in files))
            for_runtime = name.startswith(RUNTIME.replace("/", "_"))
            header = f"{BUILD}/{capability}/precompiled.h"
            edge = f"build {unit}.o: compile {unit} | {made_with}"
            lines.append(edge + f" {header}{suffix}\n  with = -include {header}" * (not for_runtime))
            visible = ["-fvisibility=default", "-fno-semantic-interposition"] * for_runtime  # to _C
            level = light if folder.startswith(COLD) else full
            lines.append(f"  flags = {shell(*vectors(capability), *level, *visible)}")
            lines.append(f"  files = {' '.join(Path(file).stem for file in files)}")
            found.append(unit + ".o")
        every.extend(found)
        return " ".join(found)

    suffix = ".pch" if CLANG else ".gch"
    kernels = [source for source in sources if os.path.dirname(source) in KERNELS]
    for capability in CAPABILITIES:
        lines.append(f"build {BUILD}/{capability}/precompiled.h{suffix}: precompile csrc/precompiled.h | {made_with}")
        lines.append(f"  flags = {shell(*vectors(capability), *full)}")
        lines.append(f"build {BUILD}/{library(capability)}: link {objects(kernels, capability)} | {BUILD}/{module}")
        lines.append(f"  with = {BUILD}/{module} {torch}")
    runtime = [source for source in sources if source.startswith(RUNTIME)]
    rest = [source for source in sources if source not in kernels and source not in runtime]
    lines.append(f"build {BUILD}/{RUNTIME_LIBRARY}: link {objects(runtime, CAPABILITIES[0])}")
    lines.append(f"  with = -Wl,-soname,{RUNTIME_LIBRARY} -Wl,-Bsymbolic-functions -pthread")
    lines.append(f"build {BUILD}/{module}: link {objects(rest, CAPABILITIES[0])} | {BUILD}/{RUNTIME_LIBRARY}")
    found = shell(f"-L{BUILD}", "-lopenreg_ops", "-Wl,-rpath,$ORIGIN/lib")
    lines.append(f"  with = -Wl,-soname,openreg_ops.{module} {found} {torch} -ltorch_python")
    lines.append(f"build objects: phony {' '.join(every)}")
    lines.append(
        f"default {BUILD}/{module} {' '.join(f'{BUILD}/{library(capability)}' for capability in CAPABILITIES)}"
    )
    return "\n".join([*lines, ""])


class Build(build_ext):
    """Compiles with ninja, keeps the objects for the next build, and records beside the extension what it is for."""

    user_options = [
        *build_ext.user_options,
        ("objects", None, "compile, and link nothing: for another machine's compiler"),
    ]
    boolean_options = [*build_ext.boolean_options, "objects"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.objects = False
        self.force = True  # the module of another torch may be newer

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        write(ROOT / BUILD / "build.ninja", rules(extension.sources, target.name))
        # Without it, ccache skips files that include a precompiled header.
        environment = {"CCACHE_SLOPPINESS": "pch_defines,time_macros", **os.environ}
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "ninja", "-f", f"{BUILD}/build.ninja", "-j", jobs, *["objects"] * self.objects]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            raise CompileError("compilation failed; the errors are above")
        if not self.objects:
            self.copy_file(str(ROOT / BUILD / target.name), str(target))

    def run(self) -> None:
        super().run()
        if self.objects:
            return
        package = (ROOT if self.inplace or self.editable_mode else Path(self.build_lib)) / "openreg_ops"
        for old in package.glob(f"_ops_*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            old.unlink()
        for capability in CAPABILITIES:
            self.copy_file(str(ROOT / BUILD / library(capability)), str(package))
        (package / "lib").mkdir(exist_ok=True)
        self.copy_file(str(ROOT / BUILD / RUNTIME_LIBRARY), str(package / "lib"))
        (package / "_build.py").write_text(
            '"""Written by setup.py: what the extension was built with."""\n\n'
            f'VERSION = "{VERSION}"\nTORCH_VERSION = "{TORCH_VERSION}"\n'
            f"CPU_CAPABILITIES = {tuple(CAPABILITIES)!r}  # the narrowest first\n"
            f"# Note [CPU scalars] in csrc/aten/traits/host_scalars.h\nHOST_SCALARS = {host_scalars()!r}\n"
        )


setup(
    version=f"{VERSION}+{LABEL}" if LABEL else VERSION,
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        "openreg_ops",
        "openreg_ops.cuda_operators",
        "openreg_ops.device",
        "openreg_ops.distributed",
        "openreg_ops.inductor",
        "openreg_ops.integrations",
        "openreg_ops.meta",
        "openreg_ops.sanitizer",
        "openreg_ops.schedules",
        "openreg_ops.testing",
        "openreg_ops.tools",
        "openreg_ops.torch_patches",
    ],
    package_dir={"openreg_ops.meta": "meta"},
    package_data={
        "openreg_ops": ["py.typed", "_C.pyi", "include/openreg/*.h", "share/cmake/openreg/*.cmake"],
        "openreg_ops.tools": ["templates/*.in", "templates/package/*.in"],
    },
    py_modules=["openreg_device", "pytest_openreg_ops"],
    # PyTorch's C++ interface is not stable between releases, so the built package works with exactly one.
    install_requires=[f"torch=={TORCH_VERSION.split('+')[0]}", openreg_tools()],
    ext_modules=[Extension("openreg_ops._C", SOURCES)],
    cmdclass={"build_ext": Build},
    options={"build": {"build_base": BUILD}},
)
