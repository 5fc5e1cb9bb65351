"""`compare`: the first operator that differs from the reference is found, and nothing is reported where none does."""

import contextlib
import functools
import json
import math
import re
import runpy
import threading
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import python
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools import backends
from openreg_tools.compare import assert_operator, compare
from openreg_tools.compare.result import plot
from openreg_tools.compare.tolerance import Tolerances, measure
from openreg_tools.forms import Wrong

DEVICE = "openreg"
SCHEMAS = (
    "scale(Tensor x, float by=2.0) -> Tensor", "scale_(Tensor(a!) x) -> Tensor(a!)", "add_(Tensor(a!) x, Tensor y) -> Tensor(a!)",
    "without_offset(Tensor x) -> Tensor", "shifts_(Tensor(a!) x, Tensor y) -> Tensor(a!)", "rows(Tensor x, Tensor y) -> (Tensor, Tensor)",
    "list(Tensor x) -> Tensor[]", "none(Tensor x) -> (Tensor, Tensor)", "beside_(Tensor(a!) x) -> Tensor(a!)", "resized(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", "turned_(Tensor(a!) x) -> Tensor(a!)", "shape(Tensor x) -> Tensor", "only_device_raises(Tensor x) -> Tensor", "nan(Tensor x) -> Tensor", "slightly(Tensor x) -> Tensor", "number(Tensor x) -> float",
)  # fmt: skip


def wrong_scale_(x):
    x.mul_(2).select(0, -1).add_(0.5)
    return x


def resized(x, *, out, more=0.0):
    return out.resize_(x.shape).copy_(x * 2 + more)


def beside_(x):
    x.as_strided((1,), (1,), 0).fill_(99.0)
    return x.add_(1)


def raises(x):
    raise RuntimeError("the kernel has no such mode")


@pytest.fixture(scope="module")
def library():
    """Operators that are right on the CPU and wrong on the device."""
    library = torch.library.Library("test_compare", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    for name, right, wrong in (
        ("scale", lambda x, by=2.0: x * by, lambda x, by=2.0: torch.where(x > 100, x * by + 1, x * by)),
        ("scale_", lambda x: x.mul_(2), wrong_scale_),
        ("add_", lambda x, y: x.add_(y), lambda x, y: x.add_(y, alpha=5)),
        ("without_offset", lambda x: x * 2, lambda x: x.as_strided(x.shape, x.stride(), 0) * 2),
        ("shifts_", lambda x, y: x.copy_(y.clone()), lambda x, y: x.fill_(9).copy_(y)),
        ("rows", lambda x, y: (x + y, x.sum(0)), lambda x, y: (x + y, x[1:].sum(0))),
        ("resized", resized, functools.partial(resized, more=1.0)),
        ("turned_", lambda x: x.transpose_(0, 1), lambda x: x.transpose_(0, 1).add_(1)),
        ("list", lambda x: [x + 1, x + 2], lambda x: [x + 1]),
        ("none", lambda x: (x + 1, x + 2), lambda x: (x + 1, None)),
        ("beside_", lambda x: x.add_(1), beside_),
        ("shape", lambda x: x.clone(), lambda x: x[None].clone()),
        ("only_device_raises", lambda x: x.clone(), raises),
        ("nan", lambda x: x / x, lambda x: torch.ones_like(x)),
        ("slightly", lambda x: x.clone(), lambda x: x * (1 + 4e-7)),
        ("number", lambda x: 1.0, lambda x: 1.0 + 1e-6),
    ):
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
    assert result.first is None and not result.skipped, result.report()
    assert ["two generators" in note for note in result.notes] == [True], "the weights are drawn on the CPU"
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    names = set(result._rows)
    assert {"aten::addmm", "aten::native_dropout", "aten::native_layer_norm_backward", "aten::randn"} & names, names
    assert all(row.compared == row.calls for row in result._rows.values())
    assert "Nothing differs" in result.report()
    result.assert_close()
    with pytest.raises(ValueError, match="nothing differs"):
        result.write_test("unused")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:0], lambda x: x[0, 0], lambda x: x.expand(2, *x.shape),
        lambda x: x.to(torch.complex64).conj(), lambda x: x > 0, lambda x: x.to(torch.bfloat16)[1:], lambda x: x.to_sparse(),
        lambda x: x.view(torch.int32), lambda x: x.to("openreg:1"),
    ],
)  # fmt: skip
def test_layouts_dtypes_and_devices(make):
    with compare() as result:
        x = make(torch.arange(1, 13, device=DEVICE, dtype=torch.float32).view(3, 4))
        (x.to_dense() if x.is_sparse else x).clone()
        x + x
    assert result.first is None and not result.skipped and not result.notes, result.report()


