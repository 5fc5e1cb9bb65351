"""What the operators' meta files share: the sentences of their errors, and running elsewhere than on openreg.

The checks are those of csrc/ops/op.h, word for word; tests hold the two equal. A fake kernel and a plain
reference call the same ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_Function = TypeVar("_Function", bound=Callable[..., Any])

_HALF = (torch.float16, torch.bfloat16)
_BATCHED, _VMAP_MODE = torch._C.DispatchKey.FuncTorchBatched, torch._C.DispatchKey.FuncTorchVmapMode
_VMAP = torch._C.DispatchKeySet(_BATCHED) | torch._C.DispatchKeySet(_VMAP_MODE)
_RANDOMNESS = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or 'different' "
    "randomness flags on vmap or perform the randomness operation out of vmap"
)
_library = torch.library.Library("openreg", "IMPL")
_references: dict[str, Callable[..., Any]] = {}


def reference(name: str, differentiable: bool = True) -> Callable[[_Function], _Function]:
    """Make a plain-PyTorch function the kernel of ``openreg::name`` on every device without one (cpu, cuda, meta).

    A differentiable one also stands for the operator where autograd is on, so that its derivatives of any
    order are those of the operators it is made of, and a compiler sees and fuses these.
    """

    def register(function: _Function) -> _Function:
        _references[name] = function
        _library.impl(name, function, "CompositeExplicitAutograd")
        if differentiable:
            _library.impl(name, function, "Autograd")
        return function

    return register


def reference_of(name: str) -> Callable[..., Any]:
    """The reference of ``openreg::name``."""
    return _references[name]


def batched(name: str, random: bool = False) -> Callable[[_Function], _Function]:
    """Make a function the batching rule of ``openreg::name``, what `torch.vmap` runs in its place, on every device.

    It is called with ``in_dims`` (the dimension to map over, or None, of each argument, nested for lists, mapped
    ones given by keyword last) and the operator's arguments, and returns the outputs and their out_dims, of one structure, an int
    or None for each tensor; or None where the operator returns nothing; or NotImplemented, and the plain reference is
    mapped, whose own operators have their rules.
    A `torch.library.register_vmap` that need not import functorch before it is used.

    The rule of a ``random`` operator is called when no argument is mapped, too, and with ``vmap``, the interpreter
    that knows `randomness()` and `batch_size()`. Where the former is "error" this raises PyTorch's sentence.
    """

    def register(rule: _Function) -> _Function:
        def kernel(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
            from torch._functorch.vmap import _add_batch_dim, unwrap_batched

            overload = operator.attrgetter(name if "." in name else f"{name}.default")(torch.ops.openreg)
            interpreter = retrieve_current_functorch_interpreter()
            level = interpreter.level()
            (plain, keywords), (dims, keyword_dims) = unwrap_batched((args, kwargs), level)
            in_dims = (*dims, *(dim for dim in keyword_dims.values() if dim is not None))
            if random:
                torch._check(interpreter.randomness() != "error", lambda: _RANDOMNESS)
                keywords["vmap"] = interpreter
            with torch._C._ExcludeDispatchKeyGuard(_VMAP):
                if not random and all(dim is None for dim in tree_leaves(in_dims, is_leaf=lambda dim: dim is None)):
                    return overload(*args, **kwargs)
                result = rule(in_dims, *plain, **keywords)
            if result is NotImplemented:
                return _references[name](*args, **kwargs)
            if result is None:
                return None
            return tree_map(lambda x, dim: x if dim is None else _add_batch_dim(x, dim, level), *result)

        # Every call inside vmap comes past its mode, one with a mapped argument past FuncTorchBatched.
        _library.impl(name, kernel, "FuncTorchVmapMode" if random else "FuncTorchBatched", with_keyset=True)
        return rule

    return register


# Sample inputs by operator name, for openreg_ops.testing.check: (device, dtype) -> argument tuples.
SAMPLES: dict[str, Callable[[str, torch.dtype], Iterable[tuple[Any, ...]]]] = {}


def samples(name: str) -> Callable[[_Function], _Function]:
    """Make a generator of (device, dtype) the sample inputs of ``openreg::name``."""

    def register(function: _Function) -> _Function:
        SAMPLES[name] = function
        return function

    return register


def all_batch_first(in_dims: Sequence[int | None], inputs: Sequence[Any]) -> list[Any]:
    """The tensors with the mapped dimension first in each: moved there, or expanded where one has none; others as given."""
    pairs = list(zip(inputs, in_dims, strict=True))
    size = next(x.shape[dim] for x, dim in pairs if dim is not None)
    return [
        x if not isinstance(x, Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in pairs
    ]


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x, the slowest in memory first; those that cannot be compared, as sizes are not known, as they are."""
    strides, order = x.stride(), list(range(x.dim()))
    if all(isinstance(stride, int) for stride in strides):
        return sorted(order, key=strides.__getitem__, reverse=True)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    for end in range(len(order) - 1, 0, -1):
        for i in range(end):
            if guard_or_false(strides[order[i]] < strides[order[i + 1]]):
                order[i], order[i + 1] = order[i + 1], order[i]
    return order


