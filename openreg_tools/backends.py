"""What the package of a device tells the tools about it.

The tools work on every device without this. A package that knows more subclasses `Backend` and calls `register` when it
is imported; docs/tools.md has an example. Imports nothing, so that a package can register without loading the tools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openreg_tools.conformance.report import Known
    from openreg_tools.dispatch import Has, Kernel
    from openreg_tools.info import Info

__all__ = ["Backend", "of_device", "of_key", "of_operator", "register", "registered"]


class Backend:
    """A device, as far as its package describes it. Each method returns what holds for any other device."""

    device = ""  # its type: "openreg"
    package = ""  # the module whose import brings the device; worker processes import it
    key = "PrivateUse1"  # the dispatch key of its dense tensors
    namespace = ""  # of the operators that the package defines: "openreg"
    source: Path | None = None  # the folder that places of registrations are relative to

    # ---- explain, operators, drift, trace ----

    fallback = "the fallback of this process"  # what runs operators that have no kernel, for the reports of drift

    def has(self, op: str, key: str, kernel: Kernel) -> Has | None:
        """What the device has for an operator, where the kernel that the dispatcher found does not tell."""
        return None

    def policies(self) -> tuple[Any, ...]:
        """Settings that change the answers of `has` while a program runs."""
        return ()

    def queues(self) -> bool:
        """Whether kernels may still be queued when a call returns."""
        return True

    # ---- the checker ----

    def samples(self, op: str) -> Callable[[str, Any], Iterable[Any]] | None:
        """The function of (device, dtype) that gives sample inputs of an operator of the package."""
        return None

    def known(self, op: str) -> Mapping[str, str]:
        """Checks that an operator is known to fail, each with the cause."""
        return {}

    def may_pass(self, op: str) -> Iterable[str]:
        """The checks in `known` that pass on some machines."""
        return ()

    def state(self) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Functions that get and set what a check, or a broken operator, may change for the whole process."""
        return []

    def filled(self, byte: int) -> contextlib.AbstractContextManager[None] | None:
        """A context that fills new device memory with a byte (0xFF, or any other); None if the package has none."""
        return None

    # ---- conformance ----

    draws_as_cpu = False  # whether the device's generator draws the CPU's numbers

    def known_failures(self) -> Mapping[str, Known]:
        """PyTorch's operators that differ from the CPU, with the cause."""
        return {}

    def differs(self) -> Mapping[str, str]:
        """Operators of the package that accept other damaged arguments than their CPU kernel does, with the cause."""
        return {}

    def is_own(self, op: str) -> bool:
        """Whether the package wrote the kernel of an operator, in contrast to running the CPU's."""
        return False

    def files(self) -> Iterable[Path]:
        """The package's libraries: results of an earlier run do not count if one has changed."""
        return ()

    # ---- compare ----

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        """A context for what a tool itself launches on this thread: injected faults neither strike nor count it."""
        return contextlib.nullcontext()

    # ---- the pytest plugin ----

    sees: frozenset[str] = frozenset()  # of "host" and "race", the kinds of misuse that the device reports
    isolation: Mapping[str, str] = {}  # environment variables that end the process where the host uses device memory
    access = r"$^"  # a regular expression of the message with which it ends, whose group 1 says what the host did
    hidden: tuple[str, ...] = ()  # files whose lines are not the program's

    def races(self, found: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[Any]:
        """A context that calls `found` with races, as objects like those of `torch.cuda._sanitizer`."""
        return contextlib.nullcontext()

    def fallbacks(self) -> int:
        """How many calls have run on the CPU, by copies."""
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
    """Every device whose package has told about it."""
    return list(_registered.values())


def of_device(device: str) -> Backend:
    """What is known of a device such as "openreg:0"."""
    return _registered.get(device.partition(":")[0], _ANY)


def of_key(key: str) -> Backend:
    """What is known of the device of a dispatch key, such as "PrivateUse1" or "SparsePrivateUse1"."""
    return next((each for each in _registered.values() if key.endswith(each.key)), _ANY)


def of_operator(op: str) -> Backend:
    """What is known by the package that defines the operator `op`, such as "openreg::rms_norm"."""
    namespace = op.partition("::")[0]
    return next((each for each in _registered.values() if each.namespace == namespace), _ANY)
