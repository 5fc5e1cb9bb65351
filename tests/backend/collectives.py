"""Collectives that several tests make. Each takes this process's matrix and a group, and starts one.

It returns the tensors that the collective reads, those that it writes, and its Work. Nothing waits for it.
"""

import torch
import torch.distributed as dist


def shifted(x):
    return [(x + i).to(x.dtype) for i in range(dist.get_world_size())]


def broadcast(x, group=None):
    work = dist.broadcast(x, 1, group=group, async_op=True)
    return ([x], [], work) if dist.get_rank() == 1 else ([], [x], work)


def all_reduce(x, group=None):
    return [], [x], dist.all_reduce(x, group=group, async_op=True)


def all_reduce_max(x, group=None):
    return [], [x], dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)


def all_reduce_coalesced(x, group=None):
    xs = [x, x[:1].clone()]
    return [], xs, dist.all_reduce_coalesced(xs, group=group, async_op=True)


def reduce(x, group=None):
    work = dist.reduce(x, 0, group=group, async_op=True)
    return [], [x] if dist.get_rank() == 0 else [], work


def all_gather(x, group=None):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    return [x], out, dist.all_gather(out, x, group=group, async_op=True)


def all_gather_into_tensor(x, group=None):
    out = x.new_empty(x.size(0) * dist.get_world_size(), *x.shape[1:])
    return [x], [out], dist.all_gather_into_tensor(out, x, group=group, async_op=True)


def all_gather_into_its_own_input(x, group=None):
    size, rank = dist.get_world_size(), dist.get_rank()
    out = x.repeat(size, 1)
    return [], [out], dist.all_gather_into_tensor(out, out.chunk(size)[rank], group=group, async_op=True)


def all_gather_coalesced(x, group=None):
    out = [[torch.empty_like(x), torch.empty_like(x[0])] for _ in range(dist.get_world_size())]
    work = dist.all_gather_coalesced(out, [x, x[0]], group=group, async_op=True)
    return [x], [each for row in out for each in row], work


def gather(x, group=None):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    return [x], out or [], dist.gather(x, out, dst=1, group=group, async_op=True)


def scatter(x, group=None):
    parts = shifted(x) if dist.get_rank() == 1 else None
    out = torch.empty_like(x)
    return parts or [], [out], dist.scatter(out, parts, src=1, group=group, async_op=True)


def reduce_scatter(x, group=None):
    out, parts = torch.empty_like(x), shifted(x)
    return parts, [out], dist.reduce_scatter(out, parts, group=group, async_op=True)


def reduce_scatter_tensor(x, group=None):
    out, whole = torch.empty_like(x), x.repeat(dist.get_world_size(), 1)
    return [whole], [out], dist.reduce_scatter_tensor(out, whole, group=group, async_op=True)


def all_to_all_single(x, group=None):
    size = dist.get_world_size()
    given, out = x.repeat(2 * size, 1)[: 2 * size], x.new_empty(size * 2, *x.shape[1:])
    return [given], [out], dist.all_to_all_single(out, given, group=group, async_op=True)


def all_to_all_of_unequal_parts(x, group=None):
    size, rank = dist.get_world_size(), dist.get_rank()
    given = x[:1].repeat(size * (rank + 1), 1)
    out = x.new_empty(sum(range(size + 1)), *x.shape[1:])
    sizes = list(range(1, size + 1)), [rank + 1] * size
    return [given], [out], dist.all_to_all_single(out, given, *sizes, group=group, async_op=True)


def all_to_all(x, group=None):
    out, parts = [torch.empty_like(x) for _ in range(dist.get_world_size())], shifted(x)
    return parts, out, dist.all_to_all(out, parts, group=group, async_op=True)


def ring(x, group=None):
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty_like(x)
    sent = dist.isend(x, (rank + 1) % size, group=group, tag=3)
    received = dist.irecv(out, (rank - 1) % size, group=group, tag=3)
    sent.wait()
    return [x], [out], received


def batch(x, group=None):
    """The receive comes first, so it must not wait before the send begins."""
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.irecv, out, (rank - 1) % size, group),
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works[:-1]:  # the device has one for all
        work.wait()
    return [x], [out], works[-1]


def receive_from_any(x, group=None):
    if dist.get_rank() == 1:
        dist.send(x, 0, group=group)
    elif dist.get_rank() == 0:
        assert dist.recv(x, group=group) == 1
    return [], [x], None


def sparse_all_reduce(x, group=None):
    rows = torch.tensor([[0, 2 + dist.get_rank()]], device=x.device)
    x = torch.sparse_coo_tensor(rows, x[:2], (8, x.size(1)))
    return [], [x], dist.all_reduce(x, group=group, async_op=True)


COLLECTIVES = [
    broadcast, all_reduce, all_reduce_max, all_reduce_coalesced, reduce, all_gather, all_gather_into_tensor,
    all_gather_into_its_own_input, all_gather_coalesced, gather, scatter, reduce_scatter, reduce_scatter_tensor,
    all_to_all_single, all_to_all_of_unequal_parts, all_to_all, ring, batch, receive_from_any, sparse_all_reduce,
]  # fmt: skip