# Operators of PyTorch that ask for sizes which are "unbacked", known only when the program runs; these do not.


def unbacked(*tensors: Tensor) -> bool:
    """Whether a tensor has such a size."""
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for x in tensors for size in x.shape)


def logsumexp(x: Tensor) -> Tensor:
    """x.logsumexp(-1)."""
    if not unbacked(x):
        return x.logsumexp(-1)
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    return (x - top).exp().sum(-1).log() + top.squeeze(-1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices. The derivative of mm asks for strides, that of bmm does not."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0) if unbacked(a, b) else a @ b


def sum_to(x: Tensor, like: Tensor) -> Tensor:
    """x.sum_to_size(like.shape)."""
    if not unbacked(x, like):
        return x.sum_to_size(like.shape)
    leading = x.dim() - like.dim()
    x = x.sum(list(range(leading))) if leading else x
    shared = [d for d, size in enumerate(like.shape) if isinstance(size, int) and size == 1]
    return x.sum(shared, keepdim=True) if shared else x


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels compute and accumulate in: float32 for the half types, else `dtype`."""
    return torch.float32 if dtype in _HALF else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_tensor(op: str, name: str, x: Tensor) -> None:
    torch._check(x is not None, lambda: f"{op}: expected {name} to be a tensor, but got None")
    torch._check(
        not x.is_nested or x.layout == torch.jagged,
        lambda: f"{op}: expected {name} to be one tensor, but got nested ones; call it for each of {name}.unbind()",
    )


def check_floating(op: str, name: str, x: Tensor) -> None:
    check_tensor(op, name, x)
    torch._check(
        x.dtype in (torch.float32, torch.float64, *_HALF),
        lambda: (
            f"{op}: expected {name} of float32, float64, float16 or bfloat16, but got {dtype_name(x.dtype)}; "
            "convert it with .to()"
        ),
    )


def check_same_device(op: str, x_name: str, x: Tensor, name: str, y: Tensor) -> None:
    check_tensor(op, x_name, x)
    check_tensor(op, name, y)
    torch._check(
        x.device == y.device,
        lambda: f"{op}: {x_name} is on {x.device} but {name} is on {y.device}; move one with .to()",
    )


def check_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype, of: str) -> None:
    torch._check(
        x.dtype == dtype,
        lambda: (
            f"{op}: expected {name} of {dtype_name(dtype)}, the dtype of {of}, but got {dtype_name(x.dtype)}; "
            "convert one with .to()"
        ),
    )


def check_shape(op: str, name: str, x: Tensor, shape: Sequence[int], of: str) -> None:
    def sentence() -> str:
        return f"{op}: expected {name} of shape {list(shape)}, {of}, but got {list(x.shape)}"

    torch._check(x.dim() == len(shape), sentence)
    for size, expected in zip(x.shape, shape, strict=True):
        torch._check(size == expected, sentence)
