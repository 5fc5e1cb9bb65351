"""Operators in graphs: a replay computes what eager mode computes, to the bit."""

from pathlib import Path

import pytest
import torch
from stream_kit import captured

from openreg_ops.meta.op import SAMPLES
from openreg_tools.conformance import graphs, outcomes, training
from openreg_tools.core import opinfo
from openreg_tools.core.samples import sample_of

DEVICE = "openreg:0"

# One of each kind: structured with an object created once, structured, in place, with a copied result, several results,
# views, random, foreach, composites.
OPERATORS = (
    "add", "mul", "exp", "mm", "addmm", "baddbmm", "softmax", "cat", "sum", "argmax", "topk", "sort", "where", "fill",
    "gather", "index_put", "index_select", "scatter_add", "linalg.inv_ex", "nn.functional.nll_loss", "nn.functional.gelu",
    "nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.dropout",
    "nn.functional.max_pool2d", "nn.functional.embedding", "bernoulli", "multinomial", "abs", "conj", "cumsum", "pow",
    "div.no_rounding_mode", "lerp", "addcdiv", "clamp", "unfold", "std_mean", "svd", "fft.fft", "_foreach_add", "_foreach_pow",
    "transpose", "squeeze", "unsqueeze",  # in place they change what the next call sees
    "randn", "full", "linspace", "cholesky",
)  # fmt: skip


def found(report):
    return "\n".join(f"sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures)


@pytest.mark.parametrize("name", OPERATORS)
def test_replay_is_eager(name):
    if name == "cholesky" and name not in opinfo.database():
        pytest.skip("this version of torch has no torch.cholesky in its OpInfos")
    op, report = opinfo.database()[name], outcomes.Tally()
    graphs.check(op, torch.float32, DEVICE, 4, report)
    assert report.ran["graph"] >= 1
    assert not report.failures, found(report)
    assert sum(report.notes.values()) < report.ran["graph"], "some samples are captured"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "div.no_rounding_mode", "sub", "eq", "sum", "neg", "pow"])
def test_replay_is_eager_in_other_dtypes(name, dtype):
    op, report = opinfo.database()[name], outcomes.Tally()
    graphs.check(op, dtype, DEVICE, 6, report)
    assert not report.failures, found(report)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["clamp", "clamp_min", "pow", "_foreach_pow", "_foreach_clamp_min", "eq", "lerp"])
def test_numbers_beside_tensors(name, dtype):
    """A number may promote the dtype of the tensors beside it; a converted copy must not outlive the capture."""
    op, report = opinfo.database()[name], outcomes.Tally()
    graphs.check_numbers(op, dtype, DEVICE, report)
    assert not report.failures, found(report)


def test_a_replay_of_a_promotion_reads_its_input():
    x = torch.tensor([3, -7, 1], device=DEVICE)
    flags, one, wide = x > 0, torch.tensor(5, device=DEVICE), torch.empty(3, device=DEVICE)
    functions = [
        lambda: x.clamp(-1.5, 1.5),
        lambda: flags.clamp(0, 1),
        lambda: x.pow(0.5),
        lambda: flags.square(),
        lambda: one.clamp_min(1.5),
        lambda: torch.clamp(x[::2], -1.5, 1.5, out=wide[:2]).clone(),
    ]
    graph, results = captured(lambda: [each() for each in functions])
    for values in ([3, -7, 1], [0, 5, 9]):
        x.copy_(torch.tensor(values))
        flags.copy_(x > 2)
        one.fill_(values[1])
        graph.replay()
        for function, result in zip(functions, results, strict=True):
            assert torch.equal(result.nan_to_num(7), function().nan_to_num(7))


MODULES = ("nn.Linear", "nn.Conv2d", "nn.BatchNorm1d", "nn.LayerNorm", "nn.LSTM", "nn.MultiheadAttention", "nn.Embedding",
           "nn.CrossEntropyLoss")  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    report = training.check_module(training.modules()[name], torch.float32, DEVICE, ("graph",))
    assert report.ran["graph"] >= 1
    assert not report.failures, found(report)
    assert sum(report.notes.values()) < report.ran["graph"], report.notes


@pytest.mark.parametrize("name", sorted(training.optimizers()))
def test_optimizers(name):
    info = training.optimizers()[name]
    report = training.check_optimizer(info, torch.float32, DEVICE, checks=("graph",))
    assert (report.ran["graph"] == 0) == (info.optim_cls.__name__ in training.HOST_STEPS)
    assert not report.failures, found(report)
    assert not report.notes


def not_captured():
    """The rows of the table of operators in docs/graphs.md, by operator."""
    text = (
        (Path(__file__).parents[2] / "docs" / "graphs.md")
        .read_text()
        .partition("| Not captured |")[2]
        .partition("\n\n")[0]
    )
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {name.strip("` "): row[2] for row in rows for name in row[1].split(",")}


