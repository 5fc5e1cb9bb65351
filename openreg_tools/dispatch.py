"""What the dispatcher does with an operator at a key, read from its own tables, for every device.

`kernels(op)` is the dispatch table of an operator. `has(op, key)` says what a device has for it:

========= ==========================================================================
own       a kernel registered for the device's key
shared    a kernel that runs the CPU's on device memory, without copies
composite the operator decomposes into others, which the device must have
fallback  the key's fallback runs it, on most devices by copies to the CPU and back
refused   the call raises an error
========= ==========================================================================
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import os
import re
import sys
from pathlib import Path

import torch

from openreg_tools import backends, manifest, script
from openreg_tools.forms import Wrong

__all__ = ["HAS", "Has", "Kernel", "Target", "has", "kernels", "names", "schema"]

HAS = ("own", "shared", "composite", "fallback", "refused")


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and the dispatch key of its dense tensors."""

    device: str
    key: str


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

    kind: str  # one of HAS
    why: str
    where: str = ""


# ---- the command line's device ----


def add_arguments(parser: argparse.ArgumentParser, default: bool = True) -> None:
    """The options --device, --key and --import."""
    text = f" (default: {_HERE})" if default else ""
    parser.add_argument("--device", help=f"device, such as openreg or cuda{text}")
    parser.add_argument("--key", help="a dispatch key instead of a device, such as PrivateUse1 or SparseCPU")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="a module to import first: another backend, or a library of operators")  # fmt: skip


# The namespaces of PyTorch's operators, including those that it registers later.
_OF_PYTORCH = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()} | {
    "_inductor_debug", "_inductor_test", "_torch_testing", "ao", "bucketing", "c10d_functional", "cplib", "device_mesh",
    "flex_lib", "fsdp", "onnx", "onnx_symbolic", "pippy", "quantized_decomposed", "semi_structured", "streams",
    "torch_attn", "torch_nn", "torch_vendor_quack", "triton",
}  # fmt: skip


def is_custom(op: str) -> bool:
    """Whether an operator belongs neither to PyTorch nor to a backend's package: its author may want to test it."""
    return op.partition("::")[0] not in _OF_PYTORCH and not backends.of_operator(op).namespace


def load(modules: list[str], device: str | None = None) -> None:
    """Import what --import names, and load the installed backend of `device` if a module needs it, or none registers
    it. What a module prints goes to stderr."""
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # python -P omits it; last, so that an installed package wins
    if modules and _lacks(device) and not _register(modules, device):
        backends.load_installed()
    for name in modules:
        try:
            with script.apart("-"):
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            tip = "".join(
                f"; {each.package} has registered {each.device} as PrivateUse1, which a process can have once: "
                f"`python -m openreg_tools` runs the tools without it"
                for each in backends.registered()
                if each.key == "PrivateUse1" and "privateuse1" in str(error)
            )
            raise Wrong(f"importing {name} failed: {type(error).__name__}: {error}{tip}") from error


