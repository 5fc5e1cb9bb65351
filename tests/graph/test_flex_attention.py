"""flex_attention on the device: eager mode, the CPU's C++ template, and training through the plain implementation."""

import pytest
import torch
from graphs import calls, on, run_and_get_code
from torch._inductor import config
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.testing import assert_close

import openreg_ops

pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def causal(b, h, q, k):
    return q >= k


def attend(device, q, k, v, bias, compiled=False, **options):
    """Causal, with a bias by head and distance: a `score_mod` that holds a tensor, and a `block_mask`."""
    q, k, v, bias = (x.to(device) for x in (q, k, v, bias))
    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=device)
    function = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    return function(q, k, v, block_mask=mask, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j), **options)


def tensors(queries=150, keys=150, heads=4, dtype=torch.float32):
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, heads, keys, 16), torch.randn(2, heads, keys, 16)
    return [x.to(dtype) for x in (q, k, v)] + [torch.randn(4)]


def expected(q, k, v, bias):
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias.view(4, 1, 1) * distance
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_and_backward(compiled):
    """Every gradient, also of the tensor that `score_mod` holds; CPU Inductor has no backward."""
    inputs = [x.requires_grad_() for x in tensors()]
    reference = expected(*inputs)
    ours = [x.detach().to("openreg").requires_grad_() for x in inputs]
    with openreg_ops.fallback.policy("error"):
        result = attend("openreg", *ours, compiled=compiled)
        gradients = torch.autograd.grad(result.square().sum(), ours)
    assert_close(result.cpu(), reference)
    wanted = torch.autograd.grad(reference.square().sum(), inputs)
    assert_close(on("cpu", list(gradients)), list(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_inference_is_the_template_of_the_cpu():
    """Two generated kernels, one of the empty mask; in stream order, under autocast, and bit for bit the CPU's result."""
    inputs = tensors(dtype=torch.bfloat16)
    graph = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * h))
    q, k, v, _ = on("openreg", inputs)
    result, code = run_and_get_code(graph, q, k, v)
    assert calls(code) == (2, []) and "_kernel_micro_gemm" in code[0]
    assert result.cpu().equal(graph(*inputs[:3]))
    late = torch.zeros_like(q)
    with torch.openreg.launch_mode("async"), torch.openreg.stream(torch.openreg.Stream()):
        torch.openreg._sleep(20_000_000)
        late.copy_(q)
        assert graph(late, k, v).equal(result)
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert graph(q.float(), k.float(), v.float()).equal(result)


def test_reads_no_memory_behind_the_keys():
    """PyTorch's kernel does with 8 keys beyond whole blocks of 16, where a vector has 8 elements."""
    q, k, v, _ = on("openreg", tensors(keys=8))
    followed = torch.full((k.numel() + 512,), torch.nan, device="openreg")
    followed[: k.numel()] = k.flatten()
    graph = torch.compile(flex_attention, fullgraph=True)
    result = graph(q, followed[: k.numel()].view_as(k), v)
    assert_close(result, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_decoding_and_grouped_heads():
    """One query on many keys is another template; two heads of keys serve four of queries."""
    q, k, v, _ = tensors(queries=1, keys=1100, heads=2)
    results = [
        torch.compile(flex_attention, fullgraph=True)(*on(device, (q, k, v)), enable_gqa=True)
        for device in ("cpu", "openreg")
    ]
    assert_close(results[1].cpu(), results[0])
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4
    assert_close(results[0], scores.softmax(-1) @ v.repeat_interleave(2, 1))


def test_other_dtypes_and_statistics():
    """What the template lacks runs the plain implementation."""
    inputs = tensors(dtype=torch.float64)
    inputs[3] = inputs[3].double()
    eager, aux = attend("openreg", *inputs, return_aux=AuxRequest(lse=True, max_scores=True))
    compiled, compiled_aux = attend("openreg", *inputs, compiled=True, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_close((compiled, *compiled_aux), (eager, *aux))
    assert_close(eager.cpu(), expected(*inputs))


def test_sizes_may_change():
    graph = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    for size in (40, 70):
        inputs = [x.requires_grad_() for x in on("openreg", tensors(size, size)[:3])]
        result, wanted = graph(*inputs), torch.nn.functional.scaled_dot_product_attention(*inputs)
        assert_close(result, wanted)
        seed = torch.randn_like(result)
        gradients = [torch.autograd.grad(y, inputs, seed) for y in (result, wanted)]
        assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_cpp_wrapper():
    q, k, v, _ = on("openreg", tensors())
    with config.patch(cpp_wrapper=True):
        result = torch.compile(flex_attention, fullgraph=True)(q, k, v)
    assert_close(result, torch.nn.functional.scaled_dot_product_attention(q, k, v))
