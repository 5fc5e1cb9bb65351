"""What you build a package of kernels for the device with: headers, a library, a CMake package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cmake_prefix_path", "include_paths", "library_paths"]

_FOLDER = Path(__file__).parent

#: Where CMake finds ``find_package(openreg)``: ``cmake -DCMAKE_PREFIX_PATH=$(python -c "import openreg_ops;
#: print(openreg_ops.cmake_prefix_path)")``, like `torch.utils.cmake_prefix_path` for torch.
cmake_prefix_path = str(_FOLDER / "share" / "cmake")


def include_paths() -> list[str]:
    """The folders of headers: ``openreg/c_api.h``, ``openreg/launch.h``, ``openreg/openreg.h`` and ``openreg/torch.h``.

    Pass them as ``include_dirs``, along with `torch.utils.cpp_extension.include_paths`. A library built with the
    headers alone looks the device up when it first needs it, and can be loaded where openreg_ops is not installed.
    """
    return [str(_FOLDER / "include")]


def library_paths() -> list[str]:
    """The folder of ``libopenreg_ops.so``: the device itself, for programs without Python.

    Such programs define ``OPENREG_LINKED`` and link with ``-lopenreg_ops``. A library that Python loads after ``import
    torch`` does not need to.
    """
    return [str(_FOLDER / "lib")]
