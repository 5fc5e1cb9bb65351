"""torchrun, a device mesh, tensor parallelism, and a distributed checkpoint."""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main(folder):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    assert dist.get_rank() == local_rank and mesh.device_type == "cuda"
    reference = MLP()
    model = parallelize_module(MLP().cuda(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert isinstance(model.up.weight, DTensor) and model.up.weight.to_local().shape == (16, 8)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01, foreach=True) for part in (model, reference)]
    torch.manual_seed(5)
    for _ in range(3):
        x = torch.randn(4, 8)
        for part, optimizer, batch in zip((model, reference), optimizers, (x.cuda(), x), strict=True):
            optimizer.zero_grad()
            part(batch).square().mean().backward()
            optimizer.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor().cpu(), value, rtol=1e-3, atol=1e-5)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        model.up.weight.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    torch.testing.assert_close(model.up.weight.full_tensor().cpu(), reference.up.weight, rtol=1e-3, atol=1e-5)
    plain = {"model": MLP().state_dict()}  # one tensor from the parts of both ranks
    dcp.load(plain, checkpoint_id=folder)
    torch.testing.assert_close(plain["model"]["down.weight"], reference.down.weight.detach(), rtol=1e-3, atol=1e-5)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            subprocess.run([*launcher, __file__, folder], check=True)
