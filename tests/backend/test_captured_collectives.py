"""Collectives in graphs: each replay makes the calls again, on every process of the group."""

import contextlib
import signal
import time
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
from stream_kit import captured
from torch.distributed import _functional_collectives as functional
from workers import Workers, in_mode

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["off", "strict"])
def group(request):
    with Workers(2, {"OPENREG_ISOLATION": request.param}) as workers:
        yield workers


PLAIN = pytest.mark.parametrize("group", ["off"], indirect=True)


def all_reduce(x):
    dist.all_reduce(x)
    return x * 2


def all_reduce_and_wait_for_the_future(x):
    [y] = dist.all_reduce(x, async_op=True).get_future().wait()
    return y + 1


def all_reduce_on_another_stream(x):
    main, side = torch.openreg.current_stream(), torch.openreg.Stream()
    side.wait_stream(main)
    with side:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1


def all_reduces_in_one(x):
    y = x * 3
    with dist._coalescing_manager(device=x.device):
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x + y


def functional_all_reduce(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 1


def send_and_receive(x):
    """One process sends first, and the other receives first."""
    other = torch.empty_like(x)
    if dist.get_rank():
        dist.recv(other, 0)
        dist.send(x, 0)
    else:
        dist.send(x, 1)
        dist.recv(other, 1)
    return x - other


BODIES = [
    all_reduce, all_reduce_and_wait_for_the_future, all_reduce_on_another_stream, all_reduces_in_one,
    functional_all_reduce, send_and_receive,
]  # fmt: skip
# In a graph, a send ends before the next call begins, so two processes must not both send first.
NOT_CAPTURED = ("all_gather_into_its_own_input", "ring", "receive_from_any", "sparse_all_reduce")
SHARED = [function for function in collectives.COLLECTIVES if function.__name__ not in NOT_CAPTURED]


@in_mode
def check_replays(function):
    """New inputs on each replay, against eager calls."""

    def body(x):
        if function in BODIES:
            return function(x)
        _, written, work = function(x)
        if work is not None:
            work.wait()
        return torch.cat([x.flatten() + 1, *(out.flatten() for out in written)])

    x = torch.zeros(4, 3, device="openreg")
    graph, out = captured(lambda: body(x.clone()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x.copy_(torch.randn(4, 3, generator=generator))
        graph.replay()
        assert torch.equal(out.cpu(), body(x.clone()).cpu())
    assert out.abs().sum() > 0


@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("function", [*BODIES, *SHARED], ids=lambda function: function.__name__)
def test_replays(group, function, mode):
    group.run(check_replays, mode, function)


def check_a_step():
    """A training step with the mean of the gradients, captured as a whole."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to("openreg")
    x = torch.zeros(4, 3, device="openreg")

    def step():
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(model.parameters(), gradients, strict=True):
            dist.all_reduce(g)
            p.detach().sub_(g, alpha=0.05)
        return loss

    expected = [p.detach().clone() for p in model.parameters()]  # which keeps no autograd node
    graph, _ = captured(step)
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True)), "a capture does nothing"
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * i + dist.get_rank())) for i in range(3)]
    for batch in batches:
        x.copy_(batch)
        graph.replay()
    found = [p.detach().cpu() for p in model.parameters()]
    with torch.no_grad():
        for p, e in zip(model.parameters(), expected, strict=True):
            p.copy_(e)
    for batch in batches:
        x.copy_(batch)
        step()
    assert all(torch.equal(p.detach().cpu(), f) for p, f in zip(model.parameters(), found, strict=True))
    return [f.tolist() for f in found]


@PLAIN
def test_a_step(group):
    first, second = group.run(check_a_step)
    assert first == second


def two_streams(x):
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with dist._coalescing_manager(device=x.device):
        dist.irecv(torch.empty_like(x), 1 - dist.get_rank())
        with side:
            dist.isend(x, 1 - dist.get_rank())


def check_refused():
    x = torch.ones(2, device="openreg")
    sparse = x.to_sparse()
    for call, name in (
        (dist.barrier, "barrier"),
        (dist.monitored_barrier, "monitored_barrier"),
        (lambda: dist.recv(x), "recvAnysource.*Pass src to recv"),
        (lambda: two_streams(x), "send.*coalesced with one on another stream"),
        (lambda: dist.all_reduce(x, async_op=True).is_completed(), "query"),
        (lambda: dist.all_reduce(sparse), "allreduce.*sparse"),
    ):
        with pytest.raises(torch.AcceleratorError, match=f"not permitted when stream is capturing: .*{name}"):
            captured(call)
    dist.all_reduce(x)  # nothing of the captures is left
    assert x.tolist() == [2.0] * 2
    work = []
    captured(lambda: work.append(dist.all_reduce(x, async_op=True)))
    with pytest.raises(torch.AcceleratorError, match="capture that has ended"):
        work[0].wait()


@PLAIN
def test_refused(group):
    group.run(check_refused)


def check_a_mismatch():
    """The replay raises the same error as calls without a graph; in async mode, the next wait raises it."""
    x = torch.ones(4, device="openreg")
    graph, _ = captured(lambda: dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0))
    with pytest.raises(dist.DistBackendError, match=r"mismatched collectives.*calls (allreduce|broadcast)"):
        graph.replay()
    with torch.openreg.launch_mode("async"):
        graph.replay()
        with pytest.raises(torch.AcceleratorError, match="mismatched collectives"):
            torch.openreg.synchronize()
    graph, _ = captured(lambda: dist.all_reduce(x))
    graph.replay()
    assert x.tolist() == [2.0] * 4


@PLAIN
def test_a_mismatch(group):
    group.run(check_a_mismatch)


def check_a_missing_rank():
    few = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(4, device="openreg")
    graph, _ = captured(lambda: dist.all_reduce(x, group=few))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="allreduce on rank 0 of 2 failed.*did not make this call"):
            graph.replay()
    dist.all_reduce(x)  # the other group works


@PLAIN
def test_a_missing_rank(group):
    group.run(check_a_missing_rank)


def check_sanitized():
    """A replay waits for the writers of its inputs, and later work waits for the replay's writes."""
    from torch.openreg import _sanitizer

    with _sanitizer.sanitize():
        x = torch.ones(4, device="openreg")
        graph, y = captured(lambda: all_reduce(x.clone()))
        graph.replay()
        assert y.tolist() == [4.0] * 4
        side = torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        with side:
            x.fill_(2)
        with pytest.raises(_sanitizer.OpenregSanitizerErrors):
            graph.replay()
        torch.openreg.current_stream().wait_stream(side)
        # What rank 0 broadcasts, it only reads, and so may another stream.
        graph, _ = captured(lambda: dist.broadcast(x, 0))
        side.wait_stream(torch.openreg.current_stream())
        graph.replay()
        with side, pytest.raises(_sanitizer.OpenregSanitizerErrors) if dist.get_rank() else contextlib.nullcontext():
            x + 1
        torch.openreg.current_stream().wait_stream(side)


@PLAIN
def test_sanitized(group):
    group.run(check_sanitized)


def check_interrupted():
    """Ctrl-C in a replay that waits for another process is a KeyboardInterrupt, as in eager mode."""
    x = torch.ones(2, device="openreg")
    graph, _ = captured(lambda: all_reduce(x))
    if dist.get_rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            graph.replay()
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1)
        graph.replay()


def test_interrupted():
    with Workers(2) as workers:
        workers.run(check_interrupted)
