"""DistributedDataParallel over NCCL, two ranks, compared with one process that sees both halves of each batch."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def make_data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(32, 10), torch.randn(32, 5))


def worker(rank, world_size, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="env://", device_id=torch.device("cuda", rank))
    assert dist.get_backend() == "nccl" and dist.get_world_size() == 2 and dist.is_nccl_available()

    model = DDP(make_model().to(rank), device_ids=[rank], output_device=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = make_data()
    sampler = DistributedSampler(dataset, shuffle=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(rank)), y.to(rank))
            loss.backward()
            optimizer.step()

    total = torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    assert total.item() == 3.0
    gathered = [torch.empty_like(total) for _ in range(world_size)]
    dist.all_gather(gathered, torch.tensor([float(rank)], device=rank))
    assert [tensor.item() for tensor in gathered] == [0.0, 1.0]
    objects = [{"name": "settings", "values": [1, 2]}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cuda", rank))
    assert objects == [{"name": "settings", "values": [1, 2]}, "text"]
    dist.barrier(device_ids=[rank])

    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = dataset.tensors
    for _ in range(2):
        for start in (0, 16):  # rank 0 has the even samples, rank 1 the odd ones
            optimizer.zero_grad()
            nn.functional.mse_loss(reference(x[start : start + 16]), y[start : start + 16]).backward()
            optimizer.step()
    for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    mp.spawn(worker, args=(torch.cuda.device_count(), port), nprocs=torch.cuda.device_count(), join=True)
