"""A transformer encoder with a padding mask, and scaled_dot_product_attention, against the CPU."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)
reference = nn.TransformerEncoder(layer, num_layers=2)
model = copy.deepcopy(reference).cuda()
x = torch.randn(3, 6, 16)
padding = torch.arange(6) >= torch.tensor([[6], [4], [2]])
real = ~padding[..., None]


def run(network, device):
    source = x.to(device).requires_grad_()
    output = network(source, src_key_padding_mask=padding.to(device))
    (output * real.to(device)).square().sum().backward()
    return [output * real.to(device), source.grad, *[parameter.grad for parameter in network.parameters()]]


for ours, theirs in zip(run(model, "cuda"), run(reference, "cpu"), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)
model.eval()
reference.eval()
with torch.inference_mode():  # PyTorch's fast path
    ours = model(x.cuda(), src_key_padding_mask=padding.cuda())
    theirs = reference(x, src_key_padding_mask=padding)
torch.testing.assert_close((ours.cpu() * real).sum(1), (theirs * real).sum(1), rtol=1e-3, atol=1e-4)

q, k, v = (torch.randn(2, 4, 10, 8, dtype=torch.float64) for _ in range(3))
causal = torch.ones(10, 10, dtype=torch.bool).tril()
scores = q @ k.transpose(-2, -1) / math.sqrt(8)
expected = torch.softmax(scores, -1) @ v
expected_causal = torch.softmax(scores.masked_fill(~causal, -math.inf), -1) @ v
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
    on_gpu = [tensor.to("cuda", dtype) for tensor in (q, k, v)]
    for result, wanted in (
        (F.scaled_dot_product_attention(*on_gpu), expected),
        (F.scaled_dot_product_attention(*on_gpu, is_causal=True), expected_causal),
        (F.scaled_dot_product_attention(*on_gpu, attn_mask=causal.cuda()), expected_causal),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            result = F.scaled_dot_product_attention(*on_gpu, is_causal=True)
        torch.testing.assert_close(result.double().cpu(), expected_causal, rtol=tolerance, atol=tolerance)
attention = nn.MultiheadAttention(16, 2, batch_first=True)
wanted, weights = attention(x, x, x, key_padding_mask=padding)
got, got_weights = copy.deepcopy(attention).cuda()(x.cuda(), x.cuda(), x.cuda(), key_padding_mask=padding.cuda())
torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-4)
torch.testing.assert_close(got_weights.cpu(), weights, rtol=1e-3, atol=1e-4)
