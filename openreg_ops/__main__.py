"""The command line: ``python -m openreg_ops COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

# Each names a module with add_arguments(parser) and main(arguments) -> exit status, imported when chosen.
COMMANDS = {
    "bench": ("openreg_ops.tools.bench", "time small and large operators and a training step against the CPU"),
    "check": ("openreg_ops.testing.check_command", "find what is wrong with a custom operator of any library"),
    "compiled": ("openreg_ops.testing.compiled", "run PyTorch's OpInfo database through torch.compile"),
    "conformance": ("openreg_ops.testing.conformance", "run PyTorch's test databases on a device against the CPU"),
    "drift": ("openreg_ops.tools.drift", "compare two versions of torch, and say which registrations break"),
    "explain": ("openreg_ops.tools.explain", "show the path of one call through the dispatcher, key by key"),
    "info": ("openreg_ops.tools.info", "say what is installed, switched on, and wrong: the start of a bug report"),
    "operators": ("openreg_ops.tools.operators", "list torch's operators by class, and what a device has for each"),
    "trace": ("openreg_ops.tools.trace", "run a program, and say what it ran on a device and which kernels to write"),
    "new": ("openreg_ops.tools.new", "write the three files of a new operator into a checkout"),
}


def _has_device() -> bool:
    """Whether the package has brought its device, which it does not under openreg_tools."""
    return "_C" in vars(sys.modules["openreg_ops"])


def _other_backend(words: list[str]) -> bool:
    """Whether the command asks for a device that another package brings, whose key may be the one openreg has."""
    device = next((b for a, b in zip(words, words[1:], strict=False) if a == "--device"), "")
    elsewhere = not device.startswith("openreg") if device else "--key" in words
    return "--import" in words and elsewhere and _has_device()


def main() -> int:
    if _other_backend(sys.argv[1:]):  # see openreg_tools.py
        os.execv(sys.executable, [sys.executable, "-m", "openreg_tools", *sys.argv[1:]])
    package = "openreg_ops" if _has_device() else "openreg_tools"
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description="Tools for the openreg device.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args()
    try:
        return importlib.import_module(COMMANDS[arguments.command][0]).main(arguments)
    except BrokenPipeError:  # head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
