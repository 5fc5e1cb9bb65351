"""attention and attention_backward."""

import math
import subprocess
import sys

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from openreg_ops import attention, attention_backward

OP = torch.ops.openreg.attention.default
BACKWARD = torch.ops.openreg.attention_backward.default


def reference(q, k, v, bias=None, *, causal=False, scale=None):
    """torch's own attention; logsumexp of the scores written out."""
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    if causal:
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -math.inf)
    if bias is not None:
        mask = mask + bias
    with sdpa_kernel(SDPBackend.MATH):  # which is differentiable twice
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT + mask
    blind = (scores == -math.inf).all(-1)
    logsumexp = scores.masked_fill(blind.unsqueeze(-1), 0).logsumexp(-1).masked_fill(blind, -math.inf)
    return out, logsumexp


def qkv(batch, heads, kv_heads, queries, keys, width, value_width, **options):
    return (
        random(batch, heads, queries, width, **options),
        random(batch, kv_heads, keys, width, **options),
        random(batch, kv_heads, keys, value_width, **options),
    )


def check(*inputs, scale_tolerance=1.0, **options):
    kit.check_against(
        lambda *x: attention(*x, **options), lambda *x: reference(*x, **options), *inputs, scale=scale_tolerance
    )


def test_by_hand():  # scores 0 and log 3: weights 1/4 and 3/4
    k = kit.tensor([0.0, math.log(3)]).view(1, 1, 2, 1)
    v = kit.tensor([[4.0, 0.0], [8.0, 4.0]]).view(1, 1, 2, 2)
    out, logsumexp = attention(kit.tensor([1.0, 0.0]).view(1, 1, 2, 1), k, v)
    assert_close(out.cpu().view(2, 2), torch.tensor([[7.0, 3.0], [6.0, 2.0]]))
    assert_close(logsumexp.cpu().view(2), torch.tensor([math.log(4), math.log(2)]))
    out, _ = attention(kit.tensor([1.0, 0.0]).view(1, 1, 2, 1), k, v, causal=True)
    assert_close(out.cpu().view(2, 2), torch.tensor([[4.0, 0.0], [6.0, 2.0]]))


# batch, heads, kv_heads, queries, keys, width, value_width; the last four cross blocks of queries and of keys.
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 5, 7, 3, 4),
    (1, 3, 1, 9, 4, 8, 20),
    (0, 2, 2, 3, 3, 4, 4),
    (2, 2, 2, 0, 3, 4, 4),
    (2, 2, 1, 3, 4, 5, 0),
    (1, 2, 1, 130, 300, 16, 8),
    (2, 2, 2, 300, 130, 33, 17),
    (1, 2, 2, 100, 600, 64, 64),
    (1, 4, 2, 257, 257, 16, 16),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_torch(sizes, dtype, causal):
    q, k, v = qkv(*sizes, dtype=dtype)
    tolerance = 4 if dtype.itemsize == 2 else 2
    check(q, k, v, causal=causal, scale_tolerance=tolerance)
    out, logsumexp = attention(q, k, v, causal=causal)
    assert out.dtype == dtype and logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_scale(scale):
    inputs = qkv(2, 4, 2, 5, 7, 3, 4)
    check(*inputs, scale=scale, scale_tolerance=2)
    kit.check_other_devices(lambda *x: attention(*x, scale=scale), *inputs, compiled=False)


BIASES = [(1,), (7,), (5, 1), (5, 7), (4, 1, 1), (2, 1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), ()]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias(shape, causal):
    q, k, v = qkv(2, 4, 2, 5, 7, 3, 4)
    check(q, k, v, random(*shape), causal=causal, scale_tolerance=2)


