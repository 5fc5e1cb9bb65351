"""Builds openreg_ops: one C++ extension, openreg_ops._C, from every file in csrc/."""

import os
import platform
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


def vector_flags() -> list[str]:
    """at::vec is chosen at compile time; use AVX2 where the building machine has it."""
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        return []
    return ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2"]


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the file's time alone where nothing changed."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


write_if_changed(
    ROOT / "openreg_ops" / "_build.py",
    f'"""Written by setup.py: what the extension was built with."""\n\nTORCH_VERSION = "{torch.__version__}"\n',
)

# DispatchStub's signature depends on what torch itself was built with.
STUBS = ["-DHAVE_AVX512_CPU_DEFINITION", "-DHAVE_AVX2_CPU_DEFINITION"] if platform.machine() == "x86_64" else []

os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

setup(
    packages=["openreg_ops", "openreg_ops.meta", "openreg_ops.testing", "openreg_ops.tools"],
    package_dir={"openreg_ops.meta": "meta"},
    ext_modules=[
        CppExtension(
            "openreg_ops._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=[
                "-std=c++20", "-O2", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra",
                "-Wno-interference-size", "-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers", "-Wno-deprecated-declarations",
                *STUBS, *vector_flags(),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
