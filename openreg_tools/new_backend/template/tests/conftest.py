"""What the tests share. One file a rung: `pytest tests/test_0*` runs the first nine."""

import subprocess
import sys
import textwrap

import torch
import torch_acme  # noqa: F401

torch.manual_seed(0)


def python(program, *arguments, **environment):
    """Runs a program in another process, and returns what it printed."""
    words = [sys.executable, "-c", "import torch, torch_acme\n" + textwrap.dedent(program), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def same(actual, expected, **tolerances):
    """Compares a result on the device with one on the CPU."""
    torch.testing.assert_close(actual.cpu(), expected, **tolerances)