@pytest.mark.parametrize("shape", [(130, 300), (2, 1, 300), (1, 130, 1)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_across_blocks(shape, dtype):
    q, k, v = qkv(2, 2, 1, 130, 300, 8, 8, dtype=dtype)
    check(q, k, v, random(*shape, dtype=dtype), causal=True, scale_tolerance=8)


def test_memory_order_is_what_layers_want():
    """out can be viewed as [batch, length, heads * width], and a gradient lies as what it is the gradient of."""
    inputs = [x.requires_grad_() for x in qkv(2, 4, 2, 5, 7, 3, 4)]
    inputs[0] = random(2, 5, 4, 3, grad=True).transpose(1, 2)
    out, _ = attention(*inputs)
    assert out.transpose(1, 2).is_contiguous()
    for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert grad.stride() == x.stride()


def test_rows_that_see_nothing():
    """Output and gradients 0, logsumexp -inf, even where logsumexp gets a gradient of inf or NaN."""
    q, k, v = qkv(1, 2, 1, 4, 5, 3, 3)
    bias = torch.zeros(4, 5, device=DEVICE)
    bias[1] = -math.inf
    bias[2, 3] = -math.inf
    check(q, k, v, bias)
    check(q, k, v, bias, causal=True)
    q, k, v, bias = (x.requires_grad_() for x in (q, k, v, bias))
    out, logsumexp = attention(q, k, v, bias)
    assert out[:, :, 1].count_nonzero() == 0 and (logsumexp[:, :, 1] == -math.inf).all()
    grads = torch.ones_like(logsumexp)
    grads[:, :, 1] = math.nan
    for grad in torch.autograd.grad((out, logsumexp), (q, k, v, bias), (torch.ones_like(out), grads)):
        assert grad.isfinite().all()
    kit.check_other_devices(attention, q, k, v, bias, compiled=False)
    # No keys at all.
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 4, 0, 3, 3))
    out, logsumexp = attention(q, k, v)
    assert out.count_nonzero() == 0 and (logsumexp == -math.inf).all()
    out.sum().backward()
    assert q.grad.shape == q.shape and q.grad.count_nonzero() == 0 and k.grad.shape == k.shape


def test_a_block_of_minus_infinity():
    """Rows that see nothing in their first block of keys, and something later."""
    q, k, v = qkv(1, 1, 1, 3, 600, 4, 4)
    bias = torch.zeros(3, 600, device=DEVICE)
    bias[0, :300] = bias[1, 300:] = bias[2, 1:] = -math.inf
    check(q, k, v, bias)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_special_scores_are_not_lost(value):
    """A score of NaN or inf gives a row of NaN, as in torch, and leaves the other rows alone."""
    q, k, v = qkv(1, 1, 1, 3, 300, 4, 4)
    bias = torch.zeros(3, 300, device=DEVICE)
    bias[1, 7] = value
    out, logsumexp = attention(q, k, v, bias)
    assert out[0, 0, 1].isnan().all() and out[0, 0, [0, 2]].isfinite().all()
    assert_close(logsumexp[0, 0, 1].item(), value, equal_nan=True)
    q = q.requires_grad_()
    attention(q, k, v, bias)[0].sum().backward()
    assert q.grad[0, 0, 1].isnan().all() and q.grad[0, 0, [0, 2]].isfinite().all()


def test_large_scores_do_not_overflow():
    q, k, v = qkv(1, 1, 1, 5, 300, 8, 4)
    check(100 * q, k, v, scale_tolerance=20)


NEAR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_in_a_wider_type(q, k, v, bias, grads):
    """Outputs and gradients as torch computes them in the dtype that the operator computes in."""
    ours = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().cpu().to(torch.promote_types(q.dtype, torch.float32)).requires_grad_() for x in (q, k, v)]
    out, _ = attention(*ours, bias)
    expected, _ = reference(*wide, bias.cpu().to(wide[0].dtype))
    pairs = [(out, expected)]
    if grads:
        grad = torch.rand_like(expected)
        out.backward(grad.to(DEVICE, q.dtype))
        expected.backward(grad)
        pairs += [(x.grad, y.grad) for x, y in zip(ours, wide, strict=True)]
    near = NEAR[q.dtype]
    for got, want in pairs:
        assert_close(got.detach().cpu().to(want.dtype), want.detach(), rtol=near, atol=near * want.abs().max().item())


