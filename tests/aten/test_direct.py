"""Operators that compute in the device's tensors themselves (csrc/aten/direct.h), and where they do not.

The results have the CPU's bits, strides and dtypes, and the errors its sentences, whichever way an argument takes.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.testing import assert_close

import openreg_ops

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


def outcome(name, arguments, **named):
    """The result, and the arguments after the call; or the error's first line."""
    operator = functools.reduce(getattr, name.split("."), aten)
    try:
        result = operator(*arguments, **named)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error).splitlines()[0]
    return result, arguments


def check(expected, got, message):
    """Check that the device's outcome is the CPU's: bits, strides, dtypes and sentences."""
    if isinstance(expected[1], str) or isinstance(got[1], str):
        assert expected == got, message
        return
    (results, left), (there, right) = ((r if isinstance(r, tuple) else (r,), a) for r, a in (expected, got))
    for want, result in zip(results, there, strict=True):
        assert result.device.type == "openreg" and result.dtype == want.dtype, message
        assert result.stride() == want.stride() and result.is_neg() == want.is_neg(), message
    for want, result in [*zip(results, there, strict=True), *zip(left, right, strict=True)]:
        if isinstance(want, torch.Tensor):
            assert_close(result.cpu(), want, rtol=0, atol=0, equal_nan=True, msg=message)


@pytest.mark.parametrize("how", ARGUMENTS)
def test_as_on_the_cpu(how):
    for name, count in OPERATORS:
        if "host scalar" in how and (count == 3 or "backward" in name):
            continue  # CUDA's kernels take none, or not each: see test_host_scalars.py
        arguments = [ARGUMENTS[how](lambda x, device=device: x.to(device))[:count] for device in ("cpu", "openreg")]
        first, second = (outcome(name, argument, **NUMBERS.get(name, {})) for argument in arguments)
        in_place = name.partition(".")[0].endswith("_")
        assert in_place is any(second[0] is argument for argument in arguments[1]) or isinstance(second[1], str), name
        check(first, second, f"{name} of {how}")


# Other operators: the shapes of their tensors, and what follows them.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x,
    "padded": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2] if x.dim() else x,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
    "negative": lambda x: torch._neg_view(-x),
    "lazy clone": torch._lazy_clone,
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
OTHERS = [
    *[("mm", [(n, k), (k, m)], []) for n, k, m in [(4, 3, 5), (1, 3, 5), (4, 1, 5), (4, 3, 1), (1, 1, 1), (0, 3, 5), (4, 0, 5), (70, 80, 90)]],
    ("mm", [(4, 3), (4, 3)], []), ("mm", [(4,), (4, 3)], []), ("mm", [(2, 4, 3), (3, 4)], []),
    *[("addmm", [bias, (4, 3), (3, 5)], []) for bias in [(5,), (1,), (), (4, 5), (4, 1), (1, 5), (4,), (2, 4, 5)]],
    ("addmm", [(5,), (4, 0), (0, 5)], []), ("addmm", [(5,), (0, 3), (3, 5)], []), ("addmm", [(1,), (4, 3), (3, 1)], []),
    ("addmm", [(5,), (4, 3), (4, 3)], []), ("addmm", [(90,), (70, 80), (80, 90)], []),
    *[("sum.dim_IntList", [shape], [dim, keep]) for shape in [(2, 3, 4), (5,), (), (0, 3), (70, 90)]
      for dim in ([], None, [0], [0, -1], [7]) for keep in (False, True)],
    *[(name, [shape], [dim, False]) for name in ("_softmax", "_log_softmax") for dim in (0, 1, -1, 5)
      for shape in [(4, 3), (2, 3, 4), (1, 1), (), (0, 3), (4, 0), (40, 50)]],
    *[("native_layer_norm", [shape, weight, bias], []) for shape in [(4, 3), (2, 4, 3), (3,), (0, 3), (4, 0), (), (40, 3)]
      for weight in ((3,), None, (4,)) for bias in ((3,), None)],
]  # fmt: skip
# Each of these, in turn, after the arguments above. The first one is for all layouts.
NAMED = {
    "addmm": [{}, {"beta": 0}, {"beta": 0.5, "alpha": -2}, {"beta": 0, "alpha": 0}, {"beta": 2j}, {"alpha": True}],
    "sum.dim_IntList": [{}, {"dtype": torch.float64}, {"dtype": torch.float32}, {"dtype": torch.int64}],
}


