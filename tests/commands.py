"""Runs a command of the tools in this process: ``command("operators", "--totals")`` is ``python -m openreg_ops …``."""

from __future__ import annotations

import sys
from pathlib import Path

from openreg_ops import __main__


def command(*words: str | Path) -> int:
    """The exit status of the command; what it prints is captured as any other output of a test."""
    before, sys.argv = sys.argv, ["openreg_ops", *map(str, words)]
    try:
        return __main__.main()
    except SystemExit as exit_:
        return exit_.code
    finally:
        sys.argv = before
