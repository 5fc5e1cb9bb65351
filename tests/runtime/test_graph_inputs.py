"""Inputs of graphs that are gone: `check_input_liveness`, and the sanitizer in PyTorch's own cases."""

import gc

import pytest
import torch
from graph_kit import DEVICE
from stream_kit import captured, in_threads
from torch import nn
from torch.openreg import _sanitizer
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


def rand(*shape):
    return torch.rand(*shape or (8,), device=DEVICE)


def test_a_graph_that_checks_its_inputs():
    """check_input_liveness, new in torch 2.12."""
    x = torch.randn(100, device=DEVICE)
    graph, y = captured(lambda x=x: x * 2 + 1, check_input_liveness=True)
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    del x
    with pytest.raises(RuntimeError, match="dead tensor"):
        graph.replay()


@pytest.mark.parametrize("nbytes, what", [(0, "resized to 0 bytes"), (100, "moved"), (800, "moved")])
def test_an_input_whose_storage_was_resized(nbytes, what):
    """FSDP does this. The replay would read memory that belongs to another tensor by then."""
    x = torch.ones(100, device=DEVICE)
    graph, y = captured(lambda: x[1:] + 1, check_input_liveness=True)
    graph.replay()
    x.untyped_storage().resize_(nbytes)
    with pytest.raises(RuntimeError, match=f"the input of .* was {what}"):
        graph.replay()


class Plain(torch.Tensor):
    """A subclass without its own dispatch."""


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def begin(graph, **options):
    """Capture on a stream, which is returned, and check the inputs."""
    stream = torch.openreg.Stream()
    with stream:
        graph.capture_begin(check_input_liveness=True, **options)
    return stream


def begun(**options):
    graph = torch.openreg.Graph()
    return graph, begin(graph, **options)


@pytest.mark.parametrize("kind", [Plain, nn.Parameter, nn.Buffer, TwoTensor], ids=lambda kind: kind.__name__)
def test_inputs_of_any_class_are_checked(kind):
    x = rand().as_subclass(Plain) if kind is Plain else TwoTensor(rand(), rand()) if kind is TwoTensor else kind(rand())
    with torch.no_grad():
        graph, _ = captured(lambda x=x: x * 2, check_input_liveness=True)
    graph.replay()
    del x
    gc.collect()
    with pytest.raises(RuntimeError, match="dead tensor"):
        graph.replay()


def test_the_thread_of_a_capture_is_gone():
    graph, streams = torch.openreg.Graph(), []
    in_threads(lambda: streams.append(begin(graph)))
    graph.reset()
    x = rand()
    with torch.openreg.graph(graph):
        y = x * 2
    graph.replay()
    assert not streams[0].is_capturing() and torch.equal(y, x * 2)


def test_a_mode_of_the_program_outlives_the_capture():
    graph, stream = begun()
    with stream:
        x = rand()
        mode = Passing()
        with mode:
            y = x * 2
            graph.capture_end()
            assert _get_current_dispatch_mode_stack() == [mode]
        assert not _get_current_dispatch_mode_stack()
        graph.replay()
    assert y.shape == (8,)


def test_captures_that_check_their_inputs_end_in_any_order():
    x, y = rand(), rand()
    first, second = (begun(capture_error_mode="relaxed") for _ in range(2))
    with first[1]:
        x * 2
        first[0].capture_end()
    with second[1]:
        y * 2
        second[0].capture_end()
    assert not _get_current_dispatch_mode_stack()
    del y
    first[0].replay()
    with pytest.raises(RuntimeError, match="dead tensor"):
        second[0].replay()


def test_a_graph_that_is_dropped_in_its_capture_checks_no_longer():
    graph, _ = begun()
    assert len(_get_current_dispatch_mode_stack()) == 1
    del graph
    gc.collect()
    assert not _get_current_dispatch_mode_stack()


def test_the_sanitizer_reports_no_input_that_is_there():
    """Intermediate results, empty tensors, a storage with another owner, results of another graph in the pool."""
    with _sanitizer.sanitize():
        x, nothing, pool = rand(), torch.empty(0, device=DEVICE), torch.openreg.graph_pool_handle()
        owner = torch.empty(0, device=DEVICE).set_(x.untyped_storage())
        held = {"x": x, "nothing": nothing}
        del x, nothing
        first, y = captured(lambda: (held["x"] * 2 + 1, held["nothing"].view(0)), pool=pool)
        second, z = captured(lambda: y[0] + owner, pool=pool)
        held.clear()
        del y
        for _ in range(2):
            first.replay()
            second.replay()
        assert torch.equal(z, owner * 2 + 1 + owner)
        # A graph that captures again forgets its inputs.
        held["x"] = rand()
        graph, y = captured(lambda: held["x"] * 2)
        held.clear()
        with pytest.raises(_sanitizer.OpenregSanitizerErrors):
            graph.replay()
        graph.reset()
        with torch.openreg.graph(graph):
            y = owner * 3
        graph.replay()
        assert torch.equal(y, owner * 3)