@pytest.mark.parametrize("masked", [300, 512, 600], ids=["a block and more", "two blocks", "all"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_masked_by_a_large_number(dtype, masked):
    """As model libraries mask keys: a block of 256 keys, or all of them, may have no other score."""
    q, k, v = qkv(1, 2, 2, 64, 600, 32, 32, dtype=dtype)
    least = torch.finfo(dtype).min
    for value in {least, *(x for x in (-1e30, -3e10, -5e9, -1e9) if x > least)}:
        bias = torch.zeros(1, 1, 64, 600, dtype=dtype, device=DEVICE)
        bias[..., :masked] = value
        # If all are masked, the logsumexp, from which backward computes the weights, rounds to the largest score.
        check_in_a_wider_type(q, k, v, bias, grads=masked < 600)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scores_beyond_the_precision_of_1(dtype):
    """The largest score of a row has the weight 1, however large it is."""
    q, k, v = qkv(1, 2, 2, 64, 600, 32, 32, dtype=dtype)
    for factor, scale in (1e5, None), (1.0, 1e10):
        out, _ = attention(q * factor, k, v, scale=scale)
        scores = (q * factor).cpu().double() @ k.cpu().double().mT
        assert_close(out.cpu(), v.cpu()[torch.arange(1)[:, None, None], torch.arange(2)[:, None], scores.argmax(-1)])


def test_backward_operator():
    """It is a function of independent tensors: out and logsumexp need not belong to q, k and v.

    Rows with a logsumexp of -inf have no weights, whatever their scores are.
    """
    q, k, v = qkv(2, 4, 2, 5, 7, 3, 4)
    bias, out, grad_out, logsumexp, grad_logsumexp = (
        random(*s) for s in [(4, 5, 1), (2, 4, 5, 4), (2, 4, 5, 4), (2, 4, 5), (2, 4, 5)]
    )
    logsumexp = logsumexp + 4

    def expected(grad_out, grad_logsumexp, q, k, v, bias, out, logsumexp):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = logsumexp > -math.inf
        scores = 0.5 * q @ k.mT + bias
        p = (scores - logsumexp.masked_fill(~seen, 0).unsqueeze(-1)).exp() * seen.unsqueeze(-1)
        ds = p * (grad_out @ v.mT - ((grad_out * out).sum(-1) - grad_logsumexp).unsqueeze(-1))

        def shared(x):
            return x.unflatten(1, (2, 2)).sum(2)

        return 0.5 * ds @ k, shared(0.5 * ds.mT @ q), shared(p.mT @ grad_out), ds.sum((0, 3), keepdim=True)[0]

    def backward(*inputs):
        return attention_backward(*inputs, scale=0.5, bias_grad=True)

    blind = logsumexp.clone()
    blind[:, :, [1, 4]] = -math.inf
    for given in logsumexp, blind:
        inputs = (grad_out, grad_logsumexp, q, k, v, bias, out, given)
        kit.check_against(backward, expected, *inputs, scale=10, grads=False)
        kit.check_other_devices(backward, *inputs, compiled=False)  # test_every_operator.py compiles it
    *_, grad_bias = attention_backward(grad_out, None, q, k, v, bias, out, logsumexp, scale=0.5)
    assert grad_bias.shape == (0,)


def test_derivatives_through_one_output():
    q, k, v = qkv(1, 2, 1, 2, 3, 2, 2, dtype=torch.float64, grad=True)
    kit.check_gradients(lambda *x: attention(*x)[0], q, k, v)
    kit.check_gradients(lambda q, k: attention(q, k, v.detach())[1], q, k)


def test_second_derivative_of_rows_that_see_nothing():
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 2, 3, 2, 2))
    bias = kit.tensor([[0.0, 0.0, 0.0], [-math.inf] * 3])
    out, logsumexp = attention(q, k, v, bias)
    grads = torch.autograd.grad(out.square().sum() + logsumexp[:, :, 0].sum(), (q, k, v), create_graph=True)
    for grad in torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v)):
        assert grad.isfinite().all()


# Products of pairs have remainders of queries, keys and widths, and panels of 128 columns. The last has no pairs.
PAIRS = [
    (1, 2, 1, 33, 129, 40, 24),
    (1, 1, 1, 97, 59, 130, 257),
    (1, 1, 1, 17, 257, 2, 1),
    (1, 2, 2, 18, 50, 1, 3),
    (1, 2, 1, 1, 257, 34, 33),
]


@pytest.mark.parametrize("enabled", [True, False], ids=["oneDNN", "without oneDNN"])
@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_bfloat16_products(sizes, enabled):
    q, k, v = qkv(*sizes, dtype=torch.bfloat16)
    bias = random(*sizes[3:5], dtype=torch.bfloat16)
    with torch.backends.mkldnn.flags(enabled=enabled):
        check(q, k, v, scale_tolerance=4)
        check(q.mT.contiguous().mT, k[..., :1, :].expand_as(k), v.mT.contiguous().mT, causal=True, scale_tolerance=4)
        check(q, k, v, bias, causal=True, scale_tolerance=8)


