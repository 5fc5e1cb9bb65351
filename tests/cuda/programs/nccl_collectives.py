"""Collectives over NCCL: asynchronous work, groups, reduce_scatter, all_to_all, point to point, on a side stream."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, file):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
    assert dist.get_backend() == "nccl"
    other = 1 - rank

    x = torch.full((1000,), float(rank + 1), device=device)
    work = dist.all_reduce(x, async_op=True)
    overlapped = torch.ones(10, device=device) * 2
    work.wait()
    assert torch.equal((x + overlapped[0]).cpu(), torch.full((1000,), 5.0)) and work.is_completed() in (True, False)
    mean = torch.tensor([float(rank)], device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.item() == 0.5
    maximum = torch.tensor([rank, -rank], device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    assert maximum.tolist() == [1, 0]

    output = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(output, torch.arange(8.0, device=device) * (rank + 1))
    assert torch.equal(output.cpu(), torch.arange(8.0)[4 * rank : 4 * rank + 4] * 3)
    everything = torch.empty(8, device=device)
    dist.all_gather_into_tensor(everything, output)
    assert torch.equal(everything.cpu(), torch.arange(8.0) * 3)
    received = torch.empty(4, device=device)
    dist.all_to_all_single(received, torch.arange(4.0, device=device) + 10 * rank)
    start = 2 * rank
    assert received.tolist() == [start, start + 1, start + 10, start + 11]

    message, answer = torch.full((3,), float(rank), device=device, dtype=torch.bfloat16), torch.empty(3, device=device)
    answer = answer.bfloat16()
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, message, other), dist.P2POp(dist.irecv, answer, other)]
    ):
        request.wait()
    assert answer.tolist() == [float(other)] * 3

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.full((256,), float(rank), device=device)
        dist.broadcast(y, src=1)
        y.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y.cpu(), torch.full((256,), 2.0))

    group = dist.new_group([0, 1], backend="nccl")
    gloo = dist.new_group(backend="gloo")
    z = torch.ones(2, device=device)
    dist.reduce(z, dst=0, group=group)
    assert rank or z.tolist() == [2.0, 2.0]
    count = torch.tensor([rank + 1])
    dist.all_reduce(count, group=gloo)  # a CPU tensor
    assert count.item() == 3 and dist.get_backend(gloo) == "gloo"
    names = [None, None]
    dist.all_gather_object(names, f"rank {rank}")
    assert names == ["rank 0", "rank 1"]
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        assert "No backend type associated with device type cpu" in str(error), error
    else:
        raise AssertionError("NCCL reduced a CPU tensor")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.join(folder, "store"),), nprocs=2)
