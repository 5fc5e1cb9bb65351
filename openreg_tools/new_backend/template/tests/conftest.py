"""What the tests share. One file a rung: `pytest tests/test_0*` runs the first nine."""

import torch
import torch_acme  # noqa: F401


def same(actual, expected, **tolerances):
    """Compares a result on the device with one on the CPU."""
    torch.testing.assert_close(actual.cpu(), expected, **tolerances)
