"""torch.distributed on the device: coalesced and mismatched collectives, barriers that watch, and the race detector.

The functions named `check_…` run on each process of a group; the tests start them. See tests/backend/workers.py.
"""

import functools
import itertools
import re
from datetime import timedelta

import collectives
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing import assert_close
from workers import Workers, in_mode

pytestmark = pytest.mark.processes

SECONDS = timedelta(seconds=30)


@pytest.fixture(scope="module")
def detail():
    with Workers(2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as workers:
        yield workers


MODES = pytest.mark.parametrize("mode", ["inline", "async", "sync"])


@functools.cache
def gloo():
    return dist.new_group(backend="gloo")


def numbers(device, *shapes, dtype=torch.float32):
    """Tensors that differ from rank to rank."""
    return [torch.arange(torch.Size(s).numel(), device=device).view(s).add(dist.get_rank()).to(dtype) for s in shapes]


# ---- coalesced ----


@in_mode
def check_coalesced(dtype):
    """Against one call after another on the CPU, with and without the manager's device."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shapes, rows = [(2, 3), (0, 3), (), (5,)], [(2, 3), (1,)]
    summed = numbers("cpu", *shapes, dtype=dtype)
    for x in summed:
        dist.all_reduce(x, group=gloo())
    alone = [x - rank for x in numbers("cpu", *rows)]
    gathered = [torch.cat([x + r for r in range(size)]) for x in alone]
    scattered = [size * (x + 10 * rank) + sum(range(size)) for x in alone]
    devices = [torch.device("openreg", i) for i in range(torch.openreg.device_count())]
    for device, async_ops, named in itertools.product(devices, (True, False), (True, False)):
        xs, ins = numbers(device, *shapes, dtype=dtype), numbers(device, *rows)
        outs, parts = [x.new_empty(size * x.size(0), *x.shape[1:]) for x in ins], [torch.empty_like(x) for x in ins]
        wholes = [torch.cat([x + 10 * r for r in range(size)]) for x in ins]
        for calls in (
            lambda xs=xs: [dist.all_reduce(x) for x in xs],
            lambda outs=outs, ins=ins: list(map(dist.all_gather_into_tensor, outs, ins)),
            lambda parts=parts, wholes=wholes: list(map(dist.reduce_scatter_tensor, parts, wholes)),
        ):
            with dist._coalescing_manager(device=device if named else None, async_ops=async_ops) as manager:
                calls()
            if async_ops:
                manager.wait()
            assert len(manager.works) == async_ops
        for got, expected in ((xs, summed), (outs, gathered), (parts, scattered)):
            assert_close([x.cpu() for x in got], expected, rtol=0, atol=0)


@MODES
@pytest.mark.slow
def test_coalesced(two, mode):
    two.run(check_coalesced, mode, torch.float32)
    two.run(check_coalesced, mode, torch.bfloat16)


def check_batch():
    """Receives before sends, in one Work; a receive that waits for itself would wait forever."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD._get_backend(torch.device("openreg")).supports_coalescing
    for shape in ((3,), (0,), (2, 2)):
        x, out = torch.full(shape, float(rank), device="openreg"), torch.empty(shape, device="openreg")
        ops = [dist.P2POp(dist.irecv, out, (rank - 1) % size), dist.P2POp(dist.isend, x, (rank + 1) % size)]
        [work] = dist.batch_isend_irecv(ops)
        assert work.wait() and work.is_completed() and work.is_success()
        assert_close(out, torch.full_like(out, (rank - 1) % size))
        [work] = dist.batch_isend_irecv(ops)
        received = work.get_future().wait()
        assert [tensor.data_ptr() for tensor in received] == [out.data_ptr()]
    out.zero_()
    with dist._coalescing_manager(device=torch.device("openreg"), async_ops=True) as manager:
        dist.recv(out, (rank - 1) % size)
        dist.send(x, (rank + 1) % size)
    manager.wait()
    assert_close(out, torch.full_like(out, (rank - 1) % size))
    with dist._coalescing_manager(device=torch.device("openreg"), async_ops=True) as manager:
        pass
    manager.wait()
    assert manager.works == []


def check_coalesced_directly():
    size, device = dist.get_world_size(), "openreg"
    xs = [torch.ones(2, device=device), torch.ones(3, device=device)]
    dist.all_reduce_coalesced(xs)
    assert [x.tolist() for x in xs] == [[size] * 2, [size] * 3]
    for x in functional.all_reduce_coalesced(xs, "sum", dist.group.WORLD):
        assert x.unique().tolist() == [size * size]
    for x, whole in zip(xs, functional.all_gather_into_tensor_coalesced(xs, dist.group.WORLD), strict=True):
        assert whole.tolist() == [size] * size * len(x)
    wholes = [x.repeat(size) for x in xs]
    parts = functional.reduce_scatter_tensor_coalesced(wholes, "sum", [0, 0], dist.group.WORLD)
    assert [x.tolist() for x in parts] == [[size * size] * 2, [size * size] * 3]
    with pytest.raises(ValueError, match="occl: allreduce_coalesced: Tensors must be contiguous"):
        dist.all_reduce_coalesced([xs[0], torch.ones(2, 3, device=device).t()])
    with pytest.raises(RuntimeError, match="occl: allreduce_coalesced: expected tensors on one device"):
        dist.all_reduce_coalesced([torch.ones(1, device="openreg:0"), torch.ones(1, device="openreg:1")])


def check_capability():
    assert dist.Backend.backend_capability["occl"] == ["openreg"]
    assert dist.Backend.default_device_backend_map["openreg"] == "occl" and dist.Backend.OCCL == "occl"
    backend = dist.group.WORLD._get_backend(torch.device("openreg"))
    assert backend.supports_coalescing
    private = "_" * (not hasattr(type(backend), "supports_time_estimate"))  # as in torch 2.15
    assert not getattr(backend, f"{private}supports_time_estimate")
    with pytest.raises(NotImplementedError, match="collective time estimator is not supported"):
        with dist.distributed_c10d._time_estimator(device=torch.device("openreg")):
            pass


@pytest.mark.parametrize(
    "check",
    [check_batch, check_coalesced_directly, check_capability],
    ids=lambda f: f.__name__,
)
def test_coalescing(four, check):
    four.run(check)


@pytest.mark.slow
def test_coalescing_with_details(detail):
    detail.run(check_coalesced, "async", torch.float32)
    for check in (check_batch, check_coalesced_directly):
        detail.run(check)


# ---- monitored barrier ----


def check_monitored_barrier():
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=SECONDS, wait_all_ranks=True)
    x = torch.ones(2, device="openreg")
    dist.all_reduce(x)  # the processes still agree on the number of calls
    assert x.tolist() == [size] * 2
    late = dist.new_group()
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=f"Ranks {'1' if size == 2 else '1, 2, 3'} failed to pass monitoredBarrier"
        ):
            dist.monitored_barrier(late, timedelta(milliseconds=300), wait_all_ranks=True)
    alone = dist.new_group([0])
    if rank == 0:
        dist.monitored_barrier(alone)
    on_host = dist.new_group(backend="gloo")
    dist.monitored_barrier(on_host, SECONDS)
    with pytest.raises(TypeError, match="timeout"):
        dist.monitored_barrier(timeout=3)
    dist.barrier()


