"""custom_abs and custom_abs_: the absolute value, forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from openreg_ops.meta import op


def _call(input, *, out=None):
    packet = torch.ops.openreg.custom_abs
    return packet.default(input) if out is None else packet.out(input, out=out)


@op.operator(differentiable=False, batch_first=True, inner=0, call=_call)
def custom_abs(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The absolute value of each element, forward only.

    y = abs(input)

    Args:
        input: any shape and layout; every dtype that `torch.abs` supports.
        out: written to and returned, if given: the result's dtype and device, any strides; resized if it has another
            shape, as in `torch.abs`.
    Returns:
        The shape and strides of `torch.abs`; the real dtype for a complex input, else the dtype of input.
    Raises:
        NotImplementedError: bool, uint16, uint32 and uint64, which `torch.abs` rejects too.
        RuntimeError: out has another dtype or device, overlaps itself or a part of input, or an argument requires a
            gradient.
        RuntimeError: at backward, on every device: "derivative for openreg::custom_abs is not implemented".
            Compiling a function whose result needs that derivative raises at compile time.

    Not differentiable, by design: use `torch.abs`, or detach the input. Autocast leaves the dtype alone.
    Source: PyTorch's in-tree OpenReg, where it shows an operator without a derivative.
    """
    return torch.abs(input, out=out)


@op.operator(differentiable=False, batch_first=True, inner=0)
def custom_abs_(input: Tensor) -> Tensor:
    """`custom_abs` in place.

    Args:
        input: any shape and strides that do not overlap; every real dtype that `torch.abs` supports.
    Returns:
        input.
    Raises:
        NotImplementedError: as `custom_abs`.
        RuntimeError: a complex dtype; elements share memory; at backward, as in `custom_abs`; a leaf that requires a
            gradient, immediately.

    Not differentiable. Autocast leaves the dtype alone.
    """
    return input.abs_()


@custom_abs.batched
def _(in_dims, input, *, out):
    if out is None:
        return torch.ops.openreg.custom_abs(input), in_dims[0]
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


custom_abs.samples(op.alike(1))
custom_abs_.samples(op.alike(1))
