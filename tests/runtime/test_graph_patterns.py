"""What PyTorch's own tests of CUDA graphs and memory pools check, in our words; docs/graphs.md lists what has no meaning.

Its other tests are in test_graphs.py, test_capture_sanitizer.py and tests/aten/test_captured.py.
"""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

DEVICE = "openreg:0"


def captured(f, **options):
    """A graph of f(), and what f returned."""
    g = torch.openreg.Graph()
    with torch.openreg.graph(g, **options):
        out = f()
    return g, out


def warmed_up(f):
    """Runs f() three times on a side stream."""
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with side:
        for _ in range(3):
            f()
    torch.openreg.current_stream().wait_stream(side)


def settled():
    torch.openreg.synchronize()
    gc.collect()
    torch.openreg.empty_cache()


# ---- the object ----


def test_an_empty_graph_warns():
    graph = torch.openreg.Graph()
    with pytest.warns(UserWarning, match="The graph is empty"), torch.openreg.graph(graph):
        pass
    graph.replay()


def test_captures_begin_and_end_once_and_on_one_stream():
    graph, other = torch.openreg.Graph(), torch.openreg.Graph()
    x, stream = torch.ones(3, device=DEVICE), torch.openreg.Stream()
    with torch.openreg.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="a capture that has not ended"):
            graph.capture_begin()
        with pytest.raises(torch.AcceleratorError, match="captured already"):
            other.capture_begin()
        y = x + 1
        graph.capture_end()
        with pytest.raises(RuntimeError, match="no capture has begun"):
            graph.capture_end()
    graph.replay()
    assert y.tolist() == [2.0] * 3


def test_a_capture_that_ends_on_another_stream_is_over():
    settled()
    before = torch.openreg.memory_allocated(DEVICE)
    stream, other = torch.openreg.Stream(), torch.openreg.Stream()
    graph = torch.openreg.Graph()
    with pytest.raises(torch.AcceleratorError, match="must end on the stream that it began on"):  # noqa: SIM117
        with torch.openreg.graph(graph, stream=stream):
            torch.zeros(1000, device=DEVICE)
            torch.openreg.set_stream(other)
    assert not stream.is_capturing() and torch.openreg.current_stream().stream_id == 0
    settled()
    assert torch.openreg.memory_allocated(DEVICE) == before
    with torch.openreg.graph(graph, stream=stream):
        y = torch.ones(3, device=DEVICE) + 1
    graph.replay()
    assert y.tolist() == [2.0] * 3


def test_too_little_memory_ends_a_capture_and_nothing_else():
    settled()
    x = torch.ones(3, device=DEVICE)
    before = torch.openreg.memory_allocated(DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        captured(lambda: (x * 2, torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)))
    settled()
    assert torch.openreg.memory_allocated(DEVICE) == before
    graph, y = captured(lambda: x * 2)
    graph.replay()
    assert y.tolist() == [2.0] * 3


def test_captures_again_and_again_take_no_more_memory():
    x, w = torch.ones(8, 8, device=DEVICE), torch.ones(8, 8, device=DEVICE)
    used = set()
    for _ in range(4):
        graph, y = captured(lambda: x @ w + x)
        graph.replay()
        assert y.unique().tolist() == [9.0]
        del graph, y
        settled()
        used.add(torch.openreg.memory_reserved(DEVICE))
    assert len(used) == 1


# ---- random numbers ----


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: nn.functional.dropout(x, 0.4),
        lambda x: nn.functional.rrelu(x - 0.5, training=True),
        lambda x: nn.functional.alpha_dropout(x, 0.3, training=True),
    ],
    ids=["dropout", "rrelu", "alpha_dropout"],
)
def test_replays_draw_between_eager_calls(draw):
    """The sequence of numbers goes on, whoever draws from it."""
    x = torch.rand(200, device=DEVICE)
    graph, y = captured(lambda: draw(draw(x)))
    torch.openreg.manual_seed(5)
    expected = [draw(draw(x)) for _ in range(5)]
    torch.openreg.manual_seed(5)
    for i, each in enumerate(expected):
        if i % 2:
            graph.replay()
            assert torch.equal(y, each)
        else:
            assert torch.equal(draw(draw(x)), each)


