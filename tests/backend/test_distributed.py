"""torch.distributed on the device: every collective against the CPU's, and training on several processes against one.

The functions named `check_…` run on each process of a group; the tests start them. See tests/backend/workers.py.
"""

import copy
import functools
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collectives import COLLECTIVES, all_reduce
from processes import python
from torch import nn
from torch.testing import assert_close
from workers import Workers

import openreg_ops

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@functools.cache
def gloo():
    """A group of the CPU with all processes."""
    return dist.new_group(backend="gloo")


# ---- collectives ----

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def outcome(collective, x, group):
    """Its result, or the type of its error."""
    try:
        _, tensors, work = collective(x, group)
        if work is not None:
            work.wait()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error), str(error)
    return [tensor.cpu() for tensor in tensors]


def check_collective(collective, dtype):
    x = torch.arange(6).reshape(2, 3).add(10 * dist.get_rank()).to(dtype)
    expected = outcome(collective, x.clone(), gloo())
    got = outcome(collective, x.to("openreg"), None)
    assert type(got) is type(expected) and (isinstance(got, list) or got == expected), (got, expected)
    if isinstance(got, list):
        assert_close(got, expected, rtol=0, atol=0)
    return isinstance(expected, list)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
def test_collective(four, collective):
    ran = [all(four.run(check_collective, collective, dtype)) for dtype in DTYPES]
    assert sum(ran) >= 4  # the rest raises the CPU's error


def check_layouts():
    """Offset, conjugated, channels-last, empty and 0-dim tensors, and parameters; NCCL rejects the strided ones."""
    size = dist.get_world_size()
    makers = [
        lambda device: torch.arange(12.0, device=device)[3:9],
        lambda device: torch.view_as_complex(torch.arange(6.0, device=device).reshape(3, 2)).conj().imag,
        lambda device: torch.arange(16.0, device=device).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
        lambda device: torch.empty(0, 3, device=device),
        lambda device: torch.tensor(3.0, device=device),
        lambda device: nn.Parameter(torch.ones(3, device=device)),
        lambda device: torch.ones(3, dtype=torch.complex64, device=device) * 2j,
    ]
    for make in makers:
        expected, got = outcome(all_reduce, make("cpu"), gloo()), outcome(all_reduce, make("openreg"), None)
        if isinstance(expected, tuple):
            assert got == expected
        else:
            assert_close(got, expected, rtol=0, atol=0)
    matrix = torch.arange(12.0, device="openreg").reshape(3, 4)
    for strided in (matrix[:, 1:3], matrix.t(), matrix.view(-1)[::2]):
        for call in (
            lambda x=strided: dist.all_reduce(x),
            lambda x=strided: dist.broadcast(x, 0),
            lambda x=strided: dist.all_gather_into_tensor(x.new_empty(size * len(x), *x.shape[1:]), x),
            lambda x=strided: dist.all_gather([torch.empty_strided(x.shape, x.stride(), device=x.device)] * size, x),
            lambda x=strided: dist.send(x, (dist.get_rank() + 1) % size),
        ):
            with pytest.raises(ValueError, match=r"occl: \w+: Tensors must be contiguous, but got one of shape"):
                call()
    assert matrix.tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    with pytest.raises(NotImplementedError, match=r"c10d::broadcast_: openreg has no kernel for SparsePrivateUse1"):
        dist.broadcast(matrix.to_sparse(), 0)
    base = torch.zeros(6, device="openreg")
    dist.all_reduce(base[2:4].fill_(1))
    assert base.tolist() == [0, 0, size, size, 0, 0]


def test_layouts(two):
    two.run(check_layouts)


def check_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    out = [None] * size
    dist.all_gather_object(out, {"rank": rank, "tensor": torch.ones(2, device="openreg") * rank})
    assert [gathered["rank"] for gathered in out] == list(range(size)) and out[1]["tensor"].device.type == "openreg"
    shared = [f"from {rank}"]
    dist.broadcast_object_list(shared, src=1)
    assert shared == ["from 1"]
    dist.gather_object(rank, out if rank == 0 else None)
    assert rank or out == list(range(size))
    mine = [None]
    dist.scatter_object_list(mine, list("abcd")[:size] if rank == 0 else None)
    assert mine == ["abcd"[rank]]


