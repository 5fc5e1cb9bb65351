"""torch.func on a GPU: vmap, grad, jacrev, jacfwd, hessian, per-sample gradients, ensembles."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

torch.manual_seed(0)
model, data, labels = nn.Linear(5, 3), torch.randn(6, 5), torch.randint(0, 3, (6,))


def per_sample(device):
    params = {name: value.detach().to(device) for name, value in model.named_parameters()}

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad_and_value(loss), in_dims=(None, 0, 0))(params, data.to(device), labels.to(device))


grads, losses = per_sample("cuda")
for index in range(6):  # the plain loop on the CPU
    model.zero_grad()
    loss = F.cross_entropy(model(data[index : index + 1]), labels[index : index + 1])
    loss.backward()
    torch.testing.assert_close(losses[index].cpu(), loss.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads["weight"][index].cpu(), model.weight.grad, rtol=1e-4, atol=1e-5)


def f(x):
    return torch.stack([x[0] * x[1].exp(), x.square().sum(), torch.sin(x[2])])


x = torch.tensor([1.0, 0.5, -2.0])
jacobian = torch.zeros(3, 3)
jacobian[0, 0], jacobian[0, 1] = x[1].exp(), x[0] * x[1].exp()
jacobian[1], jacobian[2, 2] = 2 * x, x[2].cos()
for transform in (jacrev, jacfwd):
    result = transform(f)(x.cuda())
    assert result.is_cuda
    torch.testing.assert_close(result.cpu(), jacobian, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(hessian(lambda x: x.pow(3).sum())(x.cuda()).cpu(), torch.diag(6 * x), rtol=1e-4, atol=1e-5)
value, tangent = jvp(f, (x.cuda(),), (torch.ones(3).cuda(),))
torch.testing.assert_close(tangent.cpu(), jacobian.sum(1), rtol=1e-4, atol=1e-5)
_, pullback = vjp(f, x.cuda())
torch.testing.assert_close(pullback(torch.ones(3).cuda())[0].cpu(), jacobian.sum(0), rtol=1e-4, atol=1e-5)
assert grad(lambda x: x**3)(torch.tensor(2.0, device="cuda")).item() == 12

models = [nn.Linear(5, 2).cuda() for _ in range(4)]
params, buffers = stack_module_state(models)
base = nn.Linear(5, 2, device="meta")
outputs = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(params, buffers, data.cuda())
for output, member in zip(outputs, models, strict=True):
    torch.testing.assert_close(output.cpu(), member.cpu()(data), rtol=1e-4, atol=1e-5)
a, b = torch.randn(7, 3, 4), torch.randn(7, 4)
torch.testing.assert_close(
    vmap(torch.mv)(a.cuda(), b.cuda()).cpu(), torch.einsum("bij,bj->bi", a, b), rtol=1e-4, atol=1e-5
)
noise = vmap(lambda x: x + torch.rand_like(x), randomness="different")(torch.zeros(4, 3, device="cuda"))
assert noise.is_cuda and not torch.equal(noise[0], noise[1])
