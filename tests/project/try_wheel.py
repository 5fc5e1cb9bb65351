"""Installs a folder's wheels in a new environment that has only pip, and uses them: ``make try-wheel``.

Each is tried as a user would: a small model is trained, the checker checks an operator, pytest runs a suite on the device,
and the operators' kernels are compared with their references at each vector capability of this machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to("openreg")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8, device="openreg")
y = x.sum(-1, keepdim=True)
losses = []
for _ in range(100):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 10, losses
"""
SUITE = """
import pytest
import torch

@pytest.mark.parametrize("size", [0, 1, 64])
def test_norm(device, size):
    x = torch.randn(3, size, device=device)
    assert x.device.type == "openreg"
    torch.testing.assert_close(torch.nn.functional.rms_norm(x, (size,)).cpu(), torch.nn.functional.rms_norm(x.cpu(), (size,)))
"""
COMMANDS = [
    "python -m openreg_ops info",
    "python train.py",
    "openreg-tools check openreg_ops:rms_norm --quiet",
    "pip install -q pytest expecttest",
    "python -m pytest -q -p no:cacheprovider --device openreg test_suite.py",
    f"python -m pytest -q -p no:cacheprovider --rootdir . -c /dev/null {ROOT}/tests/project/test_kernels.py",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="the version that the wheel is for")
    parser.add_argument(
        "folder", type=Path, help="with one wheel of openreg_ops for it and this Python, and openreg_tools"
    )
    options = parser.parse_args()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = []
    for pattern in (f"openreg_ops-*-{tag}-*.whl", "openreg_tools-*.whl"):
        wheels = [
            each
            for each in options.folder.glob(pattern)
            if f"+torch{options.torch}-" in each.name or "+" not in each.name
        ]
        if len(wheels) != 1:
            parser.error(
                f"expected one {pattern} for torch {options.torch} in {options.folder}, but there are {len(wheels)}"
            )
        found.append(wheels[0].resolve())
    wheel, tools = found
    with tempfile.TemporaryDirectory() as folder:
        bin = Path(folder) / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", bin.parent], check=True)
        print(f"== {wheel.name} in {bin.parent}", flush=True)
        subprocess.run([bin / "pip", "install", "-q", f"torch=={options.torch}", wheel, tools], check=True)
        (Path(folder) / "train.py").write_text(TRAIN)
        (Path(folder) / "test_suite.py").write_text(SUITE)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENREG_", "PYTHON"))}
        environment["PATH"] = f"{bin}{os.pathsep}{environment['PATH']}"
        failed = 0
        for command in COMMANDS:
            print(f"== {command}", flush=True)
            failed += (
                subprocess.run([bin / command.split()[0], *command.split()[1:]], cwd=folder, env=environment).returncode
                != 0
            )
    print(f"{failed} of {len(COMMANDS)} failed" if failed else "all passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