def check_functional():
    from torch.distributed import _functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((size, 2), float(rank), device="openreg", requires_grad=True)
    total = sum(range(size))
    assert functional.all_reduce(x.detach(), "sum", dist.group.WORLD).tolist() == [[total, total]] * size
    assert functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)[::size, 0].tolist() == list(range(size))
    y = functional.reduce_scatter_tensor(x.detach(), "avg", 0, dist.group.WORLD)
    assert y.tolist() == [[total / size] * 2]

    compiled = torch.compile(lambda t: functional.all_reduce(t * 2, "sum", dist.group.WORLD) + 1, fullgraph=True)
    assert compiled(x.detach()).tolist() == [[2 * total + 1] * 2] * size


def check_futures():
    size = dist.get_world_size()
    x = torch.ones(3, device="openreg")
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * size] * 3 and doubled.wait().is_openreg
    assert work.wait() and work.is_completed() and work.is_success()
    assert work.result()[0] is x or work.result()[0].data_ptr() == x.data_ptr()
    assert dist.barrier(async_op=True).get_future().wait() == []


def check_works_in_place():
    """One launch, which waits for the stream: nothing is copied, not even on the device."""
    from openreg_ops import _C

    x, out = torch.ones(1000, device="openreg"), torch.empty(2000, device="openreg")
    dist.barrier()
    for call in [lambda: dist.all_reduce(x), lambda: dist.all_gather_into_tensor(out, x)]:
        before = _C.launch_count(), torch.openreg.memory_allocated()
        call()
        assert _C.launch_count() - before[0] == 1
        assert torch.openreg.memory_allocated() <= before[1]  # less where an earlier call's thread lets go meanwhile


def check_order():
    """A collective comes after the current stream's queued work, and work after wait() comes after the collective."""
    size = dist.get_world_size()
    for mode in ["inline", "async", "sync"]:
        torch.openreg.set_launch_mode(mode)
        with torch.openreg.stream(torch.openreg.Stream()):
            x = torch.zeros(1000, device="openreg")
            torch.openreg._sleep(20_000_000)
            x.add_(1)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            y = x * 2
            assert y.cpu().eq(2 * size).all(), mode
    torch.openreg.set_launch_mode("inline")
    x = torch.ones(1000, device="openreg")
    work = dist.all_reduce(x, async_op=True)
    del x  # the work keeps the memory
    fresh = torch.zeros(1000, device="openreg")
    work.wait()
    assert fresh.eq(0).all()


def check_barriers():
    rank = dist.get_rank()
    torch.openreg._sleep(20_000_000)
    dist.barrier()
    assert torch.openreg.current_stream().query()
    dist.barrier(device_ids=[rank % 2])
    both = dist.new_group(backend="cpu:gloo,openreg:occl")
    x, y = torch.ones(2), torch.ones(2, device="openreg")
    dist.all_reduce(x, group=both)
    dist.all_reduce(y, group=both)
    assert x.tolist() == y.tolist() == [dist.get_world_size()] * 2
    dist.destroy_process_group(both)


