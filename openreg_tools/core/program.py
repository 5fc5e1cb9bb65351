"""Runs a program in the context of a tool, for `trace` and `compare`; several ranks write a file each.

The tool's options come before the program, as for `python` and `torchrun`; what follows belongs to the program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from openreg_tools.core.options import Wrong

__all__ = ["add_program", "of_rank", "program", "rank", "run"]


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program and its arguments to a parser that has all of the tool's options."""
    parser.set_defaults(own_options=frozenset(parser._option_string_actions) - {"-h", "--help"})
    parser.add_argument(
        "program", nargs=argparse.PARSER, metavar="SCRIPT.py", help="the program, followed by its own arguments"
    )


def program(arguments: argparse.Namespace) -> list[str]:
    """The program and its arguments, without the ``--`` that may stand between them.

    Raises:
        Wrong: an option of the tool follows the program, and no ``--`` says that it is the program's.
    """
    script, *rest = arguments.program[1:] if arguments.program[0] == "--" else arguments.program
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        option = word.partition("=")[0]
        if option in arguments.own_options:
            name = os.path.basename(script)
            raise Wrong(
                f"put {option} before {name}, because what follows it belongs to the program; "
                f"if {option} is the program's own, write {name} -- {' '.join(rest)}"
            )
    return [script, *(rest[1:] if rest[:1] == ["--"] else rest)]


def run(words: list[str], context: Any) -> int:
    """Run a script as a program inside a context; returns its exit status, 1 if it raised.

    A process that the program forked ends here: it writes no report.

    Raises:
        Wrong: there is no such script.
    """
    if not os.path.isfile(words[0]):
        raise Wrong(f"there is no file {words[0]}")
    process = os.getpid()
    before, status, started_before = (sys.argv, sys.path[:]), 0, set(threading.enumerate())
    shown = None
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    try:
        with context:
            try:
                runpy.run_path(words[0], run_name="__main__")
            except Exception as error:
                if not isinstance(error, Wrong):
                    shown = error
                    _show(error, words[0])
                raise
            finally:
                _wait_for_threads(started_before)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if status and not isinstance(exit.code, int):
            print(exit.code, file=sys.stderr)
    except Wrong:
        raise
    except Exception as error:
        if error is not shown:
            _show(error, words[0])
        status = 1
    finally:
        sys.argv, sys.path[:] = before
    if os.getpid() != process:
        sys.exit(status)
    return status


def _show(error: Exception, program: str) -> None:
    """Print an error as Python does: from the program's own frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != program:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _wait_for_threads(others: set[threading.Thread]) -> None:
    """Wait as Python does when a program ends: for threads that are not daemons, and for what its executors still have,
    which end. Executors of the tool, or of who calls it, stay."""
    if futures := sys.modules.get("concurrent.futures.thread"):
        ending = {thread: queue for thread, queue in futures._threads_queues.copy().items() if thread not in others}
        futures._shutdown = True
        for queue in ending.values():
            queue.put(None)
        for thread in ending:
            thread.join()
        futures._shutdown = False
    if compiling := sys.modules.get("torch._inductor.async_compile"):
        compiling.AsyncCompile.pool.cache_clear()  # it may have been the program's
    for thread in threading.enumerate():
        if thread not in others and not thread.daemon and thread is not threading.current_thread():
            thread.join()


def rank() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the process group, or as torchrun says after that has ended."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def of_rank(file: str | None, rank: int, ranks: int) -> str | None:
    """The file that a rank writes: page.rank1.html for page.html, where there are several."""
    if ranks == 1 or file in (None, "-"):
        return file
    path = Path(file)
    return str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))
