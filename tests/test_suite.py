"""Every operator of the suite passes the checker, with the sample inputs that its meta file gives."""

import pytest
import torch

from openreg_ops.meta import op
from openreg_ops.testing import check


def operators() -> set[str]:
    return {
        name.removeprefix("openreg::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("openreg::")
    }


def test_every_operator_has_samples():
    assert {name.partition(".")[0] for name in operators()} == set(op.SAMPLES)


@pytest.mark.parametrize("name", sorted(op.SAMPLES))
def test_operator_passes_every_check(name):
    report = check(f"openreg::{name}")
    assert report.device == "openreg" and report.of("pass")
    report.raise_if_failed()
