"""examples/stable_operators: pip builds it; its own tests and the tests of its operators' twins pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

import openreg_ops

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
PATH = str(Path(openreg_ops.__file__).parents[1])
TESTS = ["test_rms_norm.py", "test_swiglu.py", "test_every_operator.py", "test_unbacked.py", "test_vmap.py"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the package is installed. OPENREG_STABLE_OPERATORS names a folder with one that another torch or Python built."""
    if built := os.environ.get("OPENREG_STABLE_OPERATORS"):
        return Path(built)
    folder = tmp_path_factory.mktemp("stable_operators")
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT / "examples/stable_operators", folder / "source", ignore=ignore)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    without_debugging = {**os.environ, "CFLAGS": "-g0"}  # symbols take a fifth of the compiler's time
    done = subprocess.run([*command, source], capture_output=True, text=True, env=without_debugging)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def run(site, *arguments, **options):
    path = os.pathsep.join([PATH, str(site), str(ROOT / "tests/ops")])
    done = python(*arguments, PYTHONPATH=path, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_one_library_for_every_python(site):
    assert [path.name for path in (site / "stable_operators").glob("*.so")] == ["_C.abi3.so"]


def test_its_own_tests_pass(site):
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "examples/stable_operators/tests"]
    out = run(site, *arguments, dynamo=True)
    assert "passed" in out and "skipped" not in out


@pytest.mark.slow
@pytest.mark.parametrize("file", TESTS)
def test_the_tests_of_its_twins_pass(site, file):
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "stable_twins", "-rs", ROOT / "tests/ops" / file]
    out = run(site, *arguments, dynamo=True)
    assert "[100%]" in out and "SKIPPED" not in out, out


def test_it_computes_without_the_device(site):
    code = """
import sys, torch, stable_operators
x = torch.randn(3, 4, requires_grad=True)
stable_operators.swiglu(x, x).sum().backward()
assert "openreg_ops" not in sys.modules and x.grad.abs().sum() > 0
"""
    run(site, "-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
