# PYTHON_ARGCOMPLETE_OK
"""The command line: ``openreg-tools COMMAND`` and ``python -m openreg_tools COMMAND``. Imports torch only in a command."""

from __future__ import annotations

import contextlib
import sys

from openreg_tools import backends
from openreg_tools.core.options import run

# Each names a module with add_arguments(parser) and main(arguments) -> exit status, imported when chosen.
COMMANDS = {
    "check": ("openreg_tools.check.command", "find bugs in a custom operator of any library"),
    "compare": ("openreg_tools.compare.command", "find the first operator of a program that differs from a reference"),
    "conformance": ("openreg_tools.conformance.command", "run PyTorch's test databases on a device against the CPU"),
    "drift": ("openreg_tools.drift", "compare two versions of torch, and say which registrations break"),
    "explain": ("openreg_tools.explain", "show the path of one call through the dispatcher, key by key"),
    "info": ("openreg_tools.info", "report what is installed, enabled and wrong: the start of a bug report"),
    "ladder": ("openreg_tools.ladder.command", "say how far a new backend has come, and what to write next"),
    "new-backend": (
        "openreg_tools.new_backend.command",
        "write a package for a new device, which builds and runs as it is",
    ),
    "operators": ("openreg_tools.operators", "list torch's operators by class, and what a device has for each"),
    "trace": ("openreg_tools.trace", "run a program, and report what it ran on a device and which kernels to write"),
}


def main() -> int:
    if any(word in COMMANDS for word in sys.argv[1:]):
        # The command loads the backends, so that one that fails does not end it.
        with backends.without_autoload(), contextlib.suppress(ImportError):  # which the command reports
            import torch  # noqa: F401
    description = "Tools for custom operators and backends of PyTorch."
    return run(COMMANDS, "python -m openreg_tools", description, "openreg_tools")


if __name__ == "__main__":
    sys.exit(main())
