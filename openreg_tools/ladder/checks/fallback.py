"""Rung 4: every operator gives the CPU's answer or an error, and gradients are right."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from openreg_tools.ladder.rung import check, equal, raises, trained

_FALLBACK = "Accelerator: Step 2"
_KEY = "PrivateUse1"


@check(
    "csrc/fallback.cpp", _FALLBACK, "register a boxed fallback for PrivateUse1, such as at::native::cpu_fallback", _KEY
)
def values(device: str) -> None:
    """Operators without a kernel give the CPU's values."""
    torch.manual_seed(0)
    x, matrix = torch.randn(3, 5), torch.randn(4, 4)
    for name, call in {
        "sort": lambda x, m: x.sort(dim=1)[0], "argsort": lambda x, m: x.argsort(dim=1), "cumsum": lambda x, m: x.cumsum(0),
        "topk": lambda x, m: x.topk(2)[1], "inverse": lambda x, m: torch.linalg.inv(m), "erfinv": lambda x, m: x.sigmoid().erfinv(),
        "matmul": lambda x, m: m @ m, "where": lambda x, m: torch.where(x > 0, x, 2.0), "median": lambda x, m: x.median(),
        "nonzero": lambda x, m: (x > 0).nonzero(), "index": lambda x, m: x[[2, 0]], "masked": lambda x, m: x[x > 0],
        "cdist": lambda x, m: torch.cdist(x, x), "histc": lambda x, m: x.histc(4), "unique": lambda x, m: (x > 0).unique(),
        "conv1d": lambda x, m: functional.conv1d(x[None], x.view(1, 3, 5)), "softmax": lambda x, m: x.softmax(1),
        "layer_norm": lambda x, m: functional.layer_norm(x, (5,)), "amax": lambda x, m: x.amax(1), "all": lambda x, m: (x > 9).all(),
    }.items():  # fmt: skip
        equal(call(x.to(device), matrix.to(device)), call(x, matrix), name)


@check(
    "csrc/fallback.cpp", _FALLBACK, "copy what the CPU wrote back into the arguments that the schema marks (a!)", _KEY
)
def writes(device: str) -> None:
    """In-place and out= variants write their arguments."""
    x = torch.randn(3, 5)
    for name, call in {
        "cumsum_": lambda x: x.cumsum_(1), "erfinv_": lambda x: x.clamp_(-0.9, 0.9).erfinv_(),
        "index_put_": lambda x: x.index_put_((torch.tensor([0, 2], device=x.device),), torch.tensor(7.0, device=x.device)),
        "masked_fill_": lambda x: x.masked_fill_(x > 0, 3), "scatter_add_": lambda x: x.scatter_add_(
            1, torch.zeros(3, 2, dtype=torch.int64, device=x.device), torch.ones(3, 2, device=x.device)),
        "_foreach_add_": lambda x: torch._foreach_add_([x, x[0].clone()], 2.0),
    }.items():  # fmt: skip
        found, expected = x.to(device), x.clone()
        call(found), call(expected)
        equal(found, expected, f"the tensor that {name} writes")
    out, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(x.to(device), dim=1, out=(out, indices))
    equal(out, x.sort(dim=1)[0], "the values that sort writes into out=")
    equal(indices, x.sort(dim=1)[1], "the second tensor that sort writes into out=")


@check(
    "csrc/fallback.cpp",
    _FALLBACK,
    "write a result back through the strides of the argument, not over its storage",
    _KEY,
)
def views(device: str) -> None:
    """A write through a view changes its base, and nothing else."""
    for name, view in {
        "every second row": lambda x: x[::2], "a transposed part": lambda x: x.t()[1:3], "one column": lambda x: x[:, 2],
    }.items():  # fmt: skip
        found, expected = torch.arange(20.0, device=device).view(4, 5), torch.arange(20.0).view(4, 5)
        view(found).cumsum_(0), view(expected).cumsum_(0)
        equal(found, expected, f"a tensor whose view, {name}, was written in place")
    x = torch.arange(6.0, device=device)
    first, second = x.split([2, 4])
    second.erfinv_()
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "split copies"
    equal(x[:2], torch.arange(2.0), "the part of a tensor that was not written")


@check("csrc/kernels.cpp", "Extending dispatcher: Register kernels for the new backend",
       "call resolve_conj() in the kernel: PyTorch leaves conjugate views to the kernels of products", _KEY)  # fmt: skip
