"""The example of each section of docs/checker.md contains a mistake, which the check of that name reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openreg_ops.testing import check
from openreg_tools.check.checks import CHECKS

PAGE = Path(__file__).parents[2] / "docs/checker.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)) if PAGE.exists() else {}
NEED_STREAMS = ("stream", "devices")
SCOPES = []  # keep the operators' libraries


# large_strides has an example in C++.
@pytest.mark.parametrize("name", [name for name in CHECKS if "```python" in SECTIONS[name]])
def test_the_check_reports_its_example(name):
    """The operator is the last one that the first block defines. It may define `samples` and a `reference`, too."""
    blocks = re.findall(r"^```python\n(.*?)^```", SECTIONS[name], re.M | re.S)
    SCOPES.append(scope := {"__name__": f"example_{name}"})
    for block in blocks:
        exec(block, scope)
    *_, operator = re.findall(r'(?<=mylib::)\w+|(?<=define\(")\w+', blocks[0])
    device = "openreg" if name in NEED_STREAMS else "cpu"
    report = check(f"mylib::{operator}", scope.get("samples"), device, reference=scope.get("reference"), only=name)
    assert report.of("fail", name) or report.of("warn", name), str(report)
