"""Chooses which build of the operators' kernels a process uses, and loads it."""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path

import torch

from openreg_ops import _build

# The instruction sets that at::vec supports, the narrowest first, and whether this processor has them.
_WIDER = {"AVX2": torch.cpu._is_avx2_supported, "AVX512": torch.cpu._is_avx512_supported}
_ORDER = ("DEFAULT", *_WIDER)

shared = 0  # how many kernels of the CPU the device shares


def capability() -> str:
    """The vector instructions of the operators' kernels: ``"DEFAULT"``, ``"AVX2"`` or ``"AVX512"``.

    The widest build that PyTorch's own kernels may use, which ``ATEN_CPU_CAPABILITY`` limits. If every build is wider,
    as in a build for one machine, it is the narrowest.

    Raises:
        ImportError: the processor supports none of the builds.
    """
    built = [
        cpu_capability
        for cpu_capability in _build.CPU_CAPABILITIES
        if cpu_capability not in _WIDER or _WIDER[cpu_capability]()
    ]
    if not built:
        raise ImportError(
            f"openreg_ops was built for {_build.CPU_CAPABILITIES[0]}, which this processor lacks; rebuild it here with "
            "`pip install --force-reinstall --no-deps --no-build-isolation .` in its source"
        )
    torchs = torch.backends.cpu.get_cpu_capability()
    widest = _ORDER.index(torchs) if torchs in _ORDER else 0
    return next((build for build in reversed(built) if _ORDER.index(build) <= widest), built[0])


def library(capability: str) -> str:
    """The file with the kernels for a capability, linked with the extension module of this Python."""
    return f"_ops_{capability.lower()}{sysconfig.get_config_var('EXT_SUFFIX')}"


def load() -> None:
    """Load the library of `capability`, which registers kernels, and share the CPU's for all other operators."""
    global shared
    from openreg_ops import _C

    ctypes.CDLL(str(Path(__file__).with_name(library(capability()))))
    shared = _C.register_boxed_kernels()
    metas = (name.removesuffix("/Meta") for name in torch.library._impls if name.endswith("/Meta"))
    _C.set_python_meta_kernels([name.replace("/", "::") for name in metas])
