"""FullyShardedDataParallel with an auto-wrap policy and full state dictionaries, against one process."""

import functools
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

warnings.simplefilter("ignore")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def worker(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(1)
    data = [(torch.randn(8, 8), torch.randn(8, 3)) for _ in range(3)]
    reference = make_model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        optimizer.step()
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    for options, tolerance in (
        ({"use_orig_params": True}, 1e-3),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": CPUOffload(offload_params=True)}, 1e-3),
        ({"mixed_precision": half, "use_orig_params": True}, 5e-2),
    ):
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=500)
        model = FSDP(make_model(), auto_wrap_policy=policy, device_id=torch.cuda.current_device(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in data:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rank::2].cuda()).float(), y[rank::2].cuda())
            loss.backward()
            optimizer.step()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
            state = model.state_dict()
        if rank == 0:
            for name, value in reference.state_dict().items():
                assert state[name].device.type == "cpu"
                torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)
            torch.save(state, os.path.join(folder, "model.pt"))
        dist.barrier()
        loaded = make_model()
        loaded.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
        torch.testing.assert_close(loaded(data[0][0]), reference(data[0][0]), rtol=tolerance, atol=tolerance)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=2)
