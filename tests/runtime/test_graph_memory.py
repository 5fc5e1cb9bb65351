"""Memory of graphs and of private pools: our versions of PyTorch's tests of CUDA."""

import gc
import threading

import pytest
import torch
from graph_kit import DEVICE, inside, settled
from stream_kit import captured, in_threads

# ---- memory of a graph ----


@pytest.mark.parametrize("elements", [100, 1 << 20], ids=["small", "large"])
def test_a_result_outlives_its_graph(elements):
    settled()
    before = torch.openreg.memory_allocated(DEVICE)
    x = torch.full((elements,), 2.0, device=DEVICE)
    graph, y = captured(lambda x=x: (x + 1) * (x + 2))
    inside, pool = torch.openreg.memory_allocated(DEVICE), graph.pool()
    graph.replay()
    graph.reset()
    del graph
    settled()
    others = [torch.zeros(elements, device=DEVICE) for _ in range(4)]
    z = y + 1
    assert z.unique().tolist() == [13.0] and y.unique().tolist() == [12.0]
    assert inside > before
    del others, x, y, z
    settled()
    assert torch.openreg.memory_allocated(DEVICE) == before
    assert not torch.openreg.memory_snapshot(device=DEVICE, mempool_id=pool)


def test_what_a_joined_stream_allocates_is_of_the_pool():
    x, side = torch.ones(1000, device=DEVICE), torch.openreg.Stream()

    def body():
        main = torch.openreg.current_stream()
        side.wait_stream(main)
        with side:
            y = x + 1
        main.wait_stream(side)
        return y

    graph, y = captured(body)
    segments = torch.openreg.memory_snapshot(device=DEVICE, mempool_id=graph.pool())
    assert any(s["address"] <= y.data_ptr() < s["address"] + s["total_size"] for s in segments)
    assert {s["stream"] for s in segments} >= {side.stream_id}


def test_memory_that_another_stream_uses_does_not_break_a_capture():
    """An allocation in a capture asks for no event; what is freed in it waits until the capture is over."""
    with torch.openreg.launch_mode("async"):
        busy, x = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        before, side = torch.openreg.Stream(), torch.openreg.Stream()
        torch.openreg.synchronize()
        with before:
            busy.record_stream(before)
            torch.openreg._sleep(200_000_000)
            busy.fill_(1)
        address = busy.data_ptr()
        del busy
        graph, stream = torch.openreg.Graph(), torch.openreg.Stream()
        with stream:
            graph.capture_begin()
            y = x.clone()
            assert y.data_ptr() != address
            side.wait_stream(stream)
            with side:
                y.fill_(1)
                y.record_stream(side)
                del y
            stream.wait_stream(side)
            z = x + 2
            graph.capture_end()
        torch.openreg.synchronize()
        torch.zeros(3, device=DEVICE)
        graph.replay()
        torch.openreg.synchronize()
    assert z.tolist() == [2.0] * 3


def test_memory_that_three_streams_read_is_kept_until_all_are_joined():
    x, sides = torch.ones(1 << 12, device=DEVICE), [torch.openreg.Stream() for _ in range(3)]

    def body():
        main = torch.openreg.current_stream()
        y, out, fresh = x * 2, [], []
        for i, side in enumerate(sides):
            side.wait_stream(main)
            with side:
                out.append(y + i)
            y.record_stream(side)
        del y
        main.wait_stream(sides[0])
        fresh.append(torch.full((1 << 12,), 7.0, device=DEVICE))
        sides[1].wait_stream(sides[2])
        fresh.append(torch.full((1 << 12,), 8.0, device=DEVICE))
        main.wait_stream(sides[1])
        fresh.append(torch.full((1 << 12,), 9.0, device=DEVICE))
        return out, fresh

    graph, (out, fresh) = captured(body)
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert [t.unique().tolist() for t in out] == [[2 * value + i] for i in range(3)]
        assert [t.unique().tolist() for t in fresh] == [[7.0], [8.0], [9.0]]


