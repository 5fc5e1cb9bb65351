"""What waits for what, on two devices with four streams each: one stream at a time is busy until the test lets it go.

A fast kernel hides a missing wait, and a wait that is too wide is seen by nobody. So each call is tried with work on each
stream in turn, and waits for the streams that it should wait for and for no other.
"""

import contextlib
import gc

import pytest
import torch
from held import held, waits

from openreg_ops import _C

N = 3000


@pytest.fixture(scope="module")
def streams():
    """The default stream, two others and an urgent one of each device, by name."""
    named = {f"default{i}": torch.openreg.default_stream(i) for i in (0, 1)}
    for name in ("a", "b"):
        named |= {f"{name}{i}": torch.openreg.Stream(i) for i in (0, 1)}
    return named | {f"urgent{i}": torch.openreg.Stream(i, priority=-1) for i in (0, 1)}


# ---- calls for which the host waits ----

FIRST, SECOND = ["default0", "a0", "b0", "urgent0"], ["default1", "a1", "b1", "urgent1"]


def recorded(stream, **options):
    event = torch.openreg.Event(**options)
    event.record(stream)
    return event


def recorded_again(first, second):
    event = recorded(first)
    event.record(second)
    return event


# The call, of the streams and of tensors on both devices, and the streams that it waits for.
HOST = {
    "synchronize": (lambda s, x, y: torch.openreg.synchronize(), FIRST),
    "synchronize a device": (lambda s, x, y: torch.openreg.synchronize(1), SECOND),
    "torch.accelerator": (lambda s, x, y: torch.accelerator.synchronize(1), SECOND),
    "the current device": (lambda s, x, y: on(s["a1"], torch.openreg.synchronize), SECOND),
    "a stream": (lambda s, x, y: s["a0"].synchronize(), ["a0"]),
    "the default stream": (lambda s, x, y: s["default1"].synchronize(), ["default1"]),
    "an urgent stream": (lambda s, x, y: s["urgent1"].synchronize(), ["urgent1"]),
    "an event": (lambda s, x, y: recorded(s["b1"]).synchronize(), ["b1"]),
    "an event between processes": (lambda s, x, y: recorded(s["b0"], interprocess=True).synchronize(), ["b0"]),
    "an external event": (lambda s, x, y: recorded(s["a0"], external=True).synchronize(), ["a0"]),
    "an event recorded again": (lambda s, x, y: recorded_again(s["a0"], s["b0"]).synchronize(), ["b0"]),
    "an event that is not recorded": (lambda s, x, y: torch.openreg.Event().synchronize(), []),
    "item": (lambda s, x, y: x[0].item(), ["default0"]),
    "item on another stream": (lambda s, x, y: on(s["a0"], x[0].item), ["a0"]),
    "item of the second device": (lambda s, x, y: y[0].item(), ["default1"]),
    "tolist": (lambda s, x, y: on(s["b1"], y.tolist), ["b1"]),
    "cpu": (lambda s, x, y: on(s["a0"], x.cpu), ["a0"]),
    "repr": (lambda s, x, y: repr(y), ["default1"]),
    "nonzero": (lambda s, x, y: on(s["a1"], y.nonzero), ["a1"]),
    "equal": (lambda s, x, y: torch.equal(x, x.detach().clone()), ["default0"]),
    "to pageable memory": (lambda s, x, y: torch.empty(N).copy_(y, non_blocking=True), ["default1"]),
    "to pinned memory": (lambda s, x, y: torch.empty(N, pin_memory=True).copy_(y), ["default1"]),
    "from pageable memory": (lambda s, x, y: x.copy_(torch.ones(N)), ["default0"]),
    "share": (lambda s, x, y: _C.share_storage(y.untyped_storage()), SECOND),
    # None of these waits.
    "queries": (lambda s, x, y: [stream.query() for stream in s.values()], []),
    "an event's query": (lambda s, x, y: [recorded(stream).query() for stream in s.values()], []),
    "to pinned memory, non_blocking": (lambda s, x, y: torch.empty(N, pin_memory=True).copy_(x, non_blocking=True), []),
    "from pinned memory": (lambda s, x, y: x.copy_(torch.ones(N, pin_memory=True), non_blocking=True), []),
    "another device": (lambda s, x, y: (x.to("openreg:1"), y.to("openreg:0")), []),
    "waits of streams": (lambda s, x, y: [one.wait_stream(other) for one in s.values() for other in s.values()], []),
    "empty_cache": (lambda s, x, y: torch.openreg.empty_cache(), []),
    "statistics": (lambda s, x, y: (torch.openreg.memory_stats(1), torch.openreg.mem_get_info(), torch.openreg.memory_snapshot()), []),
    "record_stream": (lambda s, x, y: [torch.empty_like(x).record_stream(s[name]) for name in FIRST], []),
    "allocate": (lambda s, x, y: [on(stream, lambda: torch.empty(1 << 20, device="openreg")) for stream in s.values()], []),
    "a generator": (lambda s, x, y: (torch.openreg.get_rng_state(1), torch.openreg.manual_seed_all(1)), []),
}  # fmt: skip