def check_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, size, 2)))
    x = torch.full((2,), rank + 1.0, device="openreg")
    if rank % 2 == 0:
        dist.all_reduce(x, group=evens)
        assert x.tolist() == [sum(range(1, size + 1, 2))] * 2
    mine, _ = dist.new_subgroups(group_size=2)
    x = torch.full((2,), float(rank), device="openreg")
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [rank // 2 * 4 + 1] * 2
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    own = dist.new_group(backend="occl", pg_options=options)
    dist.all_reduce(x, group=own)
    with pytest.raises(TypeError, match="expected pg_options of type ProcessGroupGloo._Options, but got int"):
        dist.new_group(backend="occl", pg_options=3)


def check_errors():
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match="occl: all_?gather: expected tensors on openreg, but got one on cpu"):
        dist.all_gather([torch.ones(2)] * dist.get_world_size(), torch.ones(2, device="openreg"))
    with pytest.raises(RuntimeError, match="expected tensors on one device, but got openreg:0 and openreg:1"):
        work = dist.all_gather(
            [torch.ones(2, device="openreg:0")] * dist.get_world_size(), torch.ones(2, device="openreg:1")
        )
    torch.openreg.synchronize()
    with torch.openreg.faults.inject("kernel"), pytest.raises(RuntimeError, match="injected"):
        dist.all_reduce(torch.ones(2, device="openreg"))
        torch.openreg.synchronize()
    late = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(
            dist.DistBackendError, match=r"occl: allreduce on rank 0 of \d failed: .*within the timeout.*_DEBUG=DETAIL"
        ):
            dist.all_reduce(torch.ones(2, device="openreg"), group=late)
        assert time.monotonic() - start < 20
        work = dist.all_reduce(torch.ones(2, device="openreg"), group=late, async_op=True)
        with pytest.raises(RuntimeError, match="occl: allreduce on rank 0"):
            work.get_future().wait()
        assert isinstance(work.exception(), Exception) and not work.is_success()
    dist.barrier()
    x, group = torch.ones(2, device="openreg"), dist.new_group()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(
            dist.DistBackendError, match=r"occl: allreduce on rank 0 of \d failed: timed out after 100 ms"
        ):
            work.wait(timedelta(milliseconds=100))
    dist.barrier()
    work = work if rank == 0 else dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert x.tolist() == [dist.get_world_size()] * 2


def waited(timeout, device, backend):
    """What `work.wait(timeout)` does on rank 0 while rank 1 has not come; it comes when rank 0 waits or has given up."""
    group = dist.new_group([0, 1], backend=backend)
    if dist.get_rank() > 1:
        return None
    store, key = dist.distributed_c10d._get_default_store(), f"{backend} {timeout}"
    if dist.get_rank():
        store.get(key)
        dist.all_reduce(torch.ones(2, device=device), group=group)
        return None
    x = torch.ones(2, device=device)
    work = dist.all_reduce(x, group=group, async_op=True)
    later = threading.Timer(0.1, store.set, (key, ""))
    later.start()
    try:
        done = work.wait(timeout)
    except RuntimeError as error:
        assert "timed out" in str(error)
        done = False
    later.join()
    work.wait()
    assert x.tolist() == [2, 2]
    return done


def check_timeouts():
    """None, less than a millisecond, below zero and a century: as plain Gloo takes them, and no error lasts."""
    limits = {timedelta(0): True, timedelta(microseconds=10): True, timedelta(milliseconds=-1): False}
    limits |= {timedelta(seconds=-5): False, timedelta(milliseconds=1): False, timedelta(days=36500): True}
    for limit, waits in limits.items():
        found = [waited(limit, device, backend) for device, backend in (("openreg", "occl"), ("cpu", "gloo"))]
        assert found in ([None, None], [waits, waits]), limit


CHECKS = [
    check_objects, check_functional, check_futures, check_works_in_place, check_order, check_barriers, check_groups,
    check_errors, check_timeouts,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_check(two, check):
    two.run(check)


# ---- training ----


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make_model():
    torch.manual_seed(0)
    return Mlp().to("openreg")


def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 8, device="openreg") for _ in range(3)]


