"""The operators of the suite in Inductor's graphs; tests/ops runs each through aot_eager and torch.export."""

import operator

import pytest
import torch
from graphs import calls, source
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

import openreg_ops
from openreg_ops import inductor
from openreg_ops.meta.op import SAMPLES
from openreg_tools.core.samples import Sample

pytestmark = pytest.mark.compiles

NAMES = [name for name in SAMPLES if not name.endswith(("_backward", "_gradients"))]
FORWARD_ONLY = ("adamw_step_", "custom_abs", "int8_linear", "nms", "dequantize_rowwise", "quantize_rowwise")


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


@pytest.fixture
def decompositions(monkeypatch):
    monkeypatch.setattr(inductor, "decompositions", set(inductor.decompositions))
    return inductor.decompositions


@pytest.mark.parametrize("name", NAMES)
def test_in_a_graph(name):
    """Sizes as symbols, outputs, gradients and changed arguments as in eager mode; the graph does not break."""
    overload = operator.attrgetter(name if "." in name else f"{name}.default")(torch.ops.openreg)
    sample = next(iter(SAMPLES[name]("openreg", torch.float32)))
    if not isinstance(sample, Sample):
        sample = Sample(*sample)
    grads = not name.startswith((*FORWARD_ONLY, "kv_cache_update"))

    def fresh(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().clone().requires_grad_(grads and x.is_floating_point())

    runs = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = torch.compile(lambda *args, **kwargs: overload(*args, **kwargs), fullgraph=True, dynamic=True)
        for function in (overload, graph):
            args, kwargs = tree_map(fresh, (sample.args, sample.kwargs))
            torch.openreg.manual_seed(1)
            result = function(*args, **kwargs)
            outs = [x for x in tensors(result) if x.requires_grad]
            inputs = [x for x in tensors((args, kwargs)) if x.requires_grad]
            gradients = (
                torch.autograd.grad(outs, inputs, [torch.ones_like(x) for x in outs], allow_unused=True) if outs else ()
            )
            runs.append(tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (result, gradients, args)))
    assert_close(runs[1], runs[0])


def test_a_size_that_depends_on_the_data():
    """The size of nms's result is unknown while tracing; the graph continues with it."""
    boxes = torch.rand(50, 4, device="openreg").cumsum(1)
    scores = torch.rand(50, device="openreg")

    def function(boxes, scores):
        return boxes[openreg_ops.nms(boxes, scores, 0.5)].square().sum(1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_close(torch.compile(function, fullgraph=True)(boxes, scores), function(boxes, scores))


def test_a_change_of_an_argument_is_seen_by_what_follows():
    sample = next(iter(SAMPLES["kv_cache_update_"]("openreg", torch.float32)))
    results = []

    def function(*args):
        openreg_ops.kv_cache_update_(*args)
        return [x * 2 for x in args if x.is_floating_point()]

    for call in (function, torch.compile(function, fullgraph=True)):
        args = tree_map(lambda x: x.clone(), sample)
        results.append((call(*args), args))
    assert_close(results[1], results[0])


def test_decompositions(decompositions):
    """An operator that decomposes is fused with its neighbours; one that does not is one call."""

    def function(x, weight):
        return torch.relu(openreg_ops.swiglu(openreg_ops.rms_norm(x + 1, weight)[0], x))

    def agrees():
        torch._dynamo.reset()
        assert_close(torch.compile(function, fullgraph=True)(x, weight), function(x, weight))

    x, weight = torch.randn(8, 16, device="openreg"), torch.randn(16, device="openreg")
    own, operators = calls(source(function, x, weight))
    assert own == 2 and set(operators) == {"torch.ops.openreg.rms_norm.default"}
    agrees()
    decompositions.add("rms_norm")
    assert calls(source(function, x, weight)) == (1, [])
    agrees()
    decompositions.clear()
    _, operators = calls(source(function, x, weight))
    assert {"torch.ops.openreg.rms_norm.default", "torch.ops.openreg.swiglu.default"} <= set(operators)
    agrees()


@pytest.mark.parametrize("cache", [True, False])
def test_a_name_that_is_no_decomposition(decompositions, cache):
    """Also of a graph that was compiled without it."""
    x = torch.ones(3, device="openreg")
    with torch._inductor.config.patch(fx_graph_cache=cache):
        torch.compile(torch.sin)(x)
        torch._dynamo.reset()
        decompositions.add("swigloo")
        with pytest.raises(Exception, match="rms_norm, rotary_embedding, swiglu, but got 'swigloo'; remove it"):
            torch.compile(torch.sin)(x)