def _register(modules: list[str], device: str | None) -> bool:
    """Whether the modules register the device, even if the import of one fails. A forked process imports them, because
    an import that fails cannot be undone: the operators that it has defined stay."""
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with script.apart("-"):
                for name in modules:
                    importlib.import_module(name)
        finally:
            os._exit(int(_lacks(device)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _lacks(device: str | None) -> bool:
    """Whether there is no such device, and a package can still register it."""
    try:
        torch.device(device or "cpu")
    except RuntimeError:
        return torch._C._get_privateuse1_backend_name() == "privateuseone"
    return False


_HERE = "the accelerator of this process"


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


def target(device: str | None = None, key: str | None = None) -> Target:
    """The device and its dispatch key, from either; `default` unless given.

    Raises:
        Wrong: there is no such device, or no such dispatch key.
    """
    if key:
        if key not in torch._C.DispatchKey.__members__:
            raise Wrong(
                f"there is no dispatch key {key}; there are PrivateUse1, CUDA, SparseCPU, AutogradXPU and others"
            )
        private = torch._C._get_privateuse1_backend_name()
        return Target(device or (private if key == "PrivateUse1" else key.lower()), key)
    device = default() if device is None else device
    try:
        return Target(device, torch._C._dispatch_key_for_device(torch.device(device).type))
    except RuntimeError as error:
        raise Wrong(f"there is no device {device}: {str(error).splitlines()[0]}") from None


class Unusable(Wrong):
    """A device that is not available."""


def usable(device: str) -> None:
    """Make a tensor on the device.

    Raises:
        Unusable: that fails, for example because torch is built without the device.
    """
    try:
        torch.empty(1, device=device)
    except Exception as error:
        said = re.split(r"\n|\. ", str(error))[0].rstrip(".")
        raise Unusable(f"{device} cannot be used here: {said}; name one that is here") from None


LACKS = (RuntimeError, NotImplementedError, AttributeError)  # raised for what a device's package does not have yet


def is_lacking(error: Exception) -> bool:
    """Whether an error says that the device's package does not have something."""
    said = re.search(r"doesn't support|not (yet )?(implemented|supported)", str(error))
    return isinstance(error, AttributeError) or bool(said)


def synchronize(device: str | torch.device) -> None:
    """Wait for a device whose package can do that."""
    try:
        torch.accelerator.synchronize(torch.device(device))
    except LACKS as error:
        if not is_lacking(error):
            raise


def has_events(device: str | torch.device) -> bool:
    """Whether a device has events with times."""
    try:
        stream = torch.accelerator.current_stream(torch.device(device))
        torch.Event(stream.device, enable_timing=True).record(stream)
    except LACKS:
        return False
    return True


# ---- the dispatcher's tables ----


def names() -> list[str]:
    """Every defined operator, as "aten::add.Tensor", in order; kernels may exist for operators not yet defined."""
    found = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in found if torch._C._get_operation_overload(*_parts(name)))


def overloads(op: str) -> list[str]:
    """The operators of a name without overload, such as "aten::add", in order."""
    _, found = torch._C._jit_get_operation(op)
    every = (f"{op}.{each}" if each else op for each in found or ())
    return sorted(each for each in every if torch._C._dispatch_has_kernel(each))  # others are TorchScript's alone


def schema(op: str) -> torch._C.FunctionSchema:
    """The schema of an operator."""
    return torch._C._get_schema(*_parts(op))


def tags(op: str) -> list[torch.Tag]:
    return torch._C._get_operation_overload(*_parts(op))[2]


def _parts(op: str) -> tuple[str, str]:
    name, _, overload = op.partition(".")
    return name, overload


_LINE = re.compile(r"^(\w+): (fallthrough )?(.*) \[([a-z ]+)\]$", re.M)


def kernels(op: str) -> dict[str, Kernel]:
    """The dispatch table of an operator: what each run-time key resolves to. Missing keys have no kernel."""
    return {
        key: Kernel(key, source, place(where), bool(fallthrough))
        for key, fallthrough, where, source in _LINE.findall(torch._C._dispatch_dump_table(op))
    }


def kernel(op: str, key: str) -> Kernel | None:
    """One line of the table."""
    found = re.search(rf"^{key}: (fallthrough )?(.*) \[([a-z ]+)\]$", torch._C._dispatch_dump_table(op), re.M)
    return Kernel(key, found[3], place(found[2]), bool(found[1])) if found else None


def place(text: str) -> str:
    """The place of a registration, as a relative path if it is in torch's source, in site-packages or in a backend's
    source."""
    text = re.sub(
        r"^(/__w/pytorch|/pytorch|.*/site-packages)/(pytorch/)?(build/aten/src/)?",
        "",
        text.removeprefix("registered at "),
    )
    file, colon, line = text.partition(":")
    if file.startswith("/"):
        for backend in backends.registered():
            if backend.source and (within := _within(backend.source, file)):
                return within + colon + line
    return text


@functools.cache
def _within(source: Path, file: str) -> str:
    """A file relative to the source; it may have been built elsewhere."""
    parts = file.split("/")
    suffixes = ("/".join(parts[i:]) for i in range(1, len(parts) - 1))
    return next((suffix for suffix in suffixes if (source / suffix).exists()), "")


# ---- what a device has ----


def has(op: str, key: str) -> Has:
    """What the device of `key` has for an operator, under the current fallback policy."""
    found = kernel(op, key)
    if found is None:
        return Has("refused", f"nothing is registered for {key}, it does not decompose, and {key} has no fallback")
    if found.source in ("math kernel", "default backend kernel"):
        delegate = delegate_of(op)
        if delegate:
            below = has(delegate, key)
            return Has("composite", f"structured: runs {delegate}, which is {below.kind} here", found.where)
        how = "Implicit" if found.source == "math kernel" else "Explicit"
        return Has("composite", f"decomposes (Composite{how}Autograd)", found.where)
    if found.source == "backend fallback" and found.fallthrough:
        return Has("refused", f"the fallback of {key} falls through to nothing", found.where)
    if told := backends.of_key(key).has(op, key, found):
        return told
    if found.source == "backend fallback":
        # at::native::cpu_fallback copies a view, with a warning, unless the backend asked for an error.
        why = f"the fallback of {key}" + (", which copies instead of returning a view" if returns_view(op) else "")
        return Has("fallback", why, found.where)
    return Has("own", f"a kernel for {key}", found.where)


def policies() -> tuple[str, ...]:
    """The settings that may change the answers of `has` while a program runs."""
    return tuple(setting for backend in backends.registered() for setting in backend.policies())


def returns_view(op: str) -> bool:
    """Whether an operator returns a view of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema(op).returns)


def delegate_of(op: str) -> str:
    """The out variant that a structured operator runs through."""
    native = manifest.installed().operators.get(op.removeprefix("aten::")) if op.startswith("aten::") else None
    return f"aten::{native.delegate}" if native and native.kind == "structured" else ""
