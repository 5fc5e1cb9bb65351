"""The command line: ``openreg-tools COMMAND`` and ``python -m openreg_tools COMMAND``. Imports torch only in a command."""

from __future__ import annotations

import os
import sys

from openreg_tools.backends import AUTOLOAD
from openreg_tools.core.options import run

# Each names a module with add_arguments(parser) and main(arguments) -> exit status, imported when chosen.
COMMANDS = {
    "check": ("openreg_tools.checker.command", "find bugs in a custom operator of any library"),
    "compare": ("openreg_tools.compare.command", "find the first operator of a program that differs from a reference"),
    "conformance": ("openreg_tools.conformance.command", "run PyTorch's test databases on a device against the CPU"),
    "drift": ("openreg_tools.drift", "compare two versions of torch, and say which registrations break"),
    "explain": ("openreg_tools.explain", "show the path of one call through the dispatcher, key by key"),
    "info": ("openreg_tools.info", "report what is installed, enabled and wrong: the start of a bug report"),
    "operators": ("openreg_tools.operators", "list torch's operators by class, and what a device has for each"),
    "record": ("openreg_tools.compare.record_command", "record a fingerprint of each operator's results, for compare"),
    "trace": ("openreg_tools.trace", "run a program, and report what it ran on a device and which kernels to write"),
}


def _import_torch() -> None:
    """Import torch without its backends, which the command loads: one that fails must not end the program."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    except ImportError:
        return  # the command reports it if it needs torch
    finally:
        del os.environ[AUTOLOAD]
        if before is not None:
            os.environ[AUTOLOAD] = before


def main() -> int:
    if any(word in COMMANDS for word in sys.argv[1:]):
        _import_torch()
    description = "Tools for custom operators and backends of PyTorch."
    return run(COMMANDS, "python -m openreg_tools", description, "openreg_tools")


if __name__ == "__main__":
    sys.exit(main())
