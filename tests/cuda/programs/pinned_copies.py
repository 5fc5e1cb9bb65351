"""Copies between pinned memory and a GPU that do not block, both ways."""

import torch

values = torch.randn(64, 128)
pinned = values.pin_memory()
assert pinned.is_pinned() and not values.is_pinned() and torch.equal(pinned, values)
assert pinned.pin_memory() is pinned
assert torch.empty(8, pin_memory=True).is_pinned()
assert torch.zeros_like(pinned, pin_memory=True).is_pinned()

on_gpu = torch.empty(64, 128, device="cuda")
on_gpu.copy_(pinned, non_blocking=True)
squares = on_gpu.square()
back = torch.empty(64, 128, pin_memory=True)
back.copy_(squares, non_blocking=True)
torch.cuda.current_stream().synchronize()
torch.testing.assert_close(back, values.square())

stream = torch.cuda.Stream()
chunks = []
done = torch.cuda.Event()
with torch.cuda.stream(stream):
    for chunk in pinned.chunk(4):
        chunks.append(chunk.to("cuda", non_blocking=True).sum(dim=0))
    done.record()
torch.cuda.current_stream().wait_event(done)
total = torch.stack(chunks).sum(dim=0)
torch.testing.assert_close(total.cpu(), values.sum(dim=0), rtol=1e-4, atol=1e-4)

transposed = values.t().pin_memory()
assert transposed.shape == (128, 64) and torch.equal(transposed.cuda(non_blocking=True).cpu(), values.t())
narrow = torch.empty(64, 128, dtype=torch.float16, pin_memory=True)
narrow.copy_(on_gpu)
assert torch.equal(narrow, values.half())
strided = on_gpu[::2, ::3].to("cpu", non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(strided, values[::2, ::3])
try:
    on_gpu.pin_memory()
except RuntimeError as error:
    assert "cannot pin" in str(error), error
else:
    raise AssertionError("pinned a CUDA tensor")
