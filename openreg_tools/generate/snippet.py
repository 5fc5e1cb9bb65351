"""Writes a Python program that makes one call on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import torch

from openreg_tools import backends, dispatch
from openreg_tools.conformance.calls import Call, RequiresGrad, Stays, StorageOf

__all__ = ["source"]

MOST = 400  # the most elements of a storage that are written out


class _UnwrittenError(Exception):
    """An argument that cannot be written as short source."""


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.storages: dict[Any, str] = {}
        self.tensors: dict[int, str] = {}

    def value(self, value: Any) -> str:
        match value:
            case Stays():
                return self.tensor(value.tensor, '"cpu"')
            case torch.Tensor():
                if id(value) not in self.tensors:
                    self.lines.append(f"    t{len(self.tensors)} = {self.tensor(value, 'device')}")
                    self.tensors[id(value)] = f"t{len(self.tensors)}"
                return self.tensors[id(value)]
            case StorageOf():
                return f"{self.value(value.tensor)}.untyped_storage()"
            case RequiresGrad():
                return f"{self.value(value.tensor)}.requires_grad_()"
            case torch.Generator():
                return "torch.Generator(device).manual_seed(1)"
            case torch.device():
                return f'"{value}"' if value.type != "cpu" else "device"
            case list() | tuple():
                return f"[{', '.join(map(self.value, value))}]"
            case float():
                return f'float("{value}")' if value != value or value in (float("inf"), -float("inf")) else repr(value)
            case complex() | None | bool() | int() | str() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(value)
        raise _UnwrittenError(type(value).__name__)

    def tensor(self, t: torch.Tensor, device: str) -> str:
        if t.layout != torch.strided or t.is_nested or t.is_quantized or t.device.type != "cpu":
            raise _UnwrittenError(f"a tensor of layout {t.layout} on {t.device}")
        if t.is_conj():
            return f"{self.tensor(t.conj(), device)}.conj()"
        if t.is_neg():
            return f"torch._neg_view({self.tensor(torch._neg_view(t), device)})"
        storage = t.untyped_storage()
        key = (storage._cdata, t.dtype, device)
        if key not in self.storages:
            count = storage.nbytes() // t.element_size()
            if count > MOST or (t.numel() and not count):
                raise _UnwrittenError(f"a storage of {count} elements")
            flat = torch.empty(0, dtype=t.dtype).set_(storage, 0, (count,), (1,))
            self.storages[key] = f"s{len(self.storages)}"
            narrow = t.dtype.is_floating_point and t.dtype.itemsize == 1
            values = (flat.float() if narrow else flat).tolist()
            written = f"torch.tensor([{', '.join(map(_number, values))}], dtype={t.dtype}).to({device})"
            self.lines.append(f"    {self.storages[key]} = {written}")
        view = f"{tuple(t.shape)}, {t.stride()}, {t.storage_offset()}"
        return f"{self.storages[key]}.as_strided({view})"


def _number(value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_number(value.real)}, {_number(value.imag)})"
    return repr(value) if not isinstance(value, float) or abs(value) < float("inf") else f'float("{value}")'


def source(name: str, call: Call, device: str, setup: list[str]) -> str:
    """A program that prints the results of the call on both devices, with a comment if an argument cannot be written out.

    The kernels of an author's operator are tested on the CPU too, against their results in contiguous memory.


    Args:
        setup: modules to import first.
    """
    namespace, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    writer = _Writer()
    try:
        words = [writer.value(value) for value in call.args]
        words += [f"{key}={writer.value(value)}" for key, value in call.kwargs.items()]
    except _UnwrittenError as error:
        return f"# {error} has no short source; use the command"
    package = backends.of_device(device).package
    imports = [f"import {module}" for module in dict.fromkeys([*setup, package]) if module]
    written = [f"; print({each})" for each in writer.tensors.values()]
    calls = ['call("cpu")', f'call("{device}")']
    if names := ", ".join(writer.tensors.values()) if dispatch.is_custom(name) or device == "cpu" else "":
        contiguous = "t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)"
        writer.lines += ["    if contiguous:", f"        {names}, = [{contiguous} for t in ({names},)]"]
        calls.insert(0, 'call("cpu", contiguous=True)')
    return "\n".join(
        [
            "import torch",
            *imports,
            f"def call(device{', contiguous=False' if names else ''}):",
            *writer.lines,
            f"    print(torch.ops.{namespace}.{base}.{which or 'default'}({', '.join(words)})){''.join(written)}",
            *dict.fromkeys(calls),
        ]
    )
