"""PyTorch's optimizer database: every optimizer, single, foreach and fused, takes the CPU's steps."""

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import optim_db


def implementations(info):
    yield "single", {"foreach": False} if "foreach" in info.supported_impls else {}
    if "foreach" in info.supported_impls:
        yield "foreach", {"foreach": True}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield "fused", {"fused": True}


CASES = [
    pytest.param(info, flags, id=f"{info.optim_cls.__name__}-{name}")
    for info in optim_db
    for name, flags in implementations(info)
]


def train(info, flags, options, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device)
    if info.optim_cls.__name__ == "Muon":
        parameters = [p for p in model.parameters() if p.dim() == 2]  # which it takes only
    elif info.optim_cls.__name__ == "SparseAdam":
        return train_sparse(info, options, device)
    else:
        parameters = list(model.parameters())
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "params"}
    optimizer = info.optim_cls(parameters, **{**options, **flags})
    torch.manual_seed(1)
    x, y = torch.randn(8, 5).to(device), torch.randn(8, 3).to(device)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        if info.step_requires_closure:
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
    return [*losses, *(p.detach() for p in model.parameters())]


def train_sparse(info, options, device):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(6, 3, sparse=True).to(device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "params"}
    optimizer = info.optim_cls(embedding.parameters(), **options)
    for _ in range(4):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 2, 1, 5], device=device)).square().sum().backward()
        optimizer.step()
    return [embedding.weight.detach()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info,flags", CASES)
def test_optimizer(info, flags):
    for sample in info.optim_inputs_func(device="cpu"):
        options = dict(sample.kwargs)
        if (
            flags.get("foreach")
            and options.get("differentiable")
            or flags.get("fused")
            and options.get("differentiable")
        ):
            continue
        if options.get("capturable"):
            continue  # for graph capture, which is CUDA's and XPU's
        if flags.get("fused") and isinstance(options.get("lr"), torch.Tensor) and options["lr"].dim() > 0:
            continue
        try:
            expected = train(info, flags, options, "cpu")
        except (ValueError, RuntimeError) as refused:
            with pytest.raises(type(refused)):
                train(info, flags, options, "openreg")
            continue
        for e, g in zip(expected, train(info, flags, options, "openreg"), strict=True):
            assert g.is_openreg
            assert_close(g.cpu(), e, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_default_is_the_fast_one():
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    assert "openreg" in _get_foreach_kernels_supported_devices()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_state_dict_moves_between_devices(optimizer):
    def make(device):
        parameter = torch.nn.Parameter(torch.ones(3, device=device))
        return parameter, optimizer([parameter], lr=0.1)

    p, o = make("openreg")
    p.grad = torch.ones_like(p)
    o.step()
    q, r = make("cpu")
    r.load_state_dict(o.state_dict())
    for state in r.state.values():
        assert all(t.device.type == "cpu" for t in state.values() if isinstance(t, torch.Tensor))
