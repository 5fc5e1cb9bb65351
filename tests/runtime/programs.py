"""Programs in a process of their own: how they end, or what an environment does, which the device reads once."""

import os
import subprocess
import sys


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program, environment = [sys.executable, "-P", "-c", code], {**os.environ, **environment}
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
