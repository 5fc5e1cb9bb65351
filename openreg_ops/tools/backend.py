"""What `openreg_tools` needs to know about the openreg device: see openreg_tools/backends.py. Registered when
openreg_ops is imported."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openreg_tools.backends import Backend, Has, Kernel

if TYPE_CHECKING:
    from openreg_tools.core.info import Info

PACKAGE = Path(__file__).resolve().parents[1]


class Openreg(Backend):
    package = "openreg_ops"
    namespace = "openreg"
    source = PACKAGE.parent

    def __init__(self) -> None:
        self.device, self.key = _identity().name, _identity().dense

    # ---- explain, operators, drift, trace ----

    fallback = "the fallback of this process or a shared kernel"

    def has(self, op: str, key: str, kernel: Kernel) -> Has | None:
        """What the fallback does under its policies and routes, and which kernels are the CPU's."""
        from openreg_ops import fallback

        route = fallback._routed.get(op) if key == _identity().dense else None
        if kernel.source == "backend fallback" or route == "fallback":  # denied, or forced
            return _fallen(op, key, kernel)
        if route == "share" or _extension().kernel_kind(op, key) in ("boxed", "direct"):
            return Has("shared", "runs the CPU's kernel on device memory", kernel.where)
        return None

    def is_derived(self, op: str, key: str) -> bool:
        return _extension().kernel_kind(op, key) == "boxed"

    def policies(self) -> tuple[Any, ...]:
        from openreg_ops import fallback

        f = fallback
        return (f.get_policy(), *f._allow, "", *f._deny, "", *f._force, "", *f._share)

    def queues(self) -> bool:
        return torch.openreg.get_launch_mode() == "async"

    # ---- the checker ----

    def samples(self, op: str) -> Callable[[str, Any], Iterable[Any]] | None:
        from openreg_ops.meta.op import SAMPLES

        return SAMPLES.get(op.partition("::")[2])

    def known(self, op: str) -> Mapping[str, str]:
        from openreg_ops.testing.known_failures import OPERATORS

        return OPERATORS.get(op, {})

    def state(self) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        from openreg_ops import _C, autograd_fallback

        return [(autograd_fallback.get_fallback_mode, autograd_fallback.set_fallback_mode), (_C.poison, _C.set_poison)]

    @contextlib.contextmanager
    def filled(self, byte: int) -> Iterator[None]:
        from openreg_ops import _C

        before = _C.poison()
        _C.set_poison(byte == 0xFF)  # the only byte that the device can fill memory with
        try:
            yield
        finally:
            _C.set_poison(before)

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return torch.openreg.launch_mode("async")

    # ---- conformance ----

    draws_as_cpu = True

    def differs(self) -> Mapping[str, str]:
        from openreg_ops.testing.known_failures import DIFFERENT

        return DIFFERENT

    def is_own(self, op: str) -> bool:
        from openreg_ops.cuda_operators import KERNELS

        if not op.startswith("aten::"):  # an operator of another package
            return False
        keys = (_identity().dense, _identity().autograd)
        own = any(_extension().kernel_kind(op, key) in ("own", "direct") for key in keys)
        return own and op.removeprefix("aten::") not in KERNELS  # compositions of PyTorch's operators

    def files(self) -> Iterable[Path]:
        return PACKAGE.glob("_*.so")

    # ---- compare ----

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        return _Spared()

    # ---- the checker, the pytest plugin ----

    sees = frozenset({"host", "race"})
    isolation = {"OPENREG_ISOLATION": "strict"}
    access = r"^openreg: the host (.*?):.*\n.*$"
    hidden = (str(PACKAGE) + os.sep,)

    def races(self, found: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[Any]:
        return torch.openreg._sanitizer.sanitize(found)

    def fallbacks(self) -> int:
        from openreg_ops import _C

        return sum(calls for _, calls, *_ in _C.fallback_report())

    # ---- info ----

    def info(self, info: Info) -> None:
        _build(info)
        _devices(info)
        _settings(info)
        _environment(info)


class _Spared:
    """Faults skip this thread."""

    def __enter__(self) -> None:
        self._before = _spare(True)

    def __exit__(self, *exception: object) -> None:
        _spare(self._before)


def _spare(on: bool) -> bool:
    return _extension().spare_faults(on)


@functools.cache
def _extension() -> Any:
    """The package's extension, which is not loaded yet when this module is."""
    from openreg_ops import _C

    return _C


def _identity() -> Any:
    from openreg_ops.identity import identity

    return identity


def _fallen(op: str, key: str, found: Kernel) -> Has:
    """What the fallback does with an operator."""
    if key != _identity().dense:
        return Has("refused", f"{_identity().name} has no kernel for {key}", found.where)
    name, _, overload = op.partition(".")
    runs, why = _extension().fallback_decision(name, overload)
    return Has("fallback", why, found.where) if runs else Has("refused", f"it {why}", found.where)


# ---- info ----


def isolation(_C: Any) -> str:
    """The isolation mode: "off", "strict" or "keys"; "off" if the extension was built without isolation."""
    mode = getattr(_C, "isolation_mode", None)
    return mode() if mode else "off"


def _build(info: Info) -> None:
    from openreg_ops import _build, kernel_library

    built = f"torch {_build.TORCH_VERSION}, {' and '.join(_build.CPU_CAPABILITIES)}"
    info.add("openreg_ops", built_for=built, capability=kernel_library.capability())
    last, source = max(path.stat().st_mtime for path in PACKAGE.glob("_*.so")), PACKAGE.parent / "csrc"
    if source.is_dir():
        newer = [path for path in source.rglob("*.[ch]*") if path.stat().st_mtime > last]
        if newer:
            info.problem(
                f"{len(newer)} C++ files are newer than the extension, {min(newer).relative_to(source.parent)} among them",
                "python setup.py build_ext --inplace",
            )


def _devices(info: Info) -> None:
    from openreg_ops import _C
    from openreg_tools.core.blocks import size

    count = _C.device_count()
    info.add("devices", count=count, isolation=isolation(_C))
    if _identity().name != "cuda" and (name := torch._C._get_privateuse1_backend_name()) != _identity().name:
        info.problem(f"PrivateUse1 is named {name}", "a process has one PrivateUse1 backend: import openreg_ops alone")
    if not count:
        info.problem("there is no device", "set OPENREG_DEVICE_COUNT to at least 1")
    for i in range(count):
        free, total = torch.openreg.mem_get_info(i)
        info.sections["devices"][f"{_identity().name}:{i}"] = (
            f"{size(total)}, {size(free)} free, {size(torch.openreg.memory_allocated(i))} in tensors"
        )
    if torch.openreg.is_available():
        info.test(
            _identity().name, "unset OPENREG_FAULTS if it is set; else report this, with the full output of `info`"
        )


def _settings(info: Info) -> None:
    from openreg_ops import _C, autograd_fallback, fallback, kernel_library, sanitizer
    from openreg_ops.device import faults

    fell = fallback.report()
    info.add(
        "settings",
        launch_mode=_C.launch_mode(),
        fallback=f"{fallback.get_policy()}; {len(fell)} operators fell back so far",
        autograd_fallback=autograd_fallback.get_fallback_mode(),
        poison="on: new device memory holds NaN" if _C.poison() else "off",
        sanitizer="on" if sanitizer._races else "off",
        faults=", ".join(fault.kind for fault in faults._armed) or "none armed",
        kernels=f"{kernel_library.shared} of torch's CPU kernels shared",
    )


def _environment(info: Info) -> None:
    from openreg_ops.environment import VARIABLES

    for name in sorted(os.environ):
        if name.startswith("OPENREG_") and name not in VARIABLES:
            info.problem(
                f"{name} is not a variable of openreg_ops",
                f"unset it, or fix its name; the variables are {', '.join(VARIABLES)}",
            )
    if os.environ.get("OPENREG_FAULTS"):
        info.problem("OPENREG_FAULTS makes the device fail on purpose", "unset it")
