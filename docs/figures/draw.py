"""Draws the figures of the documentation: `python docs/figures/draw.py` writes the SVG files beside it.

A figure is boxes, arrows and words on a grid. Colors are variables, so that one file serves light and dark: a browser's
preference where the file is an image, the theme of the page where it is part of one.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

HERE = Path(__file__).parent
LIGHT = {
    "ink": "#1f2328",
    "dim": "#57606a",
    "line": "#8c959f",
    "base": "#f6f8fa",
    "torch": "#fdeee9",
    "ours": "#e4effc",
}
LIGHT |= {
    "warm": "#fff4d6",
    "good": "#e1f5e6",
    "bad": "#fbd5d1",
    "edge": "#c4ccd4",
    "paper": "#fff",
    "alarm": "#b42318",
}
DARK = {"ink": "#e6edf3", "dim": "#9da7b3", "line": "#7d8590", "base": "#1b2027", "torch": "#41271f", "ours": "#17304f"}
DARK |= {
    "warm": "#40371a",
    "good": "#16361f",
    "bad": "#6a2320",
    "edge": "#3d444d",
    "paper": "#0d1117",
    "alarm": "#ff9087",
}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


STYLE = f"""
.drawing-svg{{{_variables(LIGHT)}font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
@media (prefers-color-scheme:dark){{.drawing-svg{{{_variables(DARK)}}}}}
body[data-theme=light] .drawing-svg{{{_variables(LIGHT)}}}
body[data-theme=dark] .drawing-svg{{{_variables(DARK)}}}
.drawing-svg text{{fill:var(--ink);font-size:14px}}
.drawing-svg text.dim{{fill:var(--dim);font-size:12px}}
.drawing-svg text.code{{font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;font-size:13px}}
.drawing-svg text.head{{font-weight:600}}
.drawing-svg text.alarm{{fill:var(--alarm);font-size:12px;font-weight:600}}
.drawing-svg rect{{stroke:var(--edge);stroke-width:1}}
.drawing-svg path{{stroke:var(--line);stroke-width:1.5;fill:none}}
.drawing-svg path.tip{{fill:var(--line);stroke:none}}
.drawing-svg path.alarm{{stroke:var(--alarm)}}
.drawing-svg .dash{{stroke-dasharray:5 4}}
""".strip()


class Figure:
    """An SVG of a width and height in pixels. It is shown `zoom` times as large where there is room."""

    def __init__(self, name: str, width: int, height: int, title: str, zoom: float = 1) -> None:
        self.name, self.width, self.height, self.title, self.zoom = name, width, height, title, zoom
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """One line of text; `kind` is "", "dim", "code" or "head"."""
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
        fill: str = "base",
        head: str = "",
        dash: bool = False,
    ) -> None:
        """A rectangle with a heading and lines below it, centered. A line that begins with ` is code, with ~ small."""
        dash_class = ' class="dash"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="var(--{fill})"{dash_class}/>'
        )
        shown = [(head, "head")] * bool(head)
        shown += [
            (line.lstrip("`~"), "code" if line.startswith("`") else "dim" if line.startswith("~") else "")
            for line in lines
        ]
        top = y + h / 2 - (len(shown) - 1) * 9.5 + 5
        for i, (words, kind) in enumerate(shown):
            self.text(x + w / 2, top + i * 19, words, kind)

    def arrow(self, *points: tuple[float, float], dash: bool = False) -> None:
        """A line through the points, with a tip at the last."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        ends = [*points[:-1], (x1 - 6 * dx, y1 - 6 * dy)]
        line = "M" + "L".join(f"{x:g} {y:g}" for x, y in ends)
        dash_class = ' class="dash"' if dash else ""
        self.parts.append(f'<path{dash_class} d="{line}"/>')
        left, right = (x1 - 8 * dx - 4 * dy, y1 - 8 * dy - 4 * dx), (x1 - 8 * dx + 4 * dy, y1 - 8 * dy + 4 * dx)
        tip = f"M{x1:g} {y1:g}L{left[0]:g} {left[1]:g}L{right[0]:g} {right[1]:g}Z"
        self.parts.append(f'<path class="tip" d="{tip}"/>')

    def svg(self) -> str:
        kind = "drawing-svg narrow" if self.zoom > 1 else "drawing-svg"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {self.width} {self.height}" '
        head += f'width="{self.width * self.zoom:g}" height="{self.height * self.zoom:g}" role="img">'
        return "\n".join(
            [head, f"<title>{html.escape(self.title)}</title>", f"<style>{STYLE}</style>", *self.parts, "</svg>\n"]
        )


def architecture() -> Figure:
    f = Figure("architecture", 820, 552, "The architecture by layers")
    f.box(
        20,
        16,
        780,
        48,
        "~models, training frameworks, pytest suites, the tools of openreg_tools",
        head="your program",
        fill="base",
    )
    f.arrow((250, 64), (250, 92))
    f.box(
        20,
        92,
        500,
        64,
        "~autocast, autograd, functorch, Inductor, profiler, distributed",
        head="PyTorch: dispatcher",
        fill="torch",
    )
    f.box(540, 92, 260, 64, "~torch.openreg, fallback, faults, sanitizer", head="openreg_ops (Python)", fill="ours")
    f.arrow((670, 64), (670, 92))
    f.arrow((145, 156), (145, 190))
    f.arrow((395, 156), (395, 190))
    f.box(
        20,
        190,
        245,
        76,
        "~all built-in operators: the CPU's",
        "~kernels on device memory",
        head="csrc/aten",
        fill="ours",
    )
    f.box(
        275,
        190,
        245,
        76,
        "~openreg::rms_norm, attention, …",
        "~and operators in your own package",
        head="csrc/ops",
        fill="ours",
    )
    f.box(
        540,
        190,
        260,
        76,
        "~allocator, guard, hooks, generator,",
        "~profiler, c10d: PyTorch's view of it",
        head="csrc/backend",
        fill="ours",
    )
    f.arrow((670, 156), (670, 190))
    f.arrow((145, 266), (145, 300))
    f.arrow((395, 266), (395, 300))
    f.box(20, 300, 500, 52, "~loops that both use: products, attention, rows", head="csrc/kernels", fill="ours")
    f.arrow((270, 352), (270, 382))
    f.box(20, 382, 500, 52, "~the only path from a kernel to a stream", head="launch()", fill="warm")
    f.arrow((270, 434), (270, 468))
    f.arrow((670, 266), (670, 468))
    f.box(
        20,
        468,
        780,
        68,
        "~devices · memory · streams · events · isolation · faults · profiling; contains no PyTorch",
        head="csrc/runtime: the simulated accelerator",
        fill="good",
    )
    return f


def call() -> Figure:
    f = Figure("call", 820, 300, "The path of one call")
    steps = [
        ("Python", "`y = x + 1", "~parses arguments"),
        ("Autocast", "~AutocastPrivateUse1", "~casts, or falls through"),
        ("Autograd", "~AutogradPrivateUse1", "~records the derivative"),
        ("Kernel", "~PrivateUse1", "~checks, allocates"),
        ("launch()", "~on the current stream", "~runs or queues"),
    ]
    fills = ("base", "torch", "torch", "ours", "warm")
    width, gap = 140, 20
    for i, ((head, *lines), fill) in enumerate(zip(steps, fills, strict=True)):
        x = 20 + i * (width + gap)
        f.box(x, 40, width, 84, *lines, head=head, fill=fill)
        if i:
            f.arrow((x - gap, 82), (x, 82))
    f.text(20, 24, "wrong arguments raise an error here, at the call", "dim", "start")
    f.arrow((730, 124), (730, 190))
    f.box(660, 190, 140, 76, "~reads and writes", "~device memory", head="work", fill="good")
    f.arrow((660, 228), (580, 228))
    f.text(620, 220, "error", "dim")
    f.box(
        340,
        190,
        240,
        76,
        "~raised by the next call that waits:",
        "~item(), synchronize(), a copy",
        head="AcceleratorError",
        fill="base",
    )
    f.box(20, 190, 240, 76, "~a tensor that may not be", "~computed yet", head="the call returns", fill="base")
    f.arrow((570, 124), (570, 158), (140, 158), (140, 190), dash=True)
    return f


def launch() -> Figure:
    f = Figure("launch", 820, 420, "What launch() does")
    f.box(300, 16, 220, 52, "`launch(stream, work)", "~work owns pointers and sizes", fill="base")
    f.arrow((410, 68), (410, 100))
    f.box(270, 100, 280, 56, "~lost device, pending error, fork", head="Is anything unusual?", fill="warm")
    f.arrow((270, 128), (180, 128))
    f.text(225, 120, "yes", "dim")
    f.box(20, 100, 160, 56, "~with the remedy", head="raise", fill="torch")
    f.arrow((410, 156), (410, 190))
    f.box(
        270, 190, 280, 56, "~inline and idle · async or busy · capturing", head="What is the stream doing?", fill="warm"
    )
    f.arrow((300, 246), (300, 268), (140, 268), (140, 290))
    f.arrow((410, 246), (410, 290))
    f.arrow((520, 246), (520, 268), (680, 268), (680, 290))
    f.text(215, 262, "idle", "dim")
    f.text(440, 272, "busy", "dim")
    f.text(610, 262, "capturing", "dim")
    f.box(
        20,
        290,
        240,
        114,
        "~take the stream's turn",
        "~open device memory",
        "~apply injected faults, record the time",
        "~run the work · close · end the turn",
        head="run it here",
        fill="good",
    )
    f.box(
        290,
        290,
        240,
        114,
        "~append to the stream's queue",
        "~its thread does the same as on the",
        "~left; the next call that waits",
        "~raises its errors",
        head="queue it",
        fill="good",
    )
    f.box(
        560,
        290,
        240,
        114,
        "~append a node to the graph;",
        "~nothing runs. A replay is one",
        "~launch that runs the nodes",
        head="record it",
        fill="good",
    )
    return f


def memory() -> Figure:
    f = Figure("memory", 820, 360, "The life of a block of memory")
    f.text(20, 30, "host", "head", "start")
    f.text(20, 122, "stream 1", "head", "start")
    f.text(20, 212, "stream 2", "head", "start")
    f.text(20, 310, "the block", "head", "start")
    for y in (52, 144, 234):
        f.parts.append(f'<path d="M110 {y}L800 {y}"/>')
    f.arrow((275, 70), (275, 126))
    f.arrow((420, 70), (420, 216))
    f.arrow((540, 70), (540, 290), dash=True)
    f.arrow((660, 70), (660, 126))
    f.arrow((620, 252), (620, 290), dash=True)
    for x, w, words in (
        (110, 90, "allocate"),
        (230, 90, "launch"),
        (355, 130, "record_stream"),
        (505, 70, "free"),
        (610, 100, "allocate"),
    ):
        f.box(x, 34, w, 36, words, fill="base")
    f.box(225, 126, 170, 36, "kernel writes", fill="good")
    f.box(410, 216, 220, 36, "kernel reads", fill="good")
    f.box(640, 126, 150, 36, "next kernel writes", fill="good")
    for x, w, words, fill in (
        (110, 430, "in use", "ours"),
        (540, 80, "waits", "warm"),
        (620, 180, "free, in use again", "ours"),
    ):
        f.box(x, 290, w, 34, words, fill=fill)
    f.text(
        110,
        350,
        "The block waits for stream 2, because record_stream told the allocator that stream 2 uses it.",
        "dim",
        "start",
    )
    return f


def graph() -> Figure:
    f = Figure("graph", 820, 330, "Capture and replay")
    f.text(20, 26, "capture: launch() appends nodes, nothing runs", "head", "start")
    f.box(20, 40, 250, 52, "`with torch.openreg.graph(g):", "`    y = model(x)", fill="base")
    f.arrow((270, 66), (320, 66))
    for i, words in enumerate(("matmul", "add", "gelu")):
        f.box(320 + i * 150, 44, 110, 44, words, fill="ours")
        if i:
            f.arrow((280 + i * 150, 66), (320 + i * 150, 66))
    f.box(320, 118, 410, 40, "memory from the graph's own pool: addresses stay fixed", fill="warm")
    for i in range(3):
        f.arrow((375 + i * 150, 88), (375 + i * 150, 118), dash=True)
    f.text(20, 206, "replay: one launch runs the nodes, in stream order", "head", "start")
    f.box(20, 220, 250, 52, "`x.copy_(batch)", "`g.replay()", fill="base")
    f.arrow((270, 246), (320, 246))
    f.box(320, 220, 410, 52, fill="good")
    for i, words in enumerate(("matmul", "add", "gelu")):
        f.text(375 + i * 150, 251, words)
        if i:
            f.arrow((265 + i * 150, 246), (325 + i * 150, 246))
    f.arrow((525, 220), (525, 158), dash=True)
    f.text(
        20, 306, "A read on the host, a wait, or a shape that depends on data raises during capture.", "dim", "start"
    )
    return f


def race() -> Figure:
    """The race of the README, and what `pytest --device=openreg --device-misuse=race` says. It is readable on a phone."""
    f = Figure("race", 420, 318, "The host reads the result of a copy before the copy has run", zoom=1.5)
    f.parts.append('<rect x=".5" y=".5" width="419" height="317" rx="8" fill="var(--paper)"/>')
    f.text(16, 28, "Passes on the CPU, and usually on a GPU", "head", "start")
    for y, lane in ((86, "host"), (156, "stream")):
        f.text(16, y + 5, lane, "head", "start")
        f.arrow((80, y), (408, y))
    f.box(84, 70, 60, 32, "`ones()", fill="base")
    f.box(152, 70, 70, 32, "`copy_()", fill="base")
    f.text(187, 62, "library.py:7", "dim")
    f.box(258, 70, 58, 32, "`sum()", fill="bad")
    f.text(287, 62, "test_library.py:7", "dim")
    f.box(108, 140, 60, 32, "`ones", fill="good")
    f.box(336, 140, 58, 32, "`copy_", fill="good")
    f.arrow((126, 102), (126, 140))
    f.arrow((187, 102), (187, 121), (365, 121), (365, 140))
    f.text(408, 112, "time", "dim", "end")
    f.parts.append('<path class="alarm dash" d="M287 102L287 182"/>')
    f.text(404, 197, "sum() reads what copy_ has not written yet", "alarm", "end")
    lines = ("race: test_library.py:7", "the host did not wait for aten::copy_")
    f.box(16, 210, 388, 94, fill="base")
    for i, words in enumerate((*lines, "Remedy: call torch.accelerator.synchronize()", "before the host reads")):
        f.text(28, 232 + 20 * i, words, "code", "start")
    return f


def benchmarks() -> Figure:
    """The figures of docs/benchmarks.md as bars, read from the outputs that the page shows. It is readable on a phone."""
    page = (HERE.parent / "benchmarks.md").read_text()
    medians = page[page.index("the medians of 6 processes") :]
    interval = r" +([\d.]+) +([\d.]+) to ([\d.]+) "
    operators = r"^([\w-]+), float32, \w+ +[\d.]+ \w+ +[\d.]+ \w+ +([\d.]+) +target"
    means = re.findall("^geometric mean, (64|1M)" + interval, page, re.M)
    groups = [
        ("PyTorch's operators", [(f"{size} elements", *rest) for size, *rest in means]),
        ("Training steps", re.findall("^(mlp|transformer|lstm|resnet-block)" + interval, medians, re.M)[:4]),
        ("The suite's operators, against eager PyTorch", re.findall(operators, page, re.M)),
    ]
    rows = sum(len(bars) + 1.5 for _, bars in groups)
    height = int(58 + rows * 22)
    f = Figure("benchmarks", 420, height, "The device's time divided by the CPU's", zoom=1.5)
    f.parts.append(f'<rect x=".5" y=".5" width="419" height="{height - 1}" rx="8" fill="var(--paper)"/>')
    f.text(16, 28, "The device's time divided by the CPU's", "head", "start")
    left, unit, y = 160, 200, 52.0
    for title, bars in groups:
        f.text(16, y + 10, title, "dim", "start")
        y += 20
        for name, ratio, *ends in bars:
            width = float(ratio) * unit
            f.text(left - 8, y + 12, name, "dim", "end")
            f.parts.append(f'<rect x="{left}" y="{y:g}" width="{width:g}" height="16" rx="2" fill="var(--ours)"/>')
            if ends:
                low, high = (left + float(end) * unit for end in ends)
                f.parts.append(f'<path d="M{low:g} {y + 8:g}L{high:g} {y + 8:g}"/>')
            f.text(404, y + 12, ratio, "dim", "end")
            y += 22
        y += 13
    f.parts.append(f'<path class="dash" d="M{left + unit} 60L{left + unit} {y - 8:g}"/>')
    f.text(404, 52, "1: the CPU", "dim", "end")
    return f


FIGURES = (architecture, benchmarks, call, graph, launch, memory, race)


def draw() -> dict[str, str]:
    """The files: names and texts."""
    return {f"{figure.name}.svg": figure.svg() for figure in (make() for make in FIGURES)}


if __name__ == "__main__":
    for name, text in draw().items():
        (HERE / name).write_text(text)
