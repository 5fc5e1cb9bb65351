"""Dropout with a mask of bytes, depthwise convolutions, the backward of RMS normalization, sums with a number, and
questions about libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openreg_ops.cuda_operators.registry import expect, kernel


@kernel("_fused_dropout")
def fused_dropout(self: Tensor, p: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Keep each element with probability `p`, scaled by 1 / p; the mask has one byte for each."""
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * mask * (1 / p), mask


@kernel("_masked_scale")
def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`self * mask * scale`, the gradient of `_fused_dropout`."""
    expect(mask.dtype == torch.uint8, "mask should be torch.uint8 dtype")
    return self * mask * scale


@kernel("_conv_depthwise2d", "_conv_depthwise2d.out")
def conv_depthwise2d(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A convolution in which each channel of `self` has filters of its own; `out` is resized."""
    result = torch.conv2d(self, weight, bias, stride, padding, dilation, self.size(1))
    return result if out is None else out.resize_(result.shape).copy_(result)


@kernel("conv_depthwise3d")
def conv_depthwise3d(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """`conv_depthwise2d` for volumes."""
    return torch.conv3d(self, weight, bias, stride, padding, dilation, self.size(1))


@kernel("_fused_rms_norm_backward")
def fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, by PyTorch's decomposition."""
    from torch._decomp.decompositions import _fused_rms_norm_backward  # imported late: it loads much

    return _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)


@kernel(*(f"_use_{library}_ctc_loss{overload}" for library in ("cudnn", "miopen") for overload in ("", ".Tensor")))
def use_library_for_ctc_loss(*_: Any) -> bool:
    """`ctc_loss` asks this on CUDA and ROCm; the device has no library for it."""
    return False


def _expect_number(tensors: list[Tensor], other: Tensor, alpha: float, expected: str = "expected") -> None:
    """CUDA's fast kernel reads the number on the device. Otherwise each element is added by itself, with any number."""
    first = tensors[0]
    fast = all(
        (x.device, x.dtype) == (first.device, other.dtype) and torch.result_type(x, alpha) == x.dtype for x in tensors
    )
    expect(
        not fast or other.device == first.device,
        f"scalar tensor {expected} to be on {first.device} but is on {other.device}",
    )


@kernel("_foreach_add.Tensor")
def foreach_add(self: list[Tensor], other: Tensor, *, alpha: float = 1) -> list[Tensor]:
    """Add a number to each tensor."""
    _expect_number(self, other, alpha)
    return [torch.add(x, other, alpha=alpha) for x in self]


@kernel("_foreach_add_.Tensor")
def foreach_add_(self: list[Tensor], other: Tensor, *, alpha: float = 1) -> None:
    """Add a number to each tensor, in place."""
    _expect_number(self, other, alpha, "is expected")  # CUDA's two messages differ
    for x in self:
        x.add_(other, alpha=alpha)