def test_aliases_between_arguments():
    """The result of an operator whose arguments overlap depends on it."""
    with compare() as result:
        x = torch.arange(8.0, device=DEVICE)
        x[2:].add_(x[:6].clone())
        y = x.view(2, 4)
        torch.add(y, y.flip(0), out=y)
        torch._foreach_add_([x[:4], x[4:]], 1.0)
        x.as_strided((3,), (2,), 1).mul_(x[1])
    assert result.first is None, result.report()


def test_indices_nan_and_scalars():
    with compare() as result:
        x = torch.tensor([float("nan"), 1.0, float("inf"), 0.0], device=DEVICE)
        (x / x).isnan().nonzero()
        x.nan_to_num().sort()
        assert x[1].item() == 1.0
        torch.log(x)
        torch.empty(5, device=DEVICE)
    assert result.first is None, result.report()


def test_set_default_device_and_inference_mode():
    with torch.device(DEVICE), torch.inference_mode(), compare() as result:
        torch.ones(3).add_(torch.rand(3)).sum().item()
    assert result.first is None and result.operators >= 4, result.report()


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
    assert (first.operator, first.what, first.error.at) == ("test_compare::scale", "result", (0, 1))
    assert (first.error.got, first.error.expected, first.error.count) == (801.0, 800.0, 1)
    assert first.error.ulps == 2**14  # of 800: 2^-14
    assert first.place.module == "Sequential.1" and "test_compare.py:" in first.place.line()
    assert first.inputs == ["float32[2, 2]", "4.0"] and any("library.scale" in frame for frame in first.stack)
    assert len(result.differences) == 2  # the error of each operator is its own: the second is scale's again
    assert [row.operator for row in result.ranked] == ["test_compare::scale"]
    report = result.report()
    assert "The first difference" in report and "801.0 on openreg, 800.0 on cpu" in report
    with pytest.raises(AssertionError, match="off by 1.638e"):
        result.assert_close()


def test_operators_are_ranked_by_the_errors_they_add():
    """By the largest error where they add as much, then by name; an operator without an error is not ranked."""
    from openreg_tools.compare.result import Result

    result = Result(DEVICE, "cpu")
    for name, added, ulps, beyond in (
        ("exact", 0.0, 0.0, 0), ("a shape", 0.0, 0.0, 1), ("d", 0.5, 2.0, 0), ("c", 0.5, 2.0, 0), ("b", 0.5, 8.0, 1),
        ("a", 0.5, 1.0, 0), ("most", 1.0, 1.0, 0),
    ):  # fmt: skip
        row = result.row(name)
        row.added, row.ulps, row.beyond = added, ulps, beyond
    assert [row.operator for row in result.ranked] == ["most", "b", "c", "d", "a", "a shape"]


def test_what_was_written_in_place(library):
    first = first_of(lambda x: library.scale_(x[1:]), torch.arange(5.0))
    assert (first.operator, first.what, first.error.at) == ("test_compare::scale_", "x", (3,))


def test_a_result_that_the_call_resizes(library):
    """Memory that the call adds to an argument is not part of what it had before."""
    x, out = torch.ones(3000, device=DEVICE), torch.empty(0, device=DEVICE)
    junk = [torch.full((3000,), 1e30) for _ in range(16)]
    del junk
    with compare() as result:
        library.resized(x, out=out)
    first = result.first
    assert (first.what, first.error.got, first.error.expected) == ("out", 3.0, 2.0)
    assert first.inputs == ["float32[3000]", "out=float32[0]"] and first.call[2]["out"].shape == (0,)


def test_an_argument_that_the_call_transposes(library):
    first = first_of(lambda x: library.turned_(x[1:]), torch.arange(9.0).view(3, 3))
    assert (first.what, first.error.got, first.error.expected) == ("x", 4.0, 3.0)
    assert first.inputs == ["float32[2, 3]"] and first.call[1][0].stride() == (3, 1)
    whole = first_of(lambda x: library.turned_(x + 0), torch.arange(6.0).view(2, 3))
    assert whole.inputs == ["float32[2, 3]"] and whole.call[1][0].stride() == (3, 1)


@pytest.mark.parametrize("overlap", ["the same", "a view", "apart"])
def test_what_the_call_reads_and_writes(library, overlap):
    x = torch.ones(4, 3, device=DEVICE)
    other = {"the same": x, "a view": x[0], "apart": torch.ones(3, device=DEVICE)}[overlap]
    with torch.no_grad(), compare(device=DEVICE) as result:
        library.add_(x[1:] if overlap == "a view" else x, other)
    assert result.first.operator == "test_compare::add_" and result.first.what == "x" and not result.notes


def test_the_second_result(library):
    first = first_of(library.rows, torch.ones(3, 2), torch.ones(3, 2))
    assert (first.what, first.error.got, first.error.expected) == ("result 1", 2.0, 3.0)