@pytest.mark.parametrize("name", sorted(not_captured()))
def test_the_documented_exceptions_are_not_captured(name):
    op, report = opinfo.database()[name], outcomes.Tally()
    graphs.check(op, getattr(torch, opinfo.dtypes_of(op)[0]), DEVICE, 3, report)
    causes = [*report.notes, *(failure.message for failure in report.failures)]
    if name == "combinations" and torch.__version__ >= "2.14":
        pytest.skip("from torch 2.14 on it does not use masked_select")
    assert causes and name not in graphs.DYNAMIC
    for cause in causes:
        assert cause.startswith(graphs.NOTE)
        operator = cause.removeprefix(graphs.NOTE).partition(": ")[0]
        assert operator.removeprefix("aten::") in not_captured()[name], cause


@pytest.mark.parametrize("name", sorted(graphs.DYNAMIC))
def test_shapes_that_depend_on_values_are_refused(name):
    op, report = opinfo.database()[name], outcomes.Tally()
    graphs.check(op, getattr(torch, opinfo.dtypes_of(op)[0]), DEVICE, 3, report)
    assert report.notes and not report.failures


MATRIX = torch.eye(3).to(DEVICE)
READS, COPIES = "aten::_local_scalar_dense", "aten::copy_"


@pytest.mark.parametrize("refused, operator, instead", [
    (lambda: torch.tensor(2.0, device=DEVICE), COPIES, lambda: torch.full((), 2.0, device=DEVICE)),
    (lambda: MATRIX.new_tensor([1, 2]), COPIES, lambda: MATRIX.new_full((2,), 1)),
    (lambda: MATRIX.clone().copy_(torch.tensor(2.0)), COPIES, lambda: MATRIX.clone().fill_(torch.tensor(2.0))),
    (lambda: torch.tensor(2.0).to(DEVICE), COPIES, lambda: MATRIX * torch.tensor(2.0)),
    (lambda: torch.linalg.inv(MATRIX), READS, lambda: torch.linalg.inv_ex(MATRIX)[0]),
    (lambda: torch.linalg.solve(MATRIX, MATRIX), READS, lambda: torch.linalg.solve_ex(MATRIX, MATRIX)[0]),
    (lambda: torch.linalg.cholesky(MATRIX), READS, lambda: torch.linalg.cholesky_ex(MATRIX)[0]),
])  # fmt: skip
def test_what_cuda_refuses_and_what_it_captures_instead(refused, operator, instead):
    with pytest.raises(torch.AcceleratorError, match=operator):
        captured(refused)
    graph, y = captured(instead)
    graph.replay()
    assert torch.equal(y, instead())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("size", [5, 0])
