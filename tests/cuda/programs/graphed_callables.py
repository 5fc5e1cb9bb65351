"""torch.cuda.make_graphed_callables on parts of a network, with control flow between them."""

import torch
from torch import nn


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.module1 = nn.Linear(16, 32)
        self.module2 = nn.Sequential(nn.Linear(32, 4), nn.Tanh())
        self.module3 = nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.module1(x)
        return self.module2(hidden) if x.sum().item() > 0 else self.module3(hidden)


model = Parts().cuda()
x = torch.randn(8, 16, device="cuda")
hidden = torch.randn(8, 32, device="cuda", requires_grad=True)
model.module1 = torch.cuda.make_graphed_callables(model.module1, (x,))
model.module2, model.module3 = torch.cuda.make_graphed_callables((model.module2, model.module3), ((hidden,), (hidden,)))
reference = Parts()

optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
torch.manual_seed(2)
for step in range(6):
    data, target = torch.randn(8, 16) + (0.5 if step % 2 else -0.5), torch.randn(8, 4)
    losses = []
    for module, optimizer in zip((model, reference), optimizers, strict=True):
        device = next(module.parameters()).device
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(module(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.cpu())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
for name, parameter in reference.named_parameters():
    torch.testing.assert_close(dict(model.named_parameters())[name].cpu(), parameter, rtol=1e-3, atol=1e-4)


def gate(a, b):
    return torch.sigmoid(a) * b


a, b = (torch.randn(5, 5, device="cuda", requires_grad=True) for _ in range(2))
graphed = torch.cuda.make_graphed_callables(
    gate, (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
)
graphed(a, b).sum().backward()
sigmoid = torch.sigmoid(a.detach().cpu())
torch.testing.assert_close(b.grad.cpu(), sigmoid)
torch.testing.assert_close(a.grad.cpu(), sigmoid * (1 - sigmoid) * b.detach().cpu())
