"""Elementwise operators that compute in the device's tensors themselves (csrc/aten/direct.h), and where they do not.

The results have the CPU's bits, strides and dtypes, and the errors its sentences, whichever way an argument takes.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.testing import assert_close

aten = torch.ops.aten
UNARY = ["neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "relu", "silu"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "silu_backward"]
BINARY += [
    "sigmoid_backward",
    "tanh_backward",
    "threshold_backward",
    *(f"{name}.Tensor" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
]
IN_PLACE = ["add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor"]
POINTWISE = ["addcmul_", "addcdiv_"]
OF_ONE = [*UNARY, *(f"{name}_" for name in UNARY[:-1])]
# Numbers after the tensors.
NUMBERS = {"add.Tensor": {"alpha": 0.3}, "sub.Tensor": {"alpha": 0.3}, "add_.Tensor": {"alpha": -2}, "sub_.Tensor": {"alpha": -2},
           "threshold_backward": {"threshold": 0.1}, "addcmul_": {"value": 0.7}, "addcdiv_": {"value": 0.7}}  # fmt: skip
OPERATORS = (
    [(name, 1) for name in OF_ONE] + [(name, 2) for name in BINARY + IN_PLACE] + [(name, 3) for name in POINTWISE]
)


def values(*shape, dtype=torch.float32):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 4 - 2).to(dtype)


def base():
    return torch.arange(1.0, 13)


# How the arguments are: a function of the device that returns three of them, of which an operator takes the first ones.
# It is called for both devices, so whatever shares memory does on both.
ARGUMENTS = {
    "contiguous": lambda to: [to(values(4, 3)) for _ in range(3)],
    "transposed": lambda to: [to(values(4, 3)).t(), to(values(3, 4)), to(values(4, 3)).t()],
    "strided": lambda to: [to(values(8, 9))[::2, 1:7:2] for _ in range(3)],
    "channels last": lambda to: [to(values(2, 3, 4, 5)).to(memory_format=torch.channels_last) for _ in range(3)],
    "broadcast": lambda to: [to(values(4, 3)), to(values(3)), to(values(4, 1))],
    "broadcast first": lambda to: [to(values(3)), to(values(4, 3)), to(values(4, 1))],
    "expanded": lambda to: [to(values(1, 3)).expand(4, 3) for _ in range(3)],
    "no dimension": lambda to: [to(values()) for _ in range(3)],
    "empty": lambda to: [to(values(0, 3)) for _ in range(3)],
    "one": lambda to: [to(values(1, 1)) for _ in range(3)],
    "large": lambda to: [to(values(50_000)) for _ in range(3)],
    "the same": lambda to: [to(values(4, 3))] * 3,
    "shifted": lambda to: (lambda x: [x[1:], x[:-1], x[:-1]])(to(base())),
    "reversed roles": lambda to: (lambda x: [x.view(3, 4), x.view(3, 4).flip(1), x.view(3, 4)])(to(base())),
    "unlike": lambda to: [to(values(4, 3)), to(values(5)), to(values(2))],
    "wider second": lambda to: [to(values(4, 3)), to(values(4, 3, dtype=torch.float64)), to(values(4, 3))],
    "narrower second": lambda to: [to(values(4, 3)), to(values(4, 3, dtype=torch.bfloat16)), to(values(4, 3))],
    "integers second": lambda to: [to(values(4, 3)), to(values(4, 3, dtype=torch.int64)), to(values(4, 3))],
    "a number": lambda to: [to(values(4, 3)), 1.3, 0.7],
    "host scalar": lambda to: [to(values(4, 3)), torch.tensor(0.7), torch.tensor(0.3)],
    "wide host scalar": lambda to: [to(values(4, 3)), torch.tensor(0.7).double(), torch.tensor(0.3)],
    "lazy clone": lambda to: [torch._lazy_clone(to(values(4, 3))) for _ in range(3)],
    "negative": lambda to: [torch._neg_view(to(values(4, 3))) for _ in range(3)],
    **{
        str(dtype).removeprefix("torch."): lambda to, dtype=dtype: [to(values(4, 3, dtype=dtype)) for _ in range(3)]
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool,
                      torch.float8_e4m3fn)
    },
}  # fmt: skip


def outcome(name, count, how, device):
    """The result, and the arguments after the call; or the error's first line."""
    operator = functools.reduce(getattr, name.split("."), aten)
    arguments = ARGUMENTS[how](lambda x: x.to(device))[:count]
    try:
        result = operator(*arguments, **NUMBERS.get(name, {}))
    except (RuntimeError, TypeError) as error:
        return type(error), str(error).splitlines()[0]
    assert (result is arguments[0]) is name.partition(".")[0].endswith("_")
    return result, arguments


@pytest.mark.parametrize("how", ARGUMENTS)
def test_as_on_the_cpu(how):
    for name, count in OPERATORS:
        if "host scalar" in how and (count == 3 or "backward" in name):
            continue  # CUDA's kernels take none, or not each: see test_host_scalars.py
        first, second = (outcome(name, count, how, device) for device in ("cpu", "openreg"))
        wrong = f"{name} of {how}"
        if isinstance(first[1], str) or isinstance(second[1], str):
            assert first == second, wrong
            continue
        (expected, left), (result, there) = first, second
        assert result.device.type == "openreg" and result.dtype == expected.dtype, wrong
        assert result.stride() == expected.stride() and result.is_neg() == expected.is_neg(), wrong
        for got, want in [(result, expected), *zip(there, left, strict=True)]:
            if isinstance(got, torch.Tensor):
                assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True, msg=wrong)


def test_on_another_device_than_the_current_one():
    x = torch.ones(3, device="openreg:1")
    for result in (x + x, torch.exp(x), x.mul_(2)):
        assert result.device == x.device
    with pytest.raises(RuntimeError, match="at least two devices, openreg:1 and openreg:0"):
        x + torch.ones(3, device="openreg:0")


def test_memory_that_was_freed():
    x = torch.ones(3, device="openreg")
    x.untyped_storage().resize_(0)
    for call in (lambda: x + x, lambda: torch.exp(x), lambda: torch.ones(3, device="openreg").add_(x)):
        with pytest.raises(RuntimeError, match="without memory"):
            call()


def test_the_result_is_a_tensor_like_any_other():
    with torch.inference_mode():
        x = torch.ones(3, device="openreg")
        assert (x + x).is_inference() and torch.exp(x).is_inference()
    x = torch.ones(3, device="openreg", requires_grad=True)
    (x * x + torch.exp(x)).sum().backward()
    assert_close(x.grad.cpu(), torch.full((3,), 2 + torch.e))
    result = torch.ones(3, device="openreg") + 1
    result.resize_(100).fill_(2)
    assert result.sum().item() == 200
