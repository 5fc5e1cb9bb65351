"""How a device's package describes the device to the tools.

The tools work on every device without this. To tell them more, a package subclasses `Backend` and calls `register` at
import; docs/tools.md has an example. Imports nothing, so that a package can register without loading the tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_tools.core.info import Info

__all__ = ["Backend", "Has", "Kernel", "of_device", "of_key", "of_operator", "register", "registered"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@contextlib.contextmanager
def without_autoload() -> Iterator[bool]:
    """A context in which `import torch` loads no backend, as one that fails would break it; yields whether it would."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield before != "0"
    finally:
        del os.environ[AUTOLOAD]
        if before is not None:
            os.environ[AUTOLOAD] = before


def installed() -> Iterable[Any]:
    """The entry points of the installed backends; none if the environment keeps `import torch` from loading them."""
    from importlib.metadata import entry_points

    return entry_points(group="torch.backends") if os.environ.get(AUTOLOAD) != "0" else ()


def load_installed() -> None:
    """Load torch's installed backends, as `import torch` does; prints a line for a backend that fails."""
    for entry in installed():
        try:
            entry.load()()
        except Exception as error:
            sentence = f"the backend {entry.name} cannot be loaded; the tools run without it: {error}"
            print(f"openreg_tools: {sentence}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one key of an operator's dispatch table resolves to."""

    key: str
    source: str  # "kernel", "backend fallback", "default backend kernel", "math kernel", "autograd kernel"
    where: str  # "csrc/ops/rms_norm.cpp:175", or the registration's own description
    fallthrough: bool = False


@dataclasses.dataclass(frozen=True)
class Has:
    """What a device has for an operator, and why."""

    kind: str  # one of dispatch.HAS
    why: str
    where: str = ""


class Backend:
    """A device, as its package describes it. The defaults here are right for any other device."""

    device = ""  # its type: "openreg"
    package = ""  # the module that registers the device on import; worker processes import it
    key = "PrivateUse1"  # the dispatch key of its dense tensors
    namespace = ""  # the namespace of the package's operators: "openreg"
    source: Path | None = None  # the folder that registration paths are relative to

    # ---- explain, operators, drift, trace ----

    fallback = "the fallback of this process"  # what runs operators that have no kernel, for the reports of drift

    def has(self, op: str, key: str, kernel: Kernel) -> Has | None:
        """What the device has for an operator, if the kernel that the dispatcher found does not say it."""
        return None

    def policies(self) -> tuple[Any, ...]:
        """Settings that change the answers of `has` while a program runs."""
        return ()

    def queues(self) -> bool:
        """Returns true if kernels may still be queued when a call returns."""
        return True

    # ---- the checker ----

    def samples(self, op: str) -> Callable[[str, Any], Iterable[Any]] | None:
        """The function of (device, dtype) that gives sample inputs of an operator of the package."""
        return None

    def known(self, op: str) -> Mapping[str, str]:
        """The checks that an operator is known to fail, each with the cause."""
        return {}

    def state(self) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Functions that get and set process-wide state that a check, or a broken operator, may change."""
        return []

    def filled(self, byte: int) -> contextlib.AbstractContextManager[None] | None:
        """A context that fills new device memory with a byte (0xFF, or any other); None if the package has none."""
        return None

    def queued(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which a call returns before the device has computed, if the package can switch that on."""
        return contextlib.nullcontext()

    # ---- conformance ----

    draws_as_cpu = False  # whether the device's generator draws the CPU's numbers

    def differs(self) -> Mapping[str, str]:
        """The package's operators that accept different damaged arguments than their CPU kernel, with the cause."""
        return {}

    def is_derived(self, op: str, key: str) -> bool:
        """Returns true if the package registers an operator's kernel for a dispatch key because the CPU has one."""
        return False

    def is_own(self, op: str) -> bool:
        """Returns true if the package has its own kernel for an operator instead of running the CPU's."""
        return False

    def files(self) -> Iterable[Path]:
        """The package's libraries: results of an earlier run do not count if one has changed."""
        return ()

    # ---- compare ----

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        """A context for a tool's own launches on this thread: injected faults skip and do not count them."""
        return contextlib.nullcontext()

    # ---- the checker, the pytest plugin ----

    sees: frozenset[str] = frozenset()  # the kinds of misuse that the device reports: "host", "race" or both
    isolation: Mapping[str, str] = {}  # environment variables that end the process where the host uses device memory
    access = r"$^"  # a regular expression for the message with which it ends; group 1 says what the host did
    hidden: tuple[str, ...] = ()  # path prefixes of files whose lines do not belong to the program

    def races(self, found: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[Any]:
        """A context that calls `found` with races, as objects like the errors of `torch.cuda._sanitizer`."""
        return contextlib.nullcontext()

    def fallbacks(self) -> int:
        """How many calls have run on the CPU, with copies."""
        return 0

    # ---- info ----

    def info(self, info: Info) -> None:
        """Add what a bug report should say."""


_ANY = Backend()
_registered: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Tell the tools about a device: `backend` replaces an earlier one of the same device."""
    _registered[backend.device] = backend


def registered() -> list[Backend]:
    """Every device whose package has registered one."""
    return list(_registered.values())


def of_device(device: str) -> Backend:
    """The `Backend` of a device such as "openreg:0"."""
    return _registered.get(device.partition(":")[0], _ANY)


def of_key(key: str) -> Backend:
    """The `Backend` of a dispatch key such as "PrivateUse1" or "SparsePrivateUse1"."""
    return next((backend for backend in _registered.values() if key.endswith(backend.key)), _ANY)


def of_operator(op: str) -> Backend:
    """The `Backend` of the package that defines the operator `op`, such as "openreg::rms_norm"."""
    namespace = op.partition("::")[0]
    return next((backend for backend in _registered.values() if backend.namespace == namespace), _ANY)
