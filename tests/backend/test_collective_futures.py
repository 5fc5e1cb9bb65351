"""Futures of collectives, whose callbacks may start and wait for other collectives, and memory that they still use.

The functions named `check_…` run on each process of a group; the tests start them. See tests/backend/workers.py.
"""

import functools
import itertools
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.testing import assert_close
from workers import in_mode

pytestmark = pytest.mark.processes

MODES = pytest.mark.parametrize("mode", ["inline", "async", "sync"])


def new(*shape, value=1.0):
    return torch.full(shape, value, device="openreg")


COUNT = itertools.count()


def key(name):
    """A name in the store that no earlier check has used. Every process makes the same calls."""
    return f"{name}-{next(COUNT)}"


def store():
    return dist.distributed_c10d._get_default_store()


@functools.cache
def other_group():
    return dist.new_group()


def batch(x):
    """Sends x to the other process and receives its x."""
    out, other = torch.empty_like(x), 1 - dist.get_rank()
    [work] = dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, other), dist.P2POp(dist.isend, x, other)])
    return out, work


def coalesced(x):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
    return x, manager.works[0]


def with_output(call, out, *arguments, **options):
    return out, call(out, *arguments, async_op=True, **options)


# Each starts a collective of ones on 2 processes, and returns a tensor that it writes, its Work, and the tensor's sum.
CALLS = {
    "all_reduce": lambda: (*with_output(dist.all_reduce, new(4)), 8),
    "all_reduce_of_another_group": lambda: (*with_output(dist.all_reduce, new(4), group=other_group()), 8),
    "broadcast": lambda: (*with_output(dist.broadcast, new(4), src=0), 4),
    "all_gather": lambda: (*with_output(dist.all_gather_into_tensor, new(8, value=0.0), new(4)), 8),
    "reduce_scatter": lambda: (*with_output(dist.reduce_scatter_tensor, new(2, value=0.0), new(4)), 4),
    "all_to_all": lambda: (*with_output(dist.all_to_all_single, new(4, value=0.0), new(4)), 4),
    "batch": lambda: (*batch(new(4)), 4),
    "coalesced": lambda: (*coalesced(new(4)), 8),
}
WAITS = {
    "future": lambda work: work.get_future().wait(),
    "work": lambda work: work.wait(),
    "then": lambda work: work.get_future().then(lambda future: future.value()).wait(),
}


@in_mode
def check_callbacks():
    """A callback runs in then(), and makes and waits for any other collective; so does its callback."""
    for name, call in CALLS.items():
        for wait in WAITS.values():
            made = []

            def follow(future, call=call, wait=wait, made=made):
                x, work, total = call()
                wait(work)
                made.append((x.sum(), total))
                return x * 2

            def last(future, made=made):
                x = future.value()
                dist.all_reduce(x)
                made.append((x.sum(), 4 * made[-1][1]))
                return x

            x, work, total = call()
            after = work.get_future().then(follow)
            assert len(made) == 1, name
            result = after.then(follow).then(last).wait()
            work.wait()
            assert x.sum().item() == total and result.sum().item() == 4 * total, name
            assert [tensor.item() for tensor, _ in made] == [total for _, total in made], name


@MODES
def test_callbacks_make_collectives(two, mode):
    two.run(check_callbacks, mode)


def check_callbacks_with_the_sanitizer():
    with torch.openreg._sanitizer.sanitize():
        for mode in ("inline", "async"):
            check_callbacks(mode)
        work = dist.all_reduce(x := new(4), async_op=True)
        future = work.get_future()
        assert future.done()
        with pytest.raises(torch.openreg._sanitizer.OpenregSanitizerErrors, match="call wait"):
            x + 1
        future.wait()
        (x + 1).tolist()


def test_callbacks_with_the_sanitizer(two):
    two.run(check_callbacks_with_the_sanitizer)


