"""One operator by itself: a test of ten lines that fails where two devices differ, its inputs shrunk."""

from __future__ import annotations

import collections
import importlib
import math
import os
import re
import runpy
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload

from openreg_tools import dispatch
from openreg_tools.compare.copies import tensors_of
from openreg_tools.compare.lockstep import Lockstep
from openreg_tools.compare.result import Result
from openreg_tools.compare.tolerance import Tolerances

__all__ = ["assert_operator", "differs", "load_operators", "shrunk", "written"]

TAKEN = ("operator", "device", "against", "tolerances", "keywords")  # the names of assert_operator's own arguments
INLINE = 64  # tensors up to this many elements are written into the test; larger ones go into a file beside it
Call = tuple[OpOverload, list[Any], dict[str, Any]]


def differs(call: Call, device: str, against: str, tolerances: dict[str, float] | None = None) -> Any:
    """Run an operator on a device and against another, each with copies of the inputs; the first difference, or None.
    It is a difference, too, if the device alone raises."""
    func, args, kwargs = call
    memo: dict[int, Tensor] = {}
    here = [_moved(value, device, memo) for value in args], {k: _moved(v, device, memo) for k, v in kwargs.items()}
    result = Result(torch.device(device).type, against)
    with torch.no_grad(), Lockstep(device, against, Tolerances(tolerances), result, progress=False):
        try:
            func(*here[0], **here[1])
        except Exception:
            if result.first is None:
                raise
    return result.first


def assert_operator(
    operator: OpOverload | str, *args: Any, device: str, against: str = "cpu",
    tolerances: dict[str, float] | None = None, keywords: dict[str, Any] | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Assert that an operator, such as torch.ops.aten.mm.default, gives the same on two devices for these arguments.

    Tensors may be on any device; they are copied to both with their strides.

    Args:
        operator: the overload.
        args, kwargs: its arguments.
        device, against: the two devices.
        tolerances: ulps by pattern of operators, as for `compare`.
        keywords: more of its arguments, such as one that is itself named `device`.
    Raises:
        AssertionError: a result, or what the operator wrote in place, is beyond its tolerance.
    """
    found = differs((operator, list(args), kwargs | (keywords or {})), device, against, tolerances)
    if found is not None:
        raise AssertionError("\n".join(found.lines()))


def _moved(value: Any, device: str, memo: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.to(device)
        whole = value.untyped_storage()
        moved = memo.get(whole._cdata)
        if moved is None:
            flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(whole)
            moved = memo[whole._cdata] = flat.to(device, copy=True)
        x = torch.empty(0, dtype=value.dtype, device=moved.device)
        return x.set_(moved.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return [_moved(each, device, memo) for each in value]
    return value


# ---- shrinking ----


def shrunk(call: Call, device: str, against: str, seconds: float = 10.0) -> Call:
    """The smallest call found that still differs: sizes that dimensions share are halved together, values
    simplified."""
    until = time.monotonic() + seconds
    how = _failure(call, device, against)
    if how is None:
        return call

    def fails(candidate: Call) -> bool:
        return _failure(candidate, device, against) == how

    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for candidate in _smaller(call):
            if time.monotonic() > until:
                break
            if fails(candidate):
                call, progress = candidate, True
                break
    for plain in (lambda x: torch.ones_like(x), lambda x: x.round(), lambda x: (x * 8).round() / 8):
        func, args, kwargs = call
        candidate = (func, [_valued(v, plain) for v in args], {k: _valued(v, plain) for k, v in kwargs.items()})
        if time.monotonic() < until and fails(candidate):
            return candidate
    return call


def _failure(call: Call, device: str, against: str) -> tuple[str, bool] | None:
    """How the call differs: by values, or the first word of what is found, and whether beside a view; None if it does
    not."""
    try:
        first = differs(call, device, against)
    except Exception:
        return None
    return first and (first.found.partition(" ")[0], "memory beside" in first.found)


def _smaller(call: Call) -> Any:
    func, args, kwargs = call
    tensors = [t for t in tensors_of((*args, *kwargs.values())) if t.layout == torch.strided]
    sizes = sorted({size for t in tensors for size in t.shape if size > 1}, reverse=True)
    for size in sizes:
        for parts in (8, 4, 2):
            new = size // parts
            if new < 1 or (parts > 2 and new < 2):
                continue
            for start in dict.fromkeys((0, size - new, (size - new) // 2)):
                cut = lambda value, size=size, new=new, start=start: _cut(value, size, new, start)  # noqa: E731
                yield func, [cut(v) for v in args], {k: cut(v) for k, v in kwargs.items()}
        if size > 2:
            for start in (0, 1):
                cut = lambda value, size=size, start=start: _cut(value, size, size - 1, start)  # noqa: E731
                yield func, [cut(v) for v in args], {k: cut(v) for k, v in kwargs.items()}


def _cut(value: Any, size: int, new: int, start: int) -> Any:
    """A value whose dimensions of one size are shortened; sizes in lists of integers follow."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value
        dense = value.is_contiguous()
        for dim, each in enumerate(value.shape):
            if each == size:
                value = value.narrow(dim, start, new)
        return value.contiguous() if dense else _packed(value)
    if isinstance(value, (list, tuple)):
        return [_cut(each, size, new, start) if isinstance(each, Tensor) else new if each is size or each == size
                and isinstance(each, int) and not isinstance(each, bool) else each for each in value]  # fmt: skip
    return value


def _packed(x: Tensor) -> Tensor:
    """The same order of dimensions in memory, without gaps; expanded dimensions stay expanded."""
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    stride, step = [0] * x.dim(), 1
    for d in reversed(order):
        if x.stride(d) or x.shape[d] == 1:
            stride[d] = step
            step *= x.shape[d]
    gaps = x.numel() and min((s for s, n in zip(x.stride(), x.shape, strict=True) if s and n > 1), default=1) > 1
    if gaps:  # tensors strided in all dimensions stay that way
        stride = [2 * s for s in stride]
    reach = sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True)) + 1 if x.numel() else 0
    out = x.new_zeros(reach).as_strided(x.shape, stride)
    for d, s in enumerate(stride):
        if s == 0 and x.shape[d] > 1:
            return x.clone() if any(x.stride()) else x
    return out.copy_(x)