@pytest.mark.parametrize(
    ("name", "found"),
    [("list", "result has 1 tensors, and 2 on cpu"), ("none", "result 1 has no tensor, and float32[3]")],
)
def test_results_that_are_missing(library, name, found):
    first = first_of(getattr(library, name), torch.ones(3))
    assert first.operator == f"test_compare::{name}" and first.sentence().startswith(found)


def test_memory_beside_a_view(library, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest and its plugins have threads

    def write(x):
        library.beside_(x[1:, 1:])

    first = first_of(write, torch.zeros(3, 3))
    assert first.sentence() == "x is a view, and memory beside it changed, which it did not on cpu"

    def right(x, y):
        for view in (x[1:, 1:], x[:, :1].expand(3, 3)[0, :1], x.T[1], x[:, 1], x[2:2]):
            view.add_(1)
        torch.add(x, 1, out=y[:3])  # resized, within its storage
        torch.sort(x[0], out=(y[:3].view(-1)[:3], torch.empty(0, dtype=torch.int64, device=DEVICE)))

    assert first_of(right, torch.zeros(3, 3), torch.zeros(6, 3)) is None


def test_threads_of_the_program(library):
    x = torch.full((4,), 101.0, device=DEVICE)

    class Mine(threading.Thread):
        def run(self):
            library.scale(x)

    def pool():
        with ThreadPoolExecutor(2) as executor:
            [*executor.map(lambda each: library.scale(each), [x, x])]

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


def test_threads_that_write_parts_of_one_tensor():
    x = torch.zeros(8, 64, device=DEVICE)

    def work(i):
        for _ in range(20):
            x[i].add_(1)

    with compare(device=DEVICE) as result, ThreadPoolExecutor(8) as executor:
        [*executor.map(work, range(8))]
    result.assert_close()
    assert result.operators >= 160 and x.cpu().eq(20).all()


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


def test_scratch_memory_is_not_a_result():
    lstm = nn.LSTM(4, 8, batch_first=True).to(DEVICE)
    x = torch.randn(2, 5, 4, device=DEVICE)
    with compare(device=DEVICE) as result:
        lstm(x)[0].sum().backward()
    result.assert_close()
    assert any("rnn_layer" in row for row in result._rows)


@pytest.mark.slow
@pytest.mark.compiles
def test_gradients_that_are_zero_but_for_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(DEVICE)  # the bias does not matter to the result
    x = torch.randn(6, 8, device=DEVICE)
    with compare(device=DEVICE) as result:
        torch.compile(model)(x).square().sum().backward()
    result.assert_close()
    assert "compiled graph" in " ".join(result._rows)


def test_what_decides_the_tolerance_of_a_graph():
    """The reference's own sensitivity, and not a constant: a wrong gradient of ordinary size is still found."""
    from openreg_tools.compare.lockstep import Lockstep
    from openreg_tools.compare.regions import Given, Regions, _Again, _change_last_bits, _Region
    from openreg_tools.compare.result import Result

    x = torch.tensor([3.0, -5.0, 0.0])
    near = x.clone()
    _change_last_bits(
        [near, 3, torch.tensor(3), torch.ones(2).to(torch.float8_e4m3fn), x.to_sparse(), near[0].expand(4)], 0
    )
    moved = (near - x).abs()
    assert moved[2] == 0 and all(0 < moved[:2]) and all(moved[:2] <= 4 * torch.finfo(torch.float32).eps * x[:2].abs())

    def moves(function, *inputs):
        mode = Lockstep(DEVICE, "cpu", Tolerances(), Result(DEVICE, "cpu"), False)
        region = _Region(Regions(mode), torch.fx.symbolic_trace(function), "a graph")
        return _Again(region, Given([], 1, None), [*inputs], [function(*inputs), *inputs]).moves(0)

    assert moves(lambda x: x * 2, x) <= 2
    assert moves(lambda x: (x * 1e6).sin(), torch.rand(64)) > 1e4
    assert moves(lambda x: torch.floor(x) + x * 2, torch.arange(100.0)) < 10  # some elements jump
    assert (
        moves(lambda x: (x * 0 + 1).softmax(0) - (x * 0 + 1).softmax(0).mean(), x) > 1e4
    )  # rounds, whatever the inputs are


@pytest.mark.slow
@pytest.mark.compiles
def test_a_graph_that_writes_its_input_is_as_sensitive_as_before_the_write():
    def slightly_wrong(graph, inputs):
        return lambda *args: tuple(each * (1 + 4e-5) for each in graph(*args))

    @torch.compile(backend=slightly_wrong)
    def program(b, x):
        result = (b + 1) * x
        b.mul_(-1).add_(x * 0 - 1)
        return result

    with torch.no_grad(), compare(device=DEVICE) as result:
        program(torch.zeros(100, device=DEVICE), torch.ones(100, device=DEVICE))
    assert "result 0 is off by" in result.first.sentence()


@pytest.mark.parametrize(
    "program, cast, rounds, wrong",
    [
        (lambda x: (x @ x).float(), torch.bfloat16, 2**-7, 4.0),
        (lambda x: (x.bfloat16() @ x.bfloat16()).float(), None, 2**-7, 4.0),
        (lambda x: x.to(torch.float8_e4m3fn).float(), None, 2**-3, 4.0),
    ],
    ids=["autocast", "bfloat16", "float8"],
)
def test_a_graph_that_computes_in_a_smaller_type_may_round_as_that(program, cast, rounds, wrong):
    """Its float32 results may differ by a rounding of that type."""

    def changed(graph, inputs):
        return lambda *args: tuple(each * (1 + by) for each in graph(*args))

    for by in (rounds, wrong):
        torch.compiler.reset()
        with torch.no_grad(), torch.autocast(DEVICE, cast, enabled=cast is not None), compare(device=DEVICE) as result:
            torch.compile(program, backend=changed)(torch.ones(16, 16, device=DEVICE))
        assert "compiled graph" in " ".join(result._rows) and not result.skipped
        assert bool(result.differences) == (by == wrong), result.report()


def test_threads_that_draw_numbers_and_that_wait_for_each_other(library):
    meet = threading.Barrier(2)
    met = torch.library.Library("test_compare", "FRAGMENT")
    met.define("met(Tensor x) -> Tensor")
    for key in ("CPU", "PrivateUse1"):
        met.impl("met", lambda x: [meet.wait(60), x + 1][1], key)

    def work(_):
        for _ in range(20):
            torch.randn(500, device=DEVICE)
            torch.ops.test_compare.met(torch.ones(3, device=DEVICE))

    with compare(device=DEVICE) as result, ThreadPoolExecutor(2) as executor:
        [*executor.map(work, range(2))]
    result.assert_close()
    assert result.operators >= 120


def test_threads_are_left_as_they_are():
    class Fixed(threading.Thread):
        run = property(lambda self: lambda: done.append(1))

    done = []
    a, b = compare(device=DEVICE), compare(device=DEVICE)
    before = threading.Thread.start
    with a:
        for thread in (Fixed(), threading.Thread(target=done.append, args=(2,))):
            thread.start()
            thread.join()
        assert "run" not in thread.__dict__
    assert done == [1, 2] and threading.Thread.start is before
    a.mode._threads.__enter__(), b.mode._threads.__enter__(), a.mode._threads.__exit__()
    b.mode._threads.__exit__()
    thread = threading.Thread(target=done.append, args=(3,))
    thread.start()
    thread.join()
    assert done == [1, 2, 3]
    threading.Thread.start = before


def test_another_shape(library):
    first = first_of(library.shape, torch.ones(2))
    assert first.sentence() == "result is float32[1, 2], and float32[2] on cpu"


def test_what_raises_on_the_device_alone(library):
    with pytest.raises(RuntimeError, match="no such mode") as caught, compare() as result:
        library.only_device_raises(torch.ones(2, device=DEVICE))
    assert "raised RuntimeError: the kernel has no such mode" in result.report()
    assert "compare: the first difference is in test_compare::only_device_raises" in caught.value.__notes__[0]


def test_what_raises_on_both_is_not_a_difference():
    with compare() as result, pytest.raises(RuntimeError):
        torch.ones(2, device=DEVICE) @ torch.ones(3, device=DEVICE)
    assert result.first is None


def test_a_nan_that_the_reference_has(library):
    first = first_of(library.nan, torch.tensor([1.0, 0.0]))
    assert first.error.at == (1,) and first.error.ulps == float("inf")


def test_in_backward(library):
    """Under the module and the line of the forward."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return library.scale(grad)

    class Model(nn.Module):
        def forward(self, x):
            return Wrong.apply(x)

    with compare() as result:
        x = torch.full((2,), 300.0, device=DEVICE, requires_grad=True)
        Model()(x).backward(x.detach())
    assert result.first.operator == "test_compare::scale" and result.first.place.phase == "backward"
    assert result.first.place.module == "Model" and "test_compare.py" in result.first.place.line()


def test_tolerances_can_be_set(library):
    x = torch.ones(3)
    assert first_of(library.slightly, x) is None  # 3 ulps, of the 16 for what is not known
    assert first_of(library.slightly, x, tolerances={"test_compare::slight*": 2}).tolerance.ulps == 2
    assert first_of(library.slightly, x, factor=0.1) is not None
    with pytest.raises(Wrong, match="at least 0, but got -1"):
        compare(device=DEVICE, tolerances={"aten::mm": -1})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32, torch.int64], ids=str
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
    met = torch.library.Library("test_compare_numbers", "DEF")
    met.define("scalar(Tensor x) -> Scalar")
    met.impl("scalar", lambda x: right, "CPU")
    met.impl("scalar", lambda x: wrong, "PrivateUse1")
    first = first_of(torch.ops.test_compare_numbers.scalar, torch.ones(2, dtype=torch.float16))
    assert (first is None) == (right == wrong)
    met._destroy()


@pytest.mark.parametrize(
    "found, wrong",
    [
        ("", lambda x, scale: torch.rand_like(x) * scale),
        ("", lambda x, scale: torch.full_like(x, scale / 2)),
        ("", lambda x, scale: torch.linspace(-8, 11, 400, device=x.device)),
        ("has mean ", lambda x, scale: torch.rand_like(x) * scale + 0.5),
        ("is float32[1, 400], and float32[400] on cpu", lambda x, scale: torch.rand_like(x)[None] * scale),
        ("is float64[400], and float32[400] on cpu", lambda x, scale: torch.rand_like(x).double() * scale),
    ],
    ids=["right", "narrow", "wide", "mean", "shape", "dtype"],
)
def test_random_numbers_that_the_reference_cannot_draw(monkeypatch, found, wrong):
    """Their mean, shape and dtype are compared, and the difference says the inputs and what it is."""
    library = torch.library.Library("test_compare_random", "DEF")
    library.define("noise(Tensor x, *, float scale) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", lambda x, scale: torch.rand_like(x) * scale, "CPU")
    library.impl("noise", wrong, "PrivateUse1")
    monkeypatch.setattr(type(backends.of_device(DEVICE)), "draws_as_cpu", False)
    try:
        torch.manual_seed(0)
        with compare(device=DEVICE) as result:
            torch.ops.test_compare_random.noise(torch.ones(400, device=DEVICE), scale=2.0)
    finally:
        library._destroy()
    assert any("cpu draws different random numbers" in note for note in result.notes), result.notes
    assert bool(result.differences) == bool(found)
    if found:
        assert result.first.found.startswith(found), result.first
        assert len(result.first.inputs) == 2 and result.first.inputs[1] == "scale=2.0"


def test_defaults_come_from_dtype_and_operator():
    tolerance = Tolerances()
    a, b = torch.ones(3, 64), torch.ones(64, 5)
    mm = torch.ops.aten.mm.default
    assert str(tolerance(mm, (a, b), a @ b)) == "8 ulps (sum of 64)"
    assert tolerance(mm, (a.half(), b.half()), (a @ b).half()).ulps == pytest.approx(4 + 4 * 2**-13)
    assert tolerance(torch.ops.aten.clone.default, (a,), a).ulps == 0
    assert tolerance(torch.ops.aten.mul.Tensor, (a, a), a).ulps == 2
    assert tolerance(torch.ops.aten.exp.default, (a,), a).ulps == 8
    assert tolerance(torch.ops.aten.argmax.default, (a,), a.argmax()).ulps == 0


def test_ulps_by_hand():
    one, next_to = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0 - 2**-22])
    error = measure(next_to, one, "rounded", None, 2)
    assert (error.ulps, error.at, error.count) == (1.0, (1,), 0)
    assert measure(one, one, "exact", None, 0) is None
    assert measure(one.half() + 2**-10, one.half(), "exact", None, 0).ulps == 1.0
    assert measure(torch.tensor([7]), torch.tensor([4]), "exact", None, 0).ulps == 3


def test_sums_are_measured_by_their_terms():
    """Where a sum cancels, rounding of its terms is no error."""

    def cancel(x):
        return x.sum()

    x = torch.tensor([1e8, 1.0, -1e8, 1.0])
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(
            "sum", lambda x, dtype=None: torch.add(x[0] + x[2], x[1] + x[3]), "PrivateUse1", allow_override=True
        )
        first = first_of(cancel, x)
    assert first is None


@pytest.mark.parametrize("error, is_found", [((0.1, 0.0), False), ((10.0, 0.0), True), ((0.0, 1e-4), True)])
@pytest.mark.parametrize("name", ["mm", "addmm_", "mm.out"])
def test_sums_are_measured_by_their_own_terms(name, error, is_found):
    """By the sum of their absolute values, which is more than the largest of all numbers, or less."""
    x, y = torch.tensor([[1000.0, -1000.0], [0.001, -0.001]]).repeat(1, 500), torch.ones(1000, 1)

    def product(a, b):
        return (a * b.t()).sum(1, keepdim=True) + torch.tensor(error)[:, None].to(DEVICE)

    kernel, call = {
        "mm": (product, torch.mm),
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
        flipped = (x + add).flip(-1)
        index = 2 - flipped.argmax(-1)
        return index if name == "argmax" else (x.gather(-1, index[:, None]), index[:, None])

    for bias, right in ((0.0, True), (10.0 * wrong, False)):
        with torch.library._scoped_library("test_compare_ties", "DEF") as library:
            library.define(
                f"{name}(Tensor self, int k, int dim) -> " + ("Tensor" if name == "argmax" else "(Tensor, Tensor)")
            )
            plain = lambda x, k, dim: x.argmax(dim) if name == "argmax" else tuple(x.topk(k, dim))  # noqa: E731
            library.impl(name, plain, "CPU")
            library.impl(
                name, lambda x, k, dim, bias=bias: last(x, add=torch.as_tensor(bias).to(DEVICE)), "PrivateUse1"
            )
            operator = getattr(torch.ops.test_compare_ties, name)
            first = first_of(lambda x: operator(x, 1, -1), x)  # noqa: B023
        assert (first is None) == right, (bias, first)


def test_one_byte_flipped_in_a_copy():
    with compare() as result, torch.openreg.faults.inject("copy", after=1) as fault:
        x = torch.ones(10).to(DEVICE)
        y = x.clone()
        (y + 1).cpu()
    assert fault.struck == 1 and result.first.operator == "aten::clone" and len(result.differences) == 1


def test_a_kernel_that_fails_later_is_located_where_it_was_launched():
    with pytest.raises(torch.AcceleratorError, match="injected"), compare() as result:
        with torch.openreg.faults.inject("kernel", after=1):
            x = torch.ones(10, device=DEVICE)
            y = x * 2
            (y + 1).sum().item()
    assert result.first.operator == "aten::mul.Tensor" and "injected fault" in result.first.sentence()


def test_what_compare_does_itself_is_not_struck():
    with torch.openreg.faults.inject("copy", after=3) as fault, compare() as result:
        x = torch.ones(4).to(DEVICE)
        for _ in range(5):
            x = x + 1
        x.cpu()
    assert fault.struck == 0 and result.first is None


def test_memory_that_a_kernel_of_its_own_wrote():
    """What was launched directly is seen when an operator reads it, and is not the operator's error."""
    x = torch.ones(4, device=DEVICE)
    with compare() as result:
        y = x * 2
        with torch._C._DisableTorchDispatch():
            y.fill_(5)
        z = y + 1
    assert z[0].item() == 6 and result.first is None
    assert any("had changed outside operators" in note for note in result.notes)


# ---- compiled graphs ----


@pytest.mark.slow
def test_compiled_graphs_are_compared_at_their_boundaries(library, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).to(DEVICE)
    x = torch.randn(4, 6, device=DEVICE)
    function = torch.compile(lambda x: model(x).square().mean() * 1.5)
    with compare() as result:
        function(x).backward()
    assert result.first is None and not result.skipped, result.report()
    (row,) = [row for row in result._rows.values() if row.operator.startswith("compiled graph")]
    assert row.calls == row.compared == 1

    def wrong(gm, inputs):
        return lambda *args: [out + 1 for out in gm(*args)]

    with compare() as result:
        torch.compile(lambda x: x * 2 + 1, backend=wrong)(x)
    assert (
        result.first.operator == "compiled graph 0 of <lambda> (2 operators)"
        and "test_compare.py" in result.first.place.line()
    )
    with pytest.raises(ValueError, match="is not an operator"):
        result.write_test("unused")


# ---- the test that it writes ----


def run_test(path, code):
    """Run a written test where a file defines the operators."""
    (path.parent / "conftest.py").write_text(code)
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", path, cwd=path.parent, dynamo=True)


CONFTEST = """
import torch
library = torch.library.Library("test_compare", "DEF")
library.define("scale(Tensor x, float by=2.0) -> Tensor")
library.impl("scale", lambda x, by=2.0: x * by, "CPU")
library.impl("scale", lambda x, by=2.0: {}, "PrivateUse1")
"""


@pytest.mark.processes
def test_the_written_test_fails_with_the_wrong_kernel_alone(library, tmp_path):
    x = torch.ones(40, 30)
    x[17, 23] = 700
    with compare() as result:
        library.scale(x.to(DEVICE).t(), by=3.0)
    path = tmp_path / "test_first.py"
    text = result.write_test(path)
    assert len(text.splitlines()) <= 10 and "saved" not in text
    assert sum(x.numel() for x in result.first.call[1] if isinstance(x, torch.Tensor)) == 1200
    failing = run_test(path, CONFTEST.format("torch.where(x > 100, x * by + 1, x * by)"))
    assert failing.returncode == 1 and "test_compare::scale" in failing.stdout, failing.stdout
    passing = run_test(path, CONFTEST.format("x * by"))
    assert passing.returncode == 0, passing.stdout


SCRIPT = """
import torch
library = torch.library.Library("of_a_script", "DEF")
library.define("halve(Tensor x) -> Tensor")
library.impl("halve", lambda x: x / 2, "CPU")
library.impl("halve", lambda x: x / 2 + (x > 3), "PrivateUse1")
"""
CALL = 'torch.ops.of_a_script.halve(torch.full((2, 2), 4.0).to("openreg"))'


@pytest.mark.processes
@pytest.mark.parametrize("defined_by", ["the script", "a script that raises", "a module"])
def test_the_written_test_defines_the_operator(defined_by, tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "test_first.py"
    program.write_text(f'{SCRIPT}if __name__ == "__main__":\n    {CALL}')
    if defined_by == "a script that raises":
        program.write_text(f"{SCRIPT}{CALL}\nraise ValueError")
    if defined_by == "a module":
        (tmp_path / "operators_of_it.py").write_text(SCRIPT)
        program.write_text("import torch, operators_of_it\n" + CALL)
    command = ["-P", "-m", "openreg_tools", "compare", "--device", DEVICE, "--test", path, program]
    done = python(*command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert len(path.read_text().splitlines()) <= 10
    failing = run_test(path, "import sys\nsys.path.insert(0, '.')\n")
    assert failing.returncode == 1 and "of_a_script::halve" in failing.stdout, failing.stdout


@pytest.mark.parametrize(
    ("operator", "make", "source"),
    [
        ("scale", lambda: torch.full((4, 1), 101.0, device=DEVICE).expand(4, 3), ".expand((4, 3))"),
        ("scale", lambda: torch.full((2, 3), 101.0, device=DEVICE).t(), "torch.empty_strided((3, 2), (1, 3)"),
        ("shape", lambda: torch.full((3,), 101.0, device=DEVICE).bfloat16(), "dtype=torch.bfloat16"),
        ("only_device_raises", lambda: torch.ones(2, device=DEVICE), "only_device_raises"),
        ("beside_", lambda: torch.zeros(3, 3, device=DEVICE)[1:, 1:], "saved[0]"),
        ("without_offset", lambda: torch.arange(12.0, device=DEVICE).view(4, 3)[1:], "saved[0]"),
        ("without_offset", lambda: torch.arange(2e4, device=DEVICE)[9000:9009], "saved[0]"),
        ("scale", lambda: torch.full((4, 3), 101.0, device=DEVICE)[1:], "x0 = torch.tensor("),
        ("shifts_", lambda: torch.arange(4.0, device=DEVICE), "saved[1]"),
    ],
    ids=["expanded", "permuted", "bfloat16", "raises", "beside a view", "offset", "large offset", "a view", "aliases"],
)
@pytest.mark.parametrize("shrink", [False, True], ids=["as it is", "shrunk"])
def test_the_written_test_fails_for(operator, make, source, shrink, library, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest and its plugins have threads
    x = make()
    with torch.no_grad(), compare(device=DEVICE) as result, contextlib.suppress(RuntimeError):
        getattr(library, operator)(*((x[1:], x[:-1]) if operator == "shifts_" else (x,)))
    path = tmp_path / "test_it.py"
    text = result.write_test(path, shrink=shrink)
    assert shrink or source in text
    (test,) = (each for name, each in runpy.run_path(str(path)).items() if name.startswith("test_"))
    with pytest.raises(AssertionError, match=f"test_compare::{operator}"):
        test()


def test_large_inputs_are_beside_the_test(library, tmp_path):
    with compare() as result:
        library.scale(torch.full((20, 20), 500.0).to(DEVICE))
    text = result.write_test(tmp_path / "test_it.py", shrink=False)
    assert 'torch.load(__file__ + ".inputs.pt")' in text and (tmp_path / "test_it.py.inputs.pt").exists()


def test_a_transient_fault_is_said_to_be_one(tmp_path):
    with compare() as result, torch.openreg.faults.inject("copy"):
        torch.ones(3).to(DEVICE)
    assert "transient" in result.write_test(tmp_path / "test_it.py")


def test_assert_operator(library):
    x = torch.arange(6.0).view(2, 3).t()
    assert_operator(torch.ops.aten.mm.default, x, x.t(), device=DEVICE)
    with pytest.raises(AssertionError, match="test_compare::scale_"):
        assert_operator(library.scale_.default, x, device=DEVICE)


# ---- bad requests, forms ----


def test_complex_results_by_hand():
    got, want = torch.tensor([1 + 1j, 2 + 2j]), torch.tensor([1 + 1j, 2 + 3j])
    error = measure(got, want, "rounded", None, 2.0)
    assert (error.at, error.got, error.expected, error.count) == ((1,), 2 + 2j, 2 + 3j, 1)


def test_the_report_says_how_the_program_ended():
    with pytest.raises(KeyError), compare(device=DEVICE, tolerances={"aten::nosuch*": 3}) as result:
        torch.ones(2, device=DEVICE).add_(1)
        raise KeyError("the program's")
    assert "Nothing differs beyond its tolerance until the program raised KeyError" in str(result)
    assert "no operator that the tolerance of aten::nosuch* is for" in " ".join(str(result).split())
    with compare(device=DEVICE) as result:
        pass
    assert "No operator touched a tensor of openreg." in str(result)


def test_the_backward_of_a_function_is_located(library):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            return library.scale(grad * 101)

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with compare(device=DEVICE) as result:
        torch.utils.checkpoint.checkpoint(Function.apply, x, use_reentrant=True).sum().backward()
    assert result.first.operator == "test_compare::scale" and result.first.place.node == "FunctionBackward"
    assert any("in backward: return library.scale" in frame for frame in result.first.stack)


@pytest.mark.processes
@pytest.mark.parametrize(
    "registers",
    ["torch.library.Library('aten', 'IMPL')", "aten_of_it"],
    ids=["the script", "a module"],
)
def test_the_written_test_registers_the_kernel(registers, tmp_path):
    kernel = "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\n"
    kernel += "library.impl('tanh_backward', lambda g, y: g * (1 - y * y) + 1, 'PrivateUse1')\n"
    if registers == "aten_of_it":
        (tmp_path / "aten_of_it.py").write_text(kernel)
        kernel = "import torch, aten_of_it\n"
    program, path = tmp_path / "program.py", tmp_path / "test_first.py"
    body = "import sys\nx = torch.ones(int(sys.argv[1]), device='openreg', requires_grad=True)\nx.tanh().sum().backward()\n"
    program.write_text(kernel + body)
    command = ["-P", "-m", "openreg_tools", "compare", "--device", DEVICE, "--test", path, program, "3"]
    done = python(*command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "has a test of aten::tanh_backward" in done.stderr, done.stderr
    assert len(path.read_text().splitlines()) <= 10
    failing = run_test(path, "")
    assert failing.returncode == 1 and "aten::tanh_backward" in failing.stdout, failing.stdout


def test_arguments_with_the_names_of_assert_operators(library, tmp_path):
    operator = torch.ops.aten._to_copy.default
    assert_operator(
        operator, torch.ones(2), device=DEVICE, keywords={"dtype": torch.float64, "device": torch.device("cpu")}
    )
    with torch.openreg.faults.inject("copy", after=1), compare(device=DEVICE) as result:
        torch.ones(3).to(DEVICE).cpu()
    text = result.write_test(tmp_path / "test_it.py")
    assert "keywords={'device': torch.device(" in text and result.transient
    compile(text, "test_it.py", "exec")


def test_bad_requests():
    for options, message in (
        ({"tolerances": 3}, "expected the tolerances as a mapping of operators to ulps, but got 3"),
        ({"tolerances": {"": 3}}, "expected a tolerance for an operator or a pattern, such as 'aten::mm', but got ''"),
        ({"factor": 0}, "expected the factor of the tolerances as a finite number above 0, but got 0"),
        ({"against": "meta"}, "tensors on meta have no values to compare"),
    ):
        with pytest.raises(Wrong, match=message):
            compare(device=DEVICE, **options)
    with pytest.raises(Wrong, match="both are cpu"):
        compare(device="cpu")
    with pytest.raises(Wrong, match="no device|there is no"):
        compare(device="nothing")
    with pytest.raises(Wrong, match="expected two traces, but got 1"):
        compare("a.trace")


def test_forms(library):
    with compare(name="a <program>") as result:
        library.scale(torch.full((3,), 900.0, device=DEVICE))
    page, data = result.html(), json.loads(json.dumps(result.dict()))
    assert data["first"]["operator"] == "test_compare::scale" and data["calls"] == 2
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    assert ET.fromstring(svg).tag == "svg" and "light-dark(" in page and "a &lt;program&gt;" in page


def test_the_plot_has_each_error_at_its_height():
    for low, high in ((0, 4), (-3, 2)):
        powers = [2.0**e for e in range(low, high + 1)]
        svg = plot([(i, ulps, 3.0, "aten::mul") for i, ulps in enumerate(powers)], len(powers))
        labels = dict(re.findall(r'<text x="0" y="([^"]*)">([^<]*)</text>', svg))
        dots = re.findall(r'class="(\w+)" cx="[^"]*" cy="([^"]*)"', svg)
        assert list(labels.values()) == [f"{ulps:.3g}" for ulps in powers]
        assert [float(y) for _, y in dots] == pytest.approx([float(y) - 4 for y in labels])  # the middle of the label
        assert [kind for kind, _ in dots] == ["bad" if ulps > 3 else "good" for ulps in powers]


def test_the_reverse():
    """Any device may be under test: here the CPU, against the device."""
    with compare(device="cpu", against=DEVICE) as result:
        x = torch.randn(3, 4)
        (x @ x.t()).softmax(-1).sum().item()
    assert result.first is None and result._rows["aten::mm"].compared == 1, result.report()


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
