"""Faults at random places of programs: the first difference is the call that failed."""

import random

import pytest
import torch
from torch import nn
from torch.openreg.faults import inject
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools.compare import compare

DEVICE = "openreg"


def train(model, loss, kind=torch.optim.SGD):
    model = model.to(DEVICE)
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(torch.randn(4, 5, 16).to(DEVICE))).backward()
        optimizer.step()


def mlp():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    train(model, lambda y: y.square().mean())


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    train(layer, lambda y: y.clone().abs().mean(), torch.optim.AdamW)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 16, device=x.device)
        states = [h := self.cell(step, h) for step in x.unbind(1)]
        return self.out(torch.stack(states, 1))


def rnn():
    train(Cells(), lambda y: y.contiguous().logsumexp(-1).mean(), torch.optim.Adam)


class Truth(TorchDispatchMode):
    """Notes for each kernel and each copy the call that it belongs to, as `compare` numbers it, or None in between."""

    def __init__(self, result):
        super().__init__()
        self.result, self.events = result, {"kernel": [], "copy": []}
        self.arm()

    def arm(self):
        self.faults = {kind: inject(f"{kind}_latency", seconds=0.0) for kind in self.events}

    def close(self, label):
        for kind, fault in self.faults.items():
            self.events[kind] += [label] * fault.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.close(None)
        self.arm()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.close((func.name() if hasattr(func, "name") else str(func), self.result().operators - 1))
            self.arm()


def events_of(program):
    """The calls that the kernels and the copies of a clean run belong to."""
    torch.manual_seed(0)
    context = compare(device=DEVICE)
    truth = Truth(lambda: context.result)
    with truth, context as result:
        program()
    truth.close(None)
    assert result.first is None, result
    return truth.events


@pytest.mark.parametrize("program", [mlp, transformer, rnn])
def test_faults_are_located(program, monkeypatch):
    monkeypatch.setenv("OPENREG_POISON", "0")
    events, draw = events_of(program), random.Random(3)
    for i in range(6):
        kind = ("copy", "kernel")[i % 2]
        number = draw.randrange(len(events[kind]))
        expected = events[kind][number]
        torch.manual_seed(0)
        context = compare(device=DEVICE)
        try:
            with context as result, inject(kind, after=number) as fault:
                program()
                torch.openreg.synchronize()
        except torch.AcceleratorError:
            assert kind == "kernel"
        first = result.first
        assert fault.struck == 1 and first is not None, (kind, number, expected)
        assert (first.operator, first.index) == expected
