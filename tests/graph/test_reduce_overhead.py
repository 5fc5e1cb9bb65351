"""torch.compile(mode="reduce-overhead"): calls are replays of graphs, and compute what the default mode computes."""

import contextlib
import gc
import threading

import pytest
import torch
import torch.nn as nn
from graphs import uncached
from torch._inductor import compile_fx  # noqa: F401  (loads the policy)

from openreg_ops.inductor import graphs

pytestmark = pytest.mark.compiles


@pytest.fixture
def said(monkeypatch):
    """The captures made, and the sentences logged."""
    captures, sentences = [], []
    capture, log = graphs._capture, graphs.log_cudagraph_skip_and_bump_counter
    monkeypatch.setattr(graphs, "_capture", lambda *args: (capture(*args), captures.append(1))[0])
    monkeypatch.setattr(
        graphs, "log_cudagraph_skip_and_bump_counter", lambda text: (sentences.append(text), log(text))[1]
    )
    return captures, sentences


def both(function, calls, **options):
    """The results of each call in the default mode and with graphs, from the same seed."""
    found = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        torch.openreg.manual_seed(3)
        compiled = torch.compile(function, mode=mode, **options)
        found.append([compiled(*make()) for make in calls])
    return found


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def train(mode, device, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)).to(device)
    compiled = torch.compile(model, mode=mode, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.openreg.manual_seed_all(1)
    generator, results = torch.Generator().manual_seed(2), []
    for n in sizes:
        y = compiled(torch.randn(n, 8, generator=generator).to(device))
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        results.append(y.detach())  # stays valid
    return [*results, *(x.detach() for x in model.parameters()), *model.buffers()]


def test_training(said, device="openreg:1"):
    """Two shapes; parameters and batch norm's statistics are written in place, dropout draws new numbers."""
    sizes = (6, 6, 5, 6, 5, 5)
    expected = train("default", device, sizes)
    torch._dynamo.reset()
    equal(train("reduce-overhead", device, sizes), expected)
    captures, sentences = said
    assert len(captures) == 4 and not sentences  # forward and backward of each shape


def test_parameters_that_move(said):
    """A model whose weights are replaced, and a function of parameters that are written to."""
    model = nn.Linear(3, 3).to("openreg")
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.ones(2, 3, device="openreg")
    with torch.no_grad():
        for i in range(4):
            if i == 2:
                model.weight.data = torch.randn(3, 3, device="openreg")
            torch.testing.assert_close(compiled(x), model(x))
        buffers = nn.BatchNorm1d(3).to("openreg")
        step = torch.compile(buffers, mode="reduce-overhead")
        expected = nn.BatchNorm1d(3).to("openreg")
        for i in range(6):
            if i in (3, 5):
                buffers.running_mean = buffers.running_mean.clone()
            equal(step(x * i), torch.compile(expected)(x * i))
        equal(buffers.running_mean, expected.running_mean)
    assert not said[1]


def test_random_numbers(said):
    x = torch.ones(100, device="openreg")
    expected, actual = both(lambda x: nn.functional.dropout(x), [lambda: (x,)] * 4)
    equal(actual, expected)
    assert not torch.equal(actual[2], actual[3]) and len(said[0]) == 1


def test_aliases(said):
    """Results that are inputs, views of inputs, and views of one another."""
    y = torch.arange(6.0, device="openreg")

    def function(x, y):
        z = x + y
        return z, z[1:].view(5), x, y.view(2, 3), None, 7, torch.ones(2, device=x.device), y.view(torch.int32)

    inputs = [torch.full((6,), float(i), device="openreg") for i in range(3)]
    expected, actual = both(function, [lambda x=x: (x, y) for x in inputs])
    equal(actual, expected)
    for x, results in zip(inputs, actual, strict=True):
        assert results[2].data_ptr() == x.data_ptr() and results[3].data_ptr() == y.data_ptr()
        assert results[1].data_ptr() == results[0].data_ptr() + 4
    assert len(said[0]) == 1


@pytest.mark.fast
def test_results_that_are_one_tensor(said):
    def function(x):
        y = x * 2
        return y, y, [y, y + 1]

    compiled = torch.compile(function, mode="reduce-overhead")
    for i in range(3):
        first, second, (third, fourth) = compiled(torch.full((3,), float(i), device="openreg"))
        assert first is second is third
        equal(fourth, first + 1)
    assert len(said[0]) == 1


def gradients(mode, steps):
    """A model's gradients after each backward pass; `steps(compiled, x)` yields losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU()).to("openreg")
    x = torch.randn(4, 8).to("openreg")
    torch._dynamo.reset()
    found, keep = [], steps is two_backwards
    # Otherwise backward writes to what forward saved. The cache does not tell such graphs apart.
    with torch._functorch.config.patch(donated_buffer=not keep), uncached() if keep else contextlib.nullcontext():
        for loss in steps(torch.compile(model, mode=mode), x):
            loss.backward(retain_graph=keep)
            found += [p.grad.clone() for p in model.parameters()]
    return found


def two_forwards(compiled, x):
    for i in range(4):
        yield compiled(x + i).sum()
    for i in range(3):
        losses = [compiled(x + i).sum(), compiled(x * i).square().sum()]
        yield losses[1]
        yield losses[0]


def two_backwards(compiled, x):
    for i in range(4):
        loss = compiled(x + i).sum()
        yield loss
        yield loss


def checkpoints(compiled, x):
    for i in range(4):
        yield torch.utils.checkpoint.checkpoint(compiled, x * i, use_reentrant=False).sum()


def streams(compiled, x):
    """The second stream does not wait for the first, whose backward pass comes after a pause."""
    sides = [torch.openreg.Stream() for _ in range(2)]
    torch.openreg.synchronize()
    for i in range(6):
        with sides[i % 2]:
            loss = compiled(x + i).sum()
            torch.openreg._sleep(20_000_000)
        yield loss
    torch.openreg.synchronize()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(
    ("steps", "launch_mode"),
    [
        (two_forwards, "async"),
        (two_backwards, "inline"),
        (checkpoints, "async"),
        (streams, "inline"),
        (streams, "async"),
    ],
)
def test_what_backward_reads_is_not_overwritten(said, steps, launch_mode):
    with torch.openreg.launch_mode(launch_mode):
        equal(gradients("reduce-overhead", steps), gradients("default", steps))
    assert said[0] and not said[1]


def test_what_backward_reads_is_copied_if_many_forwards_come_first(said):
    def many(compiled, x):
        for _ in range(2):
            yield compiled(x).sum()
        for _ in range(3):
            yield from [compiled(x + i).sum() for i in range(graphs.LIMIT)]

    equal(gradients("reduce-overhead", many), gradients("default", many))
    assert not said[1]


def test_backward_may_return_the_memory_of_an_input(said):
    """Inductor computes the gradient in place of the cosine that forward saved."""

    def run(mode):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, b: (x + b).sin().sum(), mode=mode)
        found = []
        for i in range(6):
            bs = [torch.full((4,), float(i + j), device="openreg", requires_grad=True) for j in range(2)]
            losses = [compiled(torch.arange(4.0, device="openreg"), b) for b in bs[: 1 + i % 2]]
            for loss in losses[::-1]:
                (loss * 3).backward()
            found += [b.grad for b in bs[: 1 + i % 2]]
        return found

    equal(run("reduce-overhead"), run("default"))
    assert said[0] and not said[1]


def test_several_threads(said):
    compiled = torch.compile(lambda x: (x.sin() * 2).relu() + 1, mode="reduce-overhead", dynamic=False)
    xs = [torch.full((64,), float(i), device="openreg") for i in range(4)]
    expected = [(x.sin() * 2).relu() + 1 for x in xs]
    for x, y in zip(xs[:2], expected, strict=False):
        equal(compiled(x), y)
    wrong = []

    def work(i):
        wrong.extend(1 for _ in range(200) if not torch.equal(compiled(xs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_without_inputs(said):
    expected, actual = both(lambda: torch.rand(3, device="openreg") + 1, [lambda: ()] * 3)
    equal(actual, expected)
    assert len(said[0]) == 1


def test_strides_and_empty_inputs(said):
    inputs = [
        lambda: (torch.randn(4, 3, device="openreg").t().fill_(2), torch.ones(1, 3, device="openreg").expand(4, 3).t()),
        lambda: (torch.zeros(3, 0, device="openreg"), torch.zeros(3, 0, device="openreg")),
    ]
    expected, actual = both(lambda x, y: (x * y).t() + 1, inputs * 3, dynamic=False)
    equal(actual, expected)
    assert len(said[0]) == 2


@pytest.mark.fast
def test_mutated_inputs_run_as_before(said):
    def function(x):
        x.add_(1)
        return x * 2

    x = torch.zeros(3, device="openreg")
    expected, actual = both(function, [lambda: (x,)] * 3)
    assert [y.tolist() for y in (*expected, *actual)] == [[2.0 * i] * 3 for i in range(1, 7)]
    captures, sentences = said
    assert not captures and sentences == ["skipping cudagraphs due to mutated inputs (1 instances)"]


def test_what_cannot_be_captured_runs_as_before(said):
    x = torch.eye(3, device="openreg") * 4  # the host reads whether the matrix is positive definite
    expected, actual = both(lambda x: torch.linalg.cholesky(x.exp()), [lambda: (x,)] * 3)
    equal(actual, expected)
    captures, sentences = said
    assert not captures and len(sentences) == 1 and "_local_scalar_dense" in sentences[0]


def test_values_on_the_cpu_run_as_before(said):
    x = torch.ones(3, device="openreg")
    calls = [lambda i=i: (x, torch.tensor(float(i))) for i in range(3)]
    expected, actual = both(lambda x, n: x * n, calls)
    equal(actual, expected)
    captures, sentences = said
    assert not captures and len(sentences) == 1 and "several devices: cpu, openreg:0" in sentences[0]


def test_there_are_not_more_graphs_than_the_limit(said, monkeypatch):
    monkeypatch.setattr(graphs, "LIMIT", 2)
    calls = [lambda n=n: (torch.ones(n, device="openreg"),) for n in (4, 5, 5, 6, 6, 7, 7)]
    expected, actual = both(lambda x: x.cos() + x.shape[0], calls, dynamic=True)
    equal(actual, expected)
    captures, sentences = said
    assert len(captures) == 1 and len(sentences) == 1 and "more than 2 sets of shapes" in sentences[0]


def test_other_streams_and_a_capture_of_the_caller(said):
    compiled = torch.compile(lambda x: x.sin() * 2, mode="reduce-overhead")
    x = torch.ones(5, device="openreg")
    expected = [x.sin() * 2] * 3
    results = [compiled(x), compiled(x)]
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    with stream:
        results.append(compiled(x))
    torch.openreg.current_stream().wait_stream(stream)
    equal(results, expected)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = compiled(x)
    x.fill_(2)
    graph.replay()
    equal(y, x.sin() * 2)


def test_the_launch_mode_async(said):
    x = torch.ones(1000, device="openreg")
    with torch.openreg.launch_mode("async"):
        expected, actual = both(lambda x: (x * 3).relu().sum(), [lambda i=i: (x + i,) for i in range(5)])
        equal(actual, expected)
    assert len(said[0]) == 1


def test_graphs_go_with_the_compiled_function(said):
    x = torch.ones(4000, device="openreg")
    for _ in range(2):
        gc.collect()
        torch.openreg.synchronize()
        before = torch.openreg.memory_allocated()
        compiled = torch.compile(lambda x: x.sin().cos(), mode="reduce-overhead")
        for _ in range(3):
            compiled(x)
        assert torch.openreg.memory_allocated() > before
        del compiled
        torch._dynamo.reset()
        gc.collect()
        torch.openreg.synchronize()
        assert torch.openreg.memory_allocated() == before
    assert len(said[0]) == 2


def test_lazily_conjugated_and_negated_results(said):
    def function(x):
        return (x @ x).mH, x.conj(), (x * 2).conj().imag, (x * x.conj()).sum()

    def calls():
        for i in range(3):
            x = torch.arange(4.0).view(2, 2) + 1j * i
            yield lambda x=x: (x.to("openreg"),)

    expected, found = both(function, list(calls()))
    equal(found, expected)
    for results, wanted in zip(found, expected, strict=True):
        assert [x.is_conj() or x.is_neg() for x in results] == [x.is_conj() or x.is_neg() for x in wanted]
    assert len(said[0]) == 1


def test_gradients_of_complex_inputs(said):
    def gradients(mode):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w: ((x * w).conj(), x.conj() * w), mode=mode)
        found = []
        for i in range(3):
            x, w = (
                torch.complex(torch.ones(3) * i, torch.arange(3.0) + k).to("openreg").requires_grad_() for k in (1, 2)
            )
            a, b = compiled(x, w)
            (a * b).real.sum().backward()
            found += [a.detach(), b.detach(), x.grad, w.grad]
        return found

    equal(gradients("reduce-overhead"), gradients("default"))


def test_lazily_conjugated_inputs_run_as_before(said):
    compiled = torch.compile(lambda x: x * 2, mode="reduce-overhead")
    x = torch.tensor([1 + 2j, 3 - 1j]).to("openreg").conj()
    for _ in range(4):
        equal(compiled(x).resolve_conj(), (x * 2).resolve_conj())
    captures, sentences = said
    assert not captures and ["lazy conjugate" in sentence for sentence in sentences] == [True]


def test_buffers_stay_until_a_queued_replay_is_done():
    """Even after the compiled function, and everything else that holds them, is gone."""
    compiled = torch.compile(lambda x: x * 2, mode="reduce-overhead")
    x = torch.full((1 << 18,), 3.0, device="openreg")
    for _ in range(2):
        compiled(x)
    torch.openreg.synchronize()
    first, second = torch.openreg.Stream(), torch.openreg.Stream()
    with torch.openreg.launch_mode("async"), first:
        torch.openreg._sleep(200_000_000)
        second.wait_stream(first)
    with second:
        y = compiled(x)
    del compiled
    torch._dynamo.reset()
    gc.collect()
    others = [torch.full_like(x, -1.0) for _ in range(3)]
    torch.openreg.synchronize()
    assert all((other == -1).all() for other in others) and (y == 6).all()


def test_threads_that_meet_at_the_first_capture(said):
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, mode="reduce-overhead")
    x = torch.ones(8, device="openreg")
    compiled(x)
    barrier, found = threading.Barrier(20), []

    def run():
        barrier.wait()
        found.extend(compiled(x) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = (x * 2).sin() + 1
    assert len(found) == 60 and all(torch.allclose(result, expected) for result in found)
    captures, sentences = said
    assert len(captures) == 1 and not sentences


def test_a_call_that_waited_for_the_capture_of_its_graph_replays_it(said):
    runs = []

    def model(inputs):
        runs.append(1)
        return [inputs[0] * 2]

    class Lock(contextlib.nullcontext):
        def __enter__(self):  # in the meantime, another thread captures
            graphed.lock = contextlib.nullcontext()
            equal(graphed([x])[0], x * 2)

    x = torch.ones(8, device="openreg")
    graphed = graphs._Graphed(model, [], [], x.device.index, False, 1)
    graphed([x])
    graphed.lock = Lock()
    equal(graphed([x])[0], x * 2)
    captures, sentences = said
    assert len(runs) == 2 and len(captures) == 1 and not sentences, "a first call, a capture, and no more"


def test_a_capture_of_the_caller_on_another_device_than_the_current_one(said):
    compiled = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")
    x = torch.ones(4, device="openreg:1")
    compiled(x)
    with torch.openreg.device(1):
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph), torch.openreg.device(0):
            y = compiled(x)
        graph.replay()
    assert y.tolist() == [3.0] * 4
    for _ in range(2):
        compiled(x)
    captures, sentences = said
    assert len(captures) == 1 and not sentences
