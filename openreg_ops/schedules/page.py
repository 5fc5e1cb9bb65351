"""What `schedules` found as an HTML page, with a timeline of the order. Uses the reports of openreg_tools."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from openreg_ops.schedules.report import pieces
from openreg_tools.core.blocks import Block, Lines, PageOnly, Section, Text, counted
from openreg_tools.core.page import legend
from openreg_tools.core.report import Report
from openreg_tools.core.timeline import TimelineRow, timeline

__all__ = ["SchedulesPage", "drawing"]

LATE, EARLY = "runs as late as the waits allow", "happens before the late work has run"


@dataclasses.dataclass
class SchedulesPage(Report):
    """The page of one call of `schedules`."""

    found: Any  # explore.Schedules, which imports this module
    title = "orders of streams"

    @property
    def passed(self) -> bool:
        return self.found.passed

    def summary(self) -> str:
        difference = self.found.difference
        if difference is None:
            return str(self.found)
        return f"The result depends on the order of the streams: {difference.what}"

    def blocks(self, page: bool = False) -> Iterator[Block]:
        if (difference := self.found.difference) is not None:
            yield Text(f"Missing: {difference.missing}")
            yield PageOnly(drawing(self.found))
            yield Section("The order in words", [Lines(difference.order)])
            yield Section("To run this order again", [Lines([self.found.again.format(seed=difference.seed)])])
        tried = (
            f"{self.found.orders} of {counted(len(self.found.seeds), 'order')} ran, each of {pieces(self.found.work)}"
        )
        yield Section("This run", [Text(f"{tried}; torch {torch.__version__}")])

    def dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.found)


def drawing(found: Any) -> str:
    """The order that gives a different result as HTML: a timeline for each rank, and what its colors mean."""
    drawn = []
    for rank, rows in enumerate(found.difference.rows):
        shown = [
            TimelineRow(**row._asdict() | {"name": _short(row.name), "where": os.path.basename(row.where)})
            for row in rows
        ]
        of_rank = f" on rank {rank}" if len(found.difference.rows) > 1 else ""
        drawn.append(timeline(f"The order of seed {found.difference.seed}, shortened{of_rank}", shown))
    return "".join(block.html for block in [*drawn, legend({"fail": ("", LATE), "warn": ("", EARLY)})])


def _short(name: str) -> str:
    """``Memcpy DtoH (Device -> Pinned)`` and ``void openreg::wait(Stream)`` without what follows and precedes the name."""
    head = name.partition("(")[0].rstrip()
    return head.rpartition("::")[2] if " " in head and "::" in head else head