@in_mode
def check_order():
    """Every process makes the calls of callbacks in the same order, also if one is slow."""
    results = []
    for i in range(4):
        x = new(4, value=float(i))

        def second(future, i=i):
            y = future.value()[0] + 100 * i
            if dist.get_rank() == i % 2:
                torch.openreg._sleep(5_000_000)
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        results.append(dist.all_reduce(x, async_op=True).get_future().then(second))
    for i, result in enumerate(results):
        assert result.wait().tolist() == [4.0 * i + 200 * i] * 4


@in_mode
def check_then_does_not_wait():
    """As on CUDA: the callback has run, and its stream waits for the collective. ATen's operators wait in inline mode."""
    name = key("then")
    x = new(4)
    if dist.get_rank() == 1:
        store().wait([name])
    result = (
        dist.all_reduce(x, async_op=True)
        .get_future()
        .then(lambda future: torch.ops.openreg.swiglu(*future.value() * 2))
    )
    store().set(name, "called")
    assert_close(result.wait(), torch.ops.openreg.swiglu(new(4, value=2.0), new(4, value=2.0)))
    barrier = dist.barrier(async_op=True).get_future()
    assert barrier.then(lambda future: torch.ones(2, device="openreg")).wait().tolist() == [1, 1]


@in_mode
def check_failure():
    """The callback has run by then; its stream keeps the error, as on CUDA, and wait() raises it."""
    x = new(4 if dist.get_rank() else 3)
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RuntimeError, match="mismatched collectives"):
        work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist()
    with pytest.raises(dist.DistBackendError, match="mismatched collectives"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert dist.all_reduce(x := new(2)) is None and x.tolist() == [2, 2]


@pytest.mark.parametrize("check", [check_order, check_failure], ids=lambda f: f.__name__)
@MODES
def test_futures(two, check, mode):
    two.run(check, mode)


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_then_does_not_wait(two, mode):
    two.run(check_then_does_not_wait, mode)


def check_interrupt():
    """Ctrl-C ends the wait for the other process, and not the work: a later wait gets the result."""
    rank = dist.get_rank()
    calls = {
        "receive": (lambda x: dist.isend(x, 0) if rank else dist.irecv(x, 1), 2),
        "all_reduce": (lambda x: dist.all_reduce(x, async_op=True), 3),
    }
    for name, (call, expected) in calls.items():
        x, go = new(4, value=rank + 1.0), key("interrupt")
        if rank == 0:
            work = call(x)
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            timer.join()
            signal.signal(signal.SIGINT, before)
            assert name == "receive" or not work.is_completed()
            store().set(go, "on")
        else:
            store().wait([go])
            work = call(x)
        work.wait()
        assert x.tolist() == [expected] * 4


def test_an_interrupted_wait(two):
    two.run(check_interrupt)


# ---- hooks of DistributedDataParallel ----


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).to("openreg")


def powers(hook, **options):
    def state():
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **options
        )

    return state, hook


def twice(state, bucket):
    """A hook with two collectives, whose second depends on the first."""

    def average(future):
        return dist.all_reduce(future.value()[0] / 4, async_op=True).get_future().wait()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(average)


HOOKS = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "bf16_of_fp16": (lambda: None, default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook)),
    "power": powers(powerSGD_hook.powerSGD_hook),
    "local": (
        lambda: post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "twice": (lambda: None, twice),
    "builtin_allreduce": dist.BuiltinCommHookType.ALLREDUCE,
    "builtin_fp16": dist.BuiltinCommHookType.FP16_COMPRESS,
}
EXACT = {"allreduce", "local", "twice", "builtin_allreduce"}


