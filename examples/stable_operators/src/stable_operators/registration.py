"""The Python side of a stable library: derivatives, fake kernels, autocast and vmap. The same for every operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

NAMESPACE = "stable_operators"
# Sample inputs by operator name, for the tests and the checker: (device, dtype) -> argument tuples.
SAMPLES: dict[str, Callable[[str, torch.dtype], Iterable[Any]]] = {}
_library = torch.library.Library(NAMESPACE, "IMPL")


def register(
    name: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    check: Callable[..., None],
    batched: Callable[..., Any],
    samples: Callable[[str, torch.dtype], Iterable[Any]],
    derivative: tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]] | None = None,
    autocast: Callable[[list[Tensor]], torch.dtype] | None = None,
) -> Callable[..., Any]:
    """Register everything about an operator except its kernels; returns the reference with the check in front.

    Args:
        reference: the operator in plain PyTorch. It is the kernel on other devices, and replaces the operator where
            PyTorch must look inside: in forward mode, in nested torch.func transforms, and for derivatives without a
            kernel.
        fake: returns empty outputs for the operator's arguments.
        check: raises what the kernels raise; takes the operator's name and its arguments.
        batched: the operator on a batch: takes the arguments with the mapped dimension first, or without one.
        samples: yields arguments, from (device, dtype).
        derivative: ``save(ctx, inputs, output)`` and ``backward(ctx, *grads)``, as for `torch.library.register_autograd`
            Without them, autograd differentiates the reference.
        autocast: the dtype that autocast converts floating-point arguments to.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            check(name, *args)
            return function(*args)

        return call

    composite = checked(reference)

    redispatch, after_autograd = op._handle.redispatch_boxed, torch._C._after_autograd_keyset

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = redispatch(keyset & after_autograd, *args)
        derivative[0](ctx, args, out)
        ctx.arguments = len(args)
        return out

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = derivative[1](ctx, *grads)
        return None, *found, *[None] * (ctx.arguments - len(found))

    class_name = "".join(map(str.capitalize, name.split("_")))  # the node of the graph is RmsNormBackward
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    Derivative = type(class_name, (torch.autograd.Function,), methods)

    # This is torch.library.register_autograd plus the last case: that function supports neither forward mode nor nested
    # torch.func transforms. If nothing is recorded, this costs only two calls into PyTorch.
    def autograd(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level < 0 or not _has_tangent(args):
            if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
                return redispatch(keyset & after_autograd, *args)
            if derivative is not None and not torch._C._are_functorch_transforms_active():
                return Derivative.apply(keyset, *args)
        return composite(*args)

    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims, strict=True)]
        out = batched(info.batch_size, [dim is not None for dim in in_dims], *moved)
        return out, tree_map(lambda _: 0, out)

    def convert(key: Any, *args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            floating = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            if not floating:
                return op(*args)  # which raises for them
            dtype = autocast(floating)
            return op(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args))

    SAMPLES[name] = samples
    _library.impl(name, composite, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{name}", checked(fake), lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", vmap, lib=_library)
    if autocast is not None:
        for each in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1"):
            key = getattr(torch._C.DispatchKey, each)
            _library.impl(name, lambda *args, key=key: convert(key, *args), each)
    return composite


def _has_tangent(args: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args)


def whole_batch(size: int, mapped: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    """The tensors, all with the batch dimension, expanded where one had none."""
    return [
        x.expand(size, *x.shape) if isinstance(x, Tensor) and not has else x
        for x, has in zip(args, mapped, strict=True)
    ]  # fmt: skip


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels compute in: float32 for the half types, else `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def normal(device: str, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[Tensor, ...]:
    """Samples of these shapes, normally distributed."""
    return tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)


# ---- checks: the same messages as csrc/kernels.h ----

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_tensor(op: str, name: str, x: Tensor) -> None:
    torch._check(x is not None, lambda: f"{op}: expected {name} to be a tensor, but got None")


def check_floating(op: str, name: str, x: Tensor) -> None:
    check_tensor(op, name, x)
    torch._check(
        x.dtype in FLOATING,
        lambda: (
            f"{op}: expected {name} of float32, float64, float16 or bfloat16, but got {_name(x.dtype)}; "
            "convert it with .to()"
        ),
    )


def check_same_device(op: str, x_name: str, x: Tensor, name: str, y: Tensor) -> None:
    check_tensor(op, name, y)
    torch._check(
        x.device == y.device,
        lambda: f"{op}: {x_name} is on {x.device} but {name} is on {y.device}; move one with .to()",
    )


def check_dtype(op: str, name: str, x: Tensor, dtype: torch.dtype, of: str) -> None:
    torch._check(
        x.dtype == dtype,
        lambda: (
            f"{op}: expected {name} of {_name(dtype)}, the dtype of {of}, but got {_name(x.dtype)}; "
            "convert one with .to()"
        ),
    )


def check_shape(op: str, name: str, x: Tensor, shape: Sequence[int], of: str) -> None:
    def sentence() -> str:
        return f"{op}: expected {name} of shape {list(shape)}, {of}, but got {list(x.shape)}"

    torch._check(x.dim() == len(shape), sentence)
    for size, expected in zip(x.shape, shape, strict=True):
        torch._check(size == expected, sentence)


def check_like(op: str, name: str, x: Tensor, of: str, y: Tensor) -> None:
    """Check that x has the device, dtype and shape of y."""
    check_same_device(op, of, y, name, x)
    check_dtype(op, name, x, y.dtype, of)
    check_shape(op, name, x, y.shape, f"the same as {of}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
