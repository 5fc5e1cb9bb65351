"""The checker finds each kind of mistake in operators of different shape, reports nothing else, and passes correct ones.

`python tests/tools/mistakes` runs every check on every operator. To save time, these tests run the checks that find the kind
and, on correct operators on the CPU and where there is no such check, the fast ones. On an operator's second device, they run
for the first wrong operator and for the first correct one of each kind: what a check does differently there, it does for all.
"""

from __future__ import annotations

import re

import mistakes
import pytest

from openreg_ops.testing import check

OPERATORS = mistakes.load()
FIRST = {(operator.kind, bool(operator.found_by)): operator for operator in reversed(OPERATORS)}
CASES = [
    pytest.param(operator, device, id=f"{operator.kind}-{operator.name}-{device}")
    for operator in OPERATORS
    for i, device in enumerate(operator.devices)
    if i == 0 or operator is FIRST[operator.kind, bool(operator.found_by)]
]


@pytest.mark.parametrize("operator, device", CASES)
def test_operator(operator, device):
    example = operator.make()
    finds = {name for other in OPERATORS if other.kind == operator.kind for name in other.found_by}
    only = [*finds, *["fast"] * (not finds or device == "cpu" and not operator.found_by)]
    report = check(example.op, example.samples, device, only=only, **example.options)
    failed = [failure.check for failure in report.failures]
    assert set(failed) <= set(operator.found_by), str(report)
    assert not operator.found_by or operator.found_by[0] in failed, str(report)
    assert len(report.causes()) <= 1, str(report)
    sentences = [failure.sentence for failure in report.failures if failure.check in operator.found_by[:1]]
    says = operator.says if device == operator.devices[0] else ""
    assert re.search(mistakes.pattern(says), (*sentences, "")[0]), sentences
