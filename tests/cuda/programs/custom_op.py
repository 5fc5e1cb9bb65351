"""torch.library.custom_op for CUDA, with a kernel for the CPU, autograd, a fake kernel, and opcheck."""

import torch
from torch import Tensor


@torch.library.custom_op("users_ops::softplus_mul", mutates_args=(), device_types="cuda")
def softplus_mul(x: Tensor, scale: float) -> Tensor:
    assert x.is_cuda
    return torch.log1p(x.exp()) * scale


@softplus_mul.register_kernel("cpu")
def _(x, scale):
    assert not x.is_cuda
    return torch.log1p(x.exp()) * scale


@softplus_mul.register_fake
def _(x, scale):
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def backward(ctx, grad):
    return grad * torch.sigmoid(ctx.saved_tensors[0]) * ctx.scale, None


softplus_mul.register_autograd(backward, setup_context=setup_context)


@torch.library.custom_op("users_ops::increment_", mutates_args={"x"}, device_types=("cpu", "cuda"))
def increment_(x: Tensor, by: int = 1) -> None:
    x.add_(by)


@torch.library.custom_op("users_ops::only_cuda", mutates_args=(), device_types="cpu")
def only_cuda(x: Tensor) -> Tensor:
    raise AssertionError("the CPU's kernel ran")


@only_cuda.register_kernel("cuda")
def _(x):
    return x * 10


x = torch.randn(4, 4)
ours, theirs = x.cuda().requires_grad_(), x.clone().requires_grad_()
softplus_mul(ours, 3.0).sum().backward()
(torch.nn.functional.softplus(theirs) * 3).sum().backward()
torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
torch.testing.assert_close(softplus_mul(x, 3.0), softplus_mul(x.cuda(1), 3.0).cpu())
torch.library.opcheck(softplus_mul, (x.cuda().requires_grad_(), 2.0))
torch.library.opcheck(increment_, (x.cuda(),))
y = x.cuda()
increment_(y, by=2)
assert torch.equal(y.cpu(), x + 2) and torch.equal(torch.ops.users_ops.only_cuda(y).cpu(), (x + 2) * 10)

library = torch.library.Library("users_ops", "FRAGMENT")
library.define("negate(Tensor x) -> Tensor")
library.impl("negate", lambda x: -x, "CUDA")
assert torch.equal(torch.ops.users_ops.negate(x.cuda()).cpu(), -x)
try:
    torch.ops.users_ops.negate(x)
except NotImplementedError as error:
    assert "'CPU' backend" in str(error), error
else:
    raise AssertionError("there is no kernel for the CPU")
