"""Optimizers on an embedding model: foreach, fused, capturable, in every spelling, against the CPU's plain loop."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
batches = [(torch.randint(0, 30, (4, 6)), torch.randint(0, 5, (4,))) for _ in range(5)]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(30, 8, mode="mean")
        self.output = nn.Linear(16, 5)

    def forward(self, tokens):
        return self.output(torch.cat([self.embedding(tokens).amax(1), self.bag(tokens)], 1))


def train(kind, device, scheduler=None, **options):
    model = Bag().to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for tokens, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens.to(device)), labels.to(device)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return [parameter.detach().cpu() for parameter in model.parameters()], optimizer


optim = torch.optim
variants = [{}, {"foreach": True}, {"foreach": False}]
fused = [*variants, {"fused": True}]
capturable = [{"capturable": True}, {"capturable": True, "foreach": False}]
for kind, common, options in (
    (optim.SGD, {"lr": 0.1}, fused),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, fused),
    (optim.Adam, {"lr": 0.01}, fused + capturable + [{"fused": True, "capturable": True}]),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True}, fused + capturable),
    (optim.RMSprop, {"lr": 0.01, "centered": True}, variants + capturable),
    (optim.Adagrad, {"lr": 0.1}, variants),
    (optim.NAdam, {"lr": 0.01}, variants + capturable),
    (optim.Adadelta, {"lr": 1.0}, variants + capturable),
    (optim.Adamax, {"lr": 0.01}, variants + capturable),
):
    expected, _ = train(kind, "cpu", foreach=False, **common)
    for option in options:
        result, optimizer = train(kind, "cuda", **common, **option)
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        if option.get("capturable") or option.get("fused") and kind is not optim.SGD:
            assert all(state["step"].is_cuda for state in optimizer.state.values()), option
tensor_lr, _ = train(optim.Adam, "cuda", lr=torch.tensor(0.01, device="cuda"), capturable=True)
for ours, theirs in zip(tensor_lr, train(optim.Adam, "cpu", lr=0.01)[0], strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
