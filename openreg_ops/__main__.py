# PYTHON_ARGCOMPLETE_OK
"""The command line: ``python -m openreg_ops COMMAND``, with openreg_tools' commands and some for this device only."""

from __future__ import annotations

import sys

from openreg_tools.__main__ import COMMANDS as TOOLS
from openreg_tools.core.options import run

OWN = {
    "new": ("openreg_ops.tools.new", "write a new operator: a package (--package), or three files in a checkout"),
}
COMMANDS = dict(sorted((TOOLS | OWN).items()))


def main() -> int:
    return run(COMMANDS, "python -m openreg_ops", "Tools for the openreg device.", "openreg_ops")


if __name__ == "__main__":
    sys.exit(main())
