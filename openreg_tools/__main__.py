"""The command line: ``openreg-tools COMMAND`` and ``python -m openreg_tools COMMAND``. Imports torch only in a command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping

from openreg_tools import backends
from openreg_tools.backends import AUTOLOAD
from openreg_tools.forms import Wrong

# Each names a module with add_arguments(parser) and main(arguments) -> exit status, imported when chosen.
COMMANDS = {
    "check": ("openreg_tools.check.command", "find bugs in a custom operator of any library"),
    "compare": ("openreg_tools.compare.command", "find the first operator of a program that differs from a reference"),
    "conformance": ("openreg_tools.conformance.command", "run PyTorch's test databases on a device against the CPU"),
    "drift": ("openreg_tools.drift", "compare two versions of torch, and say which registrations break"),
    "explain": ("openreg_tools.explain", "show the path of one call through the dispatcher, key by key"),
    "info": ("openreg_tools.info", "report what is installed, enabled and wrong: the start of a bug report"),
    "operators": ("openreg_tools.operators", "list torch's operators by class, and what a device has for each"),
    "record": ("openreg_tools.compare.record_command", "record a fingerprint of each operator's results, for compare"),
    "trace": ("openreg_tools.trace", "run a program, and report what it ran on a device and which kernels to write"),
}


def run(commands: Mapping[str, tuple[str, str]], program: str, description: str) -> int:
    """Parse the command line and run the command that it names."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    chosen_parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    for name, (module, text) in commands.items():
        sub = chosen_parsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args()
    try:
        return importlib.import_module(commands[arguments.command][0]).main(arguments)
    except Wrong as error:
        print(f"{arguments.command}: {str(error).removeprefix(f'{arguments.command}: ')}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def options(words: list[str]) -> list[str]:
    """The words before the script that a command runs; the script's own arguments follow it."""
    scripts = (
        i for i, word in enumerate(words) if word.endswith(".py") and words[i - 1] != "--test"
    )  # a file to write
    return words[: next(scripts, len(words))]


def device_of(words: list[str]) -> str:
    """The device type that --device asks for, "" without one."""
    asked = [b for a, b in zip(words, words[1:], strict=False) if a == "--device"]
    asked += [word.partition("=")[2] for word in words if word.startswith("--device=")]
    return asked[0].partition(":")[0] if asked else ""


def _load_backends(words: list[str]) -> None:
    """Import torch and its installed backends, like `import torch`; prints a line for a backend that fails."""
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
    if not any(word.partition("=")[0] == "--import" for word in words):
        backends.load_installed()  # else after the imports, because a process has one PrivateUse1 backend


def main() -> int:
    words = options(sys.argv[1:])
    if "info" not in words[:1]:  # which loads them one by one, and reports errors
        _load_backends(words)
    return run(COMMANDS, "python -m openreg_tools", "Tools for custom operators and backends of PyTorch.")


if __name__ == "__main__":
    sys.exit(main())
