"""Graphs: capture, replay, order, private memory, and what cannot be captured."""

import gc
import weakref

import pytest
import torch
from graph_kit import DEVICE, inside
from stream_kit import captured, in_threads

from openreg_ops import _C


@pytest.fixture
def unpoisoned():
    """New memory is not filled, which would be nodes of their own."""
    before = _C.poison()
    _C.set_poison(False)
    yield
    _C.set_poison(before)


def device(values, **options):
    return torch.tensor(values, device=DEVICE, **options)


def test_by_hand():
    x = device([1.0, 2.0])
    g, y = captured(lambda: x * 2 + 1)
    g.replay()
    assert y.tolist() == [3.0, 5.0]
    x.copy_(torch.tensor([10.0, 20.0]))
    assert y.tolist() == [3.0, 5.0], "nothing runs before the replay"
    g.replay()
    assert y.tolist() == [21.0, 41.0]


def test_capture_computes_nothing():
    x = device([1.0, 2.0])
    state = torch.openreg.get_rng_state()
    g, y = captured(lambda: (x.add_(1), torch.rand(3, device=DEVICE), torch.nn.functional.dropout(x, 0.5)))
    assert x.tolist() == [1.0, 2.0]
    assert torch.equal(torch.openreg.get_rng_state(), state)
    g.replay()
    assert x.tolist() == [2.0, 3.0]


def test_accelerator_graph():
    x = torch.zeros(8, device=DEVICE)
    graph = torch.accelerator.Graph()
    with torch.Stream(device=DEVICE), graph:
        x += 1
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3.0] * 8
    assert isinstance(graph.pool(), tuple)


@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_launch_modes_and_streams(mode):
    x = torch.zeros(64, device=DEVICE)
    g, y = captured(lambda: (x + 1).relu_())
    with torch.openreg.launch_mode(mode):
        side = torch.openreg.Stream()
        with side:
            torch.openreg._sleep(20_000_000)
            x.fill_(1)
            g.replay()  # behind the sleep and the fill
            z = y * 2
        side.synchronize()
    assert z.tolist() == [4.0] * 64


# ---- streams ----


def test_other_streams_join_by_events(unpoisoned):
    x = torch.ones(4, device=DEVICE)
    side = torch.openreg.Stream()

    def f():
        main = torch.openreg.current_stream()
        a = x + 1
        side.wait_stream(main)
        with side:
            b = a * 10
            assert torch.openreg.is_current_stream_capturing()
        c = a * 100
        main.wait_stream(side)
        return b + c

    g, y = captured(f)
    g.replay()
    assert y.tolist() == [220.0] * 4
    nodes = g._nodes()
    assert [n[3] for n in nodes] == [[], [0], [0], [1, 2]], "the fork and the join are edges"
    assert not side.is_capturing()


def test_unjoined_streams_are_an_error(unpoisoned):
    x = torch.ones(4, device=DEVICE)
    side = torch.openreg.Stream()
    with pytest.raises(torch.AcceleratorError, match=r"unjoined work: aten::mul at .*test_graphs.py:\d+"):  # noqa: SIM117
        with torch.openreg.graph(torch.openreg.Graph()):
            side.wait_stream(torch.openreg.current_stream())
            with side:
                x * 2
    with side:
        assert (x * 2).tolist() == [2.0] * 4, "the stream is usable"


def test_waiting_for_what_is_not_captured_is_an_error():
    x = torch.ones(4, device=DEVICE)
    event = torch.Event(DEVICE)
    event.record()
    g = torch.openreg.Graph()
    with pytest.raises(torch.AcceleratorError, match="recorded before the capture"), torch.openreg.graph(g):
        x + 1
        event.wait()


def test_the_default_stream_is_not_captured():
    g = torch.openreg.Graph()
    with pytest.raises(torch.AcceleratorError, match="other than the default one"):
        g.capture_begin()
    with pytest.raises(RuntimeError, match="no capture has begun"):
        g.capture_end()


