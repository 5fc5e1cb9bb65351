"""DDP's options over NCCL: SyncBatchNorm, no_sync, unused parameters, a compression hook, AMP, ZeRO."""

import contextlib
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def make_model(norm):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12, bias=not norm), *([nn.BatchNorm1d(12)] if norm else []), nn.Tanh(), nn.Linear(12, 2)]
    return nn.Sequential(*layers)


def train(model, optimizer, data, device, accumulate=False):
    for step, (x, y) in enumerate(data):
        last = not accumulate or step % 2
        with contextlib.nullcontext() if last else model.no_sync():
            nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def worker(rank, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    torch.manual_seed(1)
    data = [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(4)]
    mine = [(x[rank::2], y[rank::2]) for x, y in data]
    for norm, accumulate, options, sharded, hook, tolerance in (
        (True, False, {}, False, None, 1e-4),
        (False, True, {"gradient_as_bucket_view": True}, False, None, 1e-4),
        (False, False, {"static_graph": True}, True, None, 1e-4),
        (
            False,
            False,
            {"find_unused_parameters": True, "bucket_cap_mb": 1},
            False,
            default_hooks.fp16_compress_hook,
            1e-2,
        ),
        (False, False, {"broadcast_buffers": False}, False, default_hooks.bf16_compress_hook, 3e-2),
    ):
        reference = make_model(norm)
        optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
        for step, (x, y) in enumerate(data):
            nn.functional.mse_loss(reference(x), y).backward()
            if not accumulate or step % 2:
                optimizer.step()
                optimizer.zero_grad()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model(norm)).cuda()
        model = DDP(model, device_ids=[rank], **options)
        if hook:
            model.register_comm_hook(dist.group.WORLD, hook)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, mine, rank, accumulate)
        for name, value in reference.state_dict().items():
            ours = model.module.state_dict()[name].cpu()
            torch.testing.assert_close(ours, value, rtol=tolerance, atol=tolerance)

    model = DDP(make_model(False).cuda(), device_ids=[rank])
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(mine[0][0].cuda()), mine[0][1].cuda())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    reference = make_model(False)
    nn.functional.mse_loss(reference(data[0][0]), data[0][1]).backward()
    for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=2e-2, atol=2e-2)
    assert not torch.isnan(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    mp.spawn(worker, args=(port,), nprocs=2)
