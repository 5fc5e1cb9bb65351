"""The command line: ``python -m openreg_ops COMMAND``, with openreg_tools' commands and some for this device only."""

from __future__ import annotations

import sys

import torch

from openreg_tools.__main__ import COMMANDS as TOOLS
from openreg_tools.__main__ import device_of, options, run

OWN = {
    "bench": ("openreg_ops.tools.bench", "time small and large operators and a training step against the CPU"),
    "compiled": ("openreg_ops.testing.compiled", "run PyTorch's OpInfo database through torch.compile"),
    "new": ("openreg_ops.tools.new", "write the three files of a new operator into a checkout"),
}
COMMANDS = dict(sorted((TOOLS | OWN).items()))


def _elsewhere(words: list[str]) -> str:
    """The device that the command asks for, if only another package can provide it."""
    device = device_of(words)
    try:
        return "" if not device or "--import" not in words or torch.device(device) else ""
    except RuntimeError:
        return device


def main() -> int:
    if device := _elsewhere(options(sys.argv[1:])):
        print(
            f"openreg_ops: a process has one PrivateUse1 backend, here openreg; for the device {device} of another "
            f"package, run `python -m openreg_tools {' '.join(sys.argv[1:])}`",
            file=sys.stderr,
        )
        return 2
    return run(COMMANDS, "python -m openreg_ops", "Tools for the openreg device.")


if __name__ == "__main__":
    sys.exit(main())
