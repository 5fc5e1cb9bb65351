"""fully_shard (FSDP2) with mixed precision off, and DTensor state, against one process."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)])


def worker(rank, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    assert mesh.device_type == "cuda" and mesh.size() == 2
    model = make_model().cuda()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    weight = model[0][0].weight
    assert isinstance(weight, DTensor) and weight.placements == (Shard(0),) and weight.to_local().shape == (12, 12)
    assert weight.to_local().is_cuda and weight.device.type == "cuda" and weight.to_local().device.index == rank
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    reference = make_model()
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 12), torch.randn(8, 12)
        mine = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine].cuda()), y[mine].cuda()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        reference_optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        reference_optimizer.step()
        torch.testing.assert_close(norm.full_tensor().cpu(), expected_norm, rtol=1e-3, atol=1e-5)
    for name, parameter in reference.named_parameters():
        full = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(full.cpu(), parameter, rtol=1e-3, atol=1e-4)

    a, b = torch.arange(24.0).reshape(6, 4), torch.arange(8.0).reshape(4, 2)
    product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Shard(0)])
    assert torch.equal(product.full_tensor().cpu(), a @ b)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    mp.spawn(worker, args=(port,), nprocs=2)
