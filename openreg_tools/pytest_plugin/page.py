"""What a pytest run on a device found, as an HTML page. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from openreg_tools.core.blocks import Block, Cell, Section, Table, Text, counted
from openreg_tools.core.report import Report
from openreg_tools.pytest_plugin.misuse import KINDS, Misuse, Misuses

__all__ = ["PytestPage"]


@dataclasses.dataclass
class PytestPage(Report):
    """The page of `--device-html`.

    Args:
        device: the devices of the run, as text.
        kinds: what was looked for, of KINDS.
        tests, failed: how many tests ran, and failed.
        more: what other plugins found, by their `pytest_device_page`.
    """

    misuses: Misuses
    device: str
    kinds: Sequence[str]
    tests: int
    failed: int
    more: Sequence[Block]

    def __post_init__(self) -> None:
        self.title = f"pytest on {self.device}"

    @property
    def passed(self) -> bool:
        return not (self.failed or self.more or self.misuses.kinds())

    def summary(self) -> str:
        kinds = self.misuses.kinds()
        found = [f"{kind} ({len(self.misuses.lines(kind))})" for kind in KINDS if kind in kinds]
        ran = f"{counted(self.tests, 'test')} on {self.device}, {self.failed or 'none'} failed"
        return f"{ran}; {'lines with misuse: ' if found else 'no misuse found'}{', '.join(found)}"

    def blocks(self, page: bool = False) -> Iterator[Block]:
        yield from self.more
        for kind, title in KINDS.items():
            if lines := self.misuses.lines(kind):
                groups: dict[str, list[list[Any]]] = {}
                for count, what, where in lines:
                    tests = self.misuses.tests(kind, what, where)
                    of = tests[0] + f" and {len(tests) - 1} more" * (len(tests) > 1) if tests else ""
                    row = [where, Cell(what, "words"), count, of]
                    groups.setdefault(Misuse(kind, what, where, "").remedy, []).append(row)
                shown: list[Block] = []
                for remedy, rows in groups.items():
                    shown += [Text(f"Remedy: {remedy}"), Table([["line", "what happened", "times", "test"], *rows])]
                yield Section(f"{kind}: {title}", shown)
            if own := self.misuses.allowed(kind):
                yield Text(f"{kind}: {own:,} more in test code (not counted)")
        yield Section("This run", [Text(f"watched for: {', '.join(self.kinds) or 'nothing; see --device-misuse'}")])

    def dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
