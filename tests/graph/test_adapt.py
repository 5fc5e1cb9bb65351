"""Each adaptation of Inductor's own code: it works with the adaptation, and fails without it.

Generated kernels are compared with CPU Inductor's, as an alarm for new versions of torch.
"""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from graphs import calls, kernels, on, source, uncached, without
from processes import python
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

pytestmark = pytest.mark.compiles


def same_as_cpu(function, *args):
    ours, theirs = source(function, *on("openreg", args)), source(function, *args)
    assert kernels(theirs)
    return kernels(ours) == kernels(theirs) and calls(ours) == calls(theirs)


def assert_same_only_with(adaptation, function, *args):
    assert same_as_cpu(function, *args)
    with without(adaptation):
        assert not same_as_cpu(function, *args)


def test_cpu_heuristics():
    assert_same_only_with("cpu_heuristics", lambda x: torch.softmax(x, -1), torch.randn(32, 100))


@pytest.mark.slow
def test_no_loop_reordering():
    def function(x):
        return (x.t() + 1).contiguous().sin(), x.sum(1)

    x = torch.randn(64, 48, device="openreg")
    assert_close(torch.compile(function)(x), function(x))
    with without("no_loop_reordering"), pytest.raises(Exception, match="can't multiply sequence"):
        torch.compile(function)(x)


def graphed():
    """The graphs that openreg_ops.inductor.graphs made for a compiled training step."""
    from openreg_ops.inductor import graphs

    x, made = torch.ones(3, device="openreg", requires_grad=True), []
    init = graphs._Graphed.__init__
    torch._dynamo.reset()
    with patch.object(graphs._Graphed, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]):
        torch.compile(lambda x: x.sin().sum(), mode="reduce-overhead")(x).backward()
    return made


def test_reduce_overhead():
    """Without it, a graph of the device is not captured. tests/graph/test_reduce_overhead.py has more."""
    with uncached():
        assert graphed()
    with without("reduce_overhead"):
        assert not graphed()


def test_graphs_of_the_device():
    from torch._inductor import config

    with uncached():
        assert graphed()
        assert config.cudagraph_policy is None  # the policy of other devices
    with without("graphs_of_the_device"):
        assert not graphed()


