"""Two mistakes that a CPU forgives and an accelerator does not, and how openreg finds them.

    python examples/streams_and_isolation.py

The program copies a batch on a side stream and uses it without waiting for the copy: the sanitizer names both accesses.
Then the host reads device memory by its address: with isolation, that ends the process with a message that names the
remedy.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import torch

import openreg_ops


def prefetch(host: torch.Tensor, side: torch.Stream, wait: bool) -> torch.Tensor:
    """Copy a batch on `side` while the current stream is busy, and double it there."""
    current = torch.openreg.current_stream()
    with side:
        batch = host.to("openreg", non_blocking=True)
    if wait:
        current.wait_stream(side)
    batch.record_stream(current)  # it was allocated on side, and may be freed while this stream uses it
    return batch * 2


def read_by_address() -> None:
    x = torch.ones(4, device="openreg")
    print("the host read", ctypes.c_float.from_address(x.data_ptr()).value)


def main() -> int:
    if sys.argv[1:] == ["--read"]:
        read_by_address()
        return 0
    host, side = torch.arange(4.0).pin_memory(), torch.openreg.Stream()
    for wait in (False, True):
        with torch.openreg._sanitizer.sanitize():
            try:
                result = prefetch(host, side, wait)
                print("with the wait:", result.tolist())
            except torch.openreg._sanitizer.OpenregSanitizerErrors as race:
                print("without the wait:", str(race).strip().splitlines()[-1])
    path = os.pathsep.join([str(Path(openreg_ops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    for mode in ("off", "strict"):
        done = subprocess.run(
            [sys.executable, __file__, "--read"],
            env={**os.environ, "OPENREG_ISOLATION": mode, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        said = [line for line in (done.stdout + done.stderr).splitlines() if "the host read" in line]
        print(f"isolation {mode}:", *said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