def _valued(value: Any, plain: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided:
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return out.copy_(plain(value)) if 0 not in value.stride() else value
    return [_valued(each, plain) for each in value] if isinstance(value, (list, tuple)) else value


# ---- the test ----


def written(result: Result, path: Path, shrink: bool) -> str:
    first = result.first
    if first is None:
        raise ValueError("write_test: nothing differs, so there is no test to write")
    if first.call is None or not isinstance(first.call[0], OpOverload):
        raise ValueError(f"write_test: {first.operator} is not an operator whose inputs are known: {first.sentence()}")
    call = first.call
    repeats = _failure(call, result.device, result.reference) is not None
    result.transient = not repeats
    if repeats:
        call = _apart(call, result)
    if shrink and repeats:
        call = shrunk(call, result.device, result.reference)
    func, args, kwargs = call
    tensors: list[Tensor] = []
    saved: list[Tensor] = []
    views = {id(t): t for t in tensors_of((*args, *kwargs.values())) if t.layout == torch.strided}
    count = collections.Counter(t.untyped_storage()._cdata for t in views.values())
    shared = {each for each, views_of_it in count.items() if views_of_it > 1}

    def source(value: Any) -> str:
        return _source(value, tensors, saved, shared)

    taken = {name: value for name, value in kwargs.items() if name in TAKEN}
    words = [source(value) for value in args]
    words += [f"{name}={source(value)}" for name, value in kwargs.items() if name not in taken]
    if taken:
        words.append(f"keywords={{{', '.join(f'{name!r}: {source(value)}' for name, value in taken.items())}}}")
    name = re.sub(r"\W+", "_", f"{func._schema.name}_{func._overloadname}".replace("::", "_"))
    once = (
        ""
        if repeats
        else "\n\nThe operator returned the correct result when it ran again: the difference was transient."
    )
    values = Path(f"{path}.inputs.pt")
    registered = _registered(func, result)
    lines = [
        f'"""{first.operator} on {result.device} differs from {result.reference}: {_one_line(first.sentence())}.{once}"""',
        "import torch", f"from openreg_tools.compare import assert_operator{', load_operators' * bool(registered)}",
        *registered, "", "",
        f"def test_{name}():",
    ]  # fmt: skip
    if saved:
        lines.append(f'    saved = torch.load(__file__ + ".inputs.pt")')  # noqa: F541
        torch.save(saved, values)
    lines += [f"    x{i} = {_literal(x, saved)}" for i, x in enumerate(tensors)]
    target = f'device="{result.device}", against="{result.reference}"'
    lines.append(f"    assert_operator({', '.join([_name(func), *words, target])})")
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    return text


def _apart(call: Call, result: Result) -> Call:
    """The call with each tensor in memory of its own, from its first byte on, if that fails in the same way."""
    func, args, kwargs = call

    def alone(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [*map(alone, value)]
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        reach = (
            sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
        )
        flat = value.as_strided((reach,), (1,), value.storage_offset() if reach else 0).clone()
        return flat.as_strided(value.shape, value.stride(), 0)

    apart = func, [*map(alone, args)], {name: alone(value) for name, value in kwargs.items()}
    same = _failure(apart, result.device, result.reference) == _failure(call, result.device, result.reference)
    return apart if same else call


def load_operators(path: str, arguments: Sequence[str] = (), module: str = "") -> None:
    """Register what a Python file does, unless it has already: import it as `module`, or run the script without its
    ``__main__``. A script that raises gives a warning, because it may have registered its operators before.

    Args:
        path: the file.
        arguments: of the script, in sys.argv.
        module: the full name of the module; its folder is added to sys.path.
    """
    if module:
        root = str(Path(path).resolve().parents[module.count(".") + (Path(path).name == "__init__.py")])
        if root not in sys.path:
            sys.path.append(root)
        importlib.import_module(module)
        return
    if path not in _ran:
        _ran.add(path)
        with mock.patch("sys.argv", [path, *arguments]):
            try:
                runpy.run_path(path, run_name="operators")
            except (Exception, SystemExit) as error:
                warnings.warn(f"{path} raised {type(error).__name__}: {error}", stacklevel=2)


_ran: set[str] = set()


def _registered(func: OpOverload, result: Result) -> list[str]:
    """Lines that define the operator, unless something else has, and its kernels, where Python files did."""
    keys = "|".join(re.escape(dispatch.target(each).key) for each in (result.device, result.reference))
    known = rf"^(debug|{keys}|Composite\w+(?:\[alias\])?): registered at (.*\.py):\d+"
    found = re.findall(known, torch._C._dispatch_dump(func.name()), re.MULTILINE)
    defined = {path for key, path in found if key == "debug"}
    lines = []
    namespace, _, name = func._schema.name.partition("::")
    for path in dict.fromkeys(
        path for _, path in found if not path.startswith(os.path.dirname(torch.__file__) + os.sep)
    ):
        line = _loading(path, result.command)
        lines += [f'if not hasattr(torch.ops.{namespace}, "{name}"):', f"    {line}"] if path in defined else [line]
    return lines


def _loading(path: str, command: list[str]) -> str:
    full = str(Path(path).resolve())
    modules = [(name, each) for name, each in list(sys.modules.items()) if getattr(each, "__file__", None) == path]
    named = [name for name, each in modules if name not in ("__main__", "__mp_main__") and each.__spec__ is not None]
    if named:
        return f"load_operators({full!r}, module={named[0]!r})"
    return f"load_operators({full!r}, arguments={command[1:]!r})" if command[1:] else f"load_operators({full!r})"


def _one_line(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'").partition("; ")[0]


def _name(func: OpOverload) -> str:
    namespace, _, name = func._schema.name.partition("::")
    return f"torch.ops.{namespace}.{name}.{func._overloadname}"


def _source(value: Any, tensors: list[Tensor], saved: list[Tensor], shared: set[int]) -> str:
    if isinstance(value, Tensor):
        for i, each in enumerate(tensors):
            if each is value:
                return f"x{i}"
        plain = value.layout == torch.strided and not value.is_complex() and value.numel() <= INLINE and _is_all(value)
        if not plain or value.untyped_storage()._cdata in shared:
            saved.append(value)
        tensors.append(value)
        return f"x{len(tensors) - 1}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_source(each, tensors, saved, shared) for each in value)}]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (torch.ScriptObject, torch.Generator)):
        raise ValueError(f"write_test: the call has a {type(value).__name__}, which a file cannot hold")
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _is_all(x: Tensor) -> bool:
    """Whether a tensor is all that its storage holds, each element once unless a dimension repeats it."""
    sizes = [1 if step == 0 else size for size, step in zip(x.shape, x.stride(), strict=True)]
    reach = 1 + sum((size - 1) * step for size, step in zip(sizes, x.stride(), strict=True))
    beside = x.untyped_storage().nbytes() > (x.storage_offset() + reach) * x.element_size()
    return not x.numel() or not (x.storage_offset() or beside or math.prod(sizes) > reach)


def _literal(x: Tensor, saved: list[Tensor]) -> str:
    for i, each in enumerate(saved):
        if each is x:
            return f"saved[{i}]"
    shape = tuple(x.shape)
    dtype = "" if x.dtype in (torch.float32, torch.int64, torch.bool) and x.numel() else f", dtype={x.dtype}"
    if x.dtype in (torch.float16, torch.bfloat16):
        numbers = x.to(torch.float64).tolist()
    else:
        numbers = x.tolist() if x.dtype != torch.float32 else x.to(torch.float64).tolist()
    text = re.sub(r"\b(nan|inf)\b", r'float("\1")', f"{numbers}")
    plain = f"torch.tensor({text}{dtype})"
    if repeated := [d for d, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)) if size > 1 and not step]:
        for d in repeated:
            x = x.narrow(d, 0, 1)
        return f"{_literal(x, saved)}.expand({shape})"
    if x.is_contiguous():
        return plain if x.numel() else f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    return f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}).copy_({plain})"
