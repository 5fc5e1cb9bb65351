"""The runtime under sanitizers: it includes no torch header, so that its own C++ test runs without torch."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / "tests/runtime/stress.cpp"), *map(str, sorted((ROOT / "csrc/runtime").glob("*.cpp")))]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress_under_sanitizers(sanitizers, tmp_path):
    program = tmp_path / "stress"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT}/openreg_ops/include", "-DOPENREG_LINKED"]
    built = subprocess.run(["g++", *flags, *SOURCES, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "OPENREG_DEVICE_MEMORY": "2GiB", "OPENREG_DEVICE_COUNT": "2"}
    seconds = os.environ.get("OPENREG_STRESS_SECONDS", "6")
    for isolation in ("auto", "strict"):
        environment["OPENREG_ISOLATION"] = isolation
        ran = subprocess.run([program, seconds], capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "0 wrong" in ran.stdout and "WARNING" not in ran.stderr and "ERROR" not in ran.stderr
