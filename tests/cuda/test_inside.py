"""The tests of the folder inside pass in a process that gives the device the name cuda."""

import re
from pathlib import Path

import processes
import pytest

INSIDE = Path(__file__).parent / "inside"


@pytest.mark.processes
@pytest.mark.parametrize("file", sorted(path.name for path in INSIDE.glob("test_*.py")))
def test_inside(file):
    ended = processes.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", INSIDE / file,
        cwd=INSIDE.parents[2], dynamo=True, OPENREG_DEVICE="cuda",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
    assert re.search(r"\d+ passed", ended.stdout)
