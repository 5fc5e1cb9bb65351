"""Each check of `conformance` sees the device go wrong in each way that it looks for, and nothing where it is right."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch.testing._internal.common_dtype import custom_types
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

from openreg_tools.conformance import (
    cuda_dtypes,
    freed,
    generated_calls,
    graphs,
    layouts,
    outcomes,
    schemas,
    sweep,
    training,
)
from openreg_tools.conformance.guarded import Guarded
from openreg_tools.core import from_schema
from openreg_tools.core.compare import tolerance
from openreg_tools.core.move import Move
from openreg_tools.core.samples import Sample

pytestmark = pytest.mark.conformance
DEVICE = "openreg"


def operator(function, count=1, **options):
    """An OpInfo of `count` arguments, in float16 on accelerators only."""

    def samples(op, device, dtype, requires_grad, **_):
        first, *rest = (
            torch.arange(1, 4, device=device).to(dtype).requires_grad_(requires_grad and dtype.is_floating_point)
            for _ in range(count)
        )
        yield SampleInput(first, args=tuple(rest))

    options = {"supports_out": False, "inplace_variant": None} | options
    return OpInfo(
        "made",
        op=function,
        dtypes=custom_types(torch.float32),
        dtypesIfCUDA=custom_types(torch.float32, torch.float16),
        sample_inputs_func=samples,
        **options,
    )


def kinds(report):
    return {(failure.check, failure.kind) for failure in report.failures}


class Scaled(torch.autograd.Function):
    """2 x, with the gradient of 4 x on the device."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2 if x.is_cpu else 4
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad


def refuse(*_):
    raise ValueError("refused")


def fail_inside(*_):
    raise RuntimeError("x INTERNAL ASSERT FAILED")


def half(op):
    """The report of the check of float16, which the CPU lacks."""
    report = cuda_dtypes.check(op, torch.float32, DEVICE, 1, ("cuda_dtypes",))
    assert report.ran["cuda_dtypes"] and {failure.check for failure in report.failures} <= {"cuda_dtypes"}
    assert all(failure.message.startswith("torch.float16: ") for failure in report.failures)
    return report


# ---- the results of forms ----


def with_out(device_side):
    def function(x, *, out=None):
        if out is None:
            return x * 2
        return torch.mul(x, 2, out=out) if x.is_cpu else device_side(x, out)

    return operator(function, supports_out=True)


def replaced(x, out):
    return out.set_((x * 2).clone())


@pytest.mark.parametrize(
    "kind, device_side",
    [
        ("value", lambda x, out: torch.mul(x, 3, out=out)),
        ("value", lambda x, out: x * 2),  # leaves out as it was
        ("error", refuse),
        ("structure", lambda x, out: torch.mul(x, 2, out=out).clone()),
        ("structure", replaced),
    ],
    ids=["value", "not written", "error", "another tensor", "other memory"],
)
def test_out(kind, device_side):
    assert not sweep.check(with_out(lambda x, out: torch.mul(x, 2, out=out)), torch.float32, DEVICE).failures
    report = sweep.check(with_out(device_side), torch.float32, DEVICE, checks=("out",))
    assert ("out", kind) in kinds(report) and {failure.check for failure in report.failures} == {"out"}, kinds(report)
    assert ("cuda_dtypes", kind) in kinds(half(with_out(device_side)))


