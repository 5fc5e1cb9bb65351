"""Operators that take functions: each part of higher_order.py, and what breaks without it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from graphs import uncached
from torch._C import DispatchKey
from torch._prims import rng_prims
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

AUTOCAST = DispatchKey.AutocastPrivateUse1

pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def without_kernel(monkeypatch, operator, key, original=None):
    """`operator` has `original` for `key`, or nothing."""
    if original is None:
        monkeypatch.delitem(operator.py_kernels, key)
    else:
        monkeypatch.setitem(operator.py_kernels, key, original)
    monkeypatch.setattr(operator, "_dispatch_cache", {})  # of what was found before


def test_register_autocast(monkeypatch):
    """The device's autocast passes control flow; else PyTorch finds no implementation for it."""

    def function(x):
        with torch.autocast("openreg", dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x + 1, (x,))

    x = torch.ones(4, 4, device="openreg")
    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert graph(x).dtype == torch.bfloat16
    cond = torch.ops.higher_order.cond
    monkeypatch.setattr(cond, "non_fallthrough_keys", cond.non_fallthrough_keys.add(AUTOCAST))
    monkeypatch.setattr(cond, "_dispatch_cache", {})
    with uncached(), pytest.raises(Exception, match="AutocastPrivateUse1"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)


def test_operators_made_later_pass_autocast_too():
    assert AUTOCAST in torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS


def dropout(x):
    return checkpoint(lambda x: F.dropout(x, 0.5).sin(), x, use_reentrant=False)


@pytest.mark.parametrize("name", ["run_and_save_rng_state", "run_with_rng_state"])
def test_register_random_state(name, monkeypatch):
    """A graph saves the device's random state and restores it; PyTorch's own implementations know a list of devices."""

    def train():
        x = torch.ones(100, device="openreg", requires_grad=True)
        y = torch.compile(dropout, backend="aot_eager", fullgraph=True)(x)
        torch.autograd.grad(y.sum(), x)

    with uncached():
        train()
    operator, key = getattr(rng_prims, name), DispatchKey.BackendSelect
    without_kernel(monkeypatch, operator, key, operator.py_kernels[key].__wrapped__)
    with uncached(), pytest.raises(Exception, match="Backend not supported for openreg"):
        train()


def test_register_random_state_in_graphs_that_are_traced(monkeypatch):
    """Inductor traces such a graph, with `fallback_random`; PyTorch's implementations for it have their own list."""
    save = rng_prims.run_and_save_rng_state
    ours = save.py_kernels[DispatchKey.BackendSelect]
    cells = [
        cell
        for traced in save.python_key_table.values()
        for cell in getattr(traced, "__closure__", None) or ()
        if cell.cell_contents is ours
    ]
    x = torch.ones(100, device="openreg")

    def trace():
        return make_fx(lambda x: save(torch.ops.aten.rand_like.default, x), tracing_mode="fake")(x)

    assert save in [node.target for node in trace().graph.nodes]
    for cell in cells:
        monkeypatch.setattr(cell, "cell_contents", ours.__wrapped__)
    with pytest.raises(AssertionError, match="Backend not supported for openreg"):
        trace()


def test_register_flex_attention(monkeypatch):
    """PyTorch's own check has a list of devices, and its autocast supports only CUDA and the CPU."""
    q = torch.randn(1, 1, 20, 16, device="openreg")
    with torch.autocast("openreg", dtype=torch.bfloat16):
        result = flex_attention(q, q, q)
        assert result.dtype == torch.bfloat16
        implementation = sys.modules["torch._higher_order_ops.flex_attention"]
        with monkeypatch.context() as patch:
            without_kernel(patch, implementation.flex_attention, AUTOCAST)
            with pytest.raises(Exception, match="AutocastPrivateUse1"):
                flex_attention(q, q, q)
    assert_close(flex_attention(q, q, q).bfloat16(), result, rtol=0.05, atol=0.05)
    flex = sys.modules["torch.nn.attention.flex_attention"]
    monkeypatch.setattr(flex, "_validate_device", flex._validate_device.__wrapped__)
    with pytest.raises(ValueError, match="openreg"):
        flex_attention(q, q, q)
