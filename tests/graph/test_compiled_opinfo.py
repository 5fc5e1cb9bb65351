"""A slice of `python -m openreg_ops compiled`: operators of PyTorch's OpInfo database, compiled against eager mode.

The first 320 of about 740 in the order of their names, forward only; the command takes all, with gradients. They take
about 110 seconds of one core, most of it the C++ compiler's. OPENREG_COMPILED_OPS=64 makes the slice shorter.
"""

import itertools
import os

import pytest
import torch
from torch.utils._pytree import tree_leaves

from openreg_ops.testing import compiled

pytestmark = pytest.mark.compiles

SLICE = int(os.environ.get("OPENREG_COMPILED_OPS", "320"))
BATCH = 40


@pytest.fixture(scope="module")
def cases():
    return list(itertools.islice(compiled.cases(), SLICE))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLICE, BATCH))
def test_compiled_operators_agree_with_eager_mode(cases, first):
    batch = cases[first : first + BATCH]
    assert len(batch) == min(BATCH, SLICE - first)
    found = compiled.check(batch)
    assert not found.different, "\n".join(f"{name}: {message[:300]}" for name, message in found.different.items())
    assert all(name.startswith("jiterator_") for name in found.invalid)  # CUDA's


@pytest.mark.slow
def test_a_wrong_operator_is_found():
    """Finds it among correct operators, and distinguishes it from one that needs a graph break and from an invalid
    call."""

    def wrong(x):
        return x + torch.compiler.is_compiling()

    def breaks_graph(x):
        return x + 1 if x.sum() > 0 else x

    def invalid(x):
        return x.reshape(2)

    cases = [
        compiled.Case(function.__name__, function, ((torch.ones(3),), {}), False)
        for function in (torch.sin, wrong, torch.cos, breaks_graph, invalid)
    ]
    found = compiled.check(cases)
    assert set(found.different) == {"wrong"}
    assert (found.breaks, found.invalid) == ({"breaks_graph"}, {"invalid"})


def test_samples_have_a_result():
    """Of operators whose first sample is empty."""
    cases = list(compiled.cases(r"^(cholesky_solve|linalg\.svd|nn\.functional\.unfold|nonzero)$"))
    assert len(cases) == 4
    for case in cases:
        args, kwargs = case.arguments
        assert any(x.numel() for x in tree_leaves(case.function(*args, **kwargs))), case.name
