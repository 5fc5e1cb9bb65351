"""Rung 11: torch.distributed. Each test runs in two processes, one for each device."""

import datetime
import traceback

import pytest
import torch
import torch.distributed as dist
from conftest import same


def _run(rank, function, file, failures):
    import torch_acme  # noqa: F401

    try:
        torch.acme.set_device(rank)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=2, timeout=timeout)
        function(rank)
        failures.put("")
    except Exception:
        failures.put(f"rank {rank}: {traceback.format_exc()}")


def _collectives(rank):
    x = torch.arange(1000.0, device="acme") + rank
    ops, values = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN), (1.0, 0.5, 1.0, 0.0)
    for op, value in zip(ops, values, strict=True):
        dist.all_reduce(y := x.clone(), op)
        same(y, torch.arange(1000.0) * (2 if op == dist.ReduceOp.SUM else 1) + value)
    dist.broadcast(y := torch.full((3,), rank, device="acme"), 1)
    same(y, torch.ones(3, dtype=torch.int64))
    dist.all_gather_into_tensor(whole := torch.empty(2000, device="acme"), x)
    dist.all_gather(parts := [torch.empty(1000, device="acme") for _ in range(2)], x)
    same(whole.view(2, -1), torch.stack([torch.arange(1000.0), torch.arange(1000.0) + 1]))
    same(torch.cat(parts), whole.cpu())
    dist.reduce_scatter_tensor(part := torch.empty(1000, device="acme"), whole)
    same(part, (torch.arange(1000.0) + rank) * 2)
    dist.barrier()


def _point_to_point(rank):
    x = torch.arange(1_000_000, device="acme") + rank  # more than a mailbox holds
    y = torch.empty_like(x)
    for request in [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]:
        request.wait()
    same(y, torch.arange(1_000_000) + 1 - rank)
    with torch.Stream("acme"):  # ordered with the stream that calls it
        dist.all_reduce(z := torch.zeros(1_000_000, device="acme").fill_(rank + 1))
        assert z.eq(3).all()
    dist.barrier()


def _mismatch(rank):
    with pytest.raises(RuntimeError, match="another rank made a different call"):
        dist.all_reduce(torch.ones(2 + rank, device="acme"))
        torch.accelerator.synchronize()


def _training(rank):
    torch.manual_seed(0)
    reference = torch.nn.Linear(4, 2)
    model = torch.nn.Linear(4, 2).to("acme")
    model.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 4)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(x[rank].to("acme")).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    same(model.weight.grad, reference.weight.grad)
    dist.barrier()


@pytest.mark.parametrize("function", [_collectives, _point_to_point, _mismatch, _training])
def test_two_ranks(function, tmp_path):
    processes = torch.multiprocessing.get_context("spawn")
    failures = processes.Queue()
    children = [
        processes.Process(target=_run, args=(rank, function, tmp_path / "store", failures)) for rank in range(2)
    ]
    for child in children:
        child.start()
    found = [failures.get(timeout=200) for _ in children]
    for child in children:
        child.join()
    assert not any(found), "\n".join(found)