def test_repeats_whose_sum_is_given_are_captured(size, dtype):
    x = torch.arange(6.0, device=DEVICE).reshape(3, 2)
    repeats = torch.zeros(3, dtype=dtype, device=DEVICE)
    graph, (y, z) = captured(lambda: (
        x.repeat_interleave(repeats, 0, output_size=size), torch.repeat_interleave(repeats, output_size=size)
    ))  # fmt: skip
    for values in ([size, 0, 0], [size // 2, 0, size - size // 2]):
        repeats.copy_(torch.tensor(values))
        graph.replay()
        assert torch.equal(y, x.repeat_interleave(repeats, 0)) and torch.equal(z, torch.repeat_interleave(repeats))
    repeats.fill_(4)
    with pytest.raises(torch.AcceleratorError, match="(?s)size.*In aten::repeat_interleave, a node"):
        graph.replay()


def test_a_node_says_what_it_reads_and_writes():
    x = torch.ones(4, 8, device=DEVICE)
    columns = x[:, 2:6]
    graph, y = captured(lambda: columns.exp())
    ((*_, uses),) = [node for node in graph._nodes() if node[0] == "aten::exp"]
    assert uses == [(columns.data_ptr(), 4 * (3 * 8 + 4), False), (y.data_ptr(), y.nbytes, True)]
    for name, both in {"exp": lambda: torch.exp(x, out=x), "mul_": lambda: x.mul_(x)}.items():
        graph, _ = captured(both)
        ((*_, uses),) = [node for node in graph._nodes() if node[0] == f"aten::{name}"]
        assert uses == [(x.data_ptr(), x.nbytes, True)]


def test_pinned_memory_is_read_at_each_replay():
    pinned = torch.tensor(1.0).pin_memory()
    graph, y = captured(lambda: torch.zeros((), device=DEVICE).copy_(pinned, non_blocking=True))
    for value in (5.0, 6.0):
        pinned.fill_(value)
        graph.replay()
        assert y.item() == value


# Results whose shape depends on values.
DYNAMIC = {"nms"}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_operators_of_the_suite(name):
    report = outcomes.Tally()
    function = getattr(torch.ops.openreg, name)
    for i, sample in enumerate(list(SAMPLES[name]("cpu", torch.float32))[:4]):
        each = sample_of(sample)
        graphs.compare(report, i, "valid", function, (tuple(each.args), dict(each.kwargs)), DEVICE)
    assert not report.failures, found(report)
    refused = sum(report.notes.values())
    assert refused == (report.ran["graph"] if name in DYNAMIC else 0), report.notes


@pytest.mark.parametrize("expression", [
    lambda x, y: x + y.to(torch.float64),  # promotes
    lambda x, y: torch.add(x, y, alpha=2, out=torch.empty(0, device=x.device)),  # is resized
    lambda x, y: torch.add(x, y, out=torch.empty(8, 4, device=x.device).t()),  # permuted
    lambda x, y: x.t().contiguous().view(-1)[3:].unfold(0, 4, 2) * 2,  # views
    lambda x, y: x * torch.tensor(3.0),  # a CPU scalar is a constant
    lambda x, y: torch.empty(0, 4, device=x.device).exp().sum(0),  # empty
    lambda x, y: torch.complex(x, y).conj() * 2j,  # lazy conjugation
    lambda x, y: torch.relu(x - 0.5).bfloat16() * 0.5 + 1,
    lambda x, y: (x.abs(), x.clone().zero_(), torch.full_like(x, 3), torch.arange(4, device=x.device) * 2),
    lambda x, y: torch._lazy_clone(x).add_(1) + x,
    lambda x, y: (torch.add(clone := torch._lazy_clone(x), 1, out=clone), x),  # reads the clone first
    lambda x, y: (clone := torch._lazy_clone(x), torch.exp(clone.t()[:4, :4], out=clone[:, 4:]), x),  # of other strides
    lambda x, y: x.clone().fill_(-0.0).reciprocal(),
    lambda x, y: torch.complex(x, y).fill_(complex(0.0, -0.0)).imag.reciprocal(),
])  # fmt: skip
def test_expressions(expression):
    report = outcomes.Tally()
    torch.manual_seed(0)
    graphs.compare(report, 0, "expression", expression, ((torch.randn(4, 8), torch.randn(4, 8)), {}), DEVICE)
    assert not report.failures, found(report)
    assert not report.notes


@pytest.mark.parametrize(
    "call, count",
    [
        (lambda x, *out: torch.linalg.qr(x, out=out), 2),
        (lambda x, *out: torch.linalg.svd(x, out=out), 3),
        (lambda x, *out: torch.linalg.eigh(x, out=out), 2),
        (lambda x, *out: torch.geqrf(x, out=out), 2),
        (lambda x, out: torch.add(x.mT, x.mT, out=out), 1),
        (lambda x, out: torch.sort(x.mT, dim=1, out=(out, torch.empty(0, dtype=torch.int64, device=x.device))), 1),
    ],
    ids=["qr", "svd", "eigh", "geqrf", "add", "sort"],
)
def test_results_that_are_resized_have_the_strides_of_the_cpu(call, count):
    """Also where these are not contiguous."""
    x = torch.randn(3, 4, 4)
    outs = {device: [torch.empty(0, device=device) for _ in range(count)] for device in ("cpu", DEVICE)}
    on_device = x.to(DEVICE)
    graph, _ = captured(lambda: call(on_device, *outs[DEVICE]))
    call(x, *outs["cpu"])
    graph.replay()
    for ours, theirs in zip(outs[DEVICE], outs["cpu"], strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs)


def cubed(x):
    return (x**3).sum()


@pytest.mark.parametrize(
    "f",
    [
        torch.func.hessian(cubed),
        torch.func.jacfwd(torch.func.jacfwd(cubed)),
        torch.func.jacrev(torch.func.jacrev(cubed)),
        torch.vmap(lambda row: torch.func.grad(cubed)(row)),
        lambda x: torch.func.jvp(lambda x, y: x.sin() * y, (x, x), (x, torch.ones_like(x)))[1],
        lambda x: torch.vmap(torch.nn.functional.dropout, randomness="different")(x),
    ],
    ids=["hessian", "jacfwd twice", "jacrev twice", "vmap of grad", "jvp", "vmap of dropout"],
)
def test_transforms(f):
    x = torch.zeros(3, 3, device="openreg")
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = f(x)
    x.copy_(torch.arange(9.0).view(3, 3))
    torch.openreg.manual_seed(2)
    expected = f(x)
    torch.openreg.manual_seed(2)
    graph.replay()
    assert torch.equal(y, expected)


def test_zeros_without_memory():
    """Forward mode makes such tensors for tangents; they are not nodes, and stay without memory."""
    x, graph = torch.zeros(3, device="openreg"), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        zeros = torch._efficientzerotensor(3, device="openreg")
        y = x + zeros
    x.fill_(2)
    graph.replay()
    assert zeros._is_zerotensor() and y.tolist() == [2.0] * 3
