"""`compare`: the first operator that differs from the reference is found, and nothing is reported where none does."""

import functools
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import python
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools import backends
from openreg_tools.compare import compare
from openreg_tools.compare.differences import Differences
from openreg_tools.compare.tolerance import Tolerances
from openreg_tools.core.options import Wrong

DEVICE = "openreg"


def resized(x, *, out, more=0.0):
    return out.resize_(x.shape).copy_(x * 2 + more)


def wrong_scale_(x):
    x.mul_(2).select(0, -1).add_(0.5)
    return x


def raises(x):
    raise RuntimeError("the kernel has no such mode")


OPERATORS = {  # the schema, what is right on the CPU, and what is wrong on the device
    "scale(Tensor x, float by=2.0) -> Tensor": (
        lambda x, by=2.0: x * by, lambda x, by=2.0: torch.where(x > 100, x * by + 1, x * by)),
    "scale_(Tensor(a!) x) -> Tensor(a!)": (lambda x: x.mul_(2), wrong_scale_),
    "add_(Tensor(a!) x, Tensor y) -> Tensor(a!)": (lambda x, y: x.add_(y), lambda x, y: x.add_(y, alpha=5)),
    "both_(Tensor(a!) x, Tensor(b!) y) -> ()": (
        lambda x, y: (x.add_(1), y.add_(1), None)[2], lambda x, y: (x.add_(1), y.add_(2), None)[2]),
    "all_(Tensor(a!)[] xs) -> ()": (
        lambda xs: [x.add_(1) for x in xs][:0] or None, lambda xs: [x.add_(i + 1) for i, x in enumerate(xs)][:0] or None),
    "without_offset(Tensor x) -> Tensor": (lambda x: x * 2, lambda x: x.as_strided(x.shape, x.stride(), 0) * 2),
    "rows(Tensor x, Tensor y) -> (Tensor, Tensor)": (
        lambda x, y: (x + y, x.sum(0)), lambda x, y: (x + y, x[1:].sum(0))),
    "resized(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": (resized, functools.partial(resized, more=1.0)),
    "turned_(Tensor(a!) x) -> Tensor(a!)": (lambda x: x.transpose_(0, 1), lambda x: x.transpose_(0, 1).add_(1)),
    "list(Tensor x) -> Tensor[]": (lambda x: [x + 1, x + 2], lambda x: [x + 1, x + 3]),
    "shorter(Tensor x) -> Tensor[]": (lambda x: [x + 1, x + 2], lambda x: [x + 1]),
    "none(Tensor x) -> (Tensor, Tensor)": (lambda x: (x + 1, x + 2), lambda x: (x + 1, None)),
    "shape(Tensor x) -> Tensor": (lambda x: x.clone(), lambda x: x[None].clone()),
    "dtype(Tensor x) -> Tensor": (lambda x: x.clone(), lambda x: x.double()),
    "only_device_raises(Tensor x) -> Tensor": (lambda x: x.clone(), raises),
    "nan(Tensor x) -> Tensor": (lambda x: x / x, lambda x: torch.ones_like(x)),
    "slightly(Tensor x) -> Tensor": (lambda x: x.clone(), lambda x: x * (1 + 4e-7)),
    "number(Tensor x) -> float": (lambda x: 1.0, lambda x: 1.0 + 1e-6),
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    """Operators that are right on the CPU and wrong on the device."""
    library = torch.library.Library("test_compare", "DEF")
    for schema, (right, wrong) in OPERATORS.items():
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, right, "CPU")
        library.impl(name, wrong, "PrivateUse1")
    yield torch.ops.test_compare
    library._destroy()


def first_of(function, *tensors, **options):
    with torch.no_grad(), compare(device=DEVICE, **options) as result:
        function(*(t.to(DEVICE) for t in tensors))
    return result.first


