"""How much memory a program uses, by the functions of torch.cuda's memory management."""

import torch

MiB = 1 << 20
device = torch.device("cuda:0")
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
x = torch.ones(1024, 1024, device=device)
assert torch.cuda.memory_allocated() - before == 4 * MiB
y = torch.ones(2048, 1024, device=device)
assert torch.cuda.memory_allocated(device) - before == 12 * MiB
assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
total = (x.sum() + y.sum()).item()
assert total == 3 * MiB
del y
assert torch.cuda.memory_allocated() - before < 5 * MiB
assert torch.cuda.max_memory_allocated() - before >= 12 * MiB
assert torch.cuda.max_memory_reserved() >= torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
torch.cuda.synchronize()
reserved = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() <= torch.cuda.memory_reserved() <= reserved

free, whole = torch.cuda.mem_get_info()
assert 0 < free <= whole and abs(whole / torch.cuda.get_device_properties(0).total_memory - 1) < 0.1
assert torch.cuda.mem_get_info(1)[1] > 0 and len(torch.cuda.mem_get_info("cuda:1")) == 2
stats = torch.cuda.memory_stats()
assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
assert stats["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
assert stats["num_ooms"] == 0 and stats["active.all.current"] >= 1 and stats["allocation.all.allocated"] >= 2
summary = torch.cuda.memory_summary(device=0, abbreviated=False)
assert "PyTorch CUDA memory summary, device ID 0" in summary and "cudaMalloc retries" in summary
assert "Allocated memory" in torch.cuda.memory_summary(abbreviated=True) and "OOMs" in summary

with torch.cuda.device(1):
    before = torch.cuda.memory_allocated()
    z = torch.ones(MiB // 4, device="cuda")
    assert torch.cuda.memory_allocated(1) - before == MiB == torch.cuda.memory_allocated() - before
small = torch.ones(1, device="cuda:1")  # rounded up to the allocator's smallest block
assert 4 <= torch.cuda.memory_allocated(1) - before - MiB <= 512
blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
assert allocated == torch.cuda.memory_allocated(0) + torch.cuda.memory_allocated(1)


def peak(function):
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - base


assert peak(lambda: x + 1 + 1) == 8 * MiB  # the intermediate result and the result
assert peak(lambda: (x + 1).add_(1)) == 4 * MiB
assert torch.cuda.get_allocator_backend() == "native"
