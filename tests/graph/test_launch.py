"""Generated kernels are ordinary work: isolation, launch modes and faults apply to them, no matter who calls them."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import python
from torch._inductor import config
from torch.testing import assert_close

pytestmark = pytest.mark.compiles

ISOLATED = """
import sys, torch, openreg_ops
from torch.nn.attention.flex_attention import flex_attention
assert torch.openreg.isolation_mode() == "strict"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
model, x = model.to("openreg"), torch.randn(700, 8).to("openreg")

def gradients(function):
    model.zero_grad()
    loss = function(x).softmax(-1).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

scalar = torch.tensor(3.0)  # host memory, which a kernel may read
for mode in ("inline", "async", "sync"):
    torch._dynamo.reset()
    with torch.openreg.launch_mode(mode):
        torch.testing.assert_close(gradients(torch.compile(model)), gradients(model), rtol=1e-4, atol=1e-4)
        graph = torch.compile(lambda x: (x * scalar).sum(0) + torch.rand(8, device=x.device))
        assert (graph(x).cpu() - 3 * x.cpu().sum(0) < 1.01).all()
q = torch.randn(1, 2, 64, 16).to("openreg")
expected = torch.nn.functional.scaled_dot_product_attention(*[q.cpu()] * 3)
torch.testing.assert_close(torch.compile(flex_attention)(q, q, q).cpu(), expected)
package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=sys.argv[1])
torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))
print("right", flush=True)

import ctypes
y = graph(x)  # what a generated kernel wrote is closed to the host again
ctypes.string_at(y.data_ptr(), 4)
"""


def test_strict_isolation(tmp_path):
    """Kernels of the Python wrapper, a template's and a package's may touch device memory, in each mode; the host not."""
    environment = {"OPENREG_ISOLATION": "strict", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = python("-c", ISOLATED, tmp_path / "model.pt2", dynamo=True, **environment)
    assert done.stdout.strip() == "right", done.stderr[-3000:]
    assert done.returncode < 0 and "openreg: the host read device memory" in done.stderr


@pytest.fixture(params=["python", "cpp"])
def graph(request):
    """A fused group of kernels behind a matrix product, called by each wrapper."""
    with config.patch(cpp_wrapper=request.param == "cpp"):
        graph = torch.compile(lambda x: F.layer_norm((x @ x).relu(), (64,)) + 1, fullgraph=True)
        graph(torch.ones(64, 64, device="openreg"))
        yield graph


@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_launch_modes(graph, mode):
    """Behind what is queued; the host runs ahead where the mode says so."""
    x = torch.randn(64, 64, device="openreg")
    expected = graph(x).cpu()
    late = torch.zeros_like(x)
    stream = torch.openreg.Stream()
    with torch.openreg.launch_mode(mode), torch.openreg.stream(stream):
        torch.openreg._sleep(500_000_000)
        late.copy_(x)
        result = graph(late)
        ahead = not stream.query()
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