# ---- nothing is reported where nothing differs ----


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_a_clean_training_run(mode):
    """Forward, dropout, backward and optimizer; and the program computes what it does without."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6, device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    with torch.openreg.launch_mode(mode):
        expected = train()
        with compare() as result:
            got = train()
    assert result.first is None and not result.skipped and not result.notes, result
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    names = {"aten::addmm", "aten::native_dropout", "aten::native_layer_norm_backward", "aten::randn"}
    assert all(result.row(name).compared == result.row(name).calls > 0 for name in names)
    assert "Nothing differs beyond its tolerance." in result.text()
    result.assert_close()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:0], lambda x: x[0, 0], lambda x: x.expand(2, *x.shape),
        lambda x: x.to(torch.complex64).conj(), lambda x: x > 0, lambda x: x.to(torch.bfloat16)[1:], lambda x: x.to_sparse(),
        lambda x: x.view(torch.int32), lambda x: x.to("openreg:1"), lambda x: x.repeat(1000, 2)[900:, 3:],
    ],
)  # fmt: skip
def test_layouts_dtypes_and_devices(make):
    with compare() as result:
        x = make(torch.arange(1, 13, device=DEVICE, dtype=torch.float32).view(3, 4))
        (x.to_dense() if x.is_sparse else x).clone()
        x + x
    assert result.first is None and not result.skipped and not result.notes, result


def test_aliases_between_arguments():
    """The result of an operator whose arguments overlap depends on it."""
    with compare() as result:
        x = torch.arange(8.0, device=DEVICE)
        x[2:].add_(x[:6].clone())
        y = x.view(2, 4)
        torch.add(y, y.flip(0), out=y)
        torch._foreach_add_([x[:4], x[4:]], 1.0)
        x.as_strided((3,), (2,), 1).mul_(x[1])
        large = torch.arange(1e4, device=DEVICE)
        large[1:].copy_(large[1:].clone()).sub_(large[0])
    assert result.first is None, result


def test_indices_nan_scalars_and_scratch_memory():
    with compare() as result:
        x = torch.tensor([float("nan"), 1.0, float("inf"), 0.0], device=DEVICE)
        (x / x).isnan().nonzero()
        x.nan_to_num().sort()
        assert x[1].item() == 1.0
        torch.log(x)
        torch.empty(5, device=DEVICE)
        nn.LSTM(4, 8).to(DEVICE)(torch.randn(2, 5, 4, device=DEVICE))[0].sum().backward()
    assert result.first is None and any("rnn_layer" in row for row in result._rows), result


def test_default_device_and_inference_mode():
    with torch.device(DEVICE), torch.inference_mode(), compare() as result:
        torch.ones(3).add_(torch.rand(3)).sum().item()
    assert result.first is None and result.operators >= 4, result


def test_the_reverse():
    """Any device may be under test: here the CPU, against the device."""
    with compare(device="cpu", against=DEVICE) as result:
        x = torch.randn(3, 4)
        (x @ x.t()).softmax(-1).sum().item()
    assert result.first is None and result.row("aten::mm").compared == 1, result


def test_a_mode_in_the_program_does_not_see_what_compare_runs():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x, context = torch.ones(3, device=DEVICE), compare()
    with Mode(), context:
        x + x
    assert seen == ["aten::add.Tensor"]


def test_what_raises_on_both_is_not_a_difference():
    with compare() as result, pytest.raises(RuntimeError):
        torch.ones(2, device=DEVICE) @ torch.ones(3, device=DEVICE)
    assert result.first is None


class Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.x if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))


def test_an_operator_that_returns_a_wrapper_is_skipped():
    with torch.library._scoped_library("test_compare_wrappers", "DEF") as wrappers:
        wrappers.define("wrap(Tensor x) -> Tensor")
        for key in ("CPU", "PrivateUse1"):
            wrappers.impl("wrap", lambda x: Wrapper(x + 1), key)
        with compare(device=DEVICE) as result:
            out = torch.ops.test_compare_wrappers.wrap(torch.ones(3, device=DEVICE))
    assert out.x.tolist() == [2.0] * 3 and not result.differences
    assert "its results cannot be copied" in result.skipped["test_compare_wrappers::wrap"]


def test_an_operator_without_a_kernel_for_the_reference_is_listed():
    with torch.library._scoped_library("test_compare_alone", "DEF") as alone:
        alone.define("twice(Tensor x) -> Tensor")
        alone.impl("twice", lambda x: x * 2, "PrivateUse1")
        with compare(device=DEVICE) as result:
            torch.ops.test_compare_alone.twice(torch.ones(3, device=DEVICE))
    assert result.row("test_compare_alone::twice").compared == 0 and result.first is None
    assert "test_compare_alone::twice was not compared: cpu raised NotImplementedError" in " ".join(str(result).split())


# ---- what differs ----


def test_the_first_difference_by_hand(library):
    x = torch.tensor([[1.0, 200.0], [3.0, 4.0]])

    class Scale(nn.Module):
        def forward(self, x):
            return library.scale(x, by=4.0)

    model = nn.Sequential(nn.Identity(), Scale())
    with compare() as result:
        z = model(x.to(DEVICE) + 0)
        library.scale(z)
    first = result.first
    assert result.seconds > 0
    assert (first.index, first.operator, first.what, first.error.at) == (2, "test_compare::scale", "result", (0, 1))
    assert (first.error.got, first.error.expected, first.error.count) == (801.0, 800.0, 1)
    assert first.error.ulps == 2**14  # of 800: 2^-14
    assert first.place.module == "Sequential.1" and "test_compare.py:" in first.place.line()
    assert first.inputs == ["float32[2, 2]", "4.0"] and any("library.scale" in frame for frame in first.stack)
    assert len(result.differences) == 2  # the error of each operator is its own: the second is scale's again
    assert [row.operator for row in result.ranked] == ["test_compare::scale"]
    assert "4 calls, 4 compared, 2 results not equal bit for bit, 2 beyond the tolerance" in " ".join(
        str(result).split()
    )
    assert "The first difference" in str(result) and "801.0 on openreg, 800.0 on cpu" in str(result)
    with pytest.raises(AssertionError, match="off by 1.638e"):
        result.assert_close()


@pytest.mark.parametrize(
    ("call", "found", "inputs"),
    [
        (lambda op, x: op.scale_(x[0]), "x is off by 1.049e+06 ulps at [2]: 4.5 on openreg, 4.0 on cpu", ["float32[3]"]),
        (lambda op, x: op.add_(x, x), "x is off by", ["float32[2, 3]"] * 2),
        (lambda op, x: op.add_(x[1:], x[:1]), "x is off by", ["float32[1, 3]"] * 2),
        (lambda op, x: op.add_(x, x[0].clone()), "x is off by", ["float32[2, 3]", "float32[3]"]),
        (lambda op, x: op.both_(x[0], x[1]), "y is off by", ["float32[3]"] * 2),
        (lambda op, x: op.all_([x[0], x[1]]), "xs[1] is off by", ["[float32[3], float32[3]]"]),
        (lambda op, x: op.without_offset(x[1:]), "result is off by", ["float32[1, 3]"]),
        (lambda op, x: op.rows(x, x), "result 1 is off by", ["float32[2, 3]"] * 2),
        (lambda op, x: op.resized(x, out=x.new_empty(0)), "out is off by", ["float32[2, 3]", "out=float32[0]"]),
        (lambda op, x: op.turned_(x[:, 1:]), "x is off by", ["float32[2, 2] strides [3, 1]"]),
        (lambda op, x: op.turned_(x + 0), "x is off by", ["float32[2, 3]"]),
        (lambda op, x: op.list(x[0]), "result[1] is off by", ["float32[3]"]),
        (lambda op, x: op.shorter(x[0]), "result has 1 tensors, and 2 on cpu", ["float32[3]"]),
        (lambda op, x: op.none(x[0]), "result 1 has no tensor, and float32[3] on cpu", ["float32[3]"]),
        (lambda op, x: op.shape(x[0]), "result is float32[1, 3], and float32[3] on cpu", ["float32[3]"]),
        (lambda op, x: op.dtype(x[0]), "result is float64[3], and float32[3] on cpu", ["float32[3]"]),
        (lambda op, x: op.nan(x[0]), "result is off by infinitely many ulps at [0]: 1.0 on openreg, nan on cpu",
         ["float32[3]"]),
    ],
)  # fmt: skip
def test_what_differs(library, call, found, inputs):
    first = first_of(lambda x: call(library, x), torch.arange(6.0).view(2, 3))
    assert first.sentence().startswith(found) and first.inputs == inputs


def test_what_raises_on_the_device_alone(library):
    with pytest.raises(RuntimeError, match="no such mode") as caught, compare() as result:
        library.only_device_raises(torch.ones(2, device=DEVICE))
    text = " ".join(str(result).split())
    assert "raised RuntimeError: the kernel has no such mode" in text
    assert "2 calls, 1 compared, 0 results not equal bit for bit, 0 beyond the tolerance, 1 different in shape" in text
    assert "compare: the first difference is in test_compare::only_device_raises" in caught.value.__notes__[0]


@pytest.mark.parametrize("operator", ["empty", "ones", "mul"])
def test_an_allocation_that_fails(operator):
    """Also of an operator whose arguments are not copied, because it has no results to compare."""
    x = torch.ones(10, device=DEVICE)
    call = {"empty": torch.empty, "ones": torch.ones, "mul": lambda *_, **__: x * 2}[operator]
    with pytest.raises(torch.OutOfMemoryError), compare() as result, torch.openreg.faults.inject("allocation"):
        call(1 << 16, device=DEVICE)
    (difference,) = result.differences
    assert difference.operator.startswith(f"aten::{operator}") and "raised OutOfMemoryError" in difference.sentence()


@pytest.mark.parametrize("after, call", [(0, ("aten::_to_copy", 0)), (1, ("aten::_to_copy", 6)), (2, None)], ids=str)
def test_a_copy_that_fails(after, call):
    """Copies of `compare` itself are neither counted nor struck."""
    with torch.openreg.faults.inject("copy", after=after) as fault, compare() as result:
        x = torch.ones(4).to(DEVICE)
        for _ in range(5):
            x = x + 1
        x.cpu()
    first = result.first and (result.first.operator, result.first.index)
    assert fault.struck == (after < 2) and first == call


def test_an_input_that_host_code_wrote():
    """What was launched directly is not the error of the operator that reads it."""
    x = torch.ones(4, device=DEVICE)
    with compare() as result:
        y = x * 2
        with torch._C._DisableTorchDispatch():
            y.fill_(5)
        z = y + 1
    assert z[0].item() == 6 and result.first is None


def test_in_backward(library):
    """The report names the module and the line of the forward."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return library.scale(grad)

    class Model(nn.Module):
        def forward(self, x):
            return Times.apply(x)

    with compare() as result:
        x = torch.full((2,), 300.0, device=DEVICE, requires_grad=True)
        Model()(x).backward(x.detach())
    first = result.first
    assert first.operator == "test_compare::scale" and first.place.node == "TimesBackward"
    assert first.place.module == "Model" and "test_compare.py" in first.place.line() and first.place.phase == "backward"
    assert any("in backward: return library.scale" in frame for frame in first.stack)


