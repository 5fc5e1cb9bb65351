"""The report of every command: numbers with their units, tables, blocks on a terminal and on a page, JSON, progress."""

import argparse
import io
import json
import math
import sys
from html.parser import HTMLParser

import pytest

from openreg_tools.core import blocks, page
from openreg_tools.core.blocks import Box, Cell, Lines, PageOnly, Section, Table, Text
from openreg_tools.core.chart import WIDTH, Bar, bars
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Progress, Report, write, write_file
from openreg_tools.core.timeline import TimelineRow, timeline

HOSTILE = "</script><script>document.title='run'</script>\"'><img src=x onerror=alert(1)>&amp;<!-- größe 名前 \u2028"


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 ns"), (2.5e-9, "2.5 ns"), (12.34e-6, "12.34 us"), (0.25, "250 ms"), (90.5, "90.5 s"),
        # On both sides of each unit's end, also where only rounding crosses it.
        (999.9e-9, "999.9 ns"), (999.96e-9, "1 us"), (1.001e-6, "1.001 us"), (999.9e-6, "999.9 us"),
        (999.96e-6, "1 ms"), (1.001e-3, "1.001 ms"), (0.9999, "999.9 ms"), (0.99996, "1 s"),
    ],
)  # fmt: skip
def test_seconds(value, text):
    assert blocks.seconds(value) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"), (1536, "1.5 KiB"), (-2048, "-2 KiB"), (4096 << 40, "4096 TiB"),
        *((1000 * 1024**p, f"1000 {unit}") for p, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
        *((1023 * 1024**p, f"1023 {unit}") for p, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
        *((1024 ** (p + 1) - 1, f"1 {unit}") for p, unit in enumerate(("MiB", "GiB", "TiB"), 1)),
    ],
)  # fmt: skip
def test_size(count, text):
    assert blocks.size(count) == text


def test_words():
    assert blocks.cut("aten::add", 9) == "aten::add" and blocks.cut("aten::a_name_of_an_operator", 12) == "aten::...tor"
    assert all(len(blocks.cut("x" * 40, width)) == width for width in range(6, 40))
    assert [blocks.counted(n, "problem") for n in (0, 1, 2)] == ["no problems", "1 problem", "2 problems"]
    lines = blocks.wrapped(["one " * 40, "two-hyphens " * 10, "x" * 100], 3)
    assert all(line.startswith("   ") and not line.startswith("    ") for line in lines)
    assert 76 < max(len(line) for line in lines if "xxx" not in line) <= 80 and "x" * 100 in lines[-1]
    assert all("two-" not in line.split() for line in lines)
    first, *rest = blocks.hanging("word " * 30, "  - ")
    assert first.startswith("  - word") and rest and all(line.startswith("    word") for line in rest)


def test_table():
    rows = [("name", "calls"), ("aten::add", 7), ("x" * 90, 1000)]
    assert blocks.table(rows[:2], left=1) == ["name       calls", "aten::add      7"]
    assert blocks.table(rows[:2]) == ["     name  calls", "aten::add      7"]
    assert blocks.table([("a", "b"), ("c", "")], left=2) == ["a  b", "c"]
    assert all(len(line) <= 80 for line in blocks.table(rows, left=1, fit=True))
    assert "x" * 90 in blocks.table(rows, left=1)[2]
    assert Table(rows, top=1, rest="2 s").lines()[-1] == "and 1 more, 2 s (--top 2)"
    assert len(Table(rows, top=2).lines()) == 3


class Example(Report):
    title = HOSTILE

    def __init__(self, passed=True):
        self.is_passed = passed

    @property
    def passed(self):
        return self.is_passed

    def blocks(self, page=False, top=1):
        yield Text("one")
        yield Lines([f"  two  {HOSTILE}"])
        yield Table([["name", "a<b"], [Cell("add", hint=HOSTILE), Cell("F", "fail")], ["mm", 7]], top=top)
        yield Section(f"Title {HOSTILE}", [Table([["n"], ["1.5 ms"]], left=0), Text("note")])
        yield Box(f"FAIL {HOSTILE}", [Text("word " * 40), Lines(["  code"])], "fail", is_open=True)
        yield Box("warn x", [Text("b")])
        yield PageOnly("<hr>")

    def summary(self):
        return "the summary"

    def dict(self):
        return {"title": self.title}


def test_report_on_a_terminal():
    text = str(Example())
    assert text.startswith("one\n  two  ") and text.endswith("warn x\n    b\n\nthe summary")
    assert (
        "\n\nname  a<b\nadd     F\nand 1 more (--top 2)\n\nTitle " in text and "\n     n\n1.5 ms\nnote\n\nFAIL " in text
    )
    assert "    word word" in text and "\n      code\nwarn x" in text and "<hr>" not in text
    assert Example().text(top=2).count("(--top") == 0
    assert all(len(line) <= 80 for line in text.splitlines() if "script" not in line)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and their texts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append((self.found[-1][0] if self.found else "", data))

    def text(self, tag):
        return "".join(data for name, data in self.texts if name == tag).strip()


def test_report_on_a_page():
    """All of it, with the verdict first, whole in one file, and no text of a program is HTML."""
    text = Example().html()
    found = Elements(text)
    assert found.text("title") == found.text("h1") == HOSTILE.strip()
    assert not {"script", "img"} & {tag for tag, _ in found.found}
    assert [attributes for tag, attributes in found.found if tag == "td"] == [
        {"class": "fail"}, {"class": "number"}, {"class": "number"}
    ]  # fmt: skip
    assert ("th", {"title": HOSTILE}) in found.found and ("details", {"class": "fail", "open": None}) in found.found
    assert (
        '<main><p class="verdict pass">the summary</p><p>one</p>' in text
        and "<hr>" in text
        and f"two  {HOSTILE}" in found.text("pre")
    )
    assert text.startswith("<!DOCTYPE html>") and "</html>" in text
    assert not [name for _, attributes in found.found for name in attributes if name in ("src", "href")]


