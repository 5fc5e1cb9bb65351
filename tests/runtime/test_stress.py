"""The runtime under sanitizers: it includes no torch header, so that its own C++ test runs without torch."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc/runtime").rglob("*.cpp"))


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress_under_sanitizers(sanitizers, tmp_path):
    program, runtime = tmp_path / "stress", tmp_path / "runtime.cpp"
    # One translation unit, as in the build, takes half of the compiler's time: headers are read once.
    runtime.write_text("".join(f'#include "{source}"\n' for source in SOURCES))
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT}/openreg_ops/include", f"-I{ROOT}/csrc", "-DOPENREG_LINKED"]
    command = ["g++", *flags, ROOT / "tests/runtime/stress.cpp", runtime, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "OPENREG_DEVICE_MEMORY": "2GiB", "OPENREG_DEVICE_COUNT": "2"}
    for isolation, usual in (("auto", "3"), ("strict", "1")):
        environment["OPENREG_ISOLATION"] = isolation
        seconds = os.environ.get("OPENREG_STRESS_SECONDS", usual)
        ran = subprocess.run([program, seconds], capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "0 wrong" in ran.stdout and "WARNING" not in ran.stderr and "ERROR" not in ran.stderr
