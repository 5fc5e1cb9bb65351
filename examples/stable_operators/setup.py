"""Builds stable_operators._C from csrc/, with the torch in the environment that pip installs into."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

# pip builds in an isolated environment, which has neither torch nor openreg_ops.
sys.path.append(sysconfig.get_path("platlib"))

from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

ROOT = Path(__file__).parent
device = importlib.util.find_spec("openreg_ops")
if device is None:
    raise SystemExit(
        "stable_operators needs the headers of openreg_ops to build, but not openreg_ops to run: pip install openreg_ops"
    )

# One library for CPython 3.11 and later and torch 2.13 and later: it calls only stable interfaces.
STABLE = "-DTORCH_TARGET_VERSION=0x020d000000000000"
setup(
    ext_modules=[
        CppExtension(
            "stable_operators._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            include_dirs=[str(Path(device.origin).parent / "include")],
            depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h")],
            # Without the last two, compilers do not vectorize loops with comparisons and math library calls.
            extra_compile_args=[
                "-O3",
                "-std=c++20",
                "-fvisibility=hidden",
                STABLE,
                "-fno-trapping-math",
                "-fno-math-errno",
            ],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildExtension},
)
