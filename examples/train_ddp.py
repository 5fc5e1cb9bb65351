"""Train a small model on several processes with DistributedDataParallel, and compare with one process on the full
batch.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import openreg_ops  # noqa: F401  `import torch` does it, where the package is installed

BATCH, WIDTH = 64, 32
TOLERANCE = 1e-5  # gradients are summed in another order


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 1)).to("openreg")


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every process: x, and a function of it to learn."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(steps)]
    return [(x, x.square().mean(1, keepdim=True)) for x in xs]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for x, y in data:
        loss = nn.functional.mse_loss(model(x.to("openreg")), y.to("openreg"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group()  # the device's backend; torchrun's environment gives the ranks
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.openreg.set_device(rank % torch.openreg.device_count())
    data = batches(steps)

    model = DistributedDataParallel(make_model())
    parts = [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in data]
    losses = torch.tensor(train(model, parts), device="openreg")
    dist.all_reduce(losses)
    losses = (losses / size).tolist()

    status = 0
    if rank == 0:
        alone = train(make_model(), data)
        difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        status = int(difference > TOLERANCE)
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # of each kind of device
        print(f"{size} processes, backend {backends['openreg']}, {steps} steps of a batch of {BATCH}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; one process: {alone[0]:.4f} -> {alone[-1]:.4f}")
        print(f"largest difference {difference:.1e} ({'within' if not status else 'MORE THAN'} rounding)")
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
