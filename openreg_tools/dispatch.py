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

import functools
import re
from pathlib import Path

import torch

from openreg_tools import backends, manifest
from openreg_tools.backends import Has, Kernel

__all__ = ["HAS", "has", "kernels", "names", "schema"]

HAS = ("own", "shared", "composite", "fallback", "refused")


# ---- operators by name ----

# The namespaces of PyTorch's operators, including those that it registers later.
_OF_PYTORCH = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()} | {
    "_inductor_debug", "_inductor_test", "_torch_testing", "ao", "bucketing", "c10d_functional", "cplib", "device_mesh",
    "flex_lib", "fsdp", "onnx", "onnx_symbolic", "pippy", "quantized_decomposed", "semi_structured", "streams",
    "torch_attn", "torch_nn", "torch_vendor_quack", "triton",
}  # fmt: skip


def is_custom(op: str) -> bool:
    """Returns true if an operator belongs neither to PyTorch nor to a backend's package; its author may test it."""
    return op.partition("::")[0] not in _OF_PYTORCH and not backends.of_operator(op).namespace


# ---- the dispatcher's tables ----


def names() -> list[str]:
    """Every defined operator, as "aten::add.Tensor", in order; kernels may exist for operators not yet defined."""
    found = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in found if torch._C._get_operation_overload(*_parts(name)))


def overloads(op: str) -> list[str]:
    """The operators of a name without overload, such as "aten::add", in order."""
    _, found = torch._C._jit_get_operation(op)
    every = (f"{op}.{overload}" if overload else op for overload in found or ())
    return sorted(name for name in every if torch._C._dispatch_has_kernel(name))  # others are TorchScript's alone


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
        key: Kernel(key, source, source_of(where), bool(fallthrough))
        for key, fallthrough, where, source in _LINE.findall(torch._C._dispatch_dump_table(op))
    }


def kernel(op: str, key: str) -> Kernel | None:
    """One line of the table."""
    found = re.search(rf"^{key}: (fallthrough )?(.*) \[([a-z ]+)\]$", torch._C._dispatch_dump_table(op), re.M)
    return Kernel(key, found[3], source_of(found[2]), bool(found[1])) if found else None


def source_of(text: str) -> str:
    """The file and line of a registration; the path is relative in torch's source, site-packages and a backend's source."""
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
    """Returns true if an operator returns a view of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema(op).returns)


def delegate_of(op: str) -> str:
    """The out variant that a structured operator runs through."""
    native = manifest.installed().operators.get(op.removeprefix("aten::")) if op.startswith("aten::") else None
    return f"aten::{native.delegate}" if native and native.kind == "structured" else ""
