"""A chart of a page: horizontal bars on a logarithmic axis, readable 360 pixels wide, as SVG without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from openreg_tools.core.blocks import PageOnly, cut

__all__ = ["Bar", "bars"]

WIDTH, LEFT, RIGHT, ROW = 360, 4, 352, 34


class Bar(NamedTuple):
    """A value above 0 and its limit, which is a mark on the bar's row."""

    name: str
    value: float
    limit: float = 0.0  # 0: none
    style: str = ""  # "fail" or ""


def bars(title: str, axis: str, rows: Sequence[Bar]) -> PageOnly:
    """The rows from top to bottom, each with its name and value; `axis` names the quantity and its unit."""
    numbers = [number for row in rows for number in (row.value, row.limit) if 0 < number < math.inf]
    if not numbers:
        return PageOnly("")
    low, high = math.floor(math.log10(min(numbers)) - 0.2), math.ceil(math.log10(max(numbers)) + 0.05)

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(math.log10(value), high) - low) / (high - low) if value > 0 else LEFT

    bottom = ROW * len(rows) + 2
    parts = []
    for power in range(low, high + 1, max(1, (high - low + 4) // 5)):
        at, anchor = x(10.0**power), "start" if power == low else "end" if power == high else "middle"
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="dim" x="{at:.1f}" y="{bottom + 13}" text-anchor="{anchor}">{10.0**power:g}</text>')
    for i, row in enumerate(rows):
        y, name = ROW * i, html.escape(cut(row.name, 40))
        parts.append(f'<text x="{LEFT}" y="{y + 13}">{name}</text>')
        parts.append(f'<text x="{RIGHT}" y="{y + 13}" text-anchor="end">{row.value:.4g}</text>')
        bar = f'x="{LEFT}" y="{y + 18}" width="{max(1, x(row.value) - LEFT):.1f}" height="10"'
        parts.append(f'<rect class="bar {row.style}" {bar}/>')
        if row.limit > 0:
            parts.append(
                f'<line class="limit" x1="{x(row.limit):.1f}" y1="{y + 15}" x2="{x(row.limit):.1f}" y2="{y + 31}"/>'
            )
    parts.append(f'<text x="{WIDTH / 2}" y="{bottom + 29}" text-anchor="middle">{html.escape(axis)}</text>')
    words = html.escape(title, quote=True)
    drawing = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {bottom + 36}" role="img" aria-label="{words}">{"".join(parts)}</svg>'
    )
    return PageOnly(f"<figure><figcaption>{words}</figcaption>{drawing}</figure>")
