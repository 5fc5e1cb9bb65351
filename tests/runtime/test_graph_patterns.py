"""Our versions of PyTorch's own tests of CUDA graphs, for captures and replays; docs/graphs.md lists what has no
meaning.

Random numbers, memory, training and inputs have files of their own, test_graph_….py. Others of its tests are in
test_graphs.py, test_capture_sanitizer.py and tests/aten/test_captured.py.
"""

import pytest
import torch
from graph_kit import DEVICE, settled
from stream_kit import captured, in_threads

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
        with pytest.raises(torch.AcceleratorError, match="already being captured"):
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


def test_a_kept_graph_is_made_executable_again_and_again():
    graph = torch.openreg.Graph(keep_graph=True)
    for step in (1.0, 2.0):
        x = torch.zeros(20, device=DEVICE)  # at a different address than in the first capture
        with torch.openreg.graph(graph, capture_error_mode="relaxed"):
            x += step
        for i in range(1, 4):
            if i < 3:
                graph.instantiate()
            graph.replay()
            assert x.unique().tolist() == [i * step]
        graph.reset()


@pytest.mark.parametrize("to", ["device", "host"])
def test_pageable_memory_is_refused_also_without_waiting(to):
    x, host = torch.ones(8, device=DEVICE), torch.zeros(8)
    destination, source = (x, host) if to == "device" else (host, x)
    with pytest.raises(torch.AcceleratorError, match="aten::copy_"):
        captured(lambda: destination.copy_(source, non_blocking=True))


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_another_thread_allocates_during_a_capture(mode):
    x, done = torch.ones(100, device=DEVICE), []

    def other():
        with torch.openreg.Stream():
            address = torch.openreg.caching_allocator_alloc(1024, DEVICE)
        torch.openreg.caching_allocator_delete(address)
        done.append((torch.zeros(10, device=DEVICE) + 1).tolist())

    def body():
        y = x + x
        in_threads(other)
        return y + x

    graph, y = captured(body, capture_error_mode=mode)
    graph.replay()
    assert done == [[1.0] * 10] and y.unique().tolist() == [3.0]


# ---- events that are nodes ----


def test_events_of_a_graph_measure_its_replay():
    x = torch.randn(1 << 18, device=DEVICE)
    start, end = (torch.openreg.Event(enable_timing=True, external=True) for _ in range(2))

    def body():
        start.record()
        y = x.cumsum(0)
        end.record()
        return y

    graph, _ = captured(body)
    graph.replay()
    torch.openreg.synchronize()
    assert start.elapsed_time(end) > 0


@pytest.mark.parametrize("nested", [False, True])
def test_one_graph_waits_for_an_event_of_another(nested):
    """Also if they are nodes of other graphs: the replay takes the event as it is when it is launched."""
    x, host = torch.ones(4, device=DEVICE), torch.zeros(4).pin_memory()
    begun, ended = (torch.openreg.Event(external=True) for _ in range(2))
    with torch.openreg.launch_mode("async"):
        signals, _ = captured(lambda: (x.add_(1), begun.record()), capture_error_mode="relaxed")
        assert begun.query(), "recorded by replays only"

        def body():
            begun.wait()
            host.copy_(x, non_blocking=True)
            ended.record()

        works, _ = captured(body, capture_error_mode="relaxed")
        inner = signals, works
        if nested:
            signals, works = (captured(each.replay, capture_error_mode="relaxed")[0] for each in inner)
        first, second = torch.openreg.Stream(), torch.openreg.Stream()
        with first:
            torch.openreg._sleep(300_000_000)
            signals.replay()
        with second:
            works.replay()
        assert not ended.query() and host.tolist() == [0.0] * 4
        ended.synchronize()
        assert host.tolist() == [2.0] * 4
        torch.openreg.synchronize()


# ---- several graphs ----


@pytest.mark.parametrize("launch_mode", ["inline", "async"])
def test_two_graphs_at_once(launch_mode):
    """With separate pools, they may run on two streams."""
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
