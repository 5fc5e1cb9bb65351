"""The HTML pages of the tools, in headless Chromium: no script error, no overflow on a phone, and controls that work."""

import json
import re
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import Browser, program

import openreg_ops
from openreg_tools import drift, pages
from openreg_tools.check.report import Report
from openreg_tools.check.report import Result as Checked
from openreg_tools.compare import Tolerance, compare
from openreg_tools.conformance.report import Results
from openreg_tools.core.compare import Error
from openreg_tools.generate import report as generated
from openreg_tools.operators import operators
from openreg_tools.recorder import Call
from openreg_tools.timeline import Slice, Timeline, _idle
from openreg_tools.trace import Trace

in_browser = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not program(), reason="needs Chromium: apt-get install chromium, or set CHROMIUM to its path"),
]
HOSTILE = "</script><script>document.title='run'</script>\"'><img src=x onerror=alert(1)>&amp;<!-- größe 名前 \u2028"


# ---- the parts of a page ----


class Elements(HTMLParser):
    """The elements of a page with their attributes, and their texts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append((self.found[-1][0] if self.found else "", data))

    def text(self, tag):
        return "".join(data for name, data in self.texts if name == tag).strip()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_table(left):
    page = Elements(
        pages.table([("name", "a<b"), ("add & mul", 7), ("mm", None), ("x", ("1.5 ms", {"title": '"'}))], left)
    )
    tags = ["th" if i < left else "td" for i in range(2)]
    cells = [(tag, attributes) for tag, attributes in page.found if tag in ("th", "td")]
    assert [tag for tag, _ in cells] == ["th", "th", *tags, *tags, *tags]
    assert [data for tag, data in page.texts if tag in ("th", "td") and data.strip()] == [
        "name", "a<b", "add & mul", "7", "mm", "None", "x", "1.5 ms"
    ]  # fmt: skip
    assert cells[-1][1].get("title") == '"' and (cells[-1][1].get("class"), cells[3][1].get("class")) == (
        ("number", "number") if left < 2 else (None, None)
    )


def test_only_long_tables_have_a_filter():
    rows = [["name"], *([i] for i in range(pages.FILTERED))]
    assert "filtered" in pages.table(rows) and "filtered" not in pages.table(rows[:-1])


def test_a_page_is_whole_and_escaped():
    text = pages.page("<title>", "a & b", pages.text("<p>") + pages.details("<i>", "", "fail", True), ("timeline.js",))
    page = Elements(text)
    assert page.text("title") == "<title>" and page.text("h1") == "a & b" and page.text("p") == "<p>"
    assert ("details", {"class": "fail", "open": None}) in page.found and page.text("summary") == "<i>"
    assert text.startswith("<!DOCTYPE html>") and not re.search(r"(src|href)=|https?:|@import|url\(", text)


def test_data_cannot_end_its_element():
    text = pages.data("id", {"name": HOSTILE})
    assert text.count("</script") == 1
    assert json.loads(Elements(text).text("script"))["name"] == HOSTILE


# ---- the page of each command ----


@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("test_pages", "DEF")
    library.define("slow(Tensor x) -> Tensor")
    library.impl("slow", lambda x: x.clone(), "CPU")
    yield library
    library._destroy()


def traced(library):
    """Two devices, two streams and a backward, with waits of the host and of a stream."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softplus()).to("openreg")
    x, side = torch.ones(4, 8, device="openreg"), torch.openreg.Stream()
    # With a thread of the backward's own.
    with torch.openreg.launch_mode("async"), Trace("openreg", name=f"program {HOSTILE}") as recorded:
        for _ in range(3):
            model(torch.ops.test_pages.slow(x)).sum().backward()
            side.wait_stream(torch.openreg.current_stream())
            with torch.openreg.stream(side):
                y = x * 2
            side.synchronize()
        y.sum().item()
        torch.ones(3, device="openreg:1").sum()
        torch.openreg.synchronize()
    recorded.calls[0].error = recorded.calls[0].module = HOSTILE
    recorded._recorder.stacks = [(HOSTILE, *each) for each in recorded._recorder.stacks]
    return recorded


def recorder(calls, threads=("MainThread",), events=False):
    """The parts of a recorder that a timeline reads."""
    return types.SimpleNamespace(calls=calls, threads=list(threads), type="maia", events=events, stacks=[("a.py:1",)])


