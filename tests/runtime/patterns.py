"""Patterns with several streams, from PyTorch's and NVIDIA's examples, each correct by default; what the host does."""

import io
import pickle

import torch
from torch import nn

DEVICE = "openreg"
current = torch.openreg.current_stream


def polled(end):
    while not end.query():
        pass


# Ways in which the host waits for the work of the current stream.
HOST_WAITS = {
    "stream": lambda: current().synchronize(),
    "event": lambda: current().record_event().synchronize(),
    "device": lambda: torch.openreg.synchronize(),
    "value": lambda: torch.ones(1, device=DEVICE).sum().item(),
    "poll": lambda: polled(current().record_event()),
    "poll, stream": lambda: polled(current()),
}
# Ways in which the host uses the values of a tensor in its memory.
HOST_READS = {
    "item": lambda host: host[3].item(),
    "sum": lambda host: host.sum(),
    "add": lambda host: host + 1,
    "view": lambda host: host.view(2, -1)[1] + 1,
    "to the device": lambda host: host.to(DEVICE),
    "numpy": lambda host: host.numpy(),
    "tolist": lambda host: host[:3].tolist(),
    "print": lambda host: str(host),
    "save": lambda host: torch.save({"host": host}, io.BytesIO()),
    "pickle": lambda host: pickle.dumps(host),
    "write": lambda host: host.zero_(),
}


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(DEVICE)


class Prefetcher:
    """The loader of NVIDIA's examples: copies the next batch on its own stream."""

    def __init__(self, loader, record=True):
        self.batches, self.record = iter(loader), record
        self.stream = torch.openreg.Stream()
        self.preload()

    def preload(self):
        self.next = next(self.batches, None)
        if self.next is None:
            return
        with self.stream:
            self.next = [x.to(DEVICE, non_blocking=True) for x in self.next]  # race
            self.next[0] = self.next[0].float().sub_(0.5)

    def __iter__(self):
        while self.next is not None:
            current().wait_stream(self.stream)
            batch = self.next
            for x in batch if self.record else ():
                x.record_stream(current())
            self.preload()
            yield batch


class Buckets:
    """DDP's overlap: as each gradient is ready, a side stream reduces it in a bucket."""

    def __init__(self, net, wait_before=True, wait_after=True):
        self.net, self.wait_before, self.wait_after = net, wait_before, wait_after
        self.side = torch.openreg.Stream()
        sizes = [p.numel() for p in net.parameters()]
        self.parts = torch.zeros(sum(sizes), device=DEVICE).split(sizes)
        for parameter, part in zip(net.parameters(), self.parts, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda parameter, part=part: self.ready(parameter, part))

    def ready(self, parameter, part):
        event = current().record_event()
        if self.wait_before:
            self.side.wait_event(event)
        with self.side:
            part.copy_(parameter.grad.view(-1), non_blocking=True)  # race
            part.div_(2)
        parameter.grad.record_stream(self.side)

    def backward(self):
        """Forward and backward of one batch, and the reduced gradients."""
        self.side.wait_stream(current())
        self.net(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        if self.wait_after:
            current().wait_stream(self.side)
        for parameter, part in zip(self.net.parameters(), self.parts, strict=True):
            parameter.grad.view(-1).copy_(part)  # race


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors wait in pinned memory, copied on a side stream; `recorded` and `waited` are what that needs."""

    def __init__(self, recorded=True, waited=True):
        side = torch.openreg.Stream()

        def pack(x):
            side.wait_stream(current())
            with side:
                host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                host.copy_(x, non_blocking=True)
            if recorded:
                x.record_stream(side)
            return host

        def unpack(host):
            with side:
                x = host.to(DEVICE, non_blocking=True)
            if waited:
                current().wait_stream(side)
            x.record_stream(current())
            return x

        super().__init__(pack, unpack)
