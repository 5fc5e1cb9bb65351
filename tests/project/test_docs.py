"""Every block of docs/integration.md and docs/graphs.md is a program that runs as it stands.

tests/clients/test_docs.py runs those about training frameworks, which the tests' environment does not have.
"""

import os
import re
from pathlib import Path

import pytest
from processes import python

import openreg_ops

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / "docs" / name).read_text() for name in ("integration.md", "graphs.md"))
BLOCKS = re.findall(r"^## ([^\n]+)|^```python\n(.*?)^```", TEXT, re.M | re.S)
TITLES = [title for title, _ in BLOCKS]
PROGRAMS = [
    pytest.param(code, id=title)
    for i, (_, code) in enumerate(BLOCKS)
    if code and (title := next(title for title in reversed(TITLES[:i]) if title)) != "Training frameworks"
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_block_runs(code, tmp_path):
    # Loaded as `import torch` does it for a user; the tests' own environment may have turned that off.
    (tmp_path / "program.py").write_text("import openreg_ops\n" + code)
    installed = str(Path(openreg_ops.__file__).parents[1])  # the checkout, or a copy where it is not built
    path = os.pathsep.join(p for p in (str(tmp_path), installed, os.environ.get("PYTHONPATH")) if p)
    done = python("program.py", cwd=tmp_path, PYTHONPATH=path, PYTHONWARNINGS="ignore")
    # A profile prints these also without this package: torch 2.13 where it starts and stops, and torch with CUDA's
    # libraries on a machine without a GPU.
    known = ("USDT:", "gpuGetDeviceCount failed")
    errors = [line for line in done.stderr.splitlines() if not any(text in line for text in known)]
    assert (done.returncode, errors) == (0, [])
