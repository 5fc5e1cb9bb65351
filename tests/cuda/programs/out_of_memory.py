"""Out of memory: caught, and the batch is halved until it fits, as accelerate's find_executable_batch_size does."""

import gc

import torch

MiB = 1 << 20
try:
    torch.empty(10**15, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    assert "CUDA out of memory. Tried to allocate" in str(error), error
    assert "GPU 0 has a total capacity of" in str(error), error
    assert isinstance(error, RuntimeError) and torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
else:
    raise AssertionError("allocated a petabyte")

whole = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(160 * MiB / whole, 0)


def should_reduce_batch_size(error):
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def with_halved_batches(function, size):
    sizes = []
    while True:
        sizes.append(size)
        try:
            return function(size), sizes
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        size //= 2


def run(batch):
    x = torch.full((batch, MiB // 4), 2.0, device="cuda")  # 1 MiB for each row
    return (x * 3).sum(dim=1).cpu()


result, sizes = with_halved_batches(run, 256)
assert sizes == [256, 128, 64], sizes
assert torch.equal(result, torch.full((64,), 6.0 * MiB / 4))
assert torch.cuda.memory_stats()["num_ooms"] >= 3
torch.cuda.set_per_process_memory_fraction(1.0)
assert torch.equal(run(128), torch.full((128,), 6.0 * MiB / 4))
try:
    kept = [torch.empty(10**15, dtype=torch.uint8, device="cuda:1")]
except RuntimeError as error:
    assert "CUDA out of memory" in str(error) and "GPU 1" in str(error), error
assert torch.ones(2, device="cuda:1").sum().item() == 2