@in_mode
def check_hook(name):
    """All processes end with the same weights, and exact hooks with those of training without one."""
    from torch.nn.parallel import DistributedDataParallel

    trained = []
    for hook in (None, HOOKS[name]):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        if isinstance(hook, tuple):
            state, call = hook
            wrapped.register_comm_hook(state(), call)
        elif hook:
            wrapped._register_builtin_comm_hook(hook)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            wrapped(torch.randn(8, 16).to("openreg")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(torch.cat([x.detach().flatten() for x in wrapped.parameters()]))
    both = [torch.empty_like(trained[1]) for _ in range(2)]
    dist.all_gather(both, trained[1])
    assert_close(both[0], both[1], rtol=0, atol=0)
    assert_close(*trained, **({} if name in EXACT else dict(rtol=0, atol=0.05)))


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hooks(two, name):
    for mode in ("inline", "async"):
        two.run(check_hook, mode, name)


# ---- memory that a collective still uses ----


def gone(x, how):
    """Lets the program lose the memory of x."""
    if how == "resize":
        x.untyped_storage().resize_(0)
    elif how == "grow":
        x.untyped_storage().resize_(8 * x.untyped_storage().nbytes())
    elif how == "set":
        x.set_(torch.empty(1, device="openreg"))
    else:
        x.data = torch.empty(1, device="openreg")


@in_mode
def check_memory(how):
    """Process 0 loses the memory of a collective's tensors before process 1 makes the call."""
    size = 5000
    ours = [new(size) for _ in range(4)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(ours[0], async_op=True),
        "broadcast": lambda: dist.broadcast(ours[0], 1, async_op=True),
        "all_gather": lambda: dist.all_gather(ours[:2], ours[2], async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(ours[0], ours[1:3], async_op=True),
        "all_to_all": lambda: dist.all_to_all(ours[:2], ours[2:], async_op=True),
        "receive": lambda: dist.irecv(ours[0], 1) if dist.get_rank() == 0 else dist.isend(ours[0], 0),
        "send": lambda: dist.isend(ours[0], 1) if dist.get_rank() == 0 else dist.irecv(ours[0], 0),
        "batch": lambda: dist.batch_isend_irecv(
            [dist.P2POp(call, x, 1 - dist.get_rank()) for call, x in ((dist.irecv, ours[0]), (dist.isend, ours[1]))]
        )[0],
    }
    for name, call in calls.items():
        ours[:] = [new(size) for _ in ours]
        started = key("memory")
        torch.openreg.synchronize()
        if dist.get_rank() == 1:
            store().wait([started])
            call().wait()
            assert all(x.sum().item() in (size, 2 * size) for x in ours), name
            continue
        work = call()
        for x in ours:
            gone(x, how)
        others = [new(size, value=77.0) for _ in range(6)]
        torch.openreg.synchronize()
        store().set(started, "yes")
        work.wait()
        assert all(x.eq(77).all().item() for x in others), name


@pytest.mark.parametrize("how", ["resize", "grow", "set", "data"])
def test_memory_stays_until_the_collective_ends(two, how):
    for mode in ("inline", "async"):
        two.run(check_memory, mode, how)


def check_memory_with_the_sanitizer():
    from torch.openreg._sanitizer import OpenregSanitizerErrors

    with torch.openreg._sanitizer.sanitize():
        for lost in (0, 1):
            out, x = new(8), new(4)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            (out, x)[lost].untyped_storage().resize_(0)
            with pytest.raises(OpenregSanitizerErrors, match=r"during:\nUntypedStorage.resize_, before this line"):
                new(4)
            work.wait()
        work = dist.all_reduce(x := new(4), async_op=True)
        work.wait()
        x.untyped_storage().resize_(0)
        work = dist.all_reduce(x := new(4), async_op=True)
        del x
        new(4).tolist()
        work.wait()


def test_the_sanitizer_reports_lost_memory(two):
    two.run(check_memory_with_the_sanitizer)


def check_no_memory():
    x = new(4)
    x.untyped_storage().resize_(0)
    for call in (
        dist.all_reduce,
        lambda x: dist.all_gather_into_tensor(new(8), x),
        lambda x: dist.send(x, 1 - dist.get_rank()),
    ):
        with pytest.raises(RuntimeError, match=r"\w+: a kernel got a tensor .* without memory"):
            call(x)


def test_a_tensor_without_memory(two):
    two.run(check_no_memory)