# ---- tolerances ----


def test_defaults_come_from_dtype_and_operator():
    tolerance = Tolerances()
    a, b = torch.ones(3, 64), torch.ones(64, 5)
    mm = torch.ops.aten.mm.default
    assert str(tolerance(mm, (a, b), a @ b)) == "8 ulps (sum of 64)"
    assert tolerance(mm, (a.half(), b.half()), (a @ b).half()).ulps == pytest.approx(4 + 4 * 2**-13)
    assert tolerance(torch.ops.aten.clone.default, (a,), a).ulps == 0
    assert tolerance(torch.ops.aten.mul.Tensor, (a, a), a).ulps == 2
    assert tolerance(torch.ops.aten.exp.default, (a,), a).ulps == 8
    assert tolerance(torch.ops.aten.gelu.default, (a,), a).ulps == 16.5
    assert tolerance(torch.ops.aten.argmax.default, (a,), a.argmax()).ulps == 0


def test_tolerances_can_be_set(library):
    x = torch.ones(3)
    assert first_of(library.slightly, x) is None  # 3 ulps, of the 16 for what is not known
    assert first_of(library.slightly, x, tolerances={"test_compare::slight*": 2}).tolerance.ulps == 2
    assert first_of(library.slightly, x, tolerances={"test_compare::slightly": 4}) is None
    assert first_of(library.slightly, x, factor=0.1) is not None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex32, torch.int64], ids=str
)
def test_a_number_is_measured_in_ulps_of_the_tensors(library, dtype):
    x = torch.ones(3, dtype=dtype)
    ulps = 1e-6 / (torch.finfo(dtype).eps if dtype != torch.int64 else 2**-52)
    first = first_of(library.number, x, tolerances={"test_compare::number": 0})
    assert first.error.ulps == pytest.approx(ulps, rel=0.1)
    assert first_of(library.number, x, tolerances={"test_compare::number": 1.1 * ulps}) is None


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16], ids=str)
def test_numbers_of_any_dtype_are_read(dtype):
    x = torch.ones(3).to(dtype)
    assert first_of(lambda x: x[0].item(), x) is None


