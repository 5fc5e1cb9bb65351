"""Rung 7: autocast chooses dtypes, and GradScaler skips steps with infinite gradients."""

from __future__ import annotations

import torch
from torch.nn import functional

from openreg_tools.ladder.rung import check, equal

_METHODS = "PrivateUse1: Generate methods and properties related to the new backend"
_KERNELS = "Extending dispatcher: Register kernels for the new backend"
_KEY = "AutocastPrivateUse1"


@check("torch_acme/device.py", _METHODS, "add get_amp_supported_dtype to the device module")
def supported(device: str) -> None:
    """torch.autocast accepts the device and its dtypes."""
    kind = torch.device(device).type
    dtypes = torch.get_device_module(kind).get_amp_supported_dtype()
    assert dtypes, f"torch.{kind}.get_amp_supported_dtype() is empty"
    for dtype in dtypes:
        with torch.autocast(kind, dtype=dtype):
            assert torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype
    assert not torch.is_autocast_enabled(kind), "autocast stays on after its block"


def _lower(device: str) -> torch.dtype:
    return torch.get_device_module(device).get_amp_supported_dtype()[0]


@check("csrc/autocast.cpp", _KERNELS, "register AT_FORALL_LOWER_PRECISION_FP at AutocastPrivateUse1", _KEY)
def lower(device: str) -> None:
    """Matrix products and convolutions run in the lower precision."""
    kind, dtype = torch.device(device).type, _lower(device)
    x, image = torch.randn(4, 4, device=device), torch.randn(1, 3, 8, 8, device=device)
    weight = torch.randn(2, 3, 3, 3, device=device)
    calls = {
        "mm": lambda: x @ x, "linear": lambda: functional.linear(x, x), "baddbmm": lambda: torch.bmm(x[None], x[None]),
        "conv2d": lambda: functional.conv2d(image, weight), "einsum": lambda: torch.einsum("ij,jk->ik", x, x),
    }  # fmt: skip
    with torch.autocast(kind, dtype=dtype):
        found = {name: call().dtype for name, call in calls.items()}
        with torch.autocast(kind, enabled=False):
            assert (x @ x).dtype == torch.float32, "autocast(enabled=False) inside autocast does not switch it off"
    wrong = {name: str(result) for name, result in found.items() if result != dtype}
    assert not wrong, f"results under autocast to {dtype} have the dtypes {wrong}"
    assert (x @ x).dtype == torch.float32


@check(
    "csrc/autocast.cpp", _KERNELS, "register AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE", _KEY
)
def precise(device: str) -> None:
    """Sums, exponentials and losses run in float32; mixed arguments take the wider dtype."""
    kind, dtype = torch.device(device).type, _lower(device)
    x = torch.rand(4, 4, device=device).to(dtype) + 0.5
    target = torch.zeros(4, dtype=torch.int64, device=device)
    calls = {
        "exp": x.exp, "log": x.log, "softmax": lambda: x.softmax(1), "sum": x.sum, "norm": x.norm,
        "layer_norm": lambda: functional.layer_norm(x, (4,)), "mse_loss": lambda: functional.mse_loss(x, x),
        "cross_entropy": lambda: functional.cross_entropy(x, target), "cat": lambda: torch.cat([x, x.float()]),
    }  # fmt: skip
    with torch.autocast(kind, dtype=dtype):
        wrong = {name: str(call().dtype) for name, call in calls.items() if call().dtype != torch.float32}
    assert not wrong, f"results under autocast to {dtype} should be float32, but have the dtypes {wrong}"


@check("csrc/autocast.cpp", _KERNELS, "register the fallthrough of AutocastPrivateUse1 for all other operators", _KEY)
def trains(device: str) -> None:
    """A step under autocast has float32 gradients near the CPU's."""
    kind, dtype = torch.device(device).type, _lower(device)
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
    gradients = []
    for where in (kind, "cpu"):
        weight = model.weight.detach().clone().to(where).requires_grad_()
        with torch.autocast(where, dtype=dtype):
            loss = functional.linear(x.to(where), weight).square().mean()
        loss.backward()
        assert weight.grad.dtype == torch.float32
        gradients.append(weight.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.02)


@check("csrc/fallback.cpp", _KERNELS,
       "register aten::_amp_foreach_non_finite_check_and_unscale_ and aten::_amp_update_scale_, or let them fall back",
       "PrivateUse1")  # fmt: skip
def scaler(device: str) -> None:
    """GradScaler steps, and skips a step whose gradients are infinite."""
    kind = torch.device(device).type
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=1)
    scaler.scale((weight * torch.tensor([1.0, 2.0, 3.0], device=device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    equal(weight, torch.tensor([0.0, -1.0, -2.0]), "a weight after a step with GradScaler")
    assert scaler.get_scale() == 8.0, f"the scale is {scaler.get_scale()} after a step, expected 8"
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor([1.0, float("inf"), 1.0], device=device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    equal(weight, torch.tensor([0.0, -1.0, -2.0]), "a weight after a step whose gradients are infinite")
    assert scaler.get_scale() == 4.0, f"the scale is {scaler.get_scale()} after infinite gradients, expected 4"