def test_monitored_barrier(four):
    four.run(check_monitored_barrier)


def test_monitored_barrier_with_details(detail):
    detail.run(check_monitored_barrier)


# ---- small sums, which travel with the description of the call ----

SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]


@in_mode
def check_small_sums(dtype):
    """On both sides of 4 KB, and in another layout, the same sum as Gloo's: of whole numbers, which are exact."""
    most = 4096 // dtype.itemsize
    for shape in ((), (0,), (3,), (most,), (most + 1,), (2, 3, 4, 4)):
        x = (torch.arange(torch.Size(shape).numel()).view(shape) % 16 + dist.get_rank()).to(dtype)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        y = x.to("openreg")
        dist.all_reduce(x, group=gloo())
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        assert work.is_completed() and work.is_success()
        assert_close(y.cpu(), x, rtol=0, atol=0)


@MODES
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_small_sums(four, mode, dtype):
    four.run(check_small_sums, mode, dtype)


def check_small_sum_after_another_call(mode):
    """The sum adds what the earlier call writes, although nobody has waited for it."""
    with torch.openreg.launch_mode(mode):
        rank, size = dist.get_rank(), dist.get_world_size()
        for trial in range(20):
            x = torch.full((200_000,), float(trial if rank == 0 else -1), device="openreg")
            work = dist.broadcast(x, 0, async_op=True)
            dist.all_reduce(x[-100:])
            work.wait()
            assert x[-100:].tolist() == [trial * size] * 100 and x[0].item() == trial


@MODES
def test_small_sum_after_another_call(two, mode):
    two.run(check_small_sum_after_another_call, mode)


# ---- mismatched ----


def odd(first, second):
    """The last rank makes another call."""
    return second if dist.get_rank() == dist.get_world_size() - 1 else first


def mismatched_operators(x):
    out = x.new_empty(dist.get_world_size() * len(x))
    odd(lambda: dist.all_reduce(x), lambda: dist.all_gather_into_tensor(out, x))()