@pytest.mark.parametrize("right, wrong", [(1e5, 2e5), (2, 2.5), (2.0, 2), (math.nan, 1.0), (1.0, 1j), (True, False)])
def test_a_wrong_number(right, wrong):
    with torch.library._scoped_library("test_compare_numbers", "DEF") as numbers:
        numbers.define("scalar(Tensor x) -> Scalar")
        numbers.impl("scalar", lambda x: right, "CPU")
        numbers.impl("scalar", lambda x: wrong, "PrivateUse1")
        first = first_of(torch.ops.test_compare_numbers.scalar, torch.ones(2, dtype=torch.float16))
    assert (first is None) == (right == wrong)


def test_a_sum_that_cancels_may_round_its_terms():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(
            "sum", lambda x, dtype=None: torch.add(x[0] + x[2], x[1] + x[3]), "PrivateUse1", allow_override=True
        )
        assert first_of(lambda x: x.sum(), torch.tensor([1e8, 1.0, -1e8, 1.0])) is None


@pytest.mark.parametrize("error, is_found", [((0.1, 0.0), False), ((10.0, 0.0), True), ((0.0, 1e-4), True)])
@pytest.mark.parametrize("name", ["mm", "addmm_", "mm.out", "index_put"])
def test_sums_are_measured_by_their_own_terms(name, error, is_found):
    """By the sum of their absolute values, which is more than the largest of all numbers, or less."""
    x, y = torch.tensor([[1000.0, -1000.0], [0.001, -0.001]]).repeat(1, 500), torch.ones(1000, 1)

    def product(a, b):
        return (a * b.t()).sum(1, keepdim=True) + torch.tensor(error)[:, None].to(DEVICE)

    def put(out, rows, values, accumulate=False):
        return values.view(2, -1).sum(1) + torch.tensor(error).to(DEVICE)

    def put_rows(a, b):
        rows = torch.arange(2, device=DEVICE).repeat_interleave(1000)
        return torch.index_put(a.new_zeros(2), [rows], a.flatten(), accumulate=True)

    kernel, call = {
        "mm": (product, torch.mm),
        "index_put": (put, put_rows),
        "addmm_": (lambda out, a, b, **_: out.add_(product(a, b)), lambda a, b: a.new_zeros(2, 1).addmm_(a, b)),
        "mm.out": (lambda a, b, out: out.copy_(product(a, b)), lambda a, b: torch.mm(a, b, out=a.new_zeros(2, 1))),
    }[name]
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
        first = first_of(call, x, y)
    assert (first is not None) is is_found, first