def test_marks_are_close_together():
    rows = [["", "f32"], ["aten::add", "."]]
    assert '<div class="scroll map">' in page.page("", [Table(rows, marks=True)])
    assert '<div class="scroll">' in page.page("", [Table(rows)])


def test_numbers_and_their_heads_are_flush_right():
    text = page.page("", [Table([["name", "calls", "mark"], ["add", Cell(7, "fail"), "."], ["mm", "1.5 ms", ""]])])
    assert (
        '<th>name</th><th class="number">calls</th><th>mark</th>' in text and '<td class="fail number">7</td>' in text
    )
    assert '<td class="words">2</td>' in page.page("", [Table([["name", "value"], ["count", Cell(2, "words")]])])
    assert "<th>empty</th>" in page.page("", [Table([["empty"]])])


def test_no_box_without_content():
    assert "<pre" not in page.page("", [Lines([])]) and "<h2>Failures</h2>" in page.page("", [Section("Failures:", [])])


def test_a_chart_has_a_title_an_axis_and_its_values():
    rows = [Bar(HOSTILE, 40.0, 16.5, "fail"), Bar("aten::mm", 2.5), Bar("endless", math.inf, 16)]
    found = Elements(bars("Largest <error>", "ulps, logarithmic", rows).html)
    assert found.text("figcaption") == "Largest <error>" and ("script", {}) not in found.found
    words = [text for tag, text in found.texts if tag == "text"]
    assert {"ulps, logarithmic", "1", "10", "100", "40", "2.5", "inf"} <= {*words}
    found = [(tag, attributes) for tag, attributes in found.found if tag in ("rect", "line")]
    lengths = [float(attributes["width"]) for tag, attributes in found if tag == "rect"]
    assert lengths[1] < lengths[0] <= lengths[2] < WIDTH
    limits = [float(attributes["x1"]) for _, attributes in found if attributes["class"] == "limit"]
    assert len(limits) == 2 and limits[0] < lengths[0]
    assert bars("t", "a", [Bar("none", 0.0)]).html == "" and bars("t", "a", [Bar("tiny", 1e-30)]).html


def test_a_timeline_has_lanes_lines_and_what_happens_in_them():
    events = [
        TimelineRow("host", HOSTILE, "a.py:1"),
        TimelineRow("stream", "add", launched=0, style="fail"),
        TimelineRow("host", "end"),
    ]
    text = timeline("The <order>", events).html
    found = Elements(text)
    assert found.text("figcaption") == "The <order>" and ("script", {}) not in found.found
    assert [attributes["class"] for tag, attributes in found.found if tag == "rect"] == [
        "event host", "event fail", "event host"
    ]  # fmt: skip
    words = [words for tag, words in found.texts if tag == "text"]
    assert words[:3] == ["time", "host", "stream"] and "a.py:1" in words and text.count('class="link fail"') == 1
    width = int(next(attributes for tag, attributes in found.found if tag == "svg")["width"])
    assert width < 340, "it fits a screen of 390 pixels"


def test_a_long_timeline_shows_what_is_near_the_mark():
    events = [TimelineRow("host", f"step {i}", style="warn" if i == 50 else "") for i in range(100)]
    words = [words for tag, words in Elements(timeline("t", events).html).texts if tag == "text"]
    assert words[2:] == [*(f"step {i}" for i in range(46, 55)), "… 46 steps", "… 45 steps"]


def test_facts_and_legend():
    assert "<dt>a&amp;b</dt><dd>7</dd>" in page.facts({"a&b": 7}).html
    assert '<b class="fail">F</b> dif&lt;fers' in page.legend({"fail": ("F", "dif<fers")}).html


@pytest.mark.parametrize("passed", [True, False])
def test_write(tmp_path, capsys, passed):
    paths = {name: str(tmp_path / name) for name in ("json", "html")}
    assert write(Example(passed), argparse.Namespace(**paths), top=2) == (not passed)
    assert "--top" not in capsys.readouterr().out
    assert json.loads((tmp_path / "json").read_text()) == {"title": HOSTILE}
    assert "the summary" in (tmp_path / "html").read_text(encoding="utf-8")
    write(Example(), argparse.Namespace(json="-", html=None))
    assert json.loads(capsys.readouterr().out) == {"title": HOSTILE}
    with pytest.raises(Wrong, match="cannot be written: No such file or directory; name another file"):
        write_file(str(tmp_path / "none" / "file"), "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    """A line in place on a terminal, at most one every 30 seconds elsewhere, and the last step always."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for err, expected in ((Terminal(), 3), (io.StringIO(), 2)):
        monkeypatch.setattr(sys, "stderr", err)
        progress = Progress(3, "findings")
        for seconds in (1, 31, 1):
            now[0] += seconds
            progress.step(f"after {seconds}", found=seconds == 31)
        progress.end()
        said = err.getvalue()
        assert said.count("min left") == expected and "3/3 1 findings, 0 min left  after 1" in said
        assert said.endswith("\r") == err.isatty()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress(quiet=True)
    now[0] += 100
    progress.show("words")
    assert not sys.stderr.getvalue()
    progress = Progress()
    progress.show("too early")
    now[0] += 30
    progress.show("words")
    assert sys.stderr.getvalue() == "words\n"
