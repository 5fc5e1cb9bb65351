"""Generated kernels are ordinary work: launch modes and faults apply to them, no matter who calls them. test_export.py has
isolation."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._inductor import config
from torch.testing import assert_close

pytestmark = pytest.mark.compiles


@pytest.fixture(params=["python", "cpp"])
def graph(request):
    """A fused group of kernels behind a matrix product, called by each wrapper."""
    with config.patch(cpp_wrapper=request.param == "cpp"):
        graph = torch.compile(lambda x: F.layer_norm((x @ x).relu(), (64,)) + 1, fullgraph=True)
        graph(torch.ones(64, 64, device="openreg"))
        yield graph


@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_launch_modes(graph, mode):
    """Behind what is queued, and the memory that it reads is not reused meanwhile; the host runs ahead where the mode says so."""
    x = torch.randn(64, 64, device="openreg")
    expected = graph(x).cpu()
    stream = torch.openreg.Stream()
    with torch.openreg.launch_mode(mode), torch.openreg.stream(stream):
        late = torch.zeros_like(x)
        torch.openreg._sleep(500_000_000)
        late.copy_(x)
        results = [graph(late) for _ in range(3)]
        ahead = not stream.query()
        del late
        for result in results:
            assert_close(result.cpu(), expected)
    assert ahead == (mode == "async")


@pytest.mark.parametrize("kind, words", [("kernel", "injected fault"), ("lost", "lost")])
@pytest.mark.parametrize("after", [0, 1], ids=["matrix product", "generated kernel"])
def test_an_injected_fault(graph, kind, words, after, request, openreg_faults):
    """A lost device is an error of the call; of one from an operator of ATen the C++ wrapper keeps no more than that."""
    x = torch.ones(64, 64, device="openreg")
    expected = graph(x).cpu()
    openreg_faults(kind, after=after)
    through_c = kind == "lost" and after == 0 and request.node.callspec.params["graph"] == "cpp"
    with pytest.raises(RuntimeError, match="API call failed" if through_c else words):
        graph(x)
        torch.openreg.synchronize()
    if kind == "lost":
        torch.openreg.faults.reset_device()
        x = torch.ones(64, 64, device="openreg")
    assert_close(graph(x).cpu(), expected)


def test_too_little_memory(openreg_faults):
    """A graph's own buffers raise out of memory as other allocations do, and the next call works."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to("openreg")
    graph, x = torch.compile(model), torch.ones(4, 8, device="openreg")
    with torch.no_grad():
        expected = graph(x).cpu()
        openreg_faults("allocation")
        with pytest.raises(torch.OutOfMemoryError):
            graph(x)
        assert_close(graph(x).cpu(), expected)
