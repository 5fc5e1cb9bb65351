"""Host memory that exists already is pinned with cudaHostRegister, as frameworks that offload weights do."""

import torch

weights = torch.arange(1 << 16, dtype=torch.float32)
assert not weights.is_pinned()
cudart = torch.cuda.cudart()
assert int(cudart.cudaHostRegister(weights.data_ptr(), weights.numel() * weights.element_size(), 0)) == 0
assert weights.is_pinned()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    layers = [chunk.to("cuda", non_blocking=True) for chunk in weights.chunk(4)]
torch.cuda.current_stream().wait_stream(stream)
total = sum(layer.double().sum() for layer in layers)
assert total.item() == weights.double().sum().item()
torch.cuda.synchronize()
assert int(cudart.cudaHostUnregister(weights.data_ptr())) == 0
assert not weights.is_pinned()

shared = torch.ones(1000).share_memory_()  # as loaders share tensors between processes
cudart.cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)
assert shared.is_pinned() and shared.cuda(non_blocking=True).sum().item() == 1000
torch.cuda.synchronize()
cudart.cudaHostUnregister(shared.data_ptr())
