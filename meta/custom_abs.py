"""custom_abs: the absolute value, forward only."""

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


def custom_abs(input: Tensor) -> Tensor:
    """The absolute value of each element, forward only.

    y = abs(input)

    Args:
        input: any shape and layout; every dtype that `torch.abs` takes.
    Returns:
        The shape and strides that `torch.abs` gives; the real dtype for a complex input, else that of input.
    Raises:
        NotImplementedError: bool, uint16, uint32 and uint64, which `torch.abs` refuses too.
        RuntimeError: at backward, on every device: "derivative for openreg::custom_abs is not implemented".
            Compiling a function whose result would need that derivative says so when it compiles.

    Not differentiable, by design: use `torch.abs`, or detach the input. Autocast leaves the dtype alone.
    Source: PyTorch's in-tree OpenReg, where it shows an operator without a derivative.
    """
    return torch.ops.openreg.custom_abs.default(input)


@torch.library.register_fake("openreg::custom_abs")
def fake(input: Tensor) -> Tensor:
    if input.dtype in _REFUSED:
        raise NotImplementedError(
            f"custom_abs: not implemented for {op.dtype_name(input.dtype)}; convert input with .to()"
        )
    return torch.abs(input)


# The fake kernel is the reference: on another device torch.abs computes.
reference = op.reference("custom_abs", differentiable=False)(fake)


@op.batched("custom_abs")
def batched(in_dims: Sequence[int | None], input: Tensor) -> Any:
    return torch.ops.openreg.custom_abs(input), in_dims[0]


@op.samples("custom_abs")
def samples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((4, 6), (5,), (2, 3, 4, 4)):
        yield (torch.randn(shape, dtype=dtype, device=device),)