def train(model, data):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def part(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def assert_trained_alike(model, reference):
    for (name, got), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def trained_alone():
    model = make_model()
    train(model, batches())
    return model


def check_ddp():
    from torch.nn.parallel import DistributedDataParallel

    device = torch.openreg.current_device()
    torch.openreg.set_device(0)
    for options in [
        {},
        {"device_ids": [0]},
        {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1e-4},
    ]:
        model = DistributedDataParallel(make_model(), **options)
        train(model, [part(x) for x in batches()])
        assert_trained_alike(model.module, trained_alone())
    torch.openreg.set_device(device)


def check_sync_batch_norm():
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = list(range(1, size + 1))  # of each process
    for shape in [(5,), (5, 4, 3)]:
        torch.manual_seed(2)
        x, grad = (torch.randn(sum(rows), *shape, device="openreg") + 1 for _ in range(2))
        alone = (torch.nn.BatchNorm1d if len(shape) == 1 else torch.nn.BatchNorm2d)(5, device="openreg")
        synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        assert isinstance(synced, torch.nn.SyncBatchNorm)
        x.requires_grad_()
        part = x.detach().split(rows)[rank].requires_grad_()
        expected, got = alone(x), synced(part)
        assert_close(got, expected.split(rows)[rank], rtol=1e-4, atol=1e-5)
        expected.backward(grad)
        got.backward(grad.split(rows)[rank])
        assert_close(part.grad, x.grad.split(rows)[rank], rtol=1e-4, atol=1e-5)
        for parameter in synced.parameters():
            dist.all_reduce(parameter.grad)
        for mine, theirs in zip(synced.parameters(), alone.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(synced.buffers(), alone.buffers(), strict=True):
            assert_close(mine, theirs)


def mesh_of(*shape, names):
    return dist.init_device_mesh("openreg", shape, mesh_dim_names=names)


def check_fsdp():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(dist.get_world_size(), names=("data",))
    reference = trained_alone().cpu()
    model = make_model().to("openreg")
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)
    train(model, [part(x) for x in (batch.to(torch.openreg.current_device()) for batch in batches())])
    for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(got.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")
    model = fully_shard(make_model(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert model(part(batches()[0])).dtype == torch.bfloat16


def check_tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(dist.get_world_size(), names=("tensor",))
    model = parallelize_module(make_model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, batches())
    assert_trained_alike(model, trained_alone())


def check_mesh():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    mesh = mesh_of(size // 2, 2, names=("data", "tensor"))
    assert mesh.device_type == "openreg" and mesh["tensor"].size() == 2
    x = torch.arange(16.0, device="openreg").reshape(4, 4)
    sharded = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    assert sharded.to_local().shape == (4 * 2 // size, 2)
    product = sharded @ distribute_tensor(x, mesh, [Replicate(), Shard(0)])
    assert isinstance(product, DTensor)
    assert_close(product.full_tensor(), x @ x)

    model = parallelize_module(make_model(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    rank = mesh.get_local_rank("data")
    train(model, [x.chunk(size // 2)[rank] for x in batches()])
    assert_trained_alike(model, trained_alone())


def check_checkpoint(folder):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(dist.get_world_size(), names=("data",))
    model = fully_shard(make_model(), mesh=mesh)
    optimizer = train(model, [part(x) for x in batches()])
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    torch.manual_seed(5)
    other = fully_shard(Mlp().to("openreg"), mesh=mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, state = get_state_dict(other, other_optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    for got, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert got.full_tensor().equal(expected.full_tensor())
    assert other_optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().is_openreg


def check_sanitized(check):
    """Correct programs give no report."""
    with torch.openreg._sanitizer.sanitize():
        check()


@pytest.mark.parametrize("check", [check_sync_batch_norm, check_mesh], ids=lambda f: f.__name__)
def test_training(four, check):
    four.run(check)


@pytest.mark.parametrize("check", [check_ddp, check_fsdp, check_tensor_parallel], ids=lambda f: f.__name__)
def test_training_with_the_sanitizer(four, check):
    four.run(check_sanitized, check)


def test_checkpoint(two, tmp_path):
    two.run(check_checkpoint, str(tmp_path))


# ---- random operators of DTensors ----


def of_each_rank(x):
    """The tensors `x` of all ranks; they must have one shape."""
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return out


def numbers_left():
    """How many numbers the current device's default generator has given since seeding, the same on all ranks."""
    offset = torch.openreg.default_generators[torch.openreg.current_device()].get_offset()
    assert len({int(other) for other in of_each_rank(torch.tensor([offset], device="openreg"))}) == 1
    return offset


def check_deferred_init():
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    with torch.device("meta"):
        layer = nn.Linear(8, 6 * size)
    fully_shard(layer, mesh=mesh_of(size, names=("data",)))
    layer.to_empty(device="openreg")
    layer.reset_parameters()
    weight, bias = layer.weight.full_tensor(), layer.bias.full_tensor()
    for full in (weight, bias):
        assert all(other.equal(full) for other in of_each_rank(full))
        shards = full.chunk(size)
        assert not any(shards[i].equal(shards[j]) for i in range(size) for j in range(i))
    assert layer.weight.to_local().equal(part(weight))
    assert layer(torch.ones(2, 8, device="openreg")).shape == (2, 6 * size)

    # By the offsets: each shard has room for 2 n + 32 numbers.
    generator = torch.Generator("openreg").manual_seed(0)
    room = 2 * 48 + 32
    for rank, shard in enumerate(weight.chunk(size)):
        expected = torch.empty_like(shard).uniform_(-(8**-0.5), 8**-0.5, generator=generator.set_offset(rank * room))
        assert_close(shard, expected, rtol=0, atol=0)
    assert numbers_left() == size * room + size * (2 * 6 + 32)


def check_random_generator():
    """An explicit generator provides all the numbers, and the default one none."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = mesh_of(size, names=("data",))
    generator = torch.Generator("openreg").manual_seed(7)
    replicated = distribute_tensor(torch.empty(3, 5, device="openreg"), mesh, [Replicate()])
    sharded = distribute_tensor(torch.empty(4 * size, device="openreg"), mesh, [Shard(0)])
    torch.rand(2, device="openreg", generator=generator)
    replicated.normal_(generator=generator)
    sharded.uniform_(generator=generator)
    following = torch.rand(2, device="openreg", generator=generator)
    assert numbers_left() == 0 and all(other.equal(following) for other in of_each_rank(following))

    generator.manual_seed(7)
    torch.rand(2, device="openreg", generator=generator)
    assert replicated.to_local().equal(torch.empty(3, 5, device="openreg").normal_(generator=generator))
    first = generator.get_offset()
    for rank, shard in enumerate(sharded.full_tensor().chunk(size)):
        generator.set_offset(first + rank * 40)
        assert shard.equal(torch.rand(4, device="openreg", generator=generator))
    generator.set_offset(first + size * 40)
    assert following.equal(torch.rand(2, device="openreg", generator=generator))
    with pytest.raises(RuntimeError, match="Expected a 'openreg' device type for generator but found 'cpu'"):
        sharded.uniform_(generator=torch.Generator())


def check_random_shards():
    """No operator draws more than its shard's share, or leaves half of a pair of normal numbers."""
    from torch.distributed import tensor

    size = dist.get_world_size()
    mesh = mesh_of(size, names=("data",))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex128):
        for length in (1, 2, 9, 16, 17, 50):
            torch.manual_seed(0)
            torch.randn(1, dtype=torch.float64, device="openreg")  # leaves one
            whole = tensor.randn(length * size, dtype=dtype, device_mesh=mesh, placements=[tensor.Shard(0)])
            reals = whole.full_tensor()
            reals = torch.view_as_real(reals).flatten() if dtype.is_complex else reals
            room = 2 * reals.numel() // size + 32
            assert numbers_left() == 4 + size * room
            if dtype != torch.bfloat16:  # has few numbers
                assert reals.unique().numel() == reals.numel()
            generator = torch.Generator("openreg").manual_seed(0)
            torch.empty(length, dtype=dtype, device="openreg").normal_(generator=generator)
            assert generator.get_offset() <= room
    uneven = tensor.rand(2 * size - 1, device_mesh=mesh, placements=[tensor.Shard(0)]).full_tensor()
    assert uneven.unique().numel() == 2 * size - 1


def check_random_synchronisation():
    """Ranks with different seeds continue from rank 0's state, as on CUDA."""
    from torch.distributed import tensor

    tensor._random._rng_tracker = None
    torch.manual_seed(dist.get_rank())
    mesh = mesh_of(dist.get_world_size(), names=("data",))
    x = tensor.rand(3, device_mesh=mesh, placements=[tensor.Replicate()]).to_local()
    torch.manual_seed(0)
    assert x.equal(torch.rand(3, device="openreg"))

    tensor._random.manual_seed(5, mesh)
    assert tensor.rand(3, device_mesh=mesh).to_local().equal(torch.manual_seed(5) and torch.rand(3, device="openreg"))
    assert isinstance(tensor._random._rng_tracker, tensor._random.OffsetBasedRNGTracker)
    with pytest.raises(RuntimeError, match="CUDA"):  # another device's mesh has PyTorch's own
        tensor._random.OffsetBasedRNGTracker(dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def check_random_operator():
    """What stands for it in graphs, and from torch 2.15 on in eager mode."""
    from torch._prims.rng_prims import run_dtensor_rng_op

    generator = torch.Generator("openreg").manual_seed(0).set_offset(10)
    x = run_dtensor_rng_op(10, 40, torch.ops.aten.rand_like.default, torch.empty(4, device="openreg"))
    assert x.equal(torch.rand(4, device="openreg", generator=generator)) and numbers_left() == 40
    run_dtensor_rng_op(0, 0, torch.ops.aten.uniform_.default, x)
    assert numbers_left() == 44
    with pytest.raises(RuntimeError, match="got cpu"):  # for another device it is PyTorch's own
        run_dtensor_rng_op(0, 4, torch.ops.aten.uniform_.default, torch.ones(2))


def check_random_graph():
    """Compiled as in eager mode; before torch 2.15, shards work only outside the graph, and the error says so."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(dist.get_world_size(), names=("data",))
    torch._dynamo.reset()
    compiled = torch.compile(nn.functional.dropout, backend="aot_eager")
    for placement in (Replicate(), Shard(0)):
        x = distribute_tensor(torch.ones(8, 8, device="openreg"), mesh, [placement])
        expected = [nn.functional.dropout(x).to_local() for _ in range(2)]
        torch.manual_seed(0)
        if placement.is_shard() and torch.__version__ < (2, 15):
            with pytest.raises(RuntimeError, match="DTensor: a graph cannot contain .* before torch 2.15"):
                compiled(x)
        else:
            assert_close([compiled(x).to_local() for _ in range(2)], expected, rtol=0, atol=0)
        torch.manual_seed(0)


@pytest.mark.parametrize(
    "check",
    [
        check_deferred_init, check_random_generator, check_random_shards,
        check_random_synchronisation, check_random_operator, check_random_graph,
    ],
    ids=lambda f: f.__name__.removeprefix("check_"),
)  # fmt: skip
def test_random(two, check):
    two.run(check)


# ---- processes of their own ----


def check_strict():
    assert torch.openreg.isolation_mode() == "strict"
    for collective in COLLECTIVES:
        assert check_collective(collective, torch.float32)
    work = dist.all_reduce(torch.ones(3, device="openreg"), async_op=True)
    assert work.get_future().wait()[0].tolist() == [2, 2, 2]


@pytest.mark.slow
def test_isolated_memory_is_copied():
    with Workers(2, {"OPENREG_ISOLATION": "strict"}) as workers:
        workers.run(check_strict)


def check_split():
    rank, device = dist.get_rank(), torch.device("openreg:0")
    assert dist.group.WORLD.bound_device_id == device
    alone = dist.new_group([0])
    half = dist.split_group(split_ranks=[[0], [1]])
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=half)
    if rank == 0:
        dist.all_reduce(x, group=alone)
    dist.all_reduce(x)
    assert half.size() == 1 and x.tolist() == [2, 2]


def check_until_death():
    """Reduces until the other process ends; returns the error and how long the last call took."""
    x = torch.ones(1 << 22, device="openreg")
    while True:
        start = time.monotonic()
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            return str(error), time.monotonic() - start


@pytest.mark.slow
def test_a_process_is_killed():
    with Workers(2, device_id=torch.device("openreg:0"), timeout=timedelta(seconds=20)) as workers:
        workers.run(check_split)
        workers.start(check_until_death)
        time.sleep(0.3)
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        [(error, seconds)] = workers.results([0])
        workers.processes[0].kill()  # its group cannot be left in order
    assert re.match(r"occl: allreduce on rank 0 of 2 failed: .*A process of the group has ended", error), error
    assert seconds < 20


@pytest.mark.slow
def test_the_example_of_the_page():
    page = (ROOT / "docs/distributed.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("torchrun ")).split()
    environment = {"PYTHONPATH": str(Path(openreg_ops.__file__).parents[1]), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = python("-m", "torch.distributed.run", *command[1:], "--steps", "3", cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes, backend occl," in done.stdout and "within rounding" in done.stdout
