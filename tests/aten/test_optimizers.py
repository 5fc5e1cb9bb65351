"""PyTorch's optimizer database: every optimizer, single, foreach and fused, takes the CPU's steps."""

import pytest
import torch

from openreg_tools.conformance import training

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", training.optimizers())
def test_optimizer(name):
    report = training.check_optimizer(training.optimizers()[name], torch.float32, "openreg")
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.ran["step"]


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
