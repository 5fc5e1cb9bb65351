"""Attempts that may crash or hang, in a forked child: another child goes on after one that ended."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from openreg_tools.core import child
from openreg_tools.core.blocks import first_line

__all__ = ["Attempt", "attempts"]


@dataclasses.dataclass
class Attempt:
    """How one attempt ended."""

    kind: str  # "returned", "raised", "crashed" or "hung"
    message: str = ""


def attempts(
    count: int, attempt: Callable[[int], Any], enough: int | None = None, seconds: float = 10.0
) -> Iterator[tuple[int, Attempt]]:
    """Make attempts 0 to count - 1 in a forked child. When one ends the child or hangs, fork another.

    Ends early once `enough` have returned, or three have hung. The attempts must not use a device that the parent has used.
    """
    first = returned = hung = 0
    while first < count and (enough is None or hung < 3):
        for i, outcome in _forked(range(first, count), attempt, seconds):
            yield i, outcome
            first = i + 1
            hung += outcome.kind == "hung"
            returned += outcome.kind == "returned"
            if enough is not None and returned >= enough:
                return


def _forked(which: range, attempt: Callable[[int], Any], seconds: float) -> Iterator[tuple[int, Attempt]]:
    running: int | None = which.start

    def work(answer: Callable[[Any], None]) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        warnings.simplefilter("ignore")
        with child.at_most(4 << 30):
            for i in which:
                answer([i])
                try:
                    attempt(i)
                    answer([i, "returned"])
                except Exception as error:
                    answer([i, "raised", first_line(error)])

    try:
        for i, *outcome in child.answers(work, seconds):
            running = None if outcome else i
            if outcome:
                yield i, Attempt(*outcome)
    except child.Ended as error:
        if running is not None:
            yield running, Attempt("hung" if isinstance(error, child.Hung) else "crashed", str(error))
