"""The command line: ``python -m openreg_ops COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import sys

# Each names a module with add_arguments(parser) and main(arguments) -> exit status, imported when chosen.
COMMANDS = {
    "bench": ("openreg_ops.tools.bench", "time small and large operators and a training step against the CPU"),
    "check": ("openreg_ops.testing.check_command", "find what is wrong with a custom operator of any library"),
    "compiled": ("openreg_ops.testing.compiled", "run PyTorch's OpInfo database through torch.compile"),
    "conformance": ("openreg_ops.testing.conformance", "run PyTorch's OpInfo database against the CPU"),
    "new": ("openreg_ops.tools.new", "write the three files of a new operator into a checkout"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m openreg_ops", description="Tools for the openreg device.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args()
    return importlib.import_module(COMMANDS[arguments.command][0]).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