@pytest.mark.parametrize(
    ("draw", "options"),
    [
        ("normal_", {}),
        ("uniform_", {"from": -2, "to": 3}),
        ("exponential_", {"lambd": 2.0}),
        ("cauchy_", {}),
        ("log_normal_", {}),
        ("geometric_", {"p": 0.3}),
        ("random_", {"from": 0, "to": 1000}),
        ("bernoulli_", {"p": 0.3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_distributions(draw, options):
    x = torch.zeros(100, device=DEVICE)
    graph, _ = captured(lambda: getattr(x, draw)(**options))
    torch.openreg.manual_seed(7)
    expected = [getattr(torch.empty_like(x), draw)(**options) for _ in range(3)]
    torch.openreg.manual_seed(7)
    for each in expected:
        graph.replay()
        assert torch.equal(x, each)
    assert not torch.equal(expected[0], expected[1])


def test_graphs_with_two_generators():
    """Each draws on from where it is, in whichever graph; freeing the graphs frees their memory."""
    settled()
    before = torch.openreg.memory_allocated(DEVICE)
    own = torch.Generator(DEVICE)

    def draw():
        return torch.rand(9, device=DEVICE), torch.rand(9, device=DEVICE, generator=own)

    def both():
        graph = torch.openreg.Graph()
        graph.register_generator_state(own)
        with torch.openreg.graph(graph):
            return graph, draw()

    def seeded():
        torch.openreg.manual_seed(1)
        own.manual_seed(2)

    seeded()
    expected = [draw() for _ in range(4)]
    graphs = [both(), both()]
    seeded()
    for i in range(4):
        graph, out = graphs[i % 2]
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected[i], strict=True))
    del graphs, graph, out, expected
    settled()
    assert torch.openreg.memory_allocated(DEVICE) == before


def test_dropout_in_a_recurrent_network():
    torch.manual_seed(0)
    model = nn.LSTM(6, 6, 2, dropout=0.5).to(DEVICE)
    x = torch.randn(3, 2, 6, device=DEVICE)
    warmed_up(lambda: model(x))
    graph, (y, _) = captured(lambda: model(x))
    torch.openreg.manual_seed(3)
    expected = [model(x)[0].detach() for _ in range(2)]
    torch.openreg.manual_seed(3)
    for each in expected:
        graph.replay()
        assert torch.equal(y.detach(), each)
    assert not torch.equal(*expected)


# ---- several graphs ----


def steps_of(x):
    """Two chains, of which the second takes the first's result."""

    def first():
        y = x.clone()
        for i in range(4):
            y = y * 1.5 + i
        return y

    def second(y):
        z = y.clone()
        for i in range(4):
            z = z - i * y
        return z

    return first, second


@pytest.mark.parametrize("pool", ["one each", "of the first", "handle"])
def test_two_graphs_in_a_row(pool):
    x = torch.ones(100, device=DEVICE)
    first, second = steps_of(x)
    handle = torch.openreg.graph_pool_handle() if pool == "handle" else None
    one, y = captured(first, pool=handle)
    two, z = captured(lambda: second(y), pool=one.pool() if pool == "of the first" else handle)
    for value in (2.0, 3.0):
        x.fill_(value)
        one.replay()
        two.replay()
        assert torch.equal(z, second(first()))


@pytest.mark.parametrize("launch_mode", ["inline", "async"])
def test_two_graphs_at_once(launch_mode):
    """With a pool each, they may run on two streams."""
    x = torch.ones(1000, device=DEVICE)
    graphs = [captured(lambda k=k: (x * k).cumsum(0).sqrt()) for k in (2, 3)]
    expected = [(x * k).cumsum(0).sqrt() for k in (2, 3)]
    streams = [torch.openreg.Stream() for _ in graphs]
    with torch.openreg.launch_mode(launch_mode):
        for _ in range(20):
            for (graph, _), stream in zip(graphs, streams, strict=True):
                stream.wait_stream(torch.openreg.current_stream())
                with stream:
                    graph.replay()
        for stream in streams:
            torch.openreg.current_stream().wait_stream(stream)
        for (_, y), each in zip(graphs, expected, strict=True):
            assert torch.equal(y, each)


@pytest.mark.parametrize("share", [True, False])
def test_three_graphs_in_other_orders(share):
    """With one pool, the order of the captures; with a pool each, any."""
    x = torch.ones(100, device=DEVICE)
    a, y = captured(lambda: x + 1)
    pool = a.pool() if share else None
    b, z = captured(lambda: y * 2, pool=pool)
    c, w = captured(lambda: y - 3, pool=pool)
    for value in (1.0, 5.0):
        x.fill_(value)
        for graph in (a, b, c) if share else (a, c, b):
            graph.replay()
        assert (z[0].item(), w[0].item()) == (2 * value + 2, value - 2)
    x.fill_(7)
    a.replay()
    c.replay()
    assert (z[0].item(), w[0].item()) == (12.0, 5.0)


# ---- memory ----


@pytest.mark.parametrize("elements", [100, 1 << 20], ids=["small", "large"])
def test_a_result_outlives_its_graph(elements):
    settled()
    before = torch.openreg.memory_allocated(DEVICE)
    x = torch.full((elements,), 2.0, device=DEVICE)
    graph, y = captured(lambda x=x: (x + 1) * (x + 2))
    inside = torch.openreg.memory_allocated(DEVICE)
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


def test_memory_is_not_reused_on_a_stream_that_still_reads_it():
    """record_stream() in a capture."""
    x, side = torch.ones(1 << 18, device=DEVICE), torch.openreg.Stream()

    def body():
        main = torch.openreg.current_stream()
        y = x * 2
        side.wait_stream(main)
        with side:
            z = y + 1
        y.record_stream(side)
        del y
        w = torch.full((1 << 18,), 9.0, device=DEVICE)
        main.wait_stream(side)
        return z, w

    graph, (z, w) = captured(body)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert (z.unique().tolist(), w.unique().tolist()) == ([2 * value + 1], [9.0])


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


def inside(pool, x):
    return any(s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in pool.snapshot())


def test_pools_have_numbers_of_their_own():
    pools = [torch.openreg.MemPool() for _ in range(3)]
    ids = {pool.id for pool in pools} | {torch.openreg.graph_pool_handle() for _ in range(3)}
    assert len(ids) == 6


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
    made = []
    thread = threading.Thread(
        target=lambda: (_C.use_pool(0, pool.id), made.append(torch.ones(1000, device=DEVICE))),
    )
    thread.start()
    thread.join()
    assert inside(pool, made[0])
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


# ---- training ----


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)).to(DEVICE)


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_graphed_callables_under_autocast(cache_enabled):
    """Two modules and a loss, forward and backward as without graphs."""

    def train(graphed):
        first, second = network(), nn.Linear(4, 2).to(DEVICE)
        loss_of = nn.functional.mse_loss
        x = torch.zeros(5, 6, device=DEVICE)
        h, out, target = (torch.zeros(5, n, device=DEVICE) for n in (4, 2, 2))
        h, out = (t.bfloat16().requires_grad_() for t in (h, out))
        with torch.autocast("openreg", torch.bfloat16, cache_enabled=cache_enabled):
            if graphed:
                first, second, loss_of = torch.openreg.make_graphed_callables(
                    (first, second, loss_of), ((x,), (h,), (out, target))
                )
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        generator = torch.Generator().manual_seed(1)
        torch.openreg.manual_seed(4)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            batch = torch.randn(5, 6, generator=generator).to(DEVICE)
            with torch.autocast("openreg", torch.bfloat16, cache_enabled=cache_enabled):
                loss = loss_of(second(first(batch)), batch[:, :2].contiguous())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, parameters

    if cache_enabled:
        with pytest.raises(RuntimeError, match="autocast caching"):
            train(True)
        return
    (losses, parameters), (expected, ones) = train(True), train(False)
    assert losses == expected
    assert_close(parameters, ones, rtol=0, atol=0)