def on(stream, call):
    with stream:
        return call()


@pytest.mark.parametrize("name", HOST)
def test_the_host_waits_for_these_streams_alone(name, streams, mode):
    call, expected = HOST[name]
    x, y = (torch.arange(N, dtype=torch.float32, device=f"openreg:{i}") for i in (0, 1))
    torch.openreg.synchronize(0), torch.openreg.synchronize(1)
    for busy, stream in streams.items():
        if busy in expected:
            assert waits(lambda: call(streams, x, y), stream), f"does not wait for {busy}"
        else:
            with held(stream) as work:
                call(streams, x, y)
                assert not work.released.is_set(), f"waits for {busy}"


# ---- calls after which a stream waits ----


def copy(to, numbers, *, strided=False, non_blocking=False):
    """A copy between the devices, of so many numbers, from a0 or a1 to the other device's stream b."""

    def prepare():
        x, y = (torch.ones(numbers, device=f"openreg:{i}") for i in (1 - to, to))
        if strided:
            x, y = x.view(2, -1).t(), y.view(-1, 2)

        def call(s):
            torch.openreg.set_stream(s[f"b{to}"])
            on(s[f"a{1 - to}"], lambda: y.copy_(x, non_blocking=non_blocking))

        return call

    return prepare


def replayed(*names):
    """One graph on several streams."""

    def prepare():
        x, graph = torch.ones(N, device="openreg"), torch.openreg.Graph()
        with torch.openreg.graph(graph):
            x.add_(1)

        def call(s):
            for name in names:
                on(s[name], graph.replay)

        return call

    return prepare


def exported():
    """To a consumer that names its stream."""
    x = torch.ones(N, device="openreg")
    return lambda s: on(s["a0"], lambda: x.__dlpack__(stream=s["b0"].native_handle))


def waited_then_recorded(s):
    event = recorded(s["a0"])
    s["b0"].wait_event(event)
    event.record(s["default0"])


