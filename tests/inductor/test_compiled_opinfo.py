"""A slice of `python -m openreg_ops compiled`: operators of PyTorch's OpInfo database, compiled against eager mode.

OPENREG_COMPILED_OPS=320 makes it longer; 320 take about two minutes on one free core.
"""

import itertools
import os

import pytest
import torch

from openreg_ops.testing import compiled

# Operators from the start of the list, forward only; the command takes all, with gradients.
SLICE = int(os.environ.get("OPENREG_COMPILED_OPS", "64"))
BATCH = 32


@pytest.fixture(scope="module")
def cases():
    return list(itertools.islice(compiled.cases(), SLICE))


@pytest.mark.parametrize("part", range(SLICE // BATCH))
def test_compiled_operators_agree_with_eager_mode(cases, part):
    found, _ = compiled.check(cases[part * BATCH : (part + 1) * BATCH])
    assert not found, "\n".join(f"{name}: {message[:300]}" for name, message in found.items())


def test_a_wrong_operator_is_found():
    def wrong(x):
        return x + torch.compiler.is_compiling()

    right = compiled.Case("right", torch.sin, ((torch.ones(3),), {}), False)
    found, breaks = compiled.check([right, compiled.Case("wrong", wrong, ((torch.ones(3),), {}), False)])
    assert set(found) == {"wrong"} and not breaks