@pytest.mark.parametrize("name", ["topk", "argmax"])
def test_indices_of_equal_elements(name):
    """Which of them is not compared; that they are the largest is."""
    x = torch.tensor([[2.0, 1.0, 2.0], [0.0, 3.0, 3.0]])
    wrong = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])

    def last(x, *args, add=0.0):
        index = 2 - (x + add).flip(-1).argmax(-1)
        return index if name == "argmax" else (x.gather(-1, index[:, None]), index[:, None])

    for bias, right in ((0.0, True), (10.0 * wrong, False)):
        with torch.library._scoped_library("test_compare_ties", "DEF") as library:
            results = "Tensor" if name == "argmax" else "(Tensor, Tensor)"
            library.define(f"{name}(Tensor self, int k, int dim) -> {results}")
            plain = lambda x, k, dim: x.argmax(dim) if name == "argmax" else tuple(x.topk(k, dim))  # noqa: E731
            there = functools.partial(lambda x, *_, bias: last(x, add=torch.as_tensor(bias).to(DEVICE)), bias=bias)
            library.impl(name, plain, "CPU")
            library.impl(name, there, "PrivateUse1")
            operator = getattr(torch.ops.test_compare_ties, name)
            first = first_of(functools.partial(lambda x, operator: operator(x, 1, -1), operator=operator), x)
        assert (first is None) == right, (bias, first)


# ---- random numbers ----


