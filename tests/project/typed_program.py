"""A user's program, which `make lint` checks with mypy --strict: what both packages say about types is enough for it."""

from __future__ import annotations

import torch

import openreg_ops
from openreg_ops import fallback
from openreg_ops.testing import Report, check
from openreg_tools.check import Sample
from openreg_tools.core.findings import Finding


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, _ = openreg_ops.rms_norm(x, weight)
    assert isinstance(y, torch.Tensor)
    return y


def failures(op: str, by: float) -> list[str]:
    report: Report = check(op, [(torch.ones(3), by), Sample(torch.ones(2, 3), by)], "openreg", only=["schema"])
    report.raise_if_failed()
    found: list[Finding] = report.findings()
    return [f"{result.check}: {result.sentence}" for result in report.failures] + [finding.message for finding in found]


def copies() -> dict[str, int]:
    with fallback.policy("error"):
        return {record.operator: record.calls for record in fallback.report()}


def build_options() -> list[str]:
    optimizer = openreg_ops.AdamW([torch.nn.Parameter(torch.ones(3))], lr=1e-3)
    optimizer.step()
    return [f"-I{path}" for path in openreg_ops.include_paths()] + [f"-L{path}" for path in openreg_ops.library_paths()]


print(
    openreg_ops.__version__,
    normalized(torch.ones(2, 3), torch.ones(3)),
    failures("a::b", 1.0),
    copies(),
    build_options(),
)
