"""torch.cuda.comm: broadcast, scatter, gather, reduce_add, and their coalesced forms."""

import torch
from torch.cuda import comm
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

x = torch.arange(12.0).reshape(6, 2)
copies = comm.broadcast(x.cuda(), devices=[0, 1])
assert [tensor.device.index for tensor in copies] == [0, 1]
assert all(torch.equal(tensor.cpu(), x) for tensor in copies)
target = torch.zeros(6, 2, device="cuda:1")
comm.broadcast(x.cuda(), out=[torch.zeros(6, 2, device="cuda:0"), target])
assert torch.equal(target.cpu(), x)
chunks = comm.scatter(x.cuda(), devices=[0, 1], chunk_sizes=[4, 2], dim=0)
assert [chunk.device.index for chunk in chunks] == [0, 1]
assert torch.equal(chunks[0].cpu(), x[:4]) and torch.equal(chunks[1].cpu(), x[4:])
streams = [torch.cuda.Stream(device=index) for index in range(2)]
chunks = comm.scatter(x, devices=[0, 1], dim=1, streams=streams)
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
assert torch.equal(chunks[1].cpu(), x[:, 1:])
together = comm.gather(chunks, dim=1, destination=1)
assert together.device.index == 1 and torch.equal(together.cpu(), x)
assert comm.gather(chunks, dim=1, destination="cpu").device.type == "cpu"
total = comm.reduce_add([x.cuda(0), (x * 2).cuda(1)], destination=1)
assert total.device.index == 1 and torch.equal(total.cpu(), 3 * x)
many = [[torch.full((size,), float(index + 1), device=index) for size in (3, 1000, 7)] for index in range(2)]
sums = comm.reduce_add_coalesced(many, destination=0, buffer_size=1024)
assert all(tensor.device.index == 0 and torch.equal(tensor.cpu(), torch.full_like(tensor.cpu(), 3)) for tensor in sums)
first, second = comm.broadcast_coalesced(many[0], devices=[0, 1])
assert all(tensor.device.index == 1 and tensor.cpu().eq(1).all() for tensor in second)

module = torch.nn.Linear(2, 3).cuda()
inputs = scatter({"x": x.cuda(), "n": 5}, [0, 1])
assert inputs[1]["x"].device.index == 1 and inputs[1]["n"] == 5
replicas = replicate(module, [0, 1])
outputs = parallel_apply(replicas, [(part["x"],) for part in inputs])
result = gather(outputs, 0)
result.square().sum().backward()
weight = module.weight.detach().cpu().requires_grad_()
expected = x @ weight.t() + module.bias.detach().cpu()
expected.square().sum().backward()
torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)
torch.testing.assert_close(module.weight.grad.cpu(), weight.grad, rtol=1e-4, atol=1e-3)