def test_graphed_callables_without_parameters_and_gradients():
    class Halves(nn.Module):
        def forward(self, x, scale):
            return x / 2 * scale

    x, scale = torch.zeros(4, device=DEVICE, requires_grad=True), torch.ones(4, device=DEVICE)
    graphed = torch.openreg.make_graphed_callables(Halves(), (x, scale))
    y = torch.full((4,), 6.0, device=DEVICE, requires_grad=True)
    out = graphed(y, scale * 3)
    out.sum().backward()
    assert out.tolist() == [9.0] * 4 and y.grad.tolist() == [1.5] * 4


def test_scaled_gradients():
    """GradScaler scales inside the graph; the inner loop sees overflows and goes on."""
    model = nn.Linear(4, 1, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=100)
    x = torch.ones(2, 4, device=DEVICE)
    scaler.scale(torch.ones(1, device=DEVICE))  # creates the scale

    def step():
        model.weight.grad = None
        scaler.scale(model(x).sum()).backward()

    warmed_up(step)
    graph, _ = captured(step)
    for value, scale, moved in ((1.0, 4.0, True), (float("inf"), 4.0, False), (1.0, 2.0, True)):
        before = model.weight.detach().clone()
        x.fill_(value)
        graph.replay()
        assert_close(model.weight.grad, torch.full_like(before, 2 * value * scale))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before - 0.5 * 2 * value if moved else before)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_param_groups_of_which_one_is_capturable(fused):
    """An optimizer with groups of its own options: only those that are captured must be capturable."""
    x, y = (torch.ones(3, device=DEVICE, requires_grad=True) for _ in range(2))
    for p in (x, y):
        p.grad = torch.full_like(p, 0.5)
    optimizer = torch.optim.AdamW(
        [{"params": [x], "lr": 0.1, "capturable": True}, {"params": [y], "lr": 0.2, "capturable": True}], fused=fused
    )
    expected = [p.detach().cpu().clone().requires_grad_() for p in (x, y)]
    for p in expected:
        p.grad = torch.full_like(p, 0.5)
    other = torch.optim.AdamW([{"params": expected[:1], "lr": 0.1}, {"params": expected[1:], "lr": 0.2}])
    warmed_up(optimizer.step)
    for _ in range(3):
        other.step()
    graph, _ = captured(optimizer.step)
    for _ in range(3):
        graph.replay()
        other.step()
    assert_close([x.detach().cpu(), y.detach().cpu()], [p.detach() for p in expected])


@pytest.mark.parametrize("graph", [
    lambda: torch.openreg.graph(torch.openreg.Graph()),
    lambda: torch.accelerator.Graph(),
], ids=["openreg", "accelerator"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_optimizers_that_are_not_capturable_say_so(graph, options):
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.grad = torch.ones_like(x)
    optimizer = torch.optim.Adam([x], lr=0.1, **options)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Adam: expected capturable=True"), torch.openreg.stream(torch.openreg.Stream()), graph():  # fmt: skip
        optimizer.step()
    optimizer.step()
    compiled = torch.compile(optimizer.step, backend="eager")
    compiled()
    assert optimizer.state[x]["step"] == 3
