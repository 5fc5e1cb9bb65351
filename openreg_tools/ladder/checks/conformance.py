"""Rung 12: a sample of PyTorch's operators, forward and backward, agrees with the CPU."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

from openreg_tools.core.child import Child, Ended
from openreg_tools.core.opinfo import database
from openreg_tools.ladder.rung import check

SHARE = 0.9
OPERATORS = 60  # of about 500, evenly spread over their names
_SECTION = "Extending dispatcher: Testing your backend against native PyTorch backends"


def _share(device: str, *options: str) -> None:
    """Raise unless most of the sample of operators passes."""
    from openreg_tools.ladder.command import imports

    names = sorted(database())
    chosen = names[:: max(1, len(names) // OPERATORS)]
    pattern = f"^({'|'.join(map(re.escape, chosen))})$"
    with tempfile.TemporaryDirectory() as folder:
        out, results = Path(folder, "results.jsonl"), Path(folder, "results.json")
        words = [word for name in imports() for word in ("--import", name)]
        command = ["conformance", *words, "--device", device, "--suites", "operators", "--ops", pattern, "--samples", "2",
                   "--dtypes", "float32", "--out", str(out), "--json", str(results), *options]  # fmt: skip
        with Child.start([sys.executable, "-P", "-m", "openreg_tools", *command]) as child:
            try:
                child.read(900)
            except Ended as error:
                assert out.exists(), f"conformance ended with {error}"
        records = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert records, "conformance ran no operator"
    failed = [f"{record['operator']} ({record['failures'][0]['message']})" for record in records if record["failures"]]
    share = 1 - len(failed) / len(records)
    assert share >= SHARE, (
        f"{share:.0%} of {len(records)} operators agree with the CPU, fewer than {SHARE:.0%}; first {failed[0]}"
    )


@check(
    "csrc/fallback.cpp",
    _SECTION,
    "run `openreg-tools conformance`, and fix the most frequent message first",
    "PrivateUse1",
)
def forward(device: str) -> None:
    """Nine of ten operators agree with the CPU, in every layout."""
    _share(device, "--checks", "forward", "layouts")


@check("csrc/fallback.cpp", _SECTION, "run `openreg-tools conformance --checks backward`", "AutogradPrivateUse1")
def backward(device: str) -> None:
    """Nine of ten gradients agree with the CPU."""
    _share(device, "--checks", "backward")