def mismatched_shapes(x):
    dist.all_reduce(odd(x, x[:2].clone()))


def mismatched_dtypes(x):
    dist.all_reduce(odd(x, x.double()))


def mismatched_order(x):
    y = torch.ones(3, device=x.device)
    for tensor in odd((x, y), (y, x)):
        dist.all_reduce(tensor)


MISMATCHES = {
    mismatched_operators: (r"allreduce\(sum\) of float32 \[4\]", r"allgather_base of float32 \[4\]"),
    mismatched_shapes: (r"allreduce\(sum\) of float32 \[4\]", r"allreduce\(sum\) of float32 \[2\]"),
    mismatched_dtypes: (r"allreduce\(sum\) of float32 \[4\]", r"allreduce\(sum\) of float64 \[4\]"),
    mismatched_order: (r"allreduce\(sum\) of float32 \[4\]", r"allreduce\(sum\) of float32 \[3\]"),
}


def check_mismatch(mismatch, index):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4, device=f"openreg:{index}")
    mine, other = odd(MISMATCHES[mismatch], MISMATCHES[mismatch][::-1])
    against = odd(size - 1, 0)
    with pytest.raises(
        dist.DistBackendError,
        match=rf"occl: mismatched collectives: at call \d+ of the group, rank {rank} of {size} calls {mine}, "
        rf"but rank {against} calls {other}\. Every rank must",
    ):
        mismatch(x)
    if mismatch is mismatched_order:  # the second call of each was not made
        return
    dist.all_reduce(x)  # nothing was begun, so the group still works
    assert x.tolist() == [size] * 4


def check_other_mismatches():
    size = dist.get_world_size()
    x = torch.ones(2 * size, device="openreg")
    calls = [
        (lambda: dist.all_reduce(x, odd(dist.ReduceOp.SUM, dist.ReduceOp.MAX)), r"allreduce\(max\)"),
        (lambda: dist.broadcast(x, odd(0, 1)), r"broadcast\(root 1\)"),
        (lambda: odd(dist.barrier, lambda: dist.all_reduce(x))(), "barrier"),
        (
            lambda: dist.all_reduce_coalesced(odd([x], [x, x.clone()])),
            r"allreduce_coalesced\(sum\) of float32 \[\d\], float32",
        ),
        (lambda: dist.reduce_scatter_tensor(odd(x[:2], x[:1]).clone(), odd(x, x[:size])), "reduce_scatter_base"),
    ]
    for call, text in calls:
        with pytest.raises(dist.DistBackendError, match=f"mismatched collectives: .*{text}"):
            call()
    mine, theirs = [1] * size, [2] * size
    with pytest.raises(
        dist.DistBackendError,
        match=r"alltoall_base of float32 .*: rank \d sends \d elements to rank \d, which expects \d\.",
    ):
        dist.all_to_all_single(torch.empty(size, device="openreg"), odd(x[:size], x), mine, odd(mine, theirs))
    with pytest.raises(
        ValueError, match=r"occl: alltoall_base: expected \w+_split_sizes with one number for each of \d ranks"
    ):
        dist.all_to_all_single(x.clone(), x, [len(x)], [len(x)])
    work = dist.all_reduce(odd(x, x[:1].clone()), async_op=True)  # the call itself does not wait for the others
    with pytest.raises(dist.DistBackendError, match="mismatched collectives"):
        work.wait(SECONDS)
    assert isinstance(work.exception(), Exception) and work.is_completed() and not work.is_success()
    with pytest.raises(dist.DistBackendError, match="mismatched collectives"):
        dist.all_reduce(odd(x, x[:1].clone()), async_op=True).get_future().wait()
    dist.all_reduce(x)
    assert x.tolist() == [size] * 2 * size


def test_mismatch(two):
    for mismatch in MISMATCHES:
        if mismatch is not mismatched_order:
            two.run(check_mismatch, mismatch, 1)
    with Workers(2) as workers:  # a group of its own, as the other calls are not made
        workers.run(check_mismatch, mismatched_order, 1)


def test_other_mismatches(four):
    four.run(check_mismatch, mismatched_operators, 0)
    four.run(check_other_mismatches)


def check_mismatch_with_details(mismatch):
    x = torch.ones(4, device="openreg")
    with pytest.raises(RuntimeError) as raised:
        mismatch(x)
    calls = re.findall(r"SequenceNumber=\d+, OpType=(\w+), TensorShape=\[(\d)\], TensorDtypes=(\w+)", str(raised.value))
    assert len(set(calls)) == 2, raised.value
    assert "Detected mismatch between collectives on ranks" in str(raised.value)


