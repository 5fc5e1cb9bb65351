"""Hooks of tensors, modules and gradients; anomaly mode; double backward; saved tensors kept on the CPU."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(5, 4)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
reference = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
reference.load_state_dict(model.state_dict())
model.cuda()
features, grads, order = {}, {}, []
handles = [
    model[1].register_forward_hook(lambda module, args, output: features.update(tanh=output.detach())),
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: grads.update(out=grad_out[0])),
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    model[0].weight.register_hook(lambda grad: grad * 10),
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: order.append(parameter.grad.is_cuda)),
]
model(x.cuda()).square().sum().backward()
hidden = torch.tanh(reference[0](x))
hidden.retain_grad()
inside = reference[0](x)
inside.retain_grad()
reference[2](torch.tanh(inside) * 2).square().sum().backward()
torch.testing.assert_close(features["tanh"].cpu(), hidden.detach(), rtol=1e-4, atol=1e-5)
torch.testing.assert_close(grads["out"].cpu(), inside.grad, rtol=1e-3, atol=1e-5)
torch.testing.assert_close(model[0].weight.grad.cpu(), reference[0].weight.grad * 10, rtol=1e-3, atol=1e-4)
assert order == [True]
for handle in handles:
    handle.remove()
torch.testing.assert_close(model(x.cuda()).cpu(), reference(x), rtol=1e-4, atol=1e-5)

a = x.cuda().requires_grad_()
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    loss = (a.sin() * a.exp()).sum()
loss.backward()
torch.testing.assert_close(a.grad.cpu(), x.cos() * x.exp() + x.sin() * x.exp(), rtol=1e-4, atol=1e-5)
packed = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.device) or t.cpu(), lambda t: t.cuda()):
    y = a.pow(3).sum()
(gradient,) = torch.autograd.grad(y, a)
assert packed and all(device.type == "cuda" for device in packed)
torch.testing.assert_close(gradient.cpu(), 3 * x.pow(2), rtol=1e-4, atol=1e-5)
(first,) = torch.autograd.grad(a.pow(3).sum(), a, create_graph=True)
(second,) = torch.autograd.grad(first.sum(), a)
torch.testing.assert_close(second.cpu(), 6 * x, rtol=1e-4, atol=1e-5)
try:
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.sqrt(torch.zeros(1, device="cuda", requires_grad=True) - 1).backward()
except RuntimeError as error:
    assert "Function 'SqrtBackward0' returned nan values in its 0th output" in str(error), error
else:
    raise AssertionError("anomaly mode overlooked NaN")
b = torch.ones(3, device="cuda", requires_grad=True)
moved = (b.cpu() * torch.arange(3.0)).to("cuda:1").sum()  # through three devices
moved.backward()
assert b.grad.device == b.device and b.grad.tolist() == [0, 1, 2]
