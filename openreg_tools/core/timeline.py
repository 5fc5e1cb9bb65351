"""A timeline of a page: lanes side by side, time from top to bottom, and lines from a launch to where it ran. SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from openreg_tools.core.blocks import PageOnly, counted, cut

__all__ = ["TimelineRow", "timeline"]

TOP, ROW, LEFT, GAP = 30, 40, 22, 18  # pixels; the gap between two lanes is where lines go down
MOST, AROUND = 24, 4  # a timeline of more rows shows only those around the rows with a style


class TimelineRow(NamedTuple):
    """One row."""

    lane: str
    name: str
    where: str = ""  # "file.py:12"
    launched: int = -1  # the number of the event that launched this one; -1: none
    style: str = ""  # "fail", "warn" or ""


def timeline(title: str, events: Sequence[TimelineRow]) -> PageOnly:
    """The events in the order in which they happened."""
    names = [*dict.fromkeys(event.lane for event in events)]
    lane_width = 92 if len(names) == 3 else 128  # three lanes, too, fit a screen of 390 pixels
    letters = lane_width // 6
    lanes = {lane: LEFT + i * (lane_width + GAP) for i, lane in enumerate(names)}
    rows, skipped = _rows(events)
    bottom = TOP + ROW * (len(rows) + len(skipped)) + 4
    width = LEFT + len(lanes) * (lane_width + GAP) - GAP + 4
    parts = [
        f'<path class="grid" d="M8 {TOP}V{bottom - 2}m-3 -6l3 6l3 -6"/>',
        f'<text class="dim" x="12" y="{TOP - 12}" text-anchor="middle">time</text>',
    ]
    for lane, x in lanes.items():
        middle = x + lane_width / 2
        parts.append(f'<path class="grid" d="M{middle} {TOP}V{bottom}"/>')
        parts.append(
            f'<text class="head" x="{middle}" y="{TOP - 12}" text-anchor="middle">{html.escape(cut(lane, letters))}</text>'
        )
    boxes = []
    for number, row in rows.items():
        event, x, y = events[number], lanes[events[number].lane], TOP + ROW * row
        kind = event.style or ("run" if event.launched >= 0 else "host")
        said = html.escape(f"{event.name} {event.where}".strip())
        boxes.append(
            f'<rect class="event {kind}" x="{x}" y="{y}" width="{lane_width}" height="{ROW - 8}" rx="5"><title>{said}</title></rect>'
        )
        lines = [(html.escape(cut(event.name, letters)), ""), (html.escape(cut(event.where, letters)), "dim")]
        lines = [line for line in lines if line[0]]
        for i, (words, style) in enumerate(lines):
            down = y + (20 if len(lines) == 1 else 14 + 13 * i)
            boxes.append(
                f'<text class="{style}" x="{x + lane_width / 2}" y="{down}" text-anchor="middle">{words}</text>'
            )
        if event.launched in rows:
            start = lanes[events[event.launched].lane] + lane_width
            from_y, to_y = TOP + ROW * rows[event.launched] + ROW / 2 - 4, y + ROW / 2 - 4
            parts.append(
                f'<path class="link {event.style}" d="M{start} {from_y}H{x - GAP / 2}V{to_y}H{x - 1}m-5 -3l5 3l-5 3"/>'
            )
    for row, count in skipped.items():
        boxes.append(f'<text class="dim" x="{LEFT}" y="{TOP + ROW * row + 18}">… {counted(count, "step")}</text>')
    words = html.escape(title, quote=True)
    drawing = (
        f'<svg class="timeline" width="{width}" height="{bottom}" role="img" aria-label="{words}">'
        f"{''.join(parts)}{''.join(boxes)}</svg>"
    )
    return PageOnly(f"<figure><figcaption>{words}</figcaption>{drawing}</figure>")


def _rows(events: Sequence[TimelineRow]) -> tuple[dict[int, int], dict[int, int]]:
    """The row of each event that is shown, and for each row that stands for others, how many."""
    marked = [i for i, event in enumerate(events) if event.style]
    near = (
        {j for i in marked for j in range(i - AROUND, i + AROUND + 1)} if len(events) > MOST else {*range(len(events))}
    )
    rows: dict[int, int] = {}
    skipped: dict[int, int] = {}
    row = 0
    for i in range(len(events)):
        if i in near:
            if skipped and row in skipped:
                row += 1
            rows[i] = row
            row += 1
        else:
            skipped[row] = skipped.get(row, 0) + 1
    return rows, skipped
