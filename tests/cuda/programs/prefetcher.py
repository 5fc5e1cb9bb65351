"""NVIDIA's data prefetcher: the next batch is copied and normalized on a side stream."""

import torch
from torch.utils.data import DataLoader, TensorDataset


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485, 0.456, 0.406]).mul(255).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225]).mul(255).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
            self.preload()
        return input, target


images = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8)
labels = torch.arange(60)
loader = DataLoader(TensorDataset(images, labels), batch_size=8, pin_memory=True)
prefetcher = Prefetcher(loader)
sums, seen = [], []
input, target = prefetcher.next()
while input is not None:
    sums.append(input.sum(dim=(1, 2, 3)))
    seen.append(target)
    input, target = prefetcher.next()
torch.cuda.synchronize()

mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1) * 255
std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1) * 255
expected = ((images.float() - mean) / std).sum(dim=(1, 2, 3))
assert torch.equal(torch.cat(seen).cpu(), labels)
torch.testing.assert_close(torch.cat(sums).cpu(), expected, rtol=1e-4, atol=1e-2)