@pytest.mark.parametrize(
    "found, wrong",
    [
        ("", lambda x, scale: torch.rand_like(x) * scale),
        ("", lambda x, scale: torch.full_like(x, scale / 2)),
        ("has mean ", lambda x, scale: torch.rand_like(x) * scale + 0.5),
        ("is float32[1, 400], and float32[400] on cpu", lambda x, scale: torch.rand_like(x)[None] * scale),
        ("is float64[400], and float32[400] on cpu", lambda x, scale: torch.rand_like(x).double() * scale),
    ],
    ids=["right", "narrow", "mean", "shape", "dtype"],
)
def test_random_numbers_that_the_reference_cannot_draw(monkeypatch, found, wrong):
    """Their mean, shape and dtype are compared."""
    monkeypatch.setattr(type(backends.of_device(DEVICE)), "draws_as_cpu", False)
    with torch.library._scoped_library("test_compare_random", "DEF") as library:
        library.define("noise(Tensor x, *, float scale) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("noise", lambda x, scale: torch.rand_like(x) * scale, "CPU")
        library.impl("noise", wrong, "PrivateUse1")
        torch.manual_seed(0)
        with compare(device=DEVICE) as result:
            torch.ops.test_compare_random.noise(torch.ones(400, device=DEVICE), scale=2.0)
    assert any("cpu draws different random numbers" in note for note in result.notes), result.notes
    assert bool(result.differences) == bool(found)
    if found:
        assert result.first.found.startswith(found) and result.first.inputs == ["float32[400]", "scale=2.0"]


def test_the_generators_of_the_program():
    """The reference draws the device's numbers, of each of its generators, and the host's generator stays as it is."""
    own = torch.Generator(DEVICE).manual_seed(7)
    before = torch.get_rng_state()
    with compare(device=DEVICE) as result:
        x = torch.rand(100, device=DEVICE, generator=own)
        torch.rand(100, device="openreg:1")
        x.bernoulli_(0.5, generator=own)
        nn.functional.dropout(x)
    assert result.first is None and not result.notes and torch.equal(torch.get_rng_state(), before), result
    assert [result.row(name).compared for name in ("aten::rand.generator", "aten::rand")] == [1, 1]


# ---- compiled functions ----


@pytest.mark.compiles
def test_compiled_functions_run_operator_by_operator(library):
    """Also one that was compiled before; afterwards, the compiled code runs again."""
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(graph) or graph(*args)

    @functools.partial(torch.compile, backend=backend)
    def function(x):
        return library.scale(x.sin() * 1000)

    x = torch.ones(3, device=DEVICE)
    function(x)
    before = len(runs)
    with compare(device=DEVICE) as result:
        function(x)
        torch.compile(lambda x: x.cos() * 2, backend=backend)(x)
    assert len(runs) == before and result.row("aten::sin").compared == result.row("aten::cos").compared == 1
    assert result.first.operator == "test_compare::scale"
    assert any("library.scale(x.sin()" in frame for frame in result.first.stack)
    function(x)
    assert len(runs) == 2 * before


COMPILED = """
import torch
import torch._inductor.config

torch._dynamo.config.repro_after, torch._dynamo.config.repro_level = "aot", 4  # as the variables do when torch is imported
torch._dynamo.config.debug_dir_root = "debug"
torch._inductor.config.force_disable_caches = True
torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
function = torch.compile(lambda x, w: (x @ w).relu().sin())
print(function(torch.randn(8, 8, device="openreg"), torch.randn(8, 8, device="openreg")).sum().item())
"""


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.processes
def test_pytorch_compares_compiled_code(tmp_path):
    """docs/tools.md names PyTorch's own comparison of compiled code with eager mode: it works on the device."""
    (tmp_path / "program.py").write_text(COMPILED)
    done = python("program.py", cwd=tmp_path, dynamo=True)
    assert done.returncode and "AccuracyError: Bad accuracy detected" in done.stderr, done.stderr


# ---- threads ----


def test_threads_of_the_program(library):
    x = torch.full((4,), 101.0, device=DEVICE)

    class Mine(threading.Thread):
        def run(self):
            library.scale(x)

    def pool():
        with ThreadPoolExecutor(2) as executor:
            [*executor.map(lambda y: library.scale(y), [x, x])]  # the line of the program

    def thread():
        started = Mine()
        started.start()
        started.join()

    for start, calls in ((thread, 1), (pool, 2)):
        with compare(device=DEVICE) as result:
            start()
        assert len(result.differences) == calls
        assert result.first.place.line().startswith("tests/tools/test_compare.py") and "threading.py" not in str(result)
    before = threading.Thread.start
    with compare(device=DEVICE):
        assert threading.Thread.start is not before
    assert threading.Thread.start is before


def test_threads_that_draw_numbers_and_write_parts_of_one_tensor():
    x = torch.zeros(8, 64, device=DEVICE)

    def work(i):
        for _ in range(20):
            torch.randn(50, device=DEVICE)
            x[i].add_(1)

    with compare(device=DEVICE) as result, ThreadPoolExecutor(8) as executor:
        [*executor.map(work, range(8))]
    result.assert_close()
    assert result.operators >= 320 and x.cpu().eq(20).all()


def test_a_thread_that_outlives_the_context_is_left_alone(library):
    x, go = torch.full((4,), 101.0, device=DEVICE), threading.Event()
    done = []

    def work():
        go.wait(30)
        done.append(library.scale(x).tolist())

    with compare(device=DEVICE) as result:
        thread = threading.Thread(target=work)
        thread.start()
    go.set()
    thread.join(30)
    assert done == [[203.0] * 4] and result.operators == 0


@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("after", [0, 7, 33])
def test_a_kernel_that_fails_in_one_of_several_threads(mode, after):
    kernels = (torch.exp, torch.sin, torch.tanh, torch.sigmoid)
    failed, inputs = [], [torch.rand(200, 200, device=DEVICE) for _ in kernels]

    def work(kernel, x):
        try:
            for _ in range(10):
                kernel(x)
        except torch.AcceleratorError as error:
            failed.append((kernel.__name__, str(error).splitlines()[0]))

    with torch.openreg.launch_mode(mode), torch.openreg.faults.inject("kernel", after=after, times=1):
        with compare(device=DEVICE) as result, ThreadPoolExecutor(4) as executor:
            [*executor.map(work, kernels, inputs)]
    ((name, message),) = failed
    assert f"aten::{name}" in message
    assert [difference.operator for difference in result.differences] == [f"aten::{name}"]


# ---- the report ----


def test_operators_are_ranked_by_the_errors_they_add():
    """By the largest error where they add as much, then by name; an operator without an error is not ranked."""
    result = Differences(DEVICE, "cpu")
    for name, added, ulps, unlike in (
        ("exact", 0.0, 0.0, 0), ("a shape", 0.0, 0.0, 1), ("d", 0.5, 2.0, 0), ("c", 0.5, 2.0, 0), ("b", 0.5, 8.0, 1),
        ("a", 0.5, 1.0, 0), ("most", 1.0, 1.0, 0),
    ):  # fmt: skip
        row = result.row(name)
        row.added, row.ulps, row.unlike = added, ulps, unlike
    assert [row.operator for row in result.ranked] == ["most", "b", "c", "d", "a", "a shape"]


def test_the_report_says_how_the_program_ended():
    with pytest.raises(KeyError), compare(device=DEVICE, tolerances={"aten::nosuch*": 3}) as result:
        torch.ones(2, device=DEVICE).add_(1)
        raise KeyError("the program's")
    text = " ".join(str(result).split())
    assert "Nothing differs beyond its tolerance until the program raised KeyError" in text
    assert "no operator that the tolerance of aten::nosuch* is for" in text
    with compare(device=DEVICE) as result:
        pass
    assert "No operator touched a tensor of openreg." in str(result)


def test_forms(library):
    with compare(name="a <program>") as result:
        library.scale(torch.full((3,), 900.0, device=DEVICE))
    page, data = result.html(), json.loads(result.json())
    assert data["first"]["operator"] == "test_compare::scale" and data["calls"] == 2
    assert "light-dark(" in page and "a &lt;program&gt;" in page
    order = ["test_compare::scale is the first operator that differs, at ", "<figcaption>Largest error",
             "units in the last place (ulps), logarithmic", "Operators, by the error that they add", "aten::full"]  # fmt: skip
    assert sorted(order, key=page.index) == order and "largest error (ulps)" in page and 'class="verdict fail"' in page
    with compare() as same:
        torch.ones(2, device=DEVICE) + 1
    assert 'class="verdict pass">Nothing differs' in same.html() and "aten::add.Tensor</th>" in same.html()


# ---- requests ----


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tolerances": 3}, "expected the tolerances as a mapping of operators to ulps, but got 3"),
        ({"tolerances": {"": 3}}, "expected a tolerance for an operator or a pattern, such as 'aten::mm', but got ''"),
        ({"tolerances": {"aten::mm": -1}}, "expected the tolerance of aten::mm as ulps, at least 0, but got -1"),
        ({"factor": 0}, "expected the factor of the tolerances as a finite number above 0, but got 0"),
        ({"against": "meta"}, "tensors on meta have no values to compare"),
        ({"device": "cpu"}, "both are cpu"),
        ({"device": "opnreg"}, "unknown device 'opnreg'; available: cpu, meta, openreg"),
        ({"against": "nothing"}, "unknown device 'nothing'"),
    ],
)
def test_wrong_requests(options, message):
    with pytest.raises(Wrong, match=message):
        compare(**{"device": DEVICE, **options})


