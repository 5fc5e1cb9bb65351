"""int8 and float8 on a GPU: quantized tensors, fake quantization, int8 products, dtype conversions."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 64)
q = torch.quantize_per_tensor(x.cuda(), scale=0.05, zero_point=10, dtype=torch.quint8)
assert q.is_cuda and q.is_quantized and q.q_scale() == 0.05 and q.q_zero_point() == 10
integers = torch.clamp(torch.round(x / 0.05) + 10, 0, 255)
assert (q.int_repr().cpu().float() - integers).abs().max() <= 1
torch.testing.assert_close(q.dequantize().cpu(), (integers - 10) * 0.05, atol=0.051, rtol=0)
assert torch.equal(q.cpu().int_repr(), q.int_repr().cpu())
scales = x.abs().amax(1) / 127
channels = torch.quantize_per_channel(
    x.cuda(), scales.cuda(), torch.zeros(32, dtype=torch.int64).cuda(), 0, torch.qint8
)
torch.testing.assert_close(channels.dequantize().cpu(), x, atol=scales.max().item(), rtol=0)

y = x.cuda().requires_grad_()
fake = torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -8, 7)
fake.sum().backward()
inside = (torch.round(x / 0.1) >= -8) & (torch.round(x / 0.1) <= 7)
torch.testing.assert_close(fake.detach().cpu(), torch.clamp(torch.round(x / 0.1), -8, 7) * 0.1, atol=0.101, rtol=0)
assert (y.grad.cpu() != inside.float()).float().mean() < 0.01
observer = torch.ao.quantization.MinMaxObserver().cuda()
observer(x.cuda())
assert observer.min_val.item() == x.min().item() and observer.max_val.is_cuda

a, b = torch.randint(-100, 100, (32, 64), dtype=torch.int8), torch.randint(-100, 100, (64, 16), dtype=torch.int8)
product = torch._int_mm(a.cuda(), b.cuda())
assert product.dtype == torch.int32 and torch.equal(product.cpu(), a.int() @ b.int())


class Int8Linear(nn.Module):
    """Weight-only quantization as in many LLM repositories."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(linear.weight / scale).to(torch.int8))
        self.register_buffer("scale", scale.squeeze(1))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype) + self.bias.to(x.dtype)


linear = nn.Linear(64, 8)
quantized = Int8Linear(copy.deepcopy(linear)).cuda()
torch.testing.assert_close(quantized(x.cuda()).cpu(), linear(x), rtol=0.1, atol=0.05)
half = quantized(x.cuda().half())
assert half.dtype == torch.float16
torch.testing.assert_close(half.float().cpu(), linear(x), rtol=0.1, atol=0.05)

for dtype, step in ((torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)):
    eight = x.cuda().to(dtype)
    assert eight.element_size() == 1 and torch.equal(eight.float().cpu(), x.to(dtype).float())
    torch.testing.assert_close(eight.float().cpu(), x, rtol=step, atol=1e-2)
for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.half):
    values = (x * 10).abs()
    assert torch.equal(values.cuda().to(dtype).cpu(), values.to(dtype))