def test_a_later_graph_of_the_pool_gets_what_was_freed_between_captures():
    """Their replays must therefore keep the order of the captures."""
    x = torch.ones(1000, device=DEVICE)
    a, y = captured(lambda: [x + 1, x + 2])
    first, second = y
    address = first.data_ptr()
    b, z = captured(lambda first=first: first + 3, pool=a.pool())
    del y, first
    c, w = captured(lambda: second + 4, pool=a.pool())
    for graph in (a, b, c):
        graph.replay()
    assert (z[0].item(), w[0].item(), w.data_ptr() == address) == (5.0, 7.0, True)
    for graph in (a, c, b):
        graph.replay()
    assert (z[0].item(), w[0].item()) == (10.0, 7.0), "z was computed from w"


# ---- pinned memory ----


def test_pinned_memory_that_a_capture_has_freed():
    """It is free if the graph did not copy it, and otherwise once the graph is gone."""

    def active():
        settled()
        return torch.openreg.host_memory_stats()["active_bytes.current"]

    def body(copied):
        y.add_(1)
        for _ in range(3):
            x = torch.ones(1 << 16).pin_memory()
            if copied:
                y.copy_(x, non_blocking=True)
            del x

    y = torch.zeros(1 << 16, device=DEVICE)
    before = active()
    graph, _ = captured(lambda: body(False), capture_error_mode="thread_local")
    assert active() == before
    graph, _ = captured(lambda: body(True), capture_error_mode="thread_local")
    assert active() == before + 3 * y.nbytes
    del graph
    assert active() == before


@pytest.mark.parametrize("to", ["device", "host"])
def test_pinned_memory_that_a_capture_copied_is_kept_for_its_replays(to):
    """Even after the program has freed it, during the capture or after it."""
    y = torch.zeros(8, device=DEVICE)

    def body():
        pinned = torch.arange(8.0).pin_memory()
        (y.copy_(pinned, non_blocking=True) if to == "device" else pinned.copy_(y, non_blocking=True))
        address = pinned.data_ptr()
        del pinned
        other = torch.full((8,), -1.0).pin_memory()
        return address, other

    graph, (address, other) = captured(body, capture_error_mode="thread_local")
    others = [other, *(torch.full((8,), -1.0).pin_memory() for _ in range(20))]
    assert address not in {x.data_ptr() for x in others}
    graph.replay()
    torch.openreg.synchronize()
    assert all(x.tolist() == [-1.0] * 8 for x in others)
    if to == "device":
        assert y.tolist() == list(range(8))


# ---- pools ----


def test_pools_of_several_threads_have_numbers_of_their_own():
    assert len(set(in_threads(*[lambda: torch.openreg.MemPool().id] * 4))) == 4


def test_nested_pools():
    outer, inner = torch.openreg.MemPool(), torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(outer):
        x = torch.ones(1000, device=DEVICE)
        with torch.openreg.use_mem_pool(inner):
            y = torch.ones(1000, device=DEVICE)
        z = torch.ones(1000, device=DEVICE)
    assert inside(outer, x) and inside(inner, y) and inside(outer, z)
    assert not inside(outer, y)


def test_a_pool_is_used_by_one_thread():
    """The other allocates from the general pool, or from the pool that it uses itself."""
    pools = [torch.openreg.MemPool() for _ in range(2)]
    made, barrier = {}, threading.Barrier(3)

    def work(i):
        with torch.openreg.use_mem_pool(pools[i]):
            barrier.wait()
            made[i] = torch.ones(1000, device=DEVICE)
            barrier.wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    barrier.wait()
    mine = torch.ones(1000, device=DEVICE)
    barrier.wait()
    for each in threads:
        each.join()
    assert [[inside(pool, made[i]) for pool in pools] for i in range(2)] == [[True, False], [False, True]]
    assert not any(inside(pool, mine) for pool in pools)


def test_a_thread_that_ends_leaves_its_pool():
    from openreg_ops import _C

    pool = torch.openreg.MemPool()
    [(_, made)] = in_threads(lambda: (_C.use_pool(0, pool.id), torch.ones(1000, device=DEVICE)))
    assert inside(pool, made)
    assert not inside(pool, torch.ones(1000, device=DEVICE))