def test_mismatch_with_details():
    with Workers(2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as workers:
        workers.run(check_mismatch_with_details, mismatched_shapes)


# ---- the race detector ----


def report_of(call):
    from torch.openreg._sanitizer import OpenregSanitizerErrors

    with pytest.raises(OpenregSanitizerErrors) as raised:
        call()
    return str(raised.value)


RACING = "all_reduce all_gather reduce_scatter_tensor all_to_all_single broadcast batch".split()


@in_mode
def check_races():
    """An output that is read, or an input that is written, before the wait, even if the collective ended long ago."""
    import time

    device = f"openreg:{dist.get_rank() % 2}"
    new = functools.partial(torch.ones, device=device)
    side = torch.openreg.Stream(device)

    def coalesced_all_reduce(x):
        xs = [new(4), new(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        return [], xs, manager.works[0]

    with torch.openreg._sanitizer.sanitize():
        for make in (*(getattr(collectives, name) for name in RACING), coalesced_all_reduce):
            inputs, outputs, work = make(new(4, 3))
            time.sleep(0.02)
            for x in inputs:
                x + 1  # reading an input is no race
                text = report_of(lambda x=x: x.add_(1))
                assert "reading from argument(s)" in text, text
            for x in outputs:
                text = report_of(lambda x=x: x + 1)
                assert text.count("With stack trace:") == 2 and text.count(__file__) >= 2, text
                assert "Previous access by a collective that the default stream" in text and "c10d::" in text, text
                assert "call wait() on the Work that the collective returned" in text, text
            with side:
                text = report_of(lambda x=(outputs or inputs)[0]: x.mul_(2))
            work.wait()
            for x in inputs + outputs:
                x.add_(1).tolist()

        # A wait orders the stream that is current, as on CUDA.
        x = new(4)
        work = dist.all_reduce(x, async_op=True)
        torch.openreg.synchronize(device)
        report_of(lambda: x + 1)
        with side:
            work.wait()
            x + 1
        assert "while the default stream of" in report_of(lambda: x + 1)
        torch.openreg.current_stream(device).wait_stream(side)
        x.add_(1)

        for wait in (
            lambda work: work.get_future().wait(),
            lambda work: work.synchronize(),
            lambda work: work.block_current_stream(),
            lambda work: [time.sleep(0.001) for _ in iter(work.is_completed, True)],
            lambda work: work.get_future().then(lambda future: future.value()[0].add_(1)).wait(),
        ):
            work = dist.all_reduce(x, async_op=True)
            wait(work)
            x.add_(1)
        work = dist.all_reduce(x, async_op=True)
        done = work.get_future()
        while not done.done():
            time.sleep(0.001)
        report_of(lambda: x.add_(1))  # it has ended, but nothing waited for it
        work.wait()
        x.add_(1)


@MODES
def test_races(two, mode):
    two.run(check_races, mode)


def check_functional_races():
    world = dist.group.WORLD
    with torch.openreg._sanitizer.sanitize():
        x = torch.ones(4, device="openreg")
        for call in (
            lambda: functional.all_reduce(x, "sum", world),
            lambda: functional.all_gather_tensor(x, 0, world),
            lambda: functional.reduce_scatter_tensor(x, "sum", 0, world),
            lambda: functional.all_to_all_single(x, None, None, world),
            lambda: functional.all_reduce_coalesced([x, x + 1], "sum", world)[1],
        ):
            (call() + 1).tolist()
        out = torch.ops._c10d_functional.all_reduce(x, "sum", world.group_name)
        x.add_(1)  # it reduces a copy
        assert "_c10d_functional::all_reduce" in report_of(lambda: out + 1)
        (torch.ops._c10d_functional.wait_tensor(out) + 1).tolist()
        out = torch.ops._c10d_functional.all_gather_into_tensor(x, world.size(), world.group_name)
        report_of(lambda: x.add_(1))
        torch.ops._c10d_functional.wait_tensor(out)
        x.add_(1)


def check_dropped_work():
    """The Work keeps the memory, so freeing it early is fine; ended collectives are forgotten."""
    from openreg_ops import sanitizer

    with torch.openreg._sanitizer.sanitize():
        for _ in range(300):
            x = torch.ones(1000, device="openreg")
            work = dist.all_reduce(x, async_op=True)
            del x
            y = torch.zeros(1000, device="openreg")
            work.wait()
            del work
            assert y.sum().item() == 0
        races = sanitizer._races
        assert len(races.syncs.current_sync_states) < 300 and len(races.works) < 100


@pytest.mark.parametrize("check", [check_functional_races, check_dropped_work], ids=lambda f: f.__name__)
def test_sanitized(two, check):
    two.run(check)
