"""A complete simulated accelerator for PyTorch, and custom operators with autograd that run on it.

Importing this package makes ``device="openreg"`` work; ``import torch`` alone does it too, through
torch's backend autoload (``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off).
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import sys
import threading
from typing import Any


def _autoload() -> None:
    """torch calls this from its ``torch.backends`` entry point; importing this package does all the work.

    It is defined first because `import openreg_ops` in a process without torch imports torch, which looks it up at
    once.
    """


import torch  # noqa: E402


def _refuse(error: Exception) -> None:
    """Raise the error that keeps the package from loading; `python -m openreg_ops info` reports it instead.

    If it ends the program, Python prints its sentence alone. torch's autoload raises it again in an error of its own,
    which would print 40 lines.
    """
    if sys.argv[:2] == ["-m", "info"] and "openreg_ops" in sys.orig_argv:
        from openreg_tools.__main__ import main

        sys.argv[0] = "info"  # which imports this package again to see what it raises
        del sys.modules["openreg_ops"]
        raise SystemExit(main())
    before = sys.excepthook

    def show(kind: type[BaseException], shown: BaseException, trace: Any) -> None:
        if error in (shown, shown.__cause__):
            print("" if str(error).startswith("openreg_ops") else "openreg_ops: ", error, sep="", file=sys.stderr)
        else:
            before(kind, shown, trace)

    sys.excepthook = show
    raise error.with_traceback(None) from None  # the message is enough


try:
    from openreg_ops._build import TORCH_VERSION, VERSION
except ImportError:
    _refuse(ImportError("openreg_ops is not built here: run `pip install --no-build-isolation -e .` in its source"))

_built, _installed = TORCH_VERSION.split("+")[0], torch.__version__.split("+")[0]
if _installed != _built:
    _refuse(
        ImportError(
            f"openreg_ops was built for torch {TORCH_VERSION} but torch {torch.__version__} is installed; "
            "rebuild it with `pip install --force-reinstall --no-deps --no-build-isolation .` in its source, "
            f"or install the wheel for that torch, openreg_ops=={VERSION}+torch{_installed}, or torch=={_built}"
        )
    )

from openreg_ops import _build, environment, kernel_library  # noqa: E402

try:
    kernel_library.capability()
except ImportError as error:
    _refuse(error)

try:
    from openreg_tools import backends
except ImportError:
    _refuse(
        ImportError(
            "openreg_ops needs openreg_tools, which is not installed: run "
            "`pip install --no-build-isolation ./openreg_tools` in its source"
        )
    )

try:
    environment.check()  # before _C, which reads the first of them when it is loaded
    environment.check_cuda()

    from openreg_ops import _C

    kernel_library.load()
    _C.set_host_scalars(_build.HOST_SCALARS)
    from openreg_ops import device_module

    device_module.register()
    from openreg_ops import autograd_fallback, cuda_operators, fallback, meta, optim, torch_patches
    from openreg_ops.distributed import process_group
    from openreg_ops.inductor import registration as graphs
    from openreg_ops.torch_patches.import_hooks import after_import
except (environment.WrongVariable, environment.CudaUnavailable) as wrong:
    _refuse(wrong)


def _end_threads() -> None:
    if threading.active_count() > 1:
        _C.end_threads()


def _end_workers() -> None:
    _C.end_workers(getattr(sys, "last_type", None) is KeyboardInterrupt)  # if Ctrl-C ends it, drops what has not begun


atexit.register(_C.observe, False)
atexit.register(_end_workers)  # from here on, the last one first; see Note [Exit] in csrc/bindings/exit.cpp
atexit.register(_C.end_autograd_threads)
atexit.register(_end_threads)

from openreg_ops.cpp_extension import cmake_prefix_path, include_paths, library_paths  # noqa: E402
from openreg_ops.meta import *  # noqa: E402, F403
from openreg_ops.optim import AdamW  # noqa: E402
from openreg_ops.tools.backend import Openreg  # noqa: E402

autograd = autograd_fallback  # the same module under a shorter name

graphs.register()
torch_patches.register()
process_group.register()
cuda_operators.register()
after_import("safetensors", lambda: importlib.import_module("openreg_ops.integrations.safetensors"))
backends.register(Openreg())

__all__ = [
    "AdamW",
    "autograd",
    "autograd_fallback",
    "cmake_prefix_path",
    "fallback",
    "include_paths",
    "library_paths",
    "meta",
    "optim",
    *meta.__all__,
]


def __getattr__(name: str) -> Any:
    if name == "trace":  # a tool, imported on first use
        from openreg_tools.trace import trace

        return trace
    if name == "testing":
        return importlib.import_module("openreg_ops.testing")
    if name == "__version__":
        return importlib.metadata.version("openreg_ops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
