"""Writes a Python program that makes one call on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openreg_tools import backends, dispatch
from openreg_tools.core.move import RequiresGrad, Stays, StorageOf
from openreg_tools.core.samples import Sample

__all__ = ["program"]

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
            case Tensor():
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
            case None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.layout():
                return _number(value)
            case torch.memory_format():
                return repr(value)
        raise _UnwrittenError(type(value).__name__)

    def tensor(self, x: Tensor, device: str) -> str:
        if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type != "cpu":
            raise _UnwrittenError(f"a tensor of layout {x.layout} on {x.device}")
        if x.is_conj():
            return f"{self.tensor(x.conj(), device)}.conj()"
        if x.is_neg():
            return f"torch._neg_view({self.tensor(torch._neg_view(x), device)})"
        storage = x.untyped_storage()
        key = (storage._cdata, x.dtype, device)
        if key not in self.storages:
            count = storage.nbytes() // x.element_size()
            if count > MOST or (x.numel() and not count):
                raise _UnwrittenError(f"a storage of {count} elements")
            flat = torch.empty(0, dtype=x.dtype).set_(storage, 0, (count,), (1,))
            self.storages[key] = f"s{len(self.storages)}"
            values = (flat.float() if x.is_floating_point() and x.dtype.itemsize == 1 else flat).tolist()
            written = f"torch.tensor([{', '.join(map(_number, values))}], dtype={x.dtype}).to({device})"
            self.lines.append(f"    {self.storages[key]} = {written}")
        return f"{self.storages[key]}.as_strided({tuple(x.shape)}, {x.stride()}, {x.storage_offset()})"


def _number(value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_number(value.real)}, {_number(value.imag)})"
    return repr(value) if not isinstance(value, float) or abs(value) < float("inf") else f'float("{value}")'


def program(name: str, sample: Sample, device: str, setup: list[str]) -> str:
    """A program that prints the results of the call on both devices; a comment if an argument cannot be written out.

    The kernels of an author's operator are tested on the CPU too, against their results in contiguous memory.

    Args:
        setup: modules to import first.
    """
    namespace, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    writer = _Writer()
    try:
        words = [writer.value(value) for value in sample.args]
        words += [f"{key}={writer.value(value)}" for key, value in sample.kwargs.items()]
    except _UnwrittenError as error:
        return f"# {error} has no short source; use the command"
    package = backends.of_device(device).package
    imports = [f"import {module}" for module in dict.fromkeys([*setup, package]) if module]
    written = [f"; print({tensor})" for tensor in writer.tensors.values()]
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
