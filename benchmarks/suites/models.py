"""The models whose training steps several suites time, on random data."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Timed
from torch import nn
from torch.nn import functional as F

Model = tuple[nn.Module, torch.Tensor, torch.Tensor]  # and a batch: its input and its targets
DEMO = Path(__file__).parents[2] / "examples" / "train_char_transformer.py"


def mlp(batch: int) -> Model:
    """784-512-512-10 with ReLU."""
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, torch.randn(batch, 784), torch.randint(10, (batch,))


class Classifier(nn.Module):
    """An LSTM of two layers, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm() -> Model:
    """Width 128 on 32 sequences of 32 steps."""
    return Classifier(), torch.randn(32, 32, 64), torch.randint(10, (32,))


class Residual(nn.Module):
    """ResNet's basic block, then the mean over the image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(width) for _ in range(2)]
        self.body = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x)).mean((2, 3))


def resnet_block() -> Model:
    """Width 32 on 16 images of 28 by 28."""
    return Residual(), torch.randn(16, 32, 28, 28), torch.randint(32, (16,))


class Transformer(nn.Module):
    """Two blocks of width 128, with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding, self.head = nn.Embedding(96, 128), nn.Linear(128, 96)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x), mask=self.mask, is_causal=True))


def transformer() -> Model:
    """8 sequences of 64 tokens."""
    return Transformer(), torch.randint(96, (8, 64)), torch.randint(96, (8, 64))


def training(make: Callable[[], Model], device: str, wrap: Callable[[Any], Any] = lambda call: call) -> Timed:
    """A step: forward, cross entropy, backward and SGD. `wrap` may compile the forward and the update."""
    torch.manual_seed(0)
    model, x, target = (part.to(device) for part in make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = wrap(lambda: F.cross_entropy(model(x).flatten(0, -2), target.flatten()))
    update = wrap(optimizer.step)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        update()

    return step


def demo(device: str, captured: bool = False) -> tuple[Any, torch.Tensor]:
    """The run of `make demo`, and tokens of a batch."""
    program = runpy.run_path(str(DEMO))
    run = program["Run"](96, device, torch.float32, captured=captured)
    shape = (program["BATCH"], program["CONTEXT"] + 1)
    return run, torch.randint(96, shape, generator=torch.Generator().manual_seed(0))