PROGRAM = """
import sys, torch
for i in [int(word) for word in sys.argv[1:]] or [0, 1]:
    x = torch.full((3, 3), float(i)).to("openreg")
    print((x @ x).sum().item())
if "exit" in __file__:
    raise SystemExit("bye")
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("program.py", "exit.py"):
        (tmp_path / name).write_text(PROGRAM)
    return tmp_path


def command(folder, *words, **environment):
    done = python(
        "-m", "openreg_tools", "compare", *words, cwd=folder, TORCH_DEVICE_BACKEND_AUTOLOAD="1", **environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
def test_the_command(folder):
    words = ("--device", "openreg", "--against", "cpu", "--html", "page.html", "program.py", "5", "7")
    status, out, err = command(folder, *words)
    assert status == 0, err
    assert "675.0" in out and "1323.0" in out and "Nothing differs" in out  # 9 * 3 * 25, of its own arguments
    assert "<html" in (folder / "page.html").read_text()
    status, out, err = command(folder, "--json", "-", "program.py", OPENREG_FAULTS="copy:after=1")
    assert status == 1 and json.loads(out)["first"]["operator"] == "aten::_to_copy" and "27.0" in err


@pytest.mark.processes
@pytest.mark.parametrize(
    "words, status, message",
    [
        (("nothing.py",), 2, "compare: there is no file nothing.py"),
        (("program.py", "--against", "cpu"), 2, "compare: put --against before program.py, because"),
        (("--tolerance", "mm", "program.py"), 2, "expected OPERATOR=ULPS, such as 'aten::mm=32', but got 'mm'"),
        (("exit.py", "1"), 1, "bye"),
    ],
)
def test_how_the_command_ends(folder, words, status, message):
    got, _, err = command(folder, *words)
    assert got == status and message in err, err


@pytest.mark.processes
def test_the_command_waits_for_threads_as_python_does(tmp_path):
    (tmp_path / "program.py").write_text("""
