"""The OPENREG_* variables and their valid values, checked before anything reads them. Imports nothing, so `info` can
load it."""

from __future__ import annotations

import os
import re
import sys

__all__ = ["VARIABLES", "WrongVariable", "check"]

_SIZE = re.compile(r"\s*(\d+\.?\d*(?:e\d+)?)\s*(?:([kmgt])i?b?|b)?\s*", re.I)


def _is_size(text: str) -> bool:
    found = _SIZE.fullmatch(text)
    return bool(found) and 1 <= float(found[1]) * 1024 ** " kmgt".index((found[2] or " ").lower()) < 1e15


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) <= 64


def _is_names(text: str) -> bool:
    return all("::" in name for name in text.split(",") if name.strip())


# Every variable that the package reads, as in docs/environment.md: its valid values, or a rule and its check.
# The code that reads faults and operators checks them and raises the same error.
_ANY = lambda _: True  # noqa: E731
_SWITCH = ("0", "1")
_TAKES = {
    "OPENREG_DEVICE": (
        "openreg, cuda, or cuda:sm_90 for a compute capability",
        re.compile(r"openreg|cuda(:sm_\d{2,3})?").fullmatch,
    ),
    "OPENREG_DEVICE_COUNT": ("a number from 0 to 64", _is_count),
    "OPENREG_DEVICE_MEMORY": ("a size such as 8GiB or 512MiB", _is_size),
    "OPENREG_POISON": _SWITCH,
    "OPENREG_LAUNCH_MODE": ("inline", "async", "sync"),
    "OPENREG_SANITIZER": _SWITCH,
    "OPENREG_ISOLATION": ("off", "auto", "strict"),
    "OPENREG_FAULTS": ("faults such as kernel:after=100 or copy_latency:seconds=0.001", _ANY),
    "OPENREG_FALLBACK": ("allow", "warn", "error"),
    "OPENREG_FALLBACK_ALLOW": ("operators such as aten::add or mylib::*, commas between", _is_names),
    "OPENREG_FALLBACK_DENY": ("operators such as aten::add or mylib::*, commas between", _is_names),
    "OPENREG_AUTOGRAD_FALLBACK": ("error", "warn", "nothing"),
}
VARIABLES = tuple(_TAKES)


class WrongVariable(ValueError):  # noqa: N818 -- the name says it
    """A variable has an invalid value."""

    def __init__(self, name: str, why: str = "") -> None:
        rule = _TAKES[name][0] if callable(_TAKES[name][-1]) else " or ".join(_TAKES[name])
        said = f"{name}: expected {rule}, but got {os.environ[name]!r}" + f" ({why})" * bool(why)
        super().__init__(f"{said}; set it to one of these, or unset it")


def check() -> None:
    """Raise WrongVariable for the first variable with an invalid value; an empty variable counts as not set."""
    for name, takes in _TAKES.items():
        value = os.environ.get(name, "")
        if value and not (takes[-1](value) if callable(takes[-1]) else value in takes):
            raise WrongVariable(name)


def compute_capability() -> tuple[int, int] | None:
    """The capability that OPENREG_DEVICE=cuda:sm_90 pretends, such as (9, 0), or None."""
    _, _, pretended = os.environ.get("OPENREG_DEVICE", "").partition(":sm_")
    return divmod(int(pretended), 10) if pretended else None


class CudaUnavailable(ImportError):  # noqa: N818 -- the name says it
    """OPENREG_DEVICE=cuda asks for a name that the device cannot have in this process."""


def check_cuda() -> None:
    """Raise CudaUnavailable if OPENREG_DEVICE asks for the name cuda, and the device cannot have it."""
    if not os.environ.get("OPENREG_DEVICE", "").startswith("cuda"):
        return
    import torch

    version = torch.__version__.split("+")[0]
    if torch.version.cuda or torch.version.hip:
        raise CudaUnavailable(
            f"openreg_ops: OPENREG_DEVICE=cuda needs a PyTorch without CUDA, but {torch.__version__} was built with it; "
            f"run `pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu`"
        )
    openreg_device = sys.modules.get("openreg_device")
    if not openreg_device or not openreg_device.loaded:
        raise CudaUnavailable(
            "openreg_ops: OPENREG_DEVICE=cuda must be set before Python starts, in an environment where openreg_ops is "
            "installed with its file openreg_device.pth; run `OPENREG_DEVICE=cuda python …`, or install the package again"
        )