def test_metadata_of_cached_graphs():
    """Which results are only for backward is known when a graph is compiled, and when it comes from the cache."""
    from torch._inductor.utils import fresh_cache

    from openreg_ops.inductor import adapt

    adaptation = adapt.ADAPTATIONS["metadata_of_cached_graphs"]
    with (
        fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        assert [graphed()[0].saved for _ in range(2)] == [1, 1]
        with patch.object(adaptation.owner, adaptation.name, adaptation.original):
            assert graphed()[0].saved == sys.maxsize


def under_cuda(adaptation, folder):
    """How a program ends under the name cuda that compiles without this adaptation."""
    code = (
        "import torch, torch._inductor.compile_fx, torch._inductor.config as config\n"
        "from openreg_ops.inductor.adapt import ADAPTATIONS\n"
        f"if {adaptation!r}: ADAPTATIONS[{adaptation!r}].put(ADAPTATIONS[{adaptation!r}].original)\n"
        "x = torch.randn(64, 48, device='cuda')\n"
        "f = lambda x: ((x @ x.t()).relu(), x.softmax(-1))\n"
        "torch.testing.assert_close(torch.compile(f, mode='max-autotune-no-cudagraphs')(x), f(x))"
    )
    return python("-c", code, dynamo=True, OPENREG_DEVICE="cuda", TORCHINDUCTOR_CACHE_DIR=str(folder))


@pytest.mark.slow
def test_cuda_is_not_a_gpu(tmp_path):
    """Otherwise Inductor tunes Triton's templates, and looks at the processors of the GPU."""
    assert "SMs" in under_cuda("cuda_is_not_a_gpu", tmp_path / "with").stderr
    ended = under_cuda(None, tmp_path / "without")
    assert ended.returncode == 0 and "SMs" not in ended.stderr, ended.stderr


@pytest.mark.slow
def test_cuda_without_triton(tmp_path):
    ended = under_cuda("cuda_without_triton", tmp_path)
    assert ended.returncode == 1 and "too old to be supported by the triton GPU compiler" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("adaptation", ["cuda_without_its_libraries", None])
def test_cuda_without_its_libraries(adaptation, tmp_path):
    code = (
        "import torch, torch._inductor.compile_fx, sys\n"
        "from openreg_ops.inductor.adapt import ADAPTATIONS\n"
        f"if {adaptation!r}: ADAPTATIONS[{adaptation!r}].put(ADAPTATIONS[{adaptation!r}].original)\n"
        "module, x = torch.nn.Linear(4, 2).cuda(), torch.randn(3, 4, device='cuda')\n"
        "with torch.no_grad():\n"
        "    package = torch._inductor.aoti_compile_and_package(torch.export.export(module, (x,)), package_path=sys.argv[1])\n"
        "    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), module(x))"
    )
    ended = python("-c", code, str(tmp_path / "model.pt2"), dynamo=True, OPENREG_DEVICE="cuda")
    assert ("a CUDA extension needs nvcc" in ended.stderr, ended.returncode) == (
        bool(adaptation),
        int(bool(adaptation)),
    )


def test_two_step_variance():
    assert_same_only_with("two_step_variance", lambda x: F.layer_norm(x, (100,)), torch.randn(32, 100))


def test_no_combo_kernels():
    """Two kernels that Inductor would combine."""

    def function(x, y):
        return x.sin(), y.cos()

    args = torch.randn(64, 48, device="openreg"), torch.randn(80, 32, device="openreg")
    options = {"combo_kernels": True}
    assert_close(torch.compile(function, options=options)(*args), function(*args))
    with without("no_combo_kernels"), pytest.raises(Exception, match="scheduler.Scheduler"):
        torch.compile(function, options=options)(*args)


@pytest.mark.slow
def test_logical_argmax():
    def function(x):
        return x.t().argmax(), x.t().argmin()

    x = torch.randn(5, 7, device="openreg")
    assert_close(torch.compile(function)(x), function(x))
    with without("logical_argmax"):
        assert torch.compile(function)(x) != function(x)


@pytest.mark.slow
def test_device_of_the_result():
    """In stream order too: a kernel of the CPU would not wait for the copy."""
    scalar, x, late = torch.tensor(3.0), torch.randn(7, device="openreg"), torch.zeros(7, device="openreg")
    for function in (torch.mul, torch.maximum):
        graph = torch.compile(lambda s, x, function=function: function(s, x) + 1, fullgraph=True)
        result = graph(scalar, x)
        assert result.device == x.device
        assert_close(result, function(scalar, x) + 1)
        with torch.openreg.launch_mode("async"):
            late.zero_()
            torch.openreg._sleep(20_000_000)
            late.copy_(x)
            assert graph(scalar, late).equal(result)
    with without("device_of_the_result"):
        assert torch.compile(torch.mul)(scalar, x).device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dynamic"), [({}, False), ({"cpp_wrapper": True}, True)], ids=["python", "cpp, sizes unknown"]
)
def test_host_values(options, dynamic):
    """Elements computed on the CPU, as either operand, where the operator does not handle them otherwise."""

    def function(x, v):
        return x * (v * 2)[2], (v + 1)[1] - x, torch.where(x > 0, v.flip(0)[0], x), v[3] / x

    x, v = torch.randn(7, device="openreg"), torch.arange(5.0)
    graph = torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)
    assert_close(graph(x, v), function(x, v))
    with (
        without("host_values"),
        pytest.raises(Exception, match="openreg: a generated kernel takes CPU tensors of one el"),
    ):
        torch.compile(function, dynamic=dynamic, options=options)(x, v)


@pytest.mark.parametrize("divisor", [lambda: 3, lambda: torch.full((), 3.0)], ids=["number", "CPU scalar"])
def test_exact_division(divisor):
    assert_same_only_with("exact_division", lambda x: x.sin() / divisor(), torch.randn(100))


def test_exact_division_of_what_the_graph_makes():
    function = torch.compile(lambda: torch.arange(1000, device="openreg", dtype=torch.float32) / 49.0)
    assert torch.equal(function().cpu(), torch.arange(1000, dtype=torch.float32) / 49.0)


