"""A pytest plugin, `-p stable_twins`: the operators of examples/stable_operators replace their twins in the suite.

The tests of rms_norm and swiglu then test the stable operators. The twins' own kernels raise, so no test runs them by
mistake. test_stable_operators.py uses it.
"""

import pytest
import stable_operators
import torch
from stable_operators.registration import SAMPLES

import openreg_ops
from openreg_ops.meta import op
from openreg_ops.tools.backend import Openreg
from openreg_tools import backends

NAMES = stable_operators.__all__


class Device(Openreg):
    """The device, as the package of its operators describes it: with their samples."""

    namespace = "stable_operators"

    def samples(self, op):
        return SAMPLES.get(op.partition("::")[2])


def refuse(*args):
    raise AssertionError("a twin ran instead of the stable operator")


backends.register(Device())
for name in NAMES:
    stable = getattr(stable_operators, name)
    torch.library.impl(f"openreg::{name}", "PrivateUse1", refuse)
    setattr(torch.ops.openreg, name, getattr(torch.ops.stable_operators, name))
    setattr(openreg_ops, name, stable)
    op.OPERATORS[name], op.SAMPLES[name] = stable, SAMPLES[name]


def pytest_collection_modifyitems(config, items):
    """Only the tests of these operators: their files, and the cases of other files that name one of them. The package's
    own tests run the checker with the same samples."""
    files = {f"test_{name}.py" for name in NAMES}
    named = [item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("name") in NAMES]
    mine = [item for item in items if item.path.name in files or item in named]
    mine = [item for item in mine if not item.name.startswith("test_checker")]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


@pytest.fixture(scope="session", autouse=True)
def swapped():
    assert torch.ops.openreg.rms_norm.default.name() == "stable_operators::rms_norm"
