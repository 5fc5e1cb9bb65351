"""The checker finds each kind of mistake in operators of different shape, reports nothing else, and passes correct ones."""

from __future__ import annotations

import mistakes
import pytest

from openreg_ops.testing import check

OPERATORS = mistakes.load()
CASES = [
    pytest.param(each, device, id=f"{each.kind}-{each.name}-{device}") for each in OPERATORS for device in each.devices
]


@pytest.mark.parametrize("operator, device", CASES)
def test_operator(operator, device):
    example = operator.make()
    only = operator.found_by if device != "cpu" else ()  # all checks run on the CPU, to save time
    report = check(example.op, example.samples, device, only=only, skip="overhead", **example.options)
    failed = [each.check for each in report.failures]
    assert set(failed) <= set(operator.found_by), str(report)
    assert not operator.found_by or operator.found_by[0] in failed, str(report)