@pytest.mark.fast
def test_exact_division_leaves_the_cpu_alone():
    """There a constant is one, for which mkldnn_lowerings asks too."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    constant = ir.Constant(value=3.0, dtype=torch.float32, device=torch.device("cpu"))
    for device, expected in (("cpu", constant), ("openreg", None)):
        node = SimpleNamespace(meta={"val": torch.ones(1, device=device)})
        with V.set_graph_handler(SimpleNamespace(current_node=node)):
            assert lowering.get_constant_value(constant) is expected


def test_vectorised_cat():
    assert_same_only_with(
        "vectorised_cat", lambda x, y: torch.cat([x * 2, y], 1), torch.randn(32, 10), torch.randn(32, 20)
    )


def test_pad_in_one_kernel():
    assert_same_only_with("pad_in_one_kernel", lambda x: F.pad(x, (0, 3)), torch.randn(8, 10))


@pytest.mark.slow
def test_no_precompiled_header(tmp_path):
    """With the header of a device that has none, the compiler finds no file. test_export.py builds packages without it."""
    program = torch.export.export(torch.nn.ReLU(), (torch.randn(3, device="openreg"),))
    with without("no_precompiled_header"), pytest.raises(Exception, match="openreg"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "without.pt2"))


def attention(q):
    return flex_attention(q, q, q)


# test_flex_attention.py has what the next two make possible.


@pytest.mark.slow
def test_flex_attention_template():
    q = torch.randn(1, 1, 20, 16, device="openreg")
    with without("flex_attention_template"), pytest.raises(Exception, match="flex_attention"):
        torch.compile(attention)(q)


@pytest.mark.slow
def test_flex_attention_backward():
    q = torch.randn(1, 1, 20, 16, device="openreg", requires_grad=True)
    with without("flex_attention_backward"), pytest.raises(Exception, match="flex_attention_backward"):
        torch.compile(attention)(q).sum().backward()


@pytest.mark.fast
def test_every_adaptation_has_a_test():
    """By name."""
    from openreg_ops.inductor import adapt  # loads Inductor

    assert set(adapt.ADAPTATIONS) <= {name.removeprefix("test_") for name in globals()}


BODIES = {
    "log_softmax": (lambda x: torch.log_softmax(x, -1), torch.randn(32, 100)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), torch.randn(8, 4, 6, 6)),
    "group_norm": (lambda x: F.group_norm(x, 2), torch.randn(8, 4, 6, 6)),
    "linear_gelu": (lambda x, w: F.gelu(F.linear(x, w)), torch.randn(32, 64), torch.randn(16, 64)),
    "sum": (lambda x: x.sum(), torch.randn(1000)),
    "sum of columns": (lambda x: x.sum(0), torch.randn(100, 90)),
    "transpose": (lambda x: x.t().contiguous() * 2, torch.randn(64, 48)),
    "embedding": (lambda i, w: F.embedding(i, w) * 2, torch.randint(10, (4, 5)), torch.randn(10, 8)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), torch.randn(2, 3, 8, 8)),
    "bfloat16": (lambda x: torch.softmax(x * x, -1), torch.randn(8, 64, dtype=torch.bfloat16)),
    "integers": (lambda x: (x // 3) % 2, torch.randint(100, (1000,))),
    "cumsum": (lambda x: x.cumsum(0) * 2, torch.randn(100)),
    "index_add": (
        lambda x, i: torch.zeros(10, 3, device=x.device).index_add(0, i, x),
        torch.randn(20, 3),
        torch.randint(10, (20,)),
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), torch.randn(1, 3, 8, 8)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), torch.randn(32, 100), torch.randint(100, (32,))),
}


@pytest.mark.slow
def test_kernels_are_those_of_the_cpu():
    """All bodies in one graph, which the compiler reads once."""

    def every(*args):
        rest = iter(args)
        return [function(*(next(rest) for _ in given)) for function, *given in BODIES.values()]

    assert same_as_cpu(every, *(x for _, *given in BODIES.values() for x in given))
