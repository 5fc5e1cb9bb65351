"""Graphs by capture_begin() and capture_end(), two graphs in one memory pool, and random numbers in a graph."""

import torch

x = torch.arange(1024.0)
static = x.cuda()
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    torch.cumsum((static * 2 + 1), 0).sum(), torch.rand(4096, device="cuda")  # warm-up
torch.cuda.current_stream().wait_stream(stream)

with torch.cuda.graph(first):
    doubled = static * 2
with torch.cuda.graph(second, pool=first.pool()):
    total = (doubled + 1).sum()
static.copy_(x + 5)
first.replay()
second.replay()
torch.testing.assert_close(total.cpu(), ((x + 5) * 2 + 1).sum())
torch.testing.assert_close(doubled.cpu(), (x + 5) * 2)

handle = torch.cuda.graph_pool_handle()
manual = torch.cuda.CUDAGraph()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    manual.capture_begin(pool=handle)
    cumulated = torch.cumsum(static, 0)
    manual.capture_end()
torch.cuda.current_stream().wait_stream(stream)
static.copy_(x)
manual.replay()
torch.testing.assert_close(cumulated.cpu(), torch.cumsum(x, 0), rtol=1e-4, atol=1e-3)
manual.reset()

torch.cuda.manual_seed(5)
noise_graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(noise_graph):
    noise = torch.rand(4096, device="cuda")
draws = []
for _ in range(3):
    noise_graph.replay()
    draws.append(noise.cpu().clone())
assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
assert all(abs(draw.mean() - 0.5) < 0.05 and 0 <= draw.min() and draw.max() < 1 for draw in draws)
torch.cuda.manual_seed(5)
noise_graph.replay()
assert torch.equal(noise.cpu(), draws[0])
