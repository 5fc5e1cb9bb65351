"""The open-source suite of docs/testing-your-library.md runs on the device, as the page shows it. `make suites`

Not among the tests: it downloads the sources that requirements.txt names, and takes minutes.
"""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import openreg_ops
import openreg_tools

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```console\n\$ cd (\S+)\n\$ (pytest [^\n]*--on-device=openreg[^\n]*)\n(.*?)```", re.S)


def test_the_suite_of_the_page(tmp_path):
    ((folder, command, shown),) = BLOCK.findall((ROOT / "docs/testing-your-library.md").read_text())
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*download, "-r", str(ROOT / "tests/suites/requirements.txt"), "-d", str(tmp_path)], check=True)
    with tarfile.open(tmp_path / f"{folder}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(tmp_path)
    paths = [str(Path(module.__file__).parents[1]) for module in (openreg_ops, openreg_tools)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_openreg_ops", *shlex.split(command)[1:]],
        cwd=tmp_path / folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True, capture_output=True,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stdout + result.stderr
    uncounted = lambda line: re.sub(r"^ +[\d,]+ | in [\d.]+s.*", "", line)  # noqa: E731
    printed = [*map(uncounted, result.stdout.splitlines())]
    missing = [line for line in map(uncounted, shown.splitlines()) if line not in printed]
    assert shown and not missing, result.stdout