def combinations(count):
    """Layouts of several tensors: each of them in each place, beside contiguous tensors and beside its own kind."""
    for layout in LAYOUTS:
        yield (layout,) * count
        if layout != "contiguous" and count > 1:
            yield from (tuple(layout if i == place else "contiguous" for i in range(count)) for place in range(count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted({name for name, *_ in OTHERS}))
def test_others_as_on_the_cpu(name, dtype):
    for shapes, after in (case[1:] for case in OTHERS if case[0] == name):
        given = [None if shape is None else values(*shape, dtype=dtype) for shape in shapes]
        if name == "native_layer_norm":
            after = [[3], *given[1:], 1e-5]
            given = given[:1]
        for layouts in combinations(len(given)):
            host, device = (
                [LAYOUTS[how](x.to(to)) for how, x in zip(layouts, given, strict=True)] for to in ("cpu", "openreg")
            )
            there = [x.to("openreg") if isinstance(x, torch.Tensor) else x for x in after]
            for named in NAMED.get(name, [{}])[: None if set(layouts) <= {"contiguous", "transposed"} else 1]:
                check(
                    outcome(name, host + after, **named),
                    outcome(name, device + there, **named),
                    f"{name} of {shapes}, {layouts}, {after}, {named}",
                )


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_the_backward_of_softmax_as_on_the_cpu(name, dtype):
    for shape in (4, 3), (2, 3, 4), (), (0, 3):
        for layouts in combinations(2):
            host, device = (
                [LAYOUTS[how](values(*shape, dtype=dtype).to(to)) for how in layouts] for to in ("cpu", "openreg")
            )
            for dim, asked in itertools.product((0, -1, 5), (dtype, torch.float64)):
                check(
                    outcome(name, [*host, dim, asked]),
                    outcome(name, [*device, dim, asked]),
                    f"{name} of {shape}, {layouts}, {dim}, {asked}",
                )


def test_each_call_is_one_launch():
    """A kernel that asked the dispatcher for a copy or a fill of a device tensor would launch twice."""
    x = values(4, 4).to("openreg")
    calls = [(name, [x] * count, NUMBERS.get(name, {})) for name, count in OPERATORS]
    calls += [(name, [x, *after], {}) for name, after in [
        ("mm", [x]), ("mm", [x.t()]), ("addmm", [x, x]), ("addmm", [x, x.t()]), ("sum.dim_IntList", [[]]), ("sum.dim_IntList", [[0]]),
        ("_softmax", [0, False]), ("_softmax", [1, False]), ("_log_softmax", [0, False]), ("_log_softmax", [1, False]),
        *[(f"{name}_backward_data", [x, dim, x.dtype]) for name in ("_softmax", "_log_softmax") for dim in (0, 1)],
        ("native_layer_norm", [[4], x[0], x[0], 1e-5]), ("native_layer_norm", [[4, 4], None, None, 1e-5])]]  # fmt: skip
    calls += [("addmm", [x[0], x, x], {"beta": beta}) for beta in (0, 1)]
    for name, arguments, named in calls:
        for dtype in DTYPES[:4]:
            given = [y.to(dtype) if isinstance(y, torch.Tensor) else y for y in arguments]
            given = [dtype if isinstance(y, torch.dtype) else y for y in given]
            before = openreg_ops._C.launch_count()
            functools.reduce(getattr, name.split("."), aten)(*given, **named)
            assert openreg_ops._C.launch_count() - before == 1, f"{name} in {dtype}"


@pytest.mark.parametrize("operand", range(3))
def test_others_with_tensors_elsewhere_or_of_other_dtypes(operand):
    """In each place: a tensor on the host, on the other device, and of a wider dtype."""
    for name, shapes, after in [
        ("mm", [(4, 3), (3, 5)], []),
        ("addmm", [(5,), (4, 3), (3, 5)], []),
        ("native_layer_norm", [(4, 3), (3,), (3,)], [1e-5]),
        ("_softmax_backward_data", [(4, 3), (4, 3)], [-1, torch.float32]),
    ]:
        if operand >= len(shapes):
            continue
        operator = functools.reduce(getattr, name.split("."), aten)

        def call(change, name=name, shapes=shapes, after=after, operator=operator):
            tensors = [values(*shape).to("openreg") for shape in shapes]
            tensors[operand] = change(tensors[operand])
            first, *rest = tensors
            return operator(first, *([[3]] if name == "native_layer_norm" else []), *rest, *after)

        for elsewhere in ("cpu", "openreg:1"):
            with pytest.raises(RuntimeError, match="on the same device|at least two devices"):
                call(lambda x, elsewhere=elsewhere: x.to(elsewhere))

        def freed(x):
            x = x.clone()
            x.untyped_storage().resize_(0)
            return x

        with pytest.raises(RuntimeError, match="without memory"):
            call(freed)
        with pytest.raises(RuntimeError, match="dtype|type"):
            call(lambda x: x.double())


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
