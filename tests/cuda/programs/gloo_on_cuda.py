"""Gloo's process groups on tensors of a GPU: collectives and DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def work(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.full((5,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert x.is_cuda and x.tolist() == [3.0] * 5
    host = torch.full((5,), rank + 1.0)
    dist.all_reduce(host)
    assert host.tolist() == [3.0] * 5
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda(), device_ids=[rank])
    inputs = torch.arange(16.0).view(4, 4)
    model(inputs[rank::world].cuda()).sum().backward()
    torch.manual_seed(0)
    reference = nn.Linear(4, 2)
    (reference(inputs).sum() / world).backward()
    torch.testing.assert_close(model.module.weight.grad.cpu(), reference.weight.grad)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["PORT"] = str(probe.getsockname()[1])
    mp.spawn(work, (2,), nprocs=2)
