"""autograd.Function under autocast, with custom_fwd and custom_bwd of both spellings."""

import warnings

import torch

warnings.simplefilter("ignore", FutureWarning)


class MyMM(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        MyMM.enabled = torch.is_autocast_enabled("cuda")
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        MyMM.backward_type = grad.mm(b.t()).dtype
        return grad.mm(b.t()), a.t().mm(grad)


class MyFloat32(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.exp()


torch.manual_seed(0)
a, b = torch.randn(4, 5), torch.randn(5, 6)
ours = [tensor.cuda().requires_grad_() for tensor in (a, b)]
with torch.autocast("cuda", dtype=torch.float16):
    product = MyMM.apply(*ours)
    assert product.dtype == torch.float16 and MyMM.enabled
    result = MyFloat32.apply(product * 0.1)
    assert result.dtype == torch.float32
result.sum().backward()  # outside autocast, whose state backward restores
assert MyMM.backward_type == torch.float16

theirs = [tensor.clone().requires_grad_() for tensor in (a, b)]
expected = torch.exp(theirs[0].mm(theirs[1]) * 0.1)
expected.sum().backward()
torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)
for our, their in zip(ours, theirs, strict=True):
    assert our.grad.dtype == torch.float32
    torch.testing.assert_close(our.grad.cpu(), their.grad, rtol=2e-2, atol=2e-2)

exact = [tensor.double().cuda().requires_grad_() for tensor in (a, b)]
assert torch.autograd.gradcheck(MyMM.apply, exact) and not MyMM.enabled
