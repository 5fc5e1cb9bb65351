"""What a bug report says about an installation: sections of names and values, and problems with their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openreg_tools.core.blocks import Block, Box, Cell, Lines, Section, Table, Text, counted, hanging
from openreg_tools.core.report import Report

__all__ = ["Info"]


class Info(Report):
    """The report of ``info``. A device's package adds to it in `Backend.info`."""

    title = "info"

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, str]] = {}
        self.problems: list[tuple[str, str]] = []

    def add(self, section: str, **values: Any) -> None:
        """Add values to a section."""
        self.sections.setdefault(section, {}).update({k.replace("_", " "): str(v) for k, v in values.items()})

    def problem(self, what: str, remedy: str) -> None:
        """Add a problem and its remedy."""
        self.problems.append((what, remedy))

    def test(self, device: str, remedy: str) -> None:
        """Compare one forward and backward on the device with the CPU."""
        import torch

        try:
            gradients = []
            for place in ("cpu", device):
                x = torch.arange(6.0).view(2, 3).to(place).requires_grad_()
                torch.softmax(x @ x.t(), -1).square().sum().backward()
                gradients.append(x.grad.cpu())
            torch.testing.assert_close(*gradients)
            self.add("devices", **{"self-test": "passed (forward and backward match the CPU)"})
        except Exception as error:
            self.add("devices", **{"self-test": "failed"})
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self.problem(f"the self-test, a small forward and backward, fails: {said}", remedy)

    @property
    def passed(self) -> bool:
        """True if there is no problem."""
        return not self.problems

    def opening(self) -> str:
        """How many problems there are."""
        return counted(len(self.problems), "problem")

    def blocks(self, page: bool = False) -> Iterator[Block]:
        if page:
            for what, remedy in self.problems:
                yield Box(what, [Text(f"Remedy: {remedy}")], "fail", is_open=True)
            for section, values in self.sections.items():
                rows = [[name, Cell(value, "words")] for name, value in values.items()]
                yield Section(section, [Table([["name", "value"], *rows])])
            return
        lines = []
        for section, values in self.sections.items():
            lines.append(section)
            for name, value in values.items():
                lines += hanging(value, f"  {name:19} ") or [f"  {name}"]
        yield Lines(lines)
        problems = []
        for what, remedy in self.problems:
            problems += [*hanging(what, "  - "), *hanging(f"Remedy: {remedy}", "    ")]
        yield Section(counted(len(self.problems), "problem"), [Lines(problems)])

    def dict(self) -> dict[str, Any]:
        problems = [{"problem": what, "remedy": remedy} for what, remedy in self.problems]
        return {**self.sections, "problems": problems}