# What prepares the call, and which streams wait for which, the one that is waited for first.
ORDER = {
    "nothing": (lambda: lambda s: None, []),
    "wait_stream": (lambda: lambda s: s["b0"].wait_stream(s["a0"]), [("a0", "b0")]),
    "wait_stream of the second device": (lambda: lambda s: s["b0"].wait_stream(s["a1"]), [("a1", "b0")]),
    "wait_event": (lambda: lambda s: s["a1"].wait_event(recorded(s["a0"])), [("a0", "a1")]),
    "an urgent stream": (lambda: lambda s: s["urgent0"].wait_stream(s["a0"]), [("a0", "urgent0")]),
    "for an urgent stream": (lambda: lambda s: s["a0"].wait_stream(s["urgent0"]), [("urgent0", "a0")]),
    "event.wait": (lambda: lambda s: recorded(s["default0"]).wait(s["b0"]), [("default0", "b0")]),
    "event.wait, the current stream": (lambda: lambda s: recorded(s["b0"]).wait(), [("b0", "default0")]),
    "an external event": (lambda: lambda s: s["b0"].wait_event(recorded(s["a0"], external=True)), [("a0", "b0")]),
    "between processes": (lambda: lambda s: s["b0"].wait_event(recorded(s["a0"], interprocess=True)), [("a0", "b0")]),
    "default streams": (lambda: lambda s: s["default1"].wait_event(recorded(s["default0"])), [("default0", "default1")]),
    "default streams, external": (lambda: lambda s: s["default1"].wait_event(recorded(s["default0"], external=True)), [("default0", "default1")]),
    "default streams, between processes": (lambda: lambda s: s["default1"].wait_event(recorded(s["default0"], interprocess=True)), [("default0", "default1")]),
    "recorded again before": (lambda: lambda s: s["b0"].wait_event(recorded_again(s["a0"], s["default0"])), [("default0", "b0")]),
    "recorded again after": (lambda: waited_then_recorded, [("a0", "b0")]),
    "an event that is not recorded": (lambda: lambda s: s["b0"].wait_event(torch.openreg.Event()), []),
    "a few bytes to the second device": (copy(1, N), [("a0", "b1"), ("b1", "a0")]),
    "a few bytes to the first device": (copy(0, N), [("a1", "b0"), ("b0", "a1")]),
    "megabytes": (copy(1, 1 << 19), [("a0", "b1"), ("b1", "a0")]),
    "megabytes, non_blocking": (copy(1, 1 << 19, non_blocking=True), [("a0", "b1"), ("b1", "a0")]),
    "one replay": (replayed("a0"), []),
    "replays of one graph": (replayed("a0", "b0"), [("a0", "b0")]),
    "replays of one graph, and again": (replayed("a0", "b0", "default0"), [("a0", "b0"), ("a0", "default0"), ("b0", "default0")]),
    "dlpack": (exported, [("a0", "b0")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDER)
def test_a_stream_waits_for_these_streams_alone(name, streams, mode):
    prepare, expected = ORDER[name]
    call = prepare()
    torch.openreg.synchronize(0), torch.openreg.synchronize(1)
    for busy, stream in streams.items():
        with contextlib.ExitStack() as stack:
            for i in (0, 1):
                stack.callback(torch.openreg.set_stream, torch.openreg.current_stream(i))
            work = stack.enter_context(held(stream))
            call(streams)
            events = {other: recorded(stream) for other, stream in streams.items()}
            behind = {other for other in streams if other == busy or (busy, other) in expected}
            for other in streams.keys() - behind:
                events[other].synchronize()
            assert not work.released.is_set(), f"with work on {busy}, another stream waits that should not"
            for other in behind:
                assert not events[other].query(), f"{other} does not wait for {busy}"


# ---- memory that a stream still uses ----


def memory(device, size):
    return torch.empty(size, dtype=torch.uint8, device=device)


SIZES = {"a small block": 5000, "pages": 3 << 20}


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
def test_memory_is_reused_when_each_stream_that_used_it_is_done(which, size, device, mode):
    """Two streams are recorded. Whichever of them is busy, its memory is not reused before it is done, and is then."""
    users = [torch.openreg.Stream(device) for _ in range(2)]
    x = memory(device, size)
    address = x.data_ptr()
    with held(users[which]):
        for user in users:
            x.record_stream(user)
        del x
        kept = [memory(device, size) for _ in range(20)]
        assert address not in {tensor.data_ptr() for tensor in kept}
    kept += [memory(device, size) for _ in range(20)]
    assert address in {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_memory_that_no_stream_was_recorded_for_is_reused_at_once(size, device, mode):
    """Whatever streams are busy, because work of the memory's own stream comes after that stream's earlier work."""
    stream, other = (torch.openreg.Stream(device) for _ in range(2))
    with held(stream), held(other), stream:
        x = memory(device, size)
        address = x.data_ptr()
        x.record_stream(stream)  # its own
        del x
        kept = [memory(device, size) for _ in range(20)]
        assert address in {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_free_memory_of_a_busy_stream_goes_to_no_other(device, mode):
    """Its queued work may still use the memory: empty_cache does not release it, and no other stream gets it."""
    stream = torch.openreg.Stream(device)
    gc.collect()
    with held(stream):
        with stream:
            x = [memory(device, size) for size in SIZES.values()]
        addresses = {tensor.data_ptr() for tensor in x}
        del x
        torch.openreg.empty_cache()
        kept = [memory(device, size) for size in SIZES.values() for _ in range(20)]
        assert not addresses & {tensor.data_ptr() for tensor in kept}


def test_memory_that_autograd_hands_to_another_stream_is_recorded():
    """A gradient is reused on the stream that computed it when the stream that it was handed to is done."""
    giver, taker = (torch.openreg.Stream() for _ in range(2))
    addresses = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            addresses.append(grad.data_ptr())
            return grad * 2

    def allocate():
        with giver:
            return [torch.empty(1 << 20, device="openreg") for _ in range(5)]

    x = torch.ones(1 << 20, device="openreg", requires_grad=True)
    torch.openreg.synchronize()
    with taker:
        y = Keeps.apply(x)
    with giver:
        z = y * 3
    with torch.openreg.launch_mode("async"), held(taker), giver:
        z.backward(torch.ones_like(z))
        kept = allocate()
        assert addresses[0] not in {tensor.data_ptr() for tensor in kept}
    kept += allocate()
    assert addresses[0] in {tensor.data_ptr() for tensor in kept}
    torch.openreg.synchronize()
    assert x.grad.unique().tolist() == [6]


@pytest.mark.parametrize("to", ["device", "host"])
@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("numbers", [100, 1 << 19])
def test_pinned_memory_is_reused_when_each_copy_is_done(numbers, which, to):
    """Copies on two streams, of which one is busy, to or from two devices."""
    streams = [torch.openreg.Stream(i) for i in (0, 1)]
    xs = [torch.ones(numbers, device=f"openreg:{i}") for i in (0, 1)]
    torch.openreg.synchronize(0), torch.openreg.synchronize(1)
    host = torch.full((numbers,), 2.0).pin_memory()
    address = host.data_ptr()
    with held(streams[which]):
        for stream, x in zip(streams, xs, strict=True):
            with stream:
                x.copy_(host, non_blocking=True) if to == "device" else host.copy_(x, non_blocking=True)
        del host
        kept = [torch.full((numbers,), 7.0).pin_memory() for _ in range(20)]
        assert address not in {other.data_ptr() for other in kept}
    kept += [torch.empty(numbers, pin_memory=True) for _ in range(20)]
    assert address in {other.data_ptr() for other in kept}
    for stream, x in zip(streams, xs, strict=True):
        stream.synchronize()
        assert x.unique().tolist() == [2 if to == "device" else 1]
    assert all(other.unique().tolist() == [7] for other in kept[:20])


# ---- random numbers ----


def test_random_numbers_come_after_a_replay_that_draws(mode):
    """Eager numbers, a state and a seed, while the replay has not drawn yet; another device's do not wait."""
    x, graph, stream = torch.zeros(100, device="openreg"), torch.openreg.Graph(), torch.openreg.Stream()
    with torch.openreg.graph(graph):
        x.uniform_()
    torch.openreg.manual_seed_all(3)
    expected = [torch.rand(100, device="openreg").cpu() for _ in range(2)]
    other = torch.Generator("openreg:1")
    for ask, waited in (
        (lambda: torch.rand(100, device="openreg"), True),
        (lambda: torch.openreg.get_rng_state(0), True),
        (lambda: torch.rand(100, device="openreg:1"), False),
        (lambda: torch.openreg.get_rng_state(1), False),
        (lambda: torch.rand(100, device="openreg:1", generator=other), False),
    ):
        torch.openreg.manual_seed_all(3)
        got = []

        def draw(ask=ask, got=got):
            with stream:
                graph.replay()
            got.append(ask())

        if waited:
            waits(draw, stream)
        else:
            with held(stream) as work:
                draw()
                assert not work.released.is_set()
        torch.openreg.synchronize()
        assert torch.equal(x.cpu(), expected[0])
        if waited:
            rest = got[0].cpu() if got[0].is_floating_point() else torch.rand(100, device="openreg").cpu()
            assert torch.equal(rest, expected[1])


def test_replays_that_draw_keep_their_order_on_two_streams(mode):
    """The second graph draws after the first one, which has not begun."""
    graphs = [torch.openreg.Graph() for _ in range(2)]
    x = [torch.zeros(100, device="openreg") for _ in graphs]
    for graph, tensor in zip(graphs, x, strict=True):
        with torch.openreg.graph(graph):
            tensor.uniform_()
    torch.openreg.manual_seed(3)
    expected = [torch.rand(100, device="openreg").cpu() for _ in graphs]
    torch.openreg.manual_seed(3)
    streams = [torch.openreg.Stream() for _ in graphs]
    with held(streams[0]):
        for graph, stream in zip(graphs, streams, strict=True):
            with stream:
                graph.replay()
        assert not recorded(streams[1]).query()
    torch.openreg.synchronize()
    for tensor, wanted in zip(x, expected, strict=True):
        assert torch.equal(tensor.cpu(), wanted)
