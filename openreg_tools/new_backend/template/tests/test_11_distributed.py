"""Rung 11: torch.distributed. Each test runs in two processes, one for each device."""

import datetime
import traceback

import pytest
import torch
import torch.distributed as dist
from conftest import same

WORLD = 2


def _run(rank, function, file, failures):
    import torch_acme  # noqa: F401

    try:
        torch.acme.set_device(rank)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=timeout)
        function(rank)
        if function is not _mismatch:  # which breaks the group
            dist.barrier()
        dist.destroy_process_group()
        failures.put(None)
    except Exception:
        failures.put(f"rank {rank}: {traceback.format_exc()}")


def run(function, tmp_path):
    processes = torch.multiprocessing.get_context("spawn")
    failures = processes.Queue()
    children = [
        processes.Process(target=_run, args=(rank, function, tmp_path / "store", failures)) for rank in range(WORLD)
    ]
    for child in children:
        child.start()
    found = [failures.get(timeout=200) for _ in children]
    for child in children:
        child.join()
    assert not any(found), "\n".join(filter(None, found))


def _collectives(rank):
    here = torch.device("acme", rank)
    x = torch.arange(1000.0, device=here) + rank
    for op, expected in (
        (dist.ReduceOp.SUM, 1.0),
        (dist.ReduceOp.AVG, 0.5),
        (dist.ReduceOp.MAX, 1.0),
        (dist.ReduceOp.MIN, 0.0),
    ):
        y = x.clone()
        dist.all_reduce(y, op)
        base = torch.arange(1000.0) * (2 if op == dist.ReduceOp.SUM else 1)
        same(y, base + expected)
    y = torch.full((3,), rank, device=here)
    dist.broadcast(y, 1)
    same(y, torch.ones(3, dtype=torch.int64))
    gathered = [torch.empty(1000, device=here) for _ in range(WORLD)]
    dist.all_gather(gathered, x)
    whole = torch.empty(2000, device=here)
    dist.all_gather_into_tensor(whole, x)
    same(torch.cat(gathered), whole.cpu())
    same(whole.view(2, -1), torch.stack([torch.arange(1000.0), torch.arange(1000.0) + 1]))
    part = torch.empty(1000, device=here)
    dist.reduce_scatter_tensor(part, whole)
    same(part, (torch.arange(1000.0) + rank) * 2)
    swapped = torch.empty(1000, device=here)
    dist.all_to_all_single(swapped, x)
    same(swapped, torch.cat([torch.arange(500.0) + 500 * rank, torch.arange(500.0) + 500 * rank + 1]))
    parts = [torch.full((2,), float(i), device=here) for i in range(WORLD)] if rank == 0 else None
    got = torch.empty(2, device=here)
    dist.scatter(got, parts, src=0)
    same(got, torch.full((2,), float(rank)))
    dist.reduce(got, 0)
    assert rank or got.tolist() == [1.0, 1.0]


def _point_to_point(rank):
    here, large = torch.device("acme", rank), 1_000_000  # more than a mailbox holds
    x = torch.arange(large, device=here) + rank
    y = torch.empty_like(x)
    requests = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    for request in requests:
        request.wait()
    same(y, torch.arange(large) + 1 - rank)
    side = torch.Stream(here)
    with side:  # ordered with the stream that calls it
        z = torch.zeros(large, device=here)
        z.fill_(rank + 1)
        dist.all_reduce(z)
        assert z.eq(3).all()


def _mismatch(rank):
    with pytest.raises(RuntimeError, match="another rank made a different call"):
        dist.all_reduce(torch.ones(2 + rank, device=f"acme:{rank}"))
        torch.accelerator.synchronize()


def _training(rank):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(f"acme:{rank}")
    reference = torch.nn.Linear(4, 2)
    reference.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.randn(WORLD, 3, 4)
    parallel(x[rank].to(f"acme:{rank}")).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    same(model.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("function", [_collectives, _point_to_point, _mismatch, _training], ids=lambda f: f.__name__)
def test_two_ranks(function, tmp_path):
    run(function, tmp_path)