# ---- what cannot be captured ----

REFUSED = {
    "item": (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
    "bool": (lambda x: bool((x > 0).all()), "aten::_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "mask": (lambda x: x[x > 0], "aten::index"),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "equal": (lambda x: torch.equal(x, x.clone()), "aten::equal"),
    "to the host": (lambda x: x.cpu(), "aten::copy_"),
    "from the host": (lambda x: torch.ones(3).to(DEVICE), "aten::copy_"),
    "index on the host": (lambda x: x[torch.tensor([0, 1])], "aten::index"),
    "pinned and waiting": (lambda x: x.copy_(torch.ones(3).pin_memory()), "non_blocking=True"),
    "synchronize": (lambda x: torch.openreg.synchronize(), "synchronize"),
    "synchronize the stream": (lambda x: torch.openreg.current_stream().synchronize(), "synchronize"),
    "query": (lambda x: torch.openreg.current_stream().query(), "query"),
    "event": (lambda x: torch.openreg.current_stream().record_event().query(), "query"),
    "nms": (lambda x: torch.ops.openreg.nms(torch.ones(2, 4, device=DEVICE), x[:2].clone(), 0.5), "openreg::nms"),
    "sparse": (lambda x: x.to_sparse(), "aten::_to_sparse"),
}


def test_refused():
    """Each says so at the line in question, leaks nothing, and leaves the stream and the graph usable."""
    x, g = torch.ones(3, device=DEVICE), torch.openreg.Graph()
    torch.openreg.synchronize()
    gc.collect()
    before = torch.openreg.memory_allocated(DEVICE)
    for case, (f, name) in REFUSED.items():
        with pytest.raises(torch.AcceleratorError) as raised, torch.openreg.graph(g):
            y = x * 2
            f(y)
        for part in (name, "not permitted when stream is capturing", "test_graphs.py:"):
            assert part in str(raised.value), case
        del y, raised
        with torch.openreg.graph(g):
            z = x + 1
        g.replay()
        assert z.tolist() == [2.0] * 3, case
        del z
        g.reset()
    gc.collect()
    assert torch.openreg.memory_allocated(DEVICE) == before, "nothing leaks"


@pytest.mark.parametrize("collects", [False, True])
def test_a_capture_collects_garbage_if_asked(collects):
    cycle = [device([1.0])]
    cycle.append(cycle)
    dropped = weakref.ref(cycle[0])
    del cycle
    with torch.compiler.config.patch(force_cudagraph_gc=collects), torch.openreg.graph(torch.openreg.Graph()):
        torch.ones(2, device=DEVICE)
    assert (dropped() is None) == collects


def test_a_void_capture_says_why():
    x = torch.ones(3, device=DEVICE)
    g = torch.openreg.Graph()
    with pytest.raises(torch.AcceleratorError, match="previous error during capture.*aten::_local_scalar_dense"):  # noqa: SIM117
        with torch.openreg.graph(g):
            try:
                x.sum().item()
            except torch.AcceleratorError:
                pass
            with pytest.raises(torch.AcceleratorError, match="whose capture is invalid"):
                x + 1


@pytest.mark.parametrize("wrapper", ["cond", "checkpoint", "no_grad", "deepcopy"])
def test_the_line_is_in_the_program(wrapper):
    x = torch.ones(3, device=DEVICE)
    calls = {
        "cond": lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),  # runs generated code
        "checkpoint": lambda: torch.utils.checkpoint.checkpoint(torch.nonzero, x, use_reentrant=False),
        "no_grad": torch.no_grad()(lambda: x.nonzero()),
        "deepcopy": lambda: torch.tensor([1.0], device=DEVICE),
    }
    with pytest.raises(torch.AcceleratorError, match=r" at \S*test_graphs.py:\d+: "):
        captured(calls[wrapper])


@pytest.mark.parametrize("end", ["invalid", "unjoined", "ended", "reset", "another thread"])
def test_an_exception_of_the_body_is_not_replaced_by_one_of_the_end(end):
    x = torch.ones(3, device=DEVICE)
    g = torch.openreg.Graph()
    stream = torch.openreg.Stream()

    def body():
        x + 1
        if end == "invalid":
            with pytest.raises(torch.AcceleratorError):
                x.sum().item()
        elif end == "unjoined":
            stream.wait_stream(torch.openreg.current_stream())
            with stream:
                x * 2
        elif end == "ended":
            g.capture_end()
        elif end == "reset":
            g.reset()
        else:
            raised = []
            in_threads(lambda: raised.append(pytest.raises(RuntimeError, g.capture_end)))
            assert "expected the thread that called capture_begin" in str(raised[0].value)

    liveness = end == "another thread"
    context = torch.openreg.graph(g, check_input_liveness=liveness)
    with pytest.raises(RuntimeError), context:  # without an exception of the body, that of the end
        body()
    g.reset()  # where the body has captured it
    context = torch.openreg.graph(g, check_input_liveness=liveness)
    with pytest.raises(KeyError, match="of the body"), context:
        body()
        raise KeyError("of the body")
    assert not torch.openreg.is_current_stream_capturing()
    g.reset()
    with torch.openreg.graph(g):
        y = x + 1
    g.replay()
    assert y.tolist() == [2.0] * 3


def test_errors_of_the_program_do_not_end_the_capture():
    x = torch.ones(3, device=DEVICE)
    g = torch.openreg.Graph()
    with torch.openreg.graph(g):
        with pytest.raises(RuntimeError, match="must match the size"):
            x + torch.ones(2, device=DEVICE)
        y = x + 1
    g.replay()
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_other_threads(mode):
    x = torch.ones(3, device=DEVICE)
    errors, values = [], []

    def other():
        try:
            values.append((x + 1).tolist())
        except torch.AcceleratorError as error:
            errors.append(str(error))

    g = torch.openreg.Graph()
    g_stream = torch.openreg.Stream()
    try:
        with torch.openreg.graph(g, stream=g_stream, capture_error_mode=mode):
            x * 2
            in_threads(other)
        void = False
    except torch.AcceleratorError:
        void = True
    if mode == "global":
        assert void
        assert "another thread captures a graph" in errors[0]
    else:
        assert not void
        assert values == [[2.0] * 3]


def test_mode_names():
    with pytest.raises(ValueError, match="capture_error_mode"):  # noqa: SIM117
        with torch.openreg.graph(torch.openreg.Graph(), capture_error_mode="loose"):
            pass
    g, y = captured(lambda: torch.ones(2, device=DEVICE) + 1, capture_error_mode="relaxed")
    g.replay()
    assert y.tolist() == [2.0, 2.0]


# ---- memory ----


def test_memory_is_private_and_keeps_its_address():
    x = torch.ones(1000, device=DEVICE)
    g, y = captured(lambda: (x + 1) * 2)
    segments = torch.openreg.memory_snapshot(device=DEVICE, mempool_id=g.pool())
    within = [range(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    assert any(y.data_ptr() in part for part in within)
    others = [torch.empty(1000, device=DEVICE) for _ in range(100)]
    freed = "freed memory of the pool goes to nobody else"
    assert not any(other.data_ptr() in part for other in others for part in within), freed
    g.replay()
    assert y[0].item() == 4


def test_mem_pool():
    pool = torch.openreg.MemPool()
    assert pool.use_count() == 1
    with torch.openreg.use_mem_pool(pool):
        assert pool.use_count() == 2
        x = torch.ones(1 << 16, device=DEVICE)
    y = torch.ones(1 << 16, device=DEVICE)
    assert pool.use_count() == 1 and inside(pool, x) and not inside(pool, y)
    assert all(segment["segment_pool_id"] == pool.id for segment in pool.snapshot())
    del x
    torch.openreg.empty_cache()
    assert pool.snapshot(), "kept for the next use"
    torch.openreg.empty_cache(pool.id)
    assert not pool.snapshot()
    with pytest.raises(ValueError, match="no_split"):
        torch.openreg.MemPool(no_split=True)


def test_allocator_functions():
    before = torch.openreg.memory_allocated(DEVICE)
    address = torch.openreg.caching_allocator_alloc(1000, DEVICE)
    assert torch.openreg.memory_allocated(DEVICE) > before
    torch.openreg.caching_allocator_delete(address)
    assert torch.openreg.memory_allocated(DEVICE) == before
    with pytest.raises(RuntimeError, match="caching_allocator_delete: expected an address"):
        torch.openreg.caching_allocator_delete(address)
    stream = torch.openreg.Stream()
    for given in stream, stream.stream_id:
        torch.openreg.caching_allocator_delete(torch.openreg.caching_allocator_alloc(1000, DEVICE, given))
    with pytest.raises(
        TypeError, match="caching_allocator_alloc: expected stream as a torch.Stream or its .* got 'side'"
    ):
        torch.openreg.caching_allocator_alloc(1000, DEVICE, "side")


def test_annotations_are_refused():
    graph, x = torch.openreg.Graph(), torch.ones(2, device=DEVICE)
    for function, call in {
        "graph": lambda on: torch.openreg.graph(graph, enable_annotations=on),
        "make_graphed_callables": lambda on: torch.openreg.make_graphed_callables(
            torch.nn.ReLU(), (x,), enable_annotations=on
        ),
    }.items():
        call(False)
        with pytest.raises(NotImplementedError, match=f"^{function}: expected enable_annotations=False, but got True"):
            call(True)


# ---- the object ----


def test_keep_graph_and_debug_dump(tmp_path):
    x = torch.ones(3, device=DEVICE)
    g = torch.openreg.Graph(keep_graph=True)
    with torch.openreg.graph(g):
        y = x.exp()
    g.debug_dump(str(tmp_path / "graph.dot"))
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph") and "aten::exp" in text and "test_graphs.py:" in text
    g.instantiate()
    g.replay()
    assert torch.equal(y.cpu(), torch.ones(3).exp())
    g, _ = captured(lambda: x + 1)
    with pytest.warns(UserWarning, match="enable_debug_mode"):
        g.debug_dump(str(tmp_path / "other.dot"))
    assert not (tmp_path / "other.dot").exists()


def test_reset():
    x = torch.ones(3, device=DEVICE)
    g, _ = captured(lambda: x + 1)
    with pytest.raises(RuntimeError, match="call reset"), torch.openreg.graph(g):
        pass
    g.reset()
    with pytest.raises(RuntimeError, match="no graph has been captured"):
        g.replay()
    with torch.openreg.graph(g):
        y = x + 2
    g.replay()
    assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize("pool", [3, "x", (0,), (0, 1.5), (-1, 0), "MemPool"])
def test_a_pool_is_a_pair_of_numbers(pool):
    pool = torch.openreg.MemPool() if pool == "MemPool" else pool
    for name, call in {
        "capture_begin": lambda: captured(lambda: None, pool=pool),
        "empty_cache": lambda: torch.openreg.empty_cache(pool),
        "memory_snapshot": lambda: torch.openreg.memory_snapshot(pool),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: expected the number of a memory pool, .* but got "):
            call()
    assert not torch.openreg.is_current_stream_capturing()
    with pytest.raises(TypeError, match="use_mem_pool: expected a torch.openreg.MemPool, but got"):
        torch.openreg.use_mem_pool((0, 1)).__enter__()


def test_a_graph_in_a_graph():
    x = torch.ones(3, device=DEVICE)
    inner, _ = captured(lambda: x.add_(1))
    outer, _ = captured(lambda: (x.mul_(10), inner.replay()))
    outer.replay()
    assert x.tolist() == [11.0] * 3


def test_faults_strike_nodes(unpoisoned):
    x = torch.ones(3, device=DEVICE)
    g, y = captured(lambda: (x + 1, x * 3))
    with torch.openreg.faults.inject("kernel", after=1):
        g.replay()
        with pytest.raises(torch.AcceleratorError, match="injected fault.*aten::mul"):
            torch.openreg.synchronize()
    assert y[0].tolist() == [2.0] * 3, "the other nodes run"


def test_profiles_show_nodes():
    x = torch.ones(3, device=DEVICE)
    g, _ = captured(lambda: torch.exp(x + 1))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    ) as profile:
        g.replay()
        torch.openreg.synchronize()
    names = [event.name for event in profile.events()]
    assert "aten::exp kernel" in names and "aten::add kernel" in names
    assert "openregGraphLaunch" in names


def test_an_error_in_a_node_names_it():
    x = torch.zeros(3, dtype=torch.long, device=DEVICE)
    table = torch.ones(4, 2, device=DEVICE)
    g, y = captured(lambda: table[x])
    g.replay()
    assert y.tolist() == [[1.0, 1.0]] * 3
    x.fill_(7)
    with pytest.raises(torch.AcceleratorError, match=r"aten::index, a node of a graph, captured at .*test_graphs.py"):
        g.replay()


# ---- the second of everything ----


@pytest.mark.parametrize("joined", [True, False])
def test_a_copy_to_another_device_joins_its_stream(joined):
    x = torch.ones(1 << 16, device=DEVICE)
    main, graph = torch.openreg.Stream(), torch.openreg.Graph()
    kept = []

    def body():
        y = (x + 1).to("openreg:1")
        kept.append(y * 10)
        if joined:
            main.wait_stream(torch.openreg.current_stream("openreg:1"))

    if not joined:
        with pytest.raises(torch.AcceleratorError, match="unjoined work"):  # noqa: SIM117
            with torch.openreg.graph(graph, stream=main):
                body()
        assert torch.ones(1, device="openreg:1").item() == 1
        return
    with torch.openreg.graph(graph, stream=main):
        body()
    others = [torch.full((1 << 16,), 5.0, device="openreg:1") for _ in range(4)]
    graph.replay()
    torch.openreg.synchronize(0)
    assert kept[0].unique().tolist() == [20] and all(o.unique().tolist() == [5] for o in others)


def test_private_memory_is_given_to_others_in_stream_order():
    """Also what a pool or a graph that is gone has left."""
    pool, side = torch.openreg.MemPool(), torch.openreg.Stream()
    with torch.openreg.launch_mode("async"):
        with torch.openreg.use_mem_pool(pool):
            x = torch.ones(1 << 20, device=DEVICE)
        torch.openreg._sleep(200_000_000)
        z = x * 2
        torch.openreg.empty_cache(pool.id)
        del x, pool
        with torch.openreg.stream(side):
            w = torch.full((1 << 20,), 7.0, device=DEVICE)
        torch.openreg.synchronize()
    assert z.unique().tolist() == [2] and w.unique().tolist() == [7]


def test_modes_of_the_caller_do_not_see_inside_a_replay():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, seen = torch.eye(3, device=DEVICE) * 2, []
    graph, (inverse, _) = captured(lambda: (torch.linalg.inv_ex(x).inverse, x.cumsum(0)))
    with Seen(), FakeTensorMode():
        graph.replay()
    torch.openreg.synchronize()
    assert not seen and torch.equal(inverse.cpu(), torch.eye(3) / 2)


def test_an_interprocess_event_is_refused():
    event = torch.openreg.Event(interprocess=True)
    event.record()
    for call in (event.record, event.wait, event.synchronize, event.query):
        with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing"):  # noqa: SIM117
            with torch.openreg.graph(torch.openreg.Graph()):
                call()
