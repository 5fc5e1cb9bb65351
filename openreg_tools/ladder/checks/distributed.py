"""Rung 11: two processes communicate over the device's own c10d backend."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from openreg_tools.core.child import Child, Ended
from openreg_tools.ladder.rung import check, imports

_SECTION = "Extending dispatcher: Future Work"
_FILE = "csrc/distributed.cpp"
_BEGIN = """
import datetime, sys, torch
import torch.distributed as dist
sys.path[:0] = {path!r}
from openreg_tools.core.child import parent
ladder = parent()
for module in {modules!r}:
    __import__(module)
rank, size = int(sys.argv[1]), 2
count = torch.accelerator.device_count()
torch.accelerator.set_device_index(rank % count)
device = torch.device({kind!r}, rank % count)
dist.init_process_group(store=dist.FileStore(sys.argv[2], size), rank=rank, world_size=size,
                        timeout=datetime.timedelta(seconds=100){options})
sys.excepthook = sys.__excepthook__  # c10d's begins each line with the rank

def same(found, expected, what):
    assert found.device == device, f"{{what}} is on {{found.device}}"
    assert found.tolist() == expected, f"rank {{rank}}: {{what}} gives {{found.tolist()}}, expected {{expected}}"
"""
_END = """
dist.barrier()
dist.destroy_process_group()
ladder.answer("done")
"""


def _run(device: str, program: str, options: str = "") -> None:
    """Run a program in two processes, and raise the first one's error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rank.py")
        begin = _BEGIN.format(path=sys.path, modules=imports(), kind=torch.device(device).type, options=options)
        file.write_text(begin + program + _END)
        ranks = [
            Child.start([sys.executable, "-P", str(file), str(rank), str(Path(folder, "store"))]) for rank in (0, 1)
        ]
        try:
            said = [_end(rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.stop()
    assert not any(said), next(filter(None, said))


def _end(rank: Child) -> str:
    """How a rank failed, "" if it did its work."""
    try:
        rank.read(120)
    except Ended as error:
        return str(error)
    return ""


@check("torch_acme/__init__.py", _SECTION, "call torch.distributed.Backend.register_backend(name, …, devices=[name])")
def registered(device: str) -> None:
    """The device has a default backend, and it is initialized."""
    if not torch.distributed.is_available():
        raise AssertionError("this torch is built without torch.distributed")
    kind = torch.device(device).type
    found = torch.distributed.Backend.default_device_backend_map.get(kind)
    assert found, f"torch.distributed.Backend.default_device_backend_map has no backend for {kind}"
    _run(device, "assert dist.get_rank() == rank and dist.get_world_size() == 2\n")


@check(_FILE, _SECTION, "implement allreduce for every ReduceOp and dtype")
def all_reduce(device: str) -> None:
    """all_reduce combines the ranks' tensors."""
    _run(device, """
for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
    x = torch.tensor([1, 2, 3], dtype=dtype, device=device) * (rank + 1)
    dist.all_reduce(x)
    same(x, [3, 6, 9], f"all_reduce of {dtype}")
x = torch.tensor([5.0, -1.0], device=device) if rank else torch.tensor([2.0, 4.0], device=device)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
same(x, [5, 4], "all_reduce with MAX")
work = dist.all_reduce(y := torch.ones(1000, device=device), async_op=True)
work.wait()
same(y + 1, [3.0] * 1000, "all_reduce with async_op=True, and an addition after wait()")
""")  # fmt: skip


@check(_FILE, _SECTION, "implement broadcast, allgather, _allgather_base and _reduce_scatter_base")
def gathers(device: str) -> None:
    """broadcast, all_gather and reduce_scatter move the right parts."""
    _run(device, """
x = torch.full((2,), float(rank), device=device)
dist.broadcast(x, src=1)
same(x, [1, 1], "broadcast from rank 1")
mine = torch.tensor([10.0 * rank, 1.0], device=device)
parts = [torch.empty(2, device=device) for _ in range(size)]
dist.all_gather(parts, mine)
same(torch.cat(parts), [0, 1, 10, 1], "all_gather")
whole = torch.empty(4, device=device)
dist.all_gather_into_tensor(whole, mine)
same(whole, [0, 1, 10, 1], "all_gather_into_tensor")
part = torch.empty(2, device=device)
dist.reduce_scatter_tensor(part, torch.arange(4.0, device=device) * (rank + 1))
same(part, [[0, 3], [6, 9]][rank], "reduce_scatter_tensor")
""")  # fmt: skip


@check(_FILE, _SECTION, "implement send, recv and barrier")
def sends(device: str) -> None:
    """send and recv move a tensor between two ranks."""
    _run(device, """
x = torch.arange(5.0, device=device) + 10 * rank
y = torch.zeros(5, device=device)
if rank == 0:
    dist.send(x, 1)
    dist.recv(y, 1)
    same(y, [10, 11, 12, 13, 14], "recv from rank 1")
else:
    dist.recv(y, 0)
    dist.send(x, 0)
    same(y, [0, 1, 2, 3, 4], "recv from rank 0")
""")  # fmt: skip


@check(_FILE, _SECTION, "DistributedDataParallel needs broadcast, allreduce and Work.getFuture()")
def data_parallel(device: str) -> None:
    """DistributedDataParallel averages gradients."""
    _run(device, """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))
model(torch.full((3, 4), float(rank + 1), device=device)).sum().backward()
same(model.module.weight.grad, [[4.5] * 4] * 2, "a gradient of DistributedDataParallel")
""")  # fmt: skip