import threading, time, torch
from concurrent.futures import ThreadPoolExecutor
def work(by):
    time.sleep(0.3)
    print((torch.ones(3, device="openreg") * by).sum().item())
threading.Thread(target=work, args=(2,)).start()
ThreadPoolExecutor(1).submit(work, 3)
{}['key']
""")
    status, out, err = command(tmp_path, "program.py")
    assert status == 1 and "8 calls, 8 compared" in " ".join(out.split()) and "6.0" in out and "9.0" in out, out + err
    assert "until the program raised KeyError" in " ".join(out.split()) and err.count("KeyError: 'key'") == 1


RANK = """
import sys, torch
import torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("cpu:gloo,openreg:occl", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
torch.openreg.set_device(rank)
x = torch.full((4,), rank + 1.0).to("openreg")
dist.all_reduce(x)
print("sum", x.tolist())
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_two_ranks(tmp_path):
    """Collectives are compared, and each rank writes its own files."""
    (tmp_path / "program.py").write_text(RANK)

    def run(rank):
        words = ("--json", "out.json", "program.py", str(tmp_path / "store"), str(rank))
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun sets them
        return command(tmp_path, *words, GLOO_SOCKET_IFNAME="lo", OPENREG_FAULTS="copy" if rank else "", **ranks)

    with ThreadPoolExecutor(2) as executor:
        done = [*executor.map(run, range(2))]
    first, second = [json.loads((tmp_path / f"out.rank{rank}.json").read_text()) for rank in range(2)]
    assert (first["name"], second["name"]) == ("program.py (rank 0 of 2)", "program.py (rank 1 of 2)"), done
    assert [status for status, *_ in done] == [0, 1] and not first["skipped"] and "sum" in done[0][1], first
    assert second["first"]["operator"] == "aten::_to_copy" and len(second["differences"]) == 1
