"""What the stable ABI costs: `new --package` in the styles separate and stable, in turns in one process.

`python benchmarks/stable_abi.py` builds both packages, and prints microseconds of one call at 64 elements on the device.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from timing import compare

import openreg_ops  # noqa: F401
from openreg_ops.tools.new import new_package

STYLES = ("separate", "stable")


def install(style: str, folder: Path) -> None:
    """Build the package that is named after its style, and put it where it can be imported."""
    new_package(f"weighs_{style}", style, ["weigh"], folder)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, folder / f"weighs_{style}"], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for style in STYLES:
            install(style, Path(folder))
        sys.path.insert(0, str(Path(folder, "site")))
        calls = [importlib.import_module(f"weighs_{style}").weigh for style in STYLES]
    print(f"{'':<22} {STYLES[0]:>8} {STYLES[1]:>8} {'ratio':>6}")
    for what, grad, mode in (
        ("inference mode", False, torch.inference_mode()),
        ("no gradient wanted", False, torch.enable_grad()),
        ("gradient recorded", True, torch.enable_grad()),
    ):
        with mode:
            x = torch.randn(64, device="openreg", requires_grad=grad)
            # Bound now, because the loop continues with other tensors.
            found = compare(*(lambda call=call, x=x: call(x) for call in calls), rounds=301)
        print(f"{what:<22} {found.reference * 1e6:8.2f} {found.measured * 1e6:8.2f} {found.ratio:6.2f}")


if __name__ == "__main__":
    main()
