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
