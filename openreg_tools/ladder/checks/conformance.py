"""Rung 12: a sample of PyTorch's operators, forward and backward, agrees with the CPU."""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from openreg_tools.core.child import Child, Ended
from openreg_tools.core.opinfo import database
from openreg_tools.ladder.rung import check, imports

SHARE = 0.9
OPERATORS = 60  # how many of about 500 operators run, evenly spread over their names
_SECTION = "Extending dispatcher: Testing your backend against native PyTorch backends"


@functools.cache
def _records(device: str) -> list[dict[str, Any]]:
    """The results of `conformance` for the sample of operators."""
    names = sorted(database())
    chosen = names[:: max(1, len(names) // OPERATORS)]
    pattern = f"^({'|'.join(map(re.escape, chosen))})$"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results.jsonl")
        words = [word for name in imports() for word in ("--import", name)]
        command = ["conformance", *words, "--device", device, "--suites", "operators", "--ops", pattern, "--samples", "2",
                   "--dtypes", "float32", "--checks", "forward", "layouts", "backward", "--out", str(out)]  # fmt: skip
        with Child.start([sys.executable, "-P", "-m", "openreg_tools", *command]) as child:
            try:
                child.read()
            except Ended as error:
                assert out.exists(), f"conformance ended with {error}"
        records = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert records, "conformance ran no operator"
    return records


def _share(device: str, *checks: str) -> None:
    """Raise unless most of the sample of operators passes `checks`."""
    failed, ran = [], 0
    for record in _records(device):
        failures = [failure for failure in record["failures"] if failure["check"] in checks]
        ran += bool(failures) or any(record["ran"].get(check) for check in checks)
        failed += [f"{record['operator']} ({failures[0]['message']})"] if failures else []
    share = 1 - len(failed) / max(1, ran)
    first = f"; first {failed[0]}" if failed else ""
    assert share >= SHARE, f"{share:.0%} of {ran} operators agree with the CPU, fewer than {SHARE:.0%}{first}"


@check(
    "csrc/fallback.cpp",
    _SECTION,
    "run `openreg-tools conformance`, and fix the most frequent message first",
    "PrivateUse1",
)
def forward(device: str) -> None:
    """Nine of ten operators agree with the CPU, in every layout."""
    _share(device, "forward", "layouts")


@check("csrc/fallback.cpp", _SECTION, "run `openreg-tools conformance --checks backward`", "AutogradPrivateUse1")
def backward(device: str) -> None:
    """Nine of ten gradients agree with the CPU."""
    _share(device, "backward")
