"""Rung 10: fake tensors know the device, and compiled programs give the results of eager ones."""

from __future__ import annotations

import functools

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from openreg_tools.ladder.rung import check, equal, trained

_JIT = "Extending dispatcher: JIT support"


@check(
    "csrc/device.cpp",
    "Accelerator: Forward Only",
    "fake tensors need isAvailable and getCurrentDevice of the hooks",
    "Meta",
)
def fake(device: str) -> None:
    """Fake tensors of the device need none of its memory."""
    kind = torch.device(device).type
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1 << 20, device=device)
        y = functional.layer_norm(x @ x.t(), (1 << 20,)).to(torch.bfloat16)
        assert y.device.type == kind and y.shape == (1 << 20, 1 << 20) and y.dtype == torch.bfloat16
        moved = y.cpu()
        assert moved.device.type == "cpu"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = mode.from_tensor(torch.ones(3, device=device))
        assert (real + 1).device.type == kind


@check("torch_acme/__init__.py", _JIT, "tracing needs the fake tensors of this rung", "Meta")
def traced(device: str) -> None:
    """make_fx and torch.export keep the device."""
    kind = torch.device(device).type

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + torch.ones(3, device=x.device)

    x = torch.randn(3, device=device)
    graph = make_fx(Model(), tracing_mode="fake")(x)
    equal(graph(x), Model()(x), "a graph of make_fx")
    exported = torch.export.export(Model(), (x,))
    devices = [node.meta["val"].device.type for node in exported.graph.nodes if "val" in node.meta]
    assert set(devices) == {kind}, f"the nodes of an exported program are on {set(devices)}"
    equal(exported.module()(x), Model()(x), "an exported program")


def _same(device: str, backend: str) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    eager = trained(device, 3, sgd)
    compiled = trained(device, 3, sgd, lambda model: torch.compile(model, backend=backend, fullgraph=True))
    for found, expected, what in zip(compiled, eager, ("loss", "gradient"), strict=True):
        torch.testing.assert_close(
            found, expected, msg=lambda text, what=what: f"the {what} of {backend} differs: {text}"
        )


@check("torch_acme/__init__.py", _JIT, "torch._dynamo needs the device interface: register_interface_for_device",
       "AutogradPrivateUse1")  # fmt: skip
def aot_eager(device: str) -> None:
    """torch.compile with aot_eager trains like eager mode."""
    _same(device, "aot_eager")


@check("torch_acme/inductor.py", _JIT, "register_backend_for_device: a scheduling and the two wrapper generators")
def inductor(device: str) -> None:
    """torch.compile with Inductor trains like eager mode."""
    _same(device, "inductor")


@check("torch_acme/inductor.py", _JIT, "let the scheduling handle symbolic sizes")
def dynamic(device: str) -> None:
    """A compiled function serves several sizes and layouts."""

    @torch.compile(dynamic=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x * 2 + 1, dim=-1) @ x.t()

    for rows, columns in ((3, 5), (7, 2), (4, 4)):
        x = torch.randn(rows, columns)
        equal(
            run(x.to(device)),
            functional.softmax(x * 2 + 1, dim=-1) @ x.t(),
            f"a compiled function for {rows}x{columns}",
        )
        equal(
            run(x.to(device).t()), functional.softmax(x.t() * 2 + 1, dim=-1) @ x, "the function for a transposed tensor"
        )
