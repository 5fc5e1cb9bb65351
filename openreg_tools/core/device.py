"""The device of a command: its options, the modules to import first, and what the device's package has."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Iterator

import torch

from openreg_tools import backends
from openreg_tools.core.options import Wrong, search_here, unknown

__all__ = ["LACKS", "Target", "Unusable", "add_device", "available", "default", "has_events", "is_lacking",
           "load", "synchronize", "target_of", "to_stderr", "usable"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and the dispatch key of its dense tensors."""

    device: str
    key: str


class Unusable(Wrong):
    """A device that is not available."""


# ---- the options ----


def add_device(
    parser: argparse.ArgumentParser, key: bool = True, default: str = "the accelerator of this process"
) -> None:
    """The options --device, --key and --import."""
    text = "device, such as openreg or cuda" + f" (default: {default})" * bool(default)
    parser.add_argument("--device", help=text)
    if key:
        parser.add_argument("--key", help="a dispatch key instead of a device, such as PrivateUse1 or SparseCPU")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="a module to import first: another backend, or a library of operators")  # fmt: skip


def load(modules: list[str], device: str | None = None) -> None:
    """Import what --import names. Then load the installed backends, unless a module has registered the device.

    What a module prints goes to stderr.

    Raises:
        Wrong: a module cannot be imported.
    """
    search_here()
    for name in modules:
        try:
            with to_stderr():
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise Wrong(f"importing {name} failed: {type(error).__name__}: {error}{_remedy(str(error))}") from error
    if not modules or device is not None and not _is_device(device):
        backends.load_installed()


def _remedy(said: str) -> str:
    """What to do about an import that failed because of the backends that are loaded, or are not."""
    for backend in backends.registered():
        if backend.key == "PrivateUse1" and "privateuse1" in said:
            return (
                f"; {backend.package} has registered {backend.device} as PrivateUse1, which a process can have once: "
                "`python -m openreg_tools` runs the tools without it"
            )
    for entry in backends.installed():
        if entry.name in said and entry.module not in sys.modules:
            return f"; {entry.name} is a device that is not loaded yet: --import {entry.module} before it"
    return ""


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """What this process and its children print to stdout goes to stderr."""
    if sys.stdout is None:  # it is closed
        yield
        return
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)


# ---- devices by name ----


def available() -> list[str]:
    """The types of device that tensors can be made on here."""
    private = torch._C._get_privateuse1_backend_name()
    found = {"cpu", "meta"} | ({private} if private != "privateuseone" else set())
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        found.add(accelerator.type)
    return sorted(found)


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def default() -> str:
    """The default device: one whose package has registered it, or the accelerator.

    Raises:
        Wrong: there is none.
    """
    private = torch._C._get_privateuse1_backend_name()
    accelerator = torch.accelerator.current_accelerator()
    if registered := backends.registered():
        return registered[0].device
    if private != "privateuseone" or accelerator:
        return private if private != "privateuseone" else accelerator.type
    raise Wrong("there is no accelerator here: import its package with --import, or name a device with --device")


def target_of(device: str | None = None, key: str | None = None) -> Target:
    """The device and its dispatch key, from either; `default` unless given.

    Raises:
        Wrong: there is no such device, or no such dispatch key.
    """
    if key:
        if key not in torch._C.DispatchKey.__members__:
            raise Wrong(
                unknown("dispatch key", key, torch._C.DispatchKey.__members__, "such as PrivateUse1 or SparseCPU")
            )
        private = torch._C._get_privateuse1_backend_name()
        return Target(device or (private if key == "PrivateUse1" else key.lower()), key)
    device = default() if device is None else device
    if not _is_device(device):
        raise Unusable(f"unknown device {device!r}; available: {', '.join(available())}")
    return Target(device, torch._C._dispatch_key_for_device(torch.device(device).type))


def usable(device: str) -> None:
    """Make a tensor on the device.

    Raises:
        Unusable: that fails, for example because torch is built without the device.
    """
    target_of(device)
    try:
        torch.empty(1, device=device)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        said, names = lines[0].partition(". ")[0].rstrip("."), available()
        if torch.device(device).type in names:  # a wrong number: its package says what to do, not a list of types
            raise Unusable(f"cannot use device {device!r}: {lines[0].rstrip('.')}") from None
        raise Unusable(f"cannot use device {device!r}: {said}; available: {', '.join(names)}") from None


# ---- what a device's package has ----

LACKS = (RuntimeError, NotImplementedError, AttributeError)  # raised for what a device's package does not have yet


def is_lacking(error: Exception) -> bool:
    """Returns true if an error says that the device's package does not have something."""
    said = re.search(r"doesn't support|not (yet )?(implemented|supported)", str(error))
    return isinstance(error, AttributeError) or bool(said)


def synchronize(device: str | torch.device) -> bool:
    """Wait for a device, and raise the errors of its queued work. Returns false if its package cannot do that."""
    try:
        torch.accelerator.synchronize(torch.device(device))
    except LACKS as error:
        if not is_lacking(error):
            raise
        return False
    return True


def has_events(device: str | torch.device) -> bool:
    """Returns true if a device has events with times."""
    try:
        stream = torch.accelerator.current_stream(torch.device(device))
        torch.Event(stream.device, enable_timing=True).record(stream)
    except LACKS:
        return False
    return True