def many(count):
    """Calls in two threads and on four streams of two devices, and a gap of a second."""
    calls = []
    for i in range(count):
        start = i * 1e-5 + (i > count // 2)
        call = Call(f"aten::op{i % 50}", "own", [], 0, i % 2, start, 9e-6, 9e-6, stack=0, number=i, host=9e-6)
        call.begins, call.stream, call.inputs = start, (i % 2, i % 4), (f"float32[{i % 7}]",)
        call.after = (i - 1,) if i % 100 == 1 else ()
        calls.append(call)
    return calls


@pytest.mark.parametrize("count", [1, 2, 7])
def test_gaps_take_at_most_a_fifth_of_the_picture(count):
    """A gap is cut to a quarter of what runs between two, and a shorter one stays."""
    busy, gap = 4000, 10**6
    slices = [Slice(None, 0, start, start + busy) for start in range(gap, count * (gap + busy), gap + busy)]
    gaps, width = _idle(slices, slices[-1].end)
    assert gaps == [(each.start - gap, each.start) for each in slices] and width == busy // 4
    assert 5 * len(gaps) * width == len(gaps) * (busy + width)
    close = [Slice(None, 0, 0, busy), Slice(None, 0, busy + 1000, 2 * busy)]
    assert _idle(close, 2 * busy)[0] == []


@pytest.mark.parametrize(
    "most, arrows",
    [(6, [("first", "second"), ("second", "third")]), (2, [("first", "second")]), (1, [])],
    ids=["all", "the longest two", "the longest"],
)
def test_the_arrows_of_a_page_join_what_it_shows(most, arrows):
    """Of the longest slices too, and in any order; an arrow is left out with one of its ends."""
    calls = []
    for number, name in enumerate(("first", "second", "third")):
        call = Call(f"aten::{name}", "own", [], 0, 0, number * 1e-5, 1e-6, 1e-6, stack=0, number=number, host=1e-6)
        call.begins, call.stream, call.seconds = call.start + 1e-6, (0, 2 - number), 8e-6 - number * 1e-6
        call.after = (number - 1,) if number else ()
        calls.append(call)
    timeline = Timeline(recorder(calls, events=True), [], "program", 1.0, 0)
    page = Elements(timeline.html(most))
    data = json.loads(page.text("script"))
    tracks, names = data["slices"]["track"], data["slices"]["name"]
    assert len(names) == most
    assert [tuple(data["texts"][names[end]] for end in each) for each in data["arrows"]] == [
        tuple(f"aten::{name}" for name in each) for each in arrows
    ]
    assert all(data["tracks"][tracks[end]]["name"].startswith("maia:0, ") for each in data["arrows"] for end in each)


def page_of(timeline):
    return pages.page("timeline", "timeline", timeline.html(), ("timeline.js",))


def checked():
    about = {"runs": HOSTILE, "out": "an out variant"}
    report = Report(HOSTILE, f"{HOSTILE}(Tensor x)", "openreg", torch.__version__, [HOSTILE, "f32[3]"], about)
    report.results = [
        Checked("runs", 0, "fail", HOSTILE, HOSTILE),
        Checked("runs", 1, "pass"),
        Checked("out", 0, "skip"),
    ]
    report.notes = [HOSTILE]
    return report


def conformed():
    failure = {"check": "out", "kind": "crash", "sample": 0, "message": HOSTILE}
    records = [
        {"operator": f"{HOSTILE} {i}", "dtype": d, "ran": {"out": 1}, "failures": [failure] * (i == 3), "notes": {}}
        for i in range(60)
        for d in ("float32", "float16", "int64", "bool", "complex64", "uint8", "int32", "bfloat16", "float64")
    ]
    return Results({"device": "openreg", "name": HOSTILE}, records, {})


def found():
    of = generated.Operator(HOSTILE, "own", 3)
    of.findings = [generated.Finding(HOSTILE, "crash", HOSTILE, HOSTILE, {"op": HOSTILE}, f"{HOSTILE}\n" * 3, True)]
    of.count({"end": "failed"})
    never = [generated.Operator(f"aten::name_{i}", "shared", never=HOSTILE) for i in range(100)]
    return generated.GeneratedReport("openreg", 0, [of, *never], [], 1.0)


def compared(library):
    with compare(against="cpu", name=HOSTILE) as result:
        x = torch.randn(8, 8, device="openreg")
        torch.softmax(x @ x, 0).sum().item()
    result.note(HOSTILE)
    for i in range(100):
        error = Error(2.0 ** (i % 9), (), 1.0, 2.0, 0.5, 1)
        result.measured(HOSTILE, i, error, Tolerance("chain", 16.0))
    return result


def drifted(folder):
    (folder / "kernels.cpp").write_text(
        'TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {\n  m.impl("cholesky", &f);\n  m.impl("maximum", &f);\n}\n'
    )
    return drift.drift("2.13", "2.14", sources=[folder])


@pytest.fixture(scope="module")
def written(tmp_path_factory, library):
    """The pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    torch.openreg.set_device(0)
    with Trace("openreg") as empty:
        pass
    texts = {
        "trace": traced(library).html(),
        "empty trace": empty.html(),
        "one call": page_of(Timeline(recorder(many(1)), [], "one", 1.0, 0)),
        "many calls": page_of(Timeline(recorder(many(60_000), "ab"), [], "many", 2.0, 0)),
        "queued": page_of(Timeline(recorder(many(500), "ab", events=True), [], "queued", 2.0, 0, rank=1)),
        "check": checked().html(),
        "conformance": conformed().html(),
        "generated": found().html(),
        "compare": compared(library).html(),
        "operators": operators("openreg", pattern="^aten::[a-m]").html(),
        "drift": drifted(folder).html(),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


PAGES = ("trace", "empty trace", "one call", "many calls", "queued", "check", "conformance", "generated", "compare",
         "operators", "drift")  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture
def opened(browser, written, request):
    """A page, whose scripts must have caused no error by the end of the test."""
    page = browser.open(written / f"{request.param}.html")
    yield page
    errors = page.errors()
    page.close()
    assert not errors


def opens(name):
    return pytest.mark.parametrize("opened", [name], indirect=True)


class TestInBrowser:
    pytestmark = in_browser

    @pytest.mark.parametrize("opened", PAGES, indirect=True)
    def test_every_page(self, opened):
        """No error, nothing of the program's text runs, no overflow, and both themes are used."""
        backgrounds = set()
        for width, theme in ((1280, "light"), (390, "dark")):
            opened.resize(width, touch=width < 400)
            opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            opened.settle()
            assert opened.run("document.documentElement.scrollWidth") <= width
            opened.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
            assert opened.run("document.documentElement.scrollWidth") <= width
            backgrounds.add(opened.run("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        assert opened.run("document.title") != "run" and not opened.run("document.images.length")
        assert opened.run("performance.getEntriesByType('resource').length") == 0

    @pytest.mark.parametrize("opened", ["trace", "check", "conformance", "generated", "compare"], indirect=True)
    def test_names_of_the_program_are_text(self, opened):
        said = opened.run("document.body.innerText + [...document.querySelectorAll('[title]')].map((e) => e.title)")
        assert "".join(HOSTILE.split()) in "".join(said.split())

    @opens("trace")
    def test_zoom_and_pan(self, opened):
        shown = "document.querySelector('.timeline .range').textContent"
        x, y, width, height = opened.area(".timeline .rows canvas")
        everything = opened.run(shown)
        before = pixels(opened)
        opened.mouse("mouseWheel", x + width / 2, y + height / 2, deltaX=0, deltaY=-240, modifiers=2)
        zoomed, after = opened.run(shown), pixels(opened)
        assert zoomed != everything and before != after
        for kind, at in (("mousePressed", 500), ("mouseMoved", 300), ("mouseReleased", 300)):
            opened.mouse(kind, x + at, y + 60, button="left", buttons=1, clickCount=1)
        assert pixels(opened) != after
        opened.run("[...document.querySelectorAll('.timeline button')].find((b) => b.textContent === 'all').click()")
        opened.settle()
        assert opened.run(shown) == everything
        x, y, width, height = opened.area(".timeline .overview")
        for kind, at in (("mousePressed", 0.2), ("mouseMoved", 0.3), ("mouseReleased", 0.3)):
            opened.mouse(kind, x + at * width, y + 10, button="left", buttons=1, clickCount=1)
        assert opened.run(shown) != everything
        opened.run("document.querySelector('.timeline .rows canvas').focus()")
        opened.call("Input.dispatchKeyEvent", type="keyDown", key="0")
        opened.settle()
        assert opened.run(shown) == everything

    @opens("trace")
    def test_idle_time_can_be_shown(self, opened):
        before = pixels(opened)
        opened.run("document.querySelector('.timeline input[type=checkbox]').click()")
        opened.settle()
        assert pixels(opened) != before

    @opens("trace")
    def test_hover_and_click(self, opened):
        hint = "document.getElementById('hint').hidden ? '' : document.getElementById('hint').innerText"
        x, y, width, height = opened.area(".timeline .rows canvas")
        said = set()
        for across in range(2, 100, 3):
            opened.mouse("mouseMoved", x + width * across / 100, y + 50)
            said.add(opened.run(hint))
        calls = [each for each in said if "float32[" in each]
        assert calls and all("test_pages.py:" in each for each in calls), said
        assert any("in Sequential.0" in each or "backward of" in each or "forward" in each for each in calls)
        opened.mouse("mouseMoved", x + width / 2, y - 30)
        assert opened.run(hint) == ""

    @opens("one call")
    def test_a_call_that_is_clicked_stays(self, opened):
        x, y, width, height = opened.area(".timeline .rows canvas")
        kept = "(({hidden, innerText}) => hidden ? '' : innerText)(document.querySelector('.timeline > .call'))"
        assert opened.run(kept) == ""
        opened.click(x + width / 4, y + 50)
        assert opened.run(kept).splitlines()[:2] == ["aten::op0", "9 us, at 0 ns"] and "a.py:1" in opened.run(kept)
        opened.click(x + width / 4, y + 5)
        assert opened.run(kept) == ""

    @opens("many calls")
    def test_many_calls_say_that_some_are_left_out(self, opened):
        assert "the longest 100,000 of 120,000" in opened.run("document.body.textContent")
        x, y, width, height = opened.area(".timeline .rows canvas")
        before = pixels(opened)
        opened.mouse("mouseWheel", x + width / 3, y + height / 2, deltaX=0, deltaY=-1200, modifiers=2)
        assert pixels(opened) != before

    @opens("trace")
    def test_find(self, opened):
        before = pixels(opened)
        write(opened, ".timeline input[type=search]", "addmm")
        opened.settle()
        assert pixels(opened) != before

    @opens("operators")
    def test_tables_sort_and_filter(self, opened):
        cells = "[...document.querySelectorAll('table')].at({0}).tBodies[0].rows"
        opened.run("[...document.querySelectorAll('table')].at(0).tHead.rows[0].cells[3].click()")  # composite
        composite = opened.run(f"[...{cells.format(0)}].map((row) => Number(row.cells[3].textContent))")
        assert composite == sorted(composite, reverse=True) and len(set(composite)) > 1
        write(opened, ".filter", "::mm.")
        shown = f"[...{cells.format(1)}].filter((row) => !row.hidden).map((row) => row.cells[0].textContent)"
        assert set(opened.run(shown)) >= {"aten::mm.out"} and all("::mm." in each for each in opened.run(shown))

    def test_tables_sort_numbers_infinities_and_statuses(self, tmp_path, browser):
        """Cells that are not numbers, such as "." or nan, sort as text, last. Among statuses, failures come first."""
        cells = [".", "-inf", "1,000", "nan", "2.5 ms", "inf", "1.2.3", "", "-3e-2"]
        marks = [
            (".", {"class": "pass"}),
            ("FAIL", {"class": "fail"}),
            ("-", {"class": "skip"}),
            ("warn", {"class": "warn"}),
        ]
        tables = [pages.table([["value"], *([each] for each in column)], left=0) for column in (cells, marks)]
        (tmp_path / "sorted.html").write_text(pages.page("sorted", "sorted", "".join(tables)))
        page = browser.open(tmp_path / "sorted.html")
        page.run("document.querySelectorAll('thead th').forEach((each) => each.click())")
        values, statuses = page.run(
            "[...document.querySelectorAll('table')].map((t) => [...t.tBodies[0].rows].map((row) => row.innerText))"
        )
        assert values[:5] == ["inf", "1,000", "2.5 ms", "-3e-2", "-inf"] and set(values[5:]) == {
            ".",
            "nan",
            "1.2.3",
            "",
        }
        assert statuses[:2] == ["FAIL", "warn"] and not page.errors()
        page.close()

    @opens("conformance")
    def test_hints_and_the_theme(self, opened):
        x, y, *_ = opened.area("td.fail")
        opened.mouse("mouseMoved", x + 4, y + 4)
        assert "out [crash]" in opened.run("document.getElementById('hint').innerText")
        color = "getComputedStyle(document.body).backgroundColor"
        before = opened.run(color)
        opened.run("document.getElementById('theme').click()")
        assert opened.run(color) != before
        opened.run("document.getElementById('theme').click()")
        assert opened.run(color) == before

    def test_errors_are_seen(self, tmp_path, browser):
        """The driver reports what a broken page does."""
        wide = '<div style="width:2000px">wide</div>'
        (tmp_path / "bad.html").write_text(pages.page("bad", "bad", f"{wide}<script>missing()</script>"))
        (tmp_path / "log.html").write_text(pages.page("log", "log", "<script>console.error('said')</script>"))
        page = browser.open(tmp_path / "bad.html", width=390)
        assert page.run("document.documentElement.scrollWidth") > 390 and "missing is not defined" in str(page.errors())
        assert "said" in str(browser.open(tmp_path / "log.html").errors())


def write(page, selector, words):
    """Type words into a field."""
    page.run(f"document.querySelector({json.dumps(selector)}).focus()")
    page.call("Input.insertText", text=words)
    page.settle()


def pixels(page):
    """The picture of the timeline, as a string."""
    return page.run("document.querySelector('.timeline .rows canvas').toDataURL()")


def test_every_command_uses_the_skeleton():
    """No other module writes its own page or style."""
    tools = Path(pages.__file__).parents[1]
    sources = [*tools.rglob("*.py"), *Path(openreg_ops.__file__).parent.rglob("*.py")]
    own = [path for path in sources if re.search(r"<html|<!DOCTYPE|<style|color-scheme", path.read_text(), re.I)]
    assert own == [Path(pages.__file__)]