class ScaledInPlace(torch.autograd.Function):
    """`Scaled`, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2 if x.is_cpu else 4
        ctx.mark_dirty(x)
        return x.mul_(2)

    backward = Scaled.backward


@pytest.mark.parametrize(
    "kind, inplace",
    [
        (None, lambda x: x.mul_(2)),
        ("value", lambda x: x.mul_(2 if x.is_cpu else 3)),
        ("gradient", ScaledInPlace.apply),
        ("error", lambda x: x.mul_(2) if x.is_cpu else refuse()),
        ("error", lambda x: x.mul_(2) if x.is_cpu or not torch.is_grad_enabled() or x.is_leaf else refuse()),
        ("structure", lambda x: x.mul_(2) if x.is_cpu else x * 2),
    ],
    ids=["right", "value", "gradient", "error", "error with gradients", "another tensor"],
)
def test_in_place(kind, inplace):
    op = operator(lambda x: x * 2, inplace_variant=inplace)
    report = sweep.check(op, torch.float32, DEVICE, checks=("inplace", "backward"))
    assert report.ran["inplace"] == 2 and (kinds(report) >= {("inplace", kind)} if kind else not report.failures)
    assert ("cuda_dtypes", kind) in kinds(half(op)) if kind else not half(op).failures


@pytest.mark.parametrize("check", ["forward", "inplace", "out"])
def test_forms_are_also_compared_without_gradients(check):
    """Where an operator is wrong only for tensors that require none, while its gradients are checked as well."""

    def wrong_if(x, form):
        return 3 if form == check and not (x.is_cpu or x.requires_grad) else 2

    def function(x, *, out=None):
        return x * wrong_if(x, "forward") if out is None else torch.mul(x, wrong_if(x, "out"), out=out)

    op = operator(function, inplace_variant=lambda x: x.mul_(wrong_if(x, "inplace")), supports_out=True)
    report = sweep.check(op, torch.float32, DEVICE, checks=("forward", "backward", "inplace", "out"))
    assert kinds(report) == {(check, "value")}


# ---- calls that the CPU refuses ----


def refuses(device_side, count=1):
    """An operator that refuses tensors of four elements, and does with them what `device_side` does on the device."""

    def function(x):
        return (refuse if x.is_cpu else device_side)(x) if len(x) == 4 else x * 2

    def errors(op, device, **_):
        for _ in range(count):
            yield ErrorInput(SampleInput(torch.ones(4, device=device)), error_type=ValueError, error_regex="refused")

    return OpInfo(
        "made",
        op=function,
        dtypes=custom_types(torch.float32, torch.float64),
        sample_inputs_func=lambda op, device, dtype, *_, **__: [SampleInput(torch.ones(3, device=device, dtype=dtype))],
        error_inputs_func=errors,
        supports_out=False,
        inplace_variant=None,
    )


def test_wrong_inputs_of_the_database():
    """They run once, with the first dtype, and `at` is told where they are."""
    said, check = [], "errors"
    report = sweep.check(refuses(refuse, 3), torch.float32, DEVICE, checks=(check,), at=said.append)
    assert report.ran[check] >= 3 and not report.failures
    assert [f"{check}, sample {i}" in said for i in range(4)] == [True] * 3 + [False], said
    assert all(isinstance(message, str) for message in said)
    assert sweep.check(refuses(refuse, 3), torch.float64, DEVICE, checks=(check,)).ran[check] == 0


@pytest.mark.parametrize("kind, device_side", [("no error", lambda x: x * 2), ("error type", lambda x: [][1])])
def test_wrong_inputs_that_the_device_takes(kind, device_side):
    report = sweep.check(refuses(device_side, 2), torch.float32, DEVICE, checks=("errors",))
    assert [(f.check, f.kind, f.sample) for f in report.failures] == [("errors", kind, i) for i in range(2)]


# ---- results ----


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("offset, reads", [(3, True), (3, False), (900, True)], ids=["whole", "unread", "beyond"])
def test_results_that_cannot_be_compared_are_counted(monkeypatch, offset, reads):
    """A nested result with parts beyond its memory is no failure; another one that cannot be read is."""

    def unread(x):
        raise RuntimeError("no copy")

    if not reads:
        monkeypatch.setattr(torch.Tensor, "cpu", unread)
    offsets = torch.tensor([0, 3])
    nested = torch._nested_view_from_buffer(torch.ones(6), torch.tensor([[2], [3]]), torch.ones(2, 1).long(), offsets)
    offsets[1] = offset
    for result, compares in ((nested, offset == 3), (torch.ones(3), True)):
        report = outcomes.Tally()
        comparison = outcomes.Comparison(report, "forward", 0, "cpu", True)
        for _ in range(3):
            comparison.tensors(result, result)
        assert report.notes["cannot be compared"] == (0 if compares else 3)
        said = [] if reads or not compares else ["reading a result: RuntimeError: no copy"] * 3
        assert [failure.message for failure in report.failures] == said


def coo():
    return torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=False)


def of_lengths(*lengths):
    return torch.nested.nested_tensor([torch.ones(length) for length in lengths])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "expected, actual, kind, says",
    [
        (lambda: torch.ones(2), lambda: torch.ones(2, device="meta"), "device", "a result is on meta"),
        (coo, lambda: coo().double(), "dtype", "expected torch.float32, but got torch.float64"),
        (coo, lambda: coo().to_dense(), "layout", "expected torch.sparse_coo, but got torch.strided"),
        (coo, lambda: coo().coalesce(), "layout", "expected is_coalesced() to be False"),
        (coo, lambda: coo().requires_grad_(), "layout", "expected requires_grad=False"),
        (lambda: torch.ones(2), lambda: torch.ones(2, 1), "shape", "expected [2], but got [2, 1]"),
        (lambda: torch.ones(2) + 1j, lambda: (torch.ones(2) - 1j).conj(), "layout", "expected is_conj() to be False"),
        (lambda: torch._neg_view(-torch.ones(2)), lambda: torch.ones(2), "layout", "expected is_neg() to be True"),
        (lambda: of_lengths(1, 2), lambda: of_lengths(2, 1), "value", "expected parts of shapes [[1], [2]], but got [[2], [1]]"),
        (lambda: torch.ones(2), lambda: torch.ones(2) * 2, "value", "a result differs in 2 of 2 elements: 2 instead of 1 at [0]"),
    ],
)  # fmt: skip
def test_failures_say_what_was_expected(expected, actual, kind, says):
    report = outcomes.Tally()
    outcomes.Comparison(report, "forward", 0, "cpu", True).tensors(expected(), actual())
    assert [(failure.kind, failure.message) for failure in report.failures] == [(kind, says)]


@pytest.mark.parametrize(
    "cpu, there, kind, says",
    [
        (torch.abs, lambda x: x + 0 * torch.rand(3).to(x.device), "rng", "the CPU's generator moved"),
        (
            torch.rand_like,
            lambda x: torch.rand_like(x) / 2,
            "rng",
            "from the same seed: a result differs in 3 of 3 elem",
        ),
        (torch.abs, refuse, "error", "ValueError: refused"),
        (refuse, torch.abs, "no error", "the CPU raised ValueError: refused"),
        (refuse, fail_inside, "error type", ""),
        (lambda x: (x, 1), lambda x: (x, 1.0), "structure", "expected int, but got float"),
        (lambda x: (x, 1), lambda x: (x, 2), "structure", "expected 1, but got 2"),
        (lambda x: x, lambda x: [x], "structure", "expected *, but got TreeSpec(list, None, [*])"),
    ],
)
def test_what_a_call_returned(cpu, there, kind, says):
    op = operator(lambda x: (cpu if x.is_cpu else there)(x))
    report = sweep.check(op, torch.float32, DEVICE, 1, ("forward",))
    assert kinds(report) == {("forward", kind)}
    assert all(failure.message.startswith(says) for failure in report.failures), report.failures


@pytest.mark.parametrize(
    "cpu, there, says",
    [
        (lambda x, y: x[:2], lambda x, y: x[:2].clone(), "tensor arguments [0], not with no argument"),
        (lambda x, y: x[:2].clone(), lambda x, y: x[:2], "no argument, not with tensor arguments [0]"),
        (lambda x, y: y[:2], lambda x, y: x[:2], "tensor arguments [1], not with tensor arguments [0]"),
    ],
    ids=["copied", "shared", "another"],
)
def test_memory_that_a_result_shares(cpu, there, says):
    op = operator(lambda x, y: (cpu if x.is_cpu else there)(x, y), count=2)
    report = sweep.check(op, torch.float32, DEVICE, 1, ("forward",))
    assert {failure.message for failure in report.failures} == {f"expected a result that shares memory with {says}"}
    assert kinds(report) == {("forward", "alias")}


class SecondScaled(torch.autograd.Function):
    """x y, with twice the derivative by y on the device."""

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.factor = 1 if inputs[0].device.type == "cpu" else 2

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x * ctx.factor

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return x_t * y + x * y_t * ctx.factor

    @staticmethod
    def vmap(info, in_dims, x, y):
        x, y = (t.movedim(d, 0) if d is not None else t for t, d in zip((x, y), in_dims, strict=True))
        return SecondScaled.apply(x, y), 0


@pytest.mark.parametrize("more", [None, torch.int64, torch.bool, torch.sparse_coo], ids=str)
@pytest.mark.parametrize("check", ["backward", "grad", "jvp", "jacrev", "vmap_grad"])
def test_a_wrong_second_derivative(check, more):
    """Alone, or beside a result that has no derivative."""

    def pair(function, x, y):
        beside = x.detach().to(more) if isinstance(more, torch.dtype) else torch.eye(3, device=x.device).to_sparse()
        return function(x, y), beside

    for function, wrong in ((SecondScaled.apply, True), (torch.mul, False)):
        info = operator(functools.partial(pair, function) if more else function, 2)
        report = sweep.check(info, torch.float32, DEVICE, checks=(check,))
        assert report.ran[check] and bool(report.failures) == wrong, report.failures
        assert kinds(report) <= {(check, "gradient" if check == "backward" else "value")}


# ---- dtypes that the CPU lacks ----


def double(x, *, out=None):
    return torch.mul(x, 2, out=out)


def on_device(device_side):
    """`double`, but for `device_side` on the device."""
    return operator(lambda x: double(x) if x.device.type in ("cpu", "meta") else device_side(x))


def test_half_types_of_a_right_operator():
    assert not half(operator(lambda x: x * torch.nan, inplace_variant=lambda x: x.mul_(torch.nan))).failures
    assert not half(operator(double, supports_out=True)).failures
    assert not half(operator(lambda x: (x * 2, x * 3))).failures
    assert not half(operator(lambda x: x > 1, inplace_variant=lambda x: refuse())).failures, "a bool does not fit"
    unwritten = half(operator(lambda x, *, out=None: x * 2, supports_out=True))
    assert not unwritten.failures and unwritten.notes["out= is not written by PyTorch's composite"] == 1


def test_half_types_in_out_of_other_strides_and_sizes():
    def strict(x, out):
        return torch.mul(x, 2, out=out) if out.is_contiguous() else refuse()

    def short(x, out):
        return torch.mul(x, 2, out=out) if out.numel() else out

    assert kinds(half(with_out(strict))) == {("cuda_dtypes", "error")}
    assert ("cuda_dtypes", "shape") in kinds(half(with_out(short)))


class Raises(Scaled):
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no backward")


@pytest.mark.parametrize(
    "kind, device_side",
    [
        ("value", lambda x: x * 2.01),
        ("dtype", lambda x: x.float() * 2),
        ("shape", lambda x: (x * 2)[:2]),
        ("structure", lambda x: (x * 2, x * 2)),
        ("device", lambda x: x.cpu() * 2),
        ("error", refuse),
        ("gradient", Scaled.apply),
        ("error", Raises.apply),
        ("gradient", lambda x: double(x.detach())),
    ],
    ids=["value", "dtype", "shape", "structure", "device", "error", "gradient", "no backward", "detached"],
)
def test_half_types(kind, device_side):
    assert ("cuda_dtypes", kind) in kinds(half(on_device(device_side)))


@pytest.mark.parametrize("kind, part", [("value", 0.25), ("gradient", 0.5)])
def test_how_far_half_types_may_be(kind, part):
    """A part of the tolerance of their dtype, a larger one for gradients, as these pass through several operators."""

    def report(error):
        class Inexact(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.by = 2 * (1 + error) if x.device.type == "openreg" else 2
                return x * (ctx.by if kind == "value" else 2)

            @staticmethod
            def backward(ctx, grad):
                return grad * (ctx.by if kind == "gradient" else 2)

        return half(operator(Inexact.apply))

    limit = part * tolerance(torch.ones((), dtype=torch.float16))
    assert not report(0.8 * limit).failures and kinds(report(1.2 * limit)) == {("cuda_dtypes", kind)}


# ---- autocast ----


def under_autocast(wrong, right=lambda x: x * 2):
    def function(x):
        return wrong(x) if torch.is_autocast_enabled(DEVICE) else right(x)

    report = cuda_dtypes.check(operator(function), torch.float32, DEVICE, 1, ("autocast",))
    assert report.ran["autocast"] == 4
    return report


def only_in_functorch(x):
    wrapped = torch._C._functorch.is_gradtrackingtensor(x)
    return refuse() if wrapped and torch.is_autocast_enabled(DEVICE) else x * 2


@pytest.mark.parametrize(
    "kind, wrong, sentence",
    [
        ("error", refuse, "ValueError: refused"),
        ("value", lambda x: x * 3, "a result differs in 3 of 3 elements"),
        ("shape", lambda x: (x * 2)[:2], "expected [3], but got [2]"),
        ("structure", lambda x: (x * 2, x), "but got TreeSpec(tuple"),
        ("gradient", Scaled.apply, "a gradient differs in "),
        ("gradient", lambda x: x.detach() * 2, "input 0: expected a gradient"),
        ("error", only_in_functorch, "ValueError: refused"),
    ],
    ids=["error", "value", "shape", "structure", "gradient", "no gradient", "functorch"],
)
def test_autocast(kind, wrong, sentence):
    report = under_autocast(wrong)
    assert ("autocast", kind) in kinds(report)
    for dtype in (torch.float16, torch.bfloat16):
        said = [failure.message for failure in report.failures if failure.message.startswith(f"{dtype}")]
        assert any(sentence in message for message in said), said


def test_autocast_of_a_right_operator():
    rounded = under_autocast(lambda x: (x * 2).to(torch.get_autocast_dtype(DEVICE)))
    assert not rounded.failures and set(rounded.notes) == {"rounding"}
    assert not under_autocast(lambda x: (x * 2, None)[0]).failures


def test_what_autocast_loses_on_the_cpu_too_is_noted():
    def function(x):
        far = torch.is_autocast_enabled(DEVICE) or torch.is_autocast_enabled("cpu")
        return x * 3 if far else x * 2

    report = cuda_dtypes.check(operator(function), torch.float32, DEVICE, 1, ("autocast",))
    assert not report.failures and report.notes["as far from float32 as autocast on the CPU"] == 2


def test_what_fails_without_autocast_is_not_its_affair():
    report = cuda_dtypes.check(
        operator(lambda x: x * 2 if x.is_cpu else refuse()), torch.float32, DEVICE, 1, ("autocast",)
    )
    assert not report.failures


# ---- arguments without memory ----


@pytest.mark.parametrize("reads, kind", [(False, None), (True, "internal")])
def test_a_call_that_does_not_expect_an_argument_without_memory(reads, kind):
    asked = []

    def call(move):
        x, y = move(torch.ones(3)), move(torch.ones(3))
        asked.append((x.untyped_storage().nbytes(), y.untyped_storage().nbytes()))
        if reads and not y.untyped_storage().nbytes():
            raise RuntimeError("data INTERNAL ASSERT FAILED")
        return x + y  # raises what it may raise

    report, places = outcomes.Tally(), []
    freed.compare(report, 4, "sample 4", call, lambda: Move(DEVICE), places.append)
    assert asked == [(12, 12), (0, 12), (0, 12), (12, 0), (12, 0)]  # in both launch modes
    assert report.ran["freed"] == 4 and places[-1] == "freed, sample 4, tensor 1, async"
    assert {(f.check, f.kind, f.sample) for f in report.failures} == ({("freed", kind, 4)} if kind else set())


# ---- captured graphs ----


def test_a_graph_that_keeps_what_a_number_promoted(monkeypatch):
    """The copy in another dtype has the values of the capture."""
    kept = {}

    def clamp(x, low):
        key = torch.accelerator.current_stream().stream_id, low
        if torch.promote_types(x.dtype, torch.result_type(x, low)) != x.dtype:
            x = x.to(torch.result_type(x, low))
            if torch.openreg.is_current_stream_capturing():
                x = kept.setdefault(key, torch.zeros_like(x))
        return x.clamp(low)

    op = operator(clamp, count=1)
    op.sample_inputs_func = lambda *_, **__: [SampleInput(torch.tensor([3, -7, 1]), args=(2,))]
    report = outcomes.Tally()
    graphs.check_numbers(op, torch.int64, DEVICE, report)
    assert [f.kind for f in report.failures] == ["value"] and report.ran["graph"] == 2
    assert report.failures[0].message.startswith("-1.5 as argument 0: replay 0 gave")


@pytest.mark.parametrize("kind", ["value", "error", None])
def test_a_graph_that_differs_from_eager_mode(kind):
    if not graphs.supported(DEVICE):
        pytest.skip("this torch has no graphs of an accelerator")

    def call(x):
        if torch.accelerator.current_stream() != before:  # a graph is captured on another stream
            return refuse() if kind == "error" else x * (3 if kind else 2)
        return x * 2

    report, before = outcomes.Tally(), torch.accelerator.current_stream()
    graphs.compare(report, 7, "valid", call, ([torch.ones(3)], {}), DEVICE)
    assert [(f.check, f.kind, f.sample) for f in report.failures] == ([("graph", kind, 7)] if kind else [])
    assert report.ran["graph"] == 1
    said = {
        "value": "valid: replay 0 gave torch.float32 [3] [3.0, 3.0, 3.0], eager torch.float32 [3] [2.0, 2.0, 2.0]",
        "error": "valid: eager: None; graph: ValueError: refused",
    }
    assert [f.message for f in report.failures] == ([said[kind]] if kind else [])


# ---- layouts ----


def test_a_graph_that_returns_less():
    tally = outcomes.Tally()
    graphs.judge(tally, 2, "made", outcomes.Outcome([[torch.ones(2)] * 2]), outcomes.Outcome([[torch.ones(2)]]))
    assert [(f.kind, f.sample, f.message) for f in tally.failures] == [
        ("structure", 2, "made: a different number of results")
    ]


def test_what_is_written_around_a_result():
    made = layouts.GuardedTensor.like(torch.zeros(3, 4), "stepped", DEVICE)
    assert made.overrun() is None
    owned = made.owned.nonzero().flatten()
    between = next(i for i in range(int(owned[0]), int(owned[-1])) if not made.owned[i])
    for place in (0, int(owned[0]) - 1, int(owned[-1]) + 1, between):
        made.memory[place] += 1
    assert made.overrun() == ("4 bytes outside the result were written, 3 of them before its start or past its end")


def around(x):
    x.fill_(2).as_strided((1,), (1,), x.storage_offset() - 1).fill_(7)


@pytest.mark.parametrize(
    "device_side, kind, says",
    [
        (lambda x: x.fill_(2), None, ""),
        (lambda x: x.fill_(3), "value", "a result differs in 12 of 12 elements: 3 instead of 2 at [0, 0]"),
        (around, "guard", "4 bytes outside the result were written, "),
        (lambda x: x.fill_(2).unsqueeze_(0), "shape", "expected [3, 4], but got [1, 3, 4]"),
        (lambda x: x.set_(torch.full_like(x, 2)), "layout", "expected the result in the memory that was passed"),
        (refuse, "error", "ValueError: refused"),
    ],
    ids=["right", "value", "guard", "shape", "layout", "error"],
)
def test_what_is_written_to_other_layouts(device_side, kind, says):
    tally = outcomes.Tally()
    made = layouts.WritingCall(
        "made", lambda move, xs: xs[0].fill_(2) if xs[0].is_cpu else device_side(xs[0]), [torch.ones(3, 4)]
    )
    made.compare(outcomes.Comparison(tally, "layouts", 0, DEVICE, True))
    assert tally.ran["layouts"] >= 2 and kinds(tally) == ({("layouts", kind)} if kind else set())
    assert all(
        re.match(f"made, (permuted|stepped|expanded): {re.escape(says)}", failed.message) for failed in tally.failures
    )


@pytest.mark.parametrize(
    "name, out, inplace",
    [
        ("add.Tensor", "add.out", "add_.Tensor"),
        ("add.Scalar", "add.Scalar_out", "add_.Scalar"),
        ("pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow_.Scalar"),
        ("sort.stable", "sort.values_stable", None),
        ("mm", "mm.out", None),
    ],
)
def test_the_forms_of_an_operator(name, out, inplace):
    packet, _, overload = name.partition(".")
    found = layouts.forms(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    assert [form and form.name().removeprefix("aten::") for form in found] == [out, inplace]


def test_a_view_between_guards():
    """It has its values and strides, and shares memory where the arguments do."""
    base = torch.arange(1.0, 17.0).view(4, 4)
    x, move = base.t()[2:], Guarded(85)
    made = move(x)
    assert torch.equal(made, x) and made.stride() == x.stride() and made.storage_offset() == x.storage_offset()
    assert made.data_ptr() - move(base).data_ptr() == x.data_ptr() - base.data_ptr()
    assert move.is_whole()
    move.buffers[0][0][0] = 0
    assert not move.is_whole()


# ---- calls made from schemas ----


@pytest.mark.parametrize(
    "kind, cpu, there",
    [
        ("value", torch.neg, torch.abs), ("error", torch.neg, refuse), ("no error", refuse, torch.neg),
        (None, torch.neg, torch.neg), (None, refuse, refuse), ("internal", torch.neg, fail_inside),
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", ["generated", "garbage"])
@pytest.mark.parametrize("space", ["aten", "test_sees"])
def test_a_call_whose_outcome_differs_from_the_cpus(monkeypatch, kind, cpu, there, check, space):
    """Also a damaged call has to raise on both sides or on none, but then its values are not compared."""
    monkeypatch.setattr(schemas, "accepted", lambda name, samples: [Sample(torch.ones(2))])
    monkeypatch.setattr(schemas, "is_own", lambda name, device: True)
    monkeypatch.setattr(from_schema, "garbage", lambda name, call, k: call)
    name = f"f_{check}_{kind}_{cpu.__name__}".replace(" ", "_")
    with torch.library._scoped_library(space, "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: cpu(x), "CPU")
        library.impl(name, lambda x: there(x), "PrivateUse1")
        report = generated_calls.check(f"{space}::{name}", DEVICE, 1, (check,))
    differs = kind and (kind, check) != ("value", "garbage")
    assert kinds(report) == ({(check, kind)} if differs else set())
    assert report.ran[check] == (1 if check == "generated" else 16)


@pytest.mark.parametrize("setting", [(False, False), (True, True)])
def test_the_choice_of_deterministic_algorithms_stays(monkeypatch, setting):
    monkeypatch.setattr(schemas, "accepted", lambda name, samples: [Sample(torch.ones(2))])
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])
    try:
        generated_calls.check("aten::neg", DEVICE, 1, ("generated",))
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert now == setting


# ---- modules ----


def module_info(made):
    """A ModuleInfo of a class of modules that take two tensors."""
    from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput

    class Info(ModuleInfo):
        name = "nn.Made"

    def samples(info, device, dtype, requires_grad, training):
        tensors = [torch.ones(3, dtype=dtype, device=device, requires_grad=requires_grad) for _ in range(2)]
        return [ModuleInput(FunctionInput(), FunctionInput(*tensors))]

    return Info(made, module_inputs_func=samples)


class Made(torch.nn.Module):
    """Two results of two inputs, of which `wrong` changes the second on the device."""

    wrong = None

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        if type(self).wrong and not x.is_cpu:
            y = type(self).wrong(self, y)
        return x * self.weight, y * 2


def only_mapped(module, y):
    return refuse() if torch._C._functorch.is_functorch_wrapped_tensor(module.weight) else y


WHOLE = ("train", "eval")


@pytest.mark.parametrize(
    "kind, checks, wrong",
    [
        (None, (), None),
        ("value", WHOLE, lambda module, y: y + 1),
        ("gradient", WHOLE, lambda module, y: 2 * y - y.detach()),
        ("error", ("vmap_grad",), only_mapped),
        ("error", (*WHOLE, "vmap_grad"), lambda module, y: refuse()),
    ],
    ids=["right", "value", "gradient", "mapped", "error"],
)
def test_a_module(kind, checks, wrong):
    """The second result is wrong, or the gradient of the second input, which no parameter has a part in."""
    info = module_info(type("Wrong", (Made,), {"wrong": wrong}))
    report = training.check_module(info, torch.float32, DEVICE, (*WHOLE, "vmap_grad"))
    assert kinds(report) == {(check, kind) for check in checks}
    assert all(report.ran[check] == 1 for check in (*WHOLE, "vmap_grad"))


@pytest.mark.parametrize(
    "kind, cpu, there",
    [("no error", ValueError, None), ("error type", ValueError, TypeError), (None, ValueError, ValueError)],
)
def test_a_module_that_raises(kind, cpu, there):
    class Raising(torch.nn.Module):
        def forward(self, x, y):
            if error := cpu if x.is_cpu else there:
                raise error("refused")
            return x * 2

    report = training.check_module(module_info(Raising), torch.float32, DEVICE, WHOLE)
    assert kinds(report) == ({(check, kind) for check in WHOLE} if kind else set())


# ---- optimizers ----


@pytest.mark.parametrize(
    "option, wrong",
    [({"momentum": 0.5}, 3), ({"foreach": True}, 3), ({"fused": True}, 3), ({"lr": 0.25}, 3), ({}, 0)],
    ids=str,
)
def test_an_optimizer_that_is_wrong_with_one_option(option, wrong):
    """Each sample's options and each implementation reach the step."""
    from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput

    class Wrong(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for parameter in group["params"] if option and option.items() <= group.items() else ():
                    parameter.data += not parameter.is_cpu

    def inputs(device, dtype=None):
        return [OptimizerInput(None, options, str(options)) for options in ({}, {"momentum": 0.5}, {"lr": 0.25})]

    info = OptimizerInfo(
        Wrong, optim_inputs_func=inputs, supported_impls=("foreach", "fused"), supports_fused_on=("cpu",)
    )
    report = training.check_optimizer(info, torch.float32, DEVICE, ("step",))
    assert report.ran["step"] == 9
    named = str(option).strip("{}")
    assert all(f.kind == "value" and named in f.message for f in report.failures), report.failures
    assert len({f.sample for f in report.failures}) == wrong