def conjugates(device: str) -> None:
    """Products of conjugate views give the CPU's values."""
    torch.manual_seed(0)
    z, batch, vector = (torch.randn(shape, dtype=torch.complex64) for shape in ((4, 4), (2, 4, 4), (4,)))
    for name, (call, a, b) in {
        "mm": (torch.mm, z, z), "addmm": (lambda a, b: torch.addmm(z.to(a.device), a, b), z, z),
        "bmm": (torch.bmm, batch, batch), "baddbmm": (lambda a, b: torch.baddbmm(batch.to(a.device), a, b), batch, batch),
        "dot": (torch.dot, vector, vector), "vdot": (torch.vdot, vector, vector), "mv": (torch.mv, z, vector),
    }.items():  # fmt: skip
        for which, change in {
            "first": lambda a, b: (a.conj(), b), "second": lambda a, b: (a, b.conj()), "adjoint": lambda a, b: (a.mH, b),
        }.items():  # fmt: skip
            if a.dim() > 1 or which != "adjoint":
                found, expected = (call(*change(a.to(where), b.to(where))) for where in (device, "cpu"))
                equal(found, expected, f"{name} with a conjugate view ({which})")


@check(
    "csrc/fallback.cpp", _FALLBACK, "take the lists of tensors in the arguments and results through the fallback", _KEY
)
def lists(device: str) -> None:
    """Lists of tensors and several results are handled."""
    tensors = [torch.randn(2, 3) for _ in range(3)]
    on_device = [tensor.to(device) for tensor in tensors]
    equal(torch.cat(on_device, 1), torch.cat(tensors, 1), "cat")
    equal(torch.stack(on_device), torch.stack(tensors), "stack")
    for found, expected in zip(
        torch._foreach_mul(on_device, on_device), torch._foreach_mul(tensors, tensors), strict=True
    ):
        equal(found, expected, "_foreach_mul")
    for found, expected in zip(torch.linalg.qr(on_device[0].t()), torch.linalg.qr(tensors[0].t()), strict=True):
        equal(found, expected, "a result of qr")
    equal(torch.einsum("ij,kj->ik", on_device[:2]), torch.einsum("ij,kj->ik", tensors[:2]), "einsum")


@check("csrc/fallback.cpp", "Accelerator: Selective Fallback",
       "refuse a host tensor with a dimension among device tensors; only a host scalar may join them", _KEY)  # fmt: skip
def mixed(device: str) -> None:
    """A device tensor and a host tensor together are an error."""
    x, host = torch.ones(3, device=device), torch.ones(3)
    for name, call in {"add": lambda: x + host, "mul": lambda: host * x, "add_": lambda: x.add_(host)}.items():
        said = raises(call, f"{name} of a device tensor and a host tensor")
        assert "device" in said, f"the error of {name} for mixed devices does not mention devices: {said}"
    equal(x * torch.tensor(3.0), torch.full((3,), 3.0), "a device tensor times a scalar tensor of the host")


@check("csrc/kernels.cpp", "Extending dispatcher: Autograd support for the new backend",
       "register the operator that the derivative calls (…_backward) at PrivateUse1", "AutogradPrivateUse1")  # fmt: skip
def gradients(device: str) -> None:
    """Gradients equal the CPU's."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    weight = torch.randn(4, 3, 3, 3)
    for name, call in {
        "convolution": lambda x, w: functional.conv2d(x, w, padding=1), "softplus": lambda x, w: functional.softplus(x) + w.sum(),
        "max_pool2d": lambda x, w: functional.max_pool2d(x, 2) * w.sum(), "layer_norm": lambda x, w: functional.layer_norm(x, (8,)) * w.mean(),
        "softmax": lambda x, w: x.softmax(-1)[..., :3] @ w.mean((0, 1)), "index": lambda x, w: x[:, [0, 2, 2]] * w.sum(),
        "interpolate": lambda x, w: functional.interpolate(x, scale_factor=2.0) + w.mean(), "cumprod": lambda x, w: x.cumprod(1) * w.sum(),
    }.items():  # fmt: skip
        gradients = []
        for where in (device, "cpu"):
            leaves = [tensor.detach().clone().to(where).requires_grad_() for tensor in (x, weight)]
            result = call(*leaves)
            assert result.requires_grad, f"the result of {name} has no gradient function"
            gradients.append(torch.autograd.grad(result.square().mean(), leaves))
        for found, expected, leaf in zip(*gradients, ("first", "second"), strict=True):
            assert found.device.type == torch.device(device).type, f"a gradient of {name} is on {found.device}"
            equal(found, expected, f"the gradient of {name}'s {leaf} argument")


@check("csrc/kernels.cpp", "Extending dispatcher: Autograd support for the new backend",
       "compare a step on the device with one on the CPU, operator by operator, with `openreg-tools compare`",
       "AutogradPrivateUse1")  # fmt: skip
def trains(device: str) -> None:
    """A model trains as on the CPU."""
    losses, expected = (
        trained(where, 5, functools.partial(torch.optim.AdamW, lr=1e-2))[0] for where in (device, "cpu")
    )
    equal(losses, expected, "the loss of five steps")
    assert losses[-1] < losses[0], "the loss does not fall"
