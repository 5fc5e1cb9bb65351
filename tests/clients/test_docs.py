"""The blocks of "Training frameworks" in docs/integration.md run unchanged."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs/integration.md").read_text().partition("## Training frameworks")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT.partition("\n## ")[0], re.M | re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
