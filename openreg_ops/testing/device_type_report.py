"""``python -m openreg_ops.testing.device_type_report FILE…``: PyTorch's test files on the CPU and on the device.

A test passes if it ends as it does on the CPU; a test that fails there too says nothing about the device.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LISTS = Path(__file__).resolve().with_name("device_type.py")
DEVICES = {"cpu": "CPU", "openreg": "OPENREG|PRIVATEUSE1"}  # and the suffix of its test classes
OUTCOMES = ("passed", "failed", "skipped")


def read(report: Path, device: str) -> Iterator[tuple[str, str]]:
    """The generic tests of a JUnit report, without the name of their device, and how each ended."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("name", "").split("_")
        kind, generic = re.subn(f"({DEVICES[device]})$", "", case.get("classname", "").split(".")[-1])
        if not generic or device not in parts:
            continue
        parts[len(parts) - 1 - parts[::-1].index(device)] = "DEVICE"
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        yield f"{kind}.{'_'.join(parts)}", outcome


def run(file: Path, device: str, arguments: list[str]) -> dict[str, str]:
    """How each generic test of a file ends on a device; SystemExit if the run itself does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The device comes first: later imports need its name. No configuration except the file's own.
        options = f"-q -p openreg_ops -p no:cacheprovider --noconftest -c {os.devnull} --rootdir . -k _{device}".split()
        command = [
            sys.executable,
            "-m",
            "pytest",
            file.name,
            *options,
            f"--junitxml={report}",
            *arguments,
        ]
        path = os.pathsep.join(filter(None, [str(LISTS.parents[2]), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": path, "TORCH_TEST_DEVICES": str(LISTS) if device == "openreg" else ""}
        done = subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not report.exists():
            sys.exit(f"{file.name} did not finish on {device}:\n{(done.stdout + done.stderr)[-2000:]}")
        return dict(read(report, device))


def main(arguments: list[str] | None = None) -> int:
    """Print a line per file and device, then the tests that pass only on the CPU; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m openreg_ops.testing.device_type_report", description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="test files from PyTorch's test/ folder, of the installed version"
    )
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="pass the remaining arguments to pytest")
    options = parser.parse_args(arguments)
    lost = []
    for file in (path.resolve() for path in options.files):
        ended = {device: run(file, device, options.pytest) for device in DEVICES}
        for device in DEVICES:
            counts = Counter(ended[device].values())
            print(f"{file.name:32}{device:8}", *(f"{counts[outcome]:6} {outcome}" for outcome in OUTCOMES), flush=True)
        for test, outcome in ended["openreg"].items():
            if outcome == "failed" and ended["cpu"].get(test, "passed") == "passed":
                lost.append(f"{file.name}::{test}")
    print(f"\n{len(lost)} fail on the device and not on the CPU", *lost, sep="\n  ")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
