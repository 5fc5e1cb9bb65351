"""Runs a program in the context of a tool: `trace`, `compare` and `record`."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

from openreg_tools.forms import Wrong

__all__ = ["apart", "run"]


@contextlib.contextmanager
def apart(json: str | None) -> Iterator[None]:
    """With --json -, the output of the program and its children goes to stderr."""
    if json != "-":
        yield
        return
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def run(words: list[str], context: Any) -> int:
    """Run a script as a program inside a context; returns its exit status, 1 if it raised."""
    before, status = (sys.argv, sys.path[:]), 0
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    try:
        with context:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(bool(exit.code))
    except Wrong:
        raise
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.argv, sys.path[:] = before
    return status
