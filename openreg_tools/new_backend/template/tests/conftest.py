"""What the tests share. One file a rung: `pytest tests/test_0*` runs the first nine."""

import os
import subprocess
import sys

import torch
import torch_acme  # noqa: F401


def same(actual, expected, **tolerances):
    """Compares a result on the device with one on the CPU."""
    torch.testing.assert_close(actual.cpu(), expected, **tolerances)


def python(*words, **options):
    """Runs Python with the modules of this process, and without the current folder's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-P", *words], env=environment, capture_output=True, text=True, **options)