@pytest.mark.slow
@pytest.mark.processes
def test_memory_is_linear():
    """8192 queries by 8192 keys would be 256 MiB of scores; forward and backward take a few."""
    program = """
import resource, torch, openreg_ops
def run(length):
    q, k, v = (torch.randn(1, 1, length, 8, device='NAME', requires_grad=True) for _ in range(3))
    openreg_ops.attention(q, k, v)[0].sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = run(64)
print(run(8192) - small)
"""
    kibibytes = int(
        subprocess.run(
            [sys.executable, "-P", "-c", program.replace("NAME", kit.NAME)], check=True, capture_output=True, text=True
        ).stdout
    )
    assert kibibytes < 64 * 1024


def test_backward_on_the_cpu_where_queries_lie_in_another_order():
    q, k, v = qkv(2, 4, 2, 5, 7, 3, 4)
    q = random(2, 5, 4, 3).transpose(1, 2)
    others = random(5, 1), random(2, 4, 5, 4), random(2, 4, 5)
    arguments = (others[1], others[2], q, k, v, *others)
    on_device = attention_backward(*arguments, bias_grad=True)
    on_host = attention_backward(*(x.cpu() for x in arguments), bias_grad=True)
    for actual, device in zip(on_host, on_device, strict=True):
        assert actual.stride() == device.stride()
        assert_close(actual, device.cpu(), rtol=1e-5, atol=1e-5)


def test_rejects():
    q, k, v = qkv(2, 4, 2, 5, 7, 3, 4)
    out, logsumexp = random(2, 4, 5, 4), random(2, 4, 5)
    kit.check_error(OP, q.long(), k, v, match="attention: expected q of float32, float64, float16 or bfloat16")
    kit.check_error(OP, q[0], k, v, match="expected q of shape [batch, heads, length, width], but got [4, 5, 3]")
    kit.check_error(OP, q, k, v[0, 0], match="expected v of shape [batch, heads, length, width], but got [7, 4]")
    kit.check_error(OP, q, v, v, match="expected k of batch 2 and width 3, like q, but got shape [2, 2, 7, 4]")
    kit.check_error(OP, q, k, v[:, :, 1:], match="batch, heads and length [2, 2, 7], like k, but got shape [2, 2, 6")
    kit.check_error(OP, q[:, :3], k, v, match="expected the number of heads of q to be a multiple of 2, the heads of k")
    kit.check_error(OP, q, k, v, random(5, 6), match="broadcastable to [2, 4, 5, 7], the scores, but got [5, 6]")
    kit.check_error(OP, q, k, v, random(1, 1, 1, 1, 1), match="the scores, but got [1, 1, 1, 1, 1]")
    kit.check_error(BACKWARD, q, None, q, k, v, None, out, logsumexp, match="grad_out of shape [2, 4, 5, 4], the same")
    kit.check_error(
        BACKWARD, out, logsumexp[0], q, k, v, None, out, logsumexp, match="expected grad_logsumexp of shape [2, 4, 5]"
    )
    kit.check_error(
        lambda *x: BACKWARD(*x, bias_grad=True),
        out,
        None,
        q,
        k,
        v,
        None,
        out,
        logsumexp,
        match="but got none; pass bias",
    )


@pytest.mark.parametrize(
    "shape, queries, keys", [((1, 1, 64, 1), 64, 3000), ((1, 1, 1, 300), 3000, 300), ((1, 1, 1, 1), 700, 900)]
)
def test_the_gradient_of_a_shared_bias_does_not_depend_on_threads(shape, queries, keys):
    """To the bit: one thread computes each element, from all blocks of scores that share it."""
    tensors = [random(1, 1, n, 8).requires_grad_() for n in (queries, keys, keys)]
    bias = random(*shape).requires_grad_()

    def gradient():
        out, _ = OP(*tensors, bias)
        return torch.autograd.grad(out.square().sum(), bias)[0].cpu()

    first, *others = kit.with_threads(gradient, (1, 3, 7))
    assert all(other.equal(first) for other in others)