def test_a_capture_in_a_pool_of_the_program():
    pool = torch.openreg.MemPool()
    x = torch.ones(1000, device=DEVICE)
    graph, y = captured(lambda: x + 1, pool=pool.id)
    assert graph.pool() == pool.id and inside(pool, y)
    with torch.openreg.use_mem_pool(pool):
        z = torch.zeros(1000, device=DEVICE)
    graph.replay()
    assert y.unique().tolist() == [2.0] and z.unique().tolist() == [0.0]


def test_memory_of_a_pool_that_is_gone_goes_to_others():
    settled()
    pool, x = torch.openreg.MemPool(), torch.empty(1 << 20, device=DEVICE)
    with torch.openreg.use_mem_pool(pool):
        y = torch.empty(1 << 20, device=DEVICE)
    start, end = y.data_ptr(), y.data_ptr() + y.nbytes
    del x, y
    before = torch.openreg.memory_reserved(DEVICE)
    top = max(each["address"] + each["total_size"] for each in torch.openreg.memory_snapshot(device=DEVICE))

    def another():
        z = torch.empty(3 << 20, dtype=torch.int8, device=DEVICE)
        return z, start < z.data_ptr() + z.nbytes and z.data_ptr() < end

    held = []  # every gap that earlier tests left: the allocator takes the smallest that is enough
    while not held or held[-1].data_ptr() < top:
        z, reused = another()
        assert not reused
        held.append(z)
    del pool
    gc.collect()
    z, reused = another()
    assert reused
    del z, held
    torch.openreg.empty_cache()
    assert torch.openreg.memory_reserved(DEVICE) <= before - (8 << 20)


def test_a_tensor_outlives_its_pool():
    settled()
    before = torch.openreg.memory_reserved(DEVICE)

    def made():
        pool = torch.openreg.MemPool()
        with torch.openreg.use_mem_pool(pool):
            return torch.arange(1 << 20, device=DEVICE), pool.id

    x, number = made()
    settled()
    others = [torch.zeros(1 << 20, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    assert torch.equal(x.cpu(), torch.arange(1 << 20))
    del x, others
    settled()
    assert not torch.openreg.memory_snapshot(device=DEVICE, mempool_id=number)
    assert torch.openreg.memory_reserved(DEVICE) <= before


def test_empty_cache_leaves_a_pool_that_is_in_use():
    """On each of four threads."""
    pools = [torch.openreg.MemPool() for _ in range(4)]

    def work(pool):
        with torch.openreg.use_mem_pool(pool):
            x = torch.randn(4, device=DEVICE)
            del x
            torch.openreg.empty_cache()

    in_threads(*(lambda pool=pool: work(pool) for pool in pools))
    assert [len(pool.snapshot()) for pool in pools] == [1] * 4


def test_free_memory_of_a_pool_goes_to_no_other_thread():
    pool, barrier, made = torch.openreg.MemPool(), threading.Barrier(2), []

    def work():
        with torch.openreg.use_mem_pool(pool):
            x = torch.empty(1 << 20, dtype=torch.int8, device=DEVICE)
            del x
            barrier.wait()
            barrier.wait()

    thread = threading.Thread(target=work)
    thread.start()
    barrier.wait()
    made = [torch.empty(1 << 20, dtype=torch.int8, device=DEVICE) for _ in range(3)]
    active = [segment["active_size"] for segment in pool.snapshot()]
    barrier.wait()
    thread.join()
    assert not any(inside(pool, x) for x in made) and active and not any(active)


@pytest.mark.parametrize("size", [1000, 1 << 16])
def test_empty_cache_of_a_graphs_pool_takes_nothing_from_the_graph(size):
    """What the graph frees between its nodes is written again by each replay, so no other tensor may get it."""
    x, graph = torch.ones(size, device="openreg"), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        between = x + 1
        address = between.data_ptr()
        y = between * 2
        del between
    torch.openreg.empty_cache(graph.pool())
    others = [torch.full((size,), 7.0, device="openreg") for _ in range(50)]
    assert address not in {each.data_ptr() for each in others}
    graph.replay()
    assert y.unique().tolist() == [4] and all(each.unique().tolist() == [7] for each in others)
