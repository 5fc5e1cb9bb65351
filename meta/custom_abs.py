"""custom_abs and custom_abs_: the absolute value, forward only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_ops.meta import op

# What torch.abs refuses on the CPU.
_REFUSED = (
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.bits8,
    torch.bits16,
    torch.bits1x8,
    torch.bits2x4,
    torch.bits4x2,
)


def custom_abs(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The absolute value of each element, forward only.

    y = abs(input)

    Args:
        input: any shape and layout; every dtype that `torch.abs` takes.
        out: written to and returned, if given: the result's dtype and device, any strides; resized where it has another
            shape, as `torch.abs` does.
    Returns:
        The shape and strides that `torch.abs` gives; the real dtype for a complex input, else that of input.
    Raises:
        NotImplementedError: bool, uint16, uint32 and uint64, which `torch.abs` refuses too.
        RuntimeError: out has another dtype or device, overlaps itself or a part of input, or a gradient is wanted.
        RuntimeError: at backward, on every device: "derivative for openreg::custom_abs is not implemented".
            Compiling a function whose result would need that derivative says so when it compiles.

    Not differentiable, by design: use `torch.abs`, or detach the input. Autocast leaves the dtype alone.
    Source: PyTorch's in-tree OpenReg, where it shows an operator without a derivative.
    """
    if out is not None:
        return torch.ops.openreg.custom_abs.out(input, out=out)
    return torch.ops.openreg.custom_abs.default(input)


def custom_abs_(input: Tensor) -> Tensor:
    """`custom_abs` in place.

    Args:
        input: any shape and strides that do not overlap; every real dtype that `torch.abs` takes.
    Returns:
        input.
    Raises:
        NotImplementedError: as `custom_abs`.
        RuntimeError: a complex dtype; elements share memory; at backward, as `custom_abs`; a leaf that requires a
            gradient, at once.

    Not differentiable. Autocast leaves the dtype alone.
    """
    return torch.ops.openreg.custom_abs_.default(input)


def _check(name: str, input: Tensor) -> None:
    op.check_tensor(name, "input", input)
    if input.dtype in _REFUSED:
        raise NotImplementedError(f"{name}: not implemented for {op.dtype_name(input.dtype)}; convert input with .to()")


# The fake kernels are the references: on another device torch.abs computes.


@torch.library.register_fake("openreg::custom_abs")
def fake(input: Tensor) -> Tensor:
    _check("custom_abs", input)
    return torch.abs(input)


@torch.library.register_fake("openreg::custom_abs_")
def fake_(input: Tensor) -> Tensor:
    _check("custom_abs_", input)
    torch._check(
        not input.is_complex(),
        lambda: (
            "custom_abs_: expected input of a real dtype, in which the result is stored, but got "
            f"{op.dtype_name(input.dtype)}; use custom_abs"
        ),
    )
    return input.abs_()


@torch.library.register_fake("openreg::custom_abs.out")
def fake_out(input: Tensor, *, out: Tensor) -> Tensor:
    _check("custom_abs", input)
    op.check_same_device("custom_abs", "input", input, "out", out)
    dtype = input.dtype.to_real() if input.is_complex() else input.dtype
    torch._check(
        out.dtype == dtype,
        lambda: (
            f"custom_abs: expected out of {op.dtype_name(dtype)}, the dtype of the result, but got "
            f"{op.dtype_name(out.dtype)}; convert it with .to()"
        ),
    )
    return torch.abs(input, out=out)


reference = op.reference("custom_abs", differentiable=False)(fake)
reference_ = op.reference("custom_abs_", differentiable=False)(fake_)
reference_out = op.reference("custom_abs.out", differentiable=False)(fake_out)


@op.batched("custom_abs")
def batched(in_dims: Sequence[int | None], input: Tensor) -> Any:
    return torch.ops.openreg.custom_abs(input), in_dims[0]


@op.batched("custom_abs_")
def batched_(in_dims: Sequence[int | None], input: Tensor) -> Any:
    return torch.ops.openreg.custom_abs_(input), in_dims[0]


@op.batched("custom_abs.out")
def batched_out(in_dims: Sequence[int | None], input: Tensor, *, out: Tensor) -> Any:
    torch._check(
        len(in_dims) == 2 and in_dims[0] is not None,
        lambda: "custom_abs: expected vmap to map over both input and out; call it without out",
    )
    x, y = input.movedim(in_dims[0], 0), out.movedim(in_dims[1], 0)
    torch._check(
        x.shape == y.shape,
        lambda: (
            f"custom_abs: expected out of shape {list(x.shape[1:])} under vmap, where it cannot be resized, but got "
            f"{list(y.shape[1:])}; call it without out"
        ),
    )
    torch.ops.openreg.custom_abs.out(x, out=y)
    return out, in_dims[1]


@op.samples("custom_abs_")
@op.samples("custom_abs")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield (torch.randn(shape, dtype=dtype, device=device),)
