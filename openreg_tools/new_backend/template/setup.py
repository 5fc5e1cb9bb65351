"""Builds torch_acme with setuptools and ninja, against the torch that is installed. Rung 1.

Document: "Extending dispatcher for a new backend in C++", section "Build an extension".
"""

import os
import sys
import sysconfig
from glob import glob

from setuptools import setup

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # an older torch_acme must not be loaded here
try:
    import torch
except ImportError:  # pip hides the environment while it builds, but the build is for the torch in it
    sys.path += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    import torch
from torch.utils.cpp_extension import BuildExtension, CppExtension

here = os.path.dirname(os.path.abspath(__file__))
kineto = os.path.join(os.path.dirname(torch.__file__), "include", "kineto")
extension = CppExtension(
    "torch_acme._C",
    sorted(glob("csrc/**/*.cpp", recursive=True)),
    include_dirs=[os.path.join(here, "csrc"), kineto],
    extra_compile_args=["-O1", "-g0", "-std=c++20"],
)
setup(
    packages=["torch_acme"],
    package_data={"torch_acme": ["exclusions.txt"]},
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    # PyTorch's C++ interface changes between releases, so each build works with one of them.
    install_requires=[f"torch=={torch.__version__.partition('+')[0]}"],
)
