"""Orders of streams: programs with a missing wait are found, correct ones are not, and a seed gives one order."""

import asyncio
import collections
import os
import random
import re
import textwrap
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.openreg._sanitizer as sanitizer
from processes import python
from schedule_programs import PROGRAMS, UNSEEN

from openreg_ops import _C
from openreg_ops.testing.schedules import SchedulesPlugin
from openreg_tools.pytest_plugin.misuse import Misuses
from openreg_tools.pytest_plugin.page import PytestPage

DEVICE = "openreg"
ORDERS = int(os.environ.get("OPENREG_SCHEDULE_ORDERS", "40"))  # of each right program
current = torch.openreg.current_stream
schedules = torch.openreg.schedules


@pytest.fixture(scope="module", autouse=True)
def no_group():
    yield
    if torch.distributed.is_initialized():  # some programs make one
        torch.distributed.destroy_process_group()


def found(program, *args, seeds=50):
    report = schedules(program, *args, seeds=seeds)
    assert not report.passed, f"{program.__name__} gives the same result in {report.orders} orders"
    return report.difference


# ---- the page ----


def use_on_another_stream():
    return PROGRAMS["use_on_another_stream"](False)


def test_the_page_draws_the_order():
    report = schedules(use_on_another_stream, seeds=50)
    (rows,) = report.difference.rows
    late = [row for row in rows if row.style == "fail"]
    assert [row.launched >= 0 for row in late] == [False, True], "the launch, then the work"
    early = next(row for row in rows if row.style == "warn")
    assert rows.index(late[0]) < rows.index(early) < rows.index(late[1]) and rows.index(late[0]) == late[1].launched
    assert re.fullmatch(r"stream \d+|default stream", early.lane)
    assert early.lane != late[1].lane and late[0].lane == "host"
    page = report.html()
    order = ['<p class="verdict fail">The result depends on the order', "Missing: ", "<figcaption>The order of seed",
             ">time</text>", ">host</text>", "The order in words", "To run this order again"]  # fmt: skip
    assert sorted(order, key=page.index) == order
    assert page.count('class="link fail"') == 1 and not re.search(r"None|\[&#x27;|Step\(|Row\(", page)


def test_the_page_of_a_program_whose_orders_agree():
    page = schedules(lambda: torch.ones(4, device=DEVICE) + 1, seeds=3).html()
    assert '<p class="verdict pass">schedules: 3 orders of 2 pieces of work give the same result</p>' in page
    assert "<svg" not in page and "3 of 3 orders ran" in page


# ---- the programs ----

# What is late in the order that differs, and the missing wait, of some programs. A program's first stream is number 1.
NAMED = {
    "use_on_another_stream": ("abs_into", "have stream 1 of openreg:0 wait: call its wait_stream()"),
    "reuse_without_record_stream": ("abs_into", "Call its record_stream() with stream 1 of openreg:0"),
    "output_of_a_side_stream": ("fill_", "does not wait for stream 1 of openreg:0 before it returns"),
    "numpy_view_made_before_the_copy": ("Memcpy DtoH", "call synchronize() on the default stream of openreg:0"),
    "host_writes_what_a_copy_reads": ("Memcpy HtoD", "call synchronize() on the default stream of openreg:0"),
    "collective_read_before_its_wait": ("allgather_base", "call wait() on the Work"),
    "thread_hands_over_a_tensor": ("aten::mul", "does not wait for stream"),
    "synchronize_the_other_device": ("fill_", "of openreg:1 wait: call its wait_stream()"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_wait_is_found(name):
    _C.set_next_streams([0] * len(_C.next_streams()))
    difference = found(PROGRAMS[name], False)
    assert difference.late, "the order has no exception"
    if name in NAMED:
        late, missing = NAMED[name]
        assert len(difference.late) == 1 and late in difference.late[0]
        assert missing in difference.missing
        assert "with 1 exception:" in difference.order[0]
        assert "schedule_programs.py:" in difference.order[1], "the line that launches the late work"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_the_wait_every_order_gives_the_same(name):
    report = schedules(PROGRAMS[name], True, seeds=ORDERS)
    assert report.passed, report
    assert report.orders == ORDERS and report.work > 0


@pytest.mark.parametrize("name", sorted(UNSEEN))
def test_what_the_race_detector_does_not_see(name):
    told = []
    with sanitizer.sanitize(told.extend):
        PROGRAMS[name](False)
        torch.openreg.synchronize()
    assert told == []


def test_the_report():
    def program():
        x = torch.ones(4, device=DEVICE)
        with torch.openreg.Stream():
            y = x * 2
        return {"sums": [y.sum()]}

    report = schedules(program)
    lines = str(report).splitlines()
    seed = report.difference.seed
    assert lines[0] == f"schedules: order {report.orders} of 200, seed {seed}, gives a different result"
    assert (
        "result['sums'][0]: 1 of 1 elements differ; at [] it is" in lines[1]
        and "8.0 in the program's order" in lines[1]
    )
    assert lines[-1] == f"To run this order again: torch.openreg.schedules(program, seeds=[{seed}])"
    again = schedules(program, seeds=[seed])
    assert again.fingerprints[seed] == report.fingerprints[seed]
    assert again.difference.late == report.difference.late
    assert str(schedules(lambda: torch.ones(4, device=DEVICE), seeds=3)).endswith(
        "3 orders of 1 piece of work give the same result"
    )


def test_the_report_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/streams.md").read_text().partition("## Orders of streams")[2]
    _, code, _, report, _ = text.split("```", 4)
    names = {}
    exec(compile(code.removeprefix("python\n").replace("print(", "report = ("), "example.py", "exec"), names)
    assert " ".join(str(names["report"]).split()) == " ".join(report.removeprefix("output\n").split())


def test_as_a_context():
    program = PROGRAMS["write_while_another_stream_reads"]
    with schedules(program, True, seeds=10) as report:
        assert report.passed
    with pytest.raises(AssertionError, match="gives a different result"), schedules(program, False) as report:
        assert not report.passed
    with pytest.raises(KeyError), schedules(program, False):  # what the body raises
        raise KeyError


# ---- what an order is ----

ORDER = """
import sys; sys.path.insert(0, {folder!r})
import torch
from schedule_programs import PROGRAMS
torch.set_num_threads({threads})
for name in ("bucket_without_a_wait_after", "prefetcher_without_record_stream", "copy_between_devices"):
    print(name, sorted(torch.openreg.schedules(PROGRAMS[name], True, seeds=60).fingerprints.items()))
"""


@pytest.mark.processes
def test_a_seed_gives_the_same_order_in_another_process(capsys):
    """With another number of threads."""
    folder, threads = os.path.dirname(__file__), torch.get_num_threads()
    done = python("-c", ORDER.format(folder=folder, threads=threads + 1))
    exec(ORDER.format(folder=folder, threads=threads))
    assert done.returncode == 0 and done.stdout == capsys.readouterr().out, done.stderr


def test_seeds_give_different_orders():
    report = schedules(PROGRAMS["bucket_without_a_wait_after"], True, seeds=40)
    assert len({*report.fingerprints.values()}) > 25
    some = schedules(PROGRAMS["bucket_without_a_wait_after"], True, seeds=[3, 39, 12])
    assert some.fingerprints == {seed: report.fingerprints[seed] for seed in (3, 39, 12)}


def test_work_is_delayed_one_piece_at_a_time_after_the_random_orders():
    """The last seeds are small exceptions to the program's order: one piece of work that is late, then two."""
    from openreg_ops.schedules.explore import RANDOM

    report = schedules(lambda: [torch.ones(4, device=DEVICE) for i in range(3)], seeds=range(RANDOM, RANDOM + 6))
    assert report.passed and report.orders == 6
    difference = found(PROGRAMS["use_on_another_stream"], False, seeds=range(RANDOM, RANDOM + 9))
    assert difference.seed - RANDOM < 3, "the program has three pieces of work"


def test_nothing_is_left_behind():
    """The modes, the generators, the current device and streams, and what is queued."""
    side = torch.openreg.Stream()

    def program():
        random.random(), torch.rand(3)
        torch.openreg.set_device(1)
        torch.openreg.set_stream(torch.openreg.Stream(0))
        torch.openreg.set_device(1)
        return torch.rand(4, device=DEVICE) + 1

    before = random.getstate(), torch.get_rng_state().tolist(), torch.openreg.get_rng_state(1).tolist()
    with side:
        assert schedules(program, seeds=20).passed
        assert current() == side
    assert (random.getstate(), torch.get_rng_state().tolist(), torch.openreg.get_rng_state(1).tolist()) == before
    assert torch.openreg.current_device() == 0 and torch.openreg.get_launch_mode() == "inline"
    assert not _C.order_on() and threading.Lock is _thread_lock and current().query()
    assert torch.autograd.is_multithreading_enabled()


_thread_lock = threading.Lock


def test_what_the_program_raises_is_compared():
    def program(fixed):
        index = torch.full((4,), 9.0, pin_memory=True)
        index.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        if fixed:
            current().synchronize()
        return [1, 2, 3][int(index.numpy()[0])]

    assert schedules(program, True, seeds=20).passed
    assert "the program raises IndexError" in found(program, False).what


@pytest.mark.parametrize("changes", ["by its runs", "by an address", "in one run"])
def test_what_differs_without_an_order_is_no_difference(changes):
    runs, kept = [], []

    def program():
        x = torch.ones(2, device=DEVICE)
        runs.append(0)
        if changes == "by an address":
            kept.append(object())
            return x, id(kept[-1]) if len(runs) > 2 else 0
        return x * (len(runs) > 4 if changes == "by its runs" else len(runs) == 5)

    with pytest.raises(ValueError, match="gives two results in the same order"):
        schedules(program, seeds=10)


def test_a_difference_in_an_order_that_is_the_programs_own():
    """Some seeds leave the order of little work as it is."""
    said = []
    for seed in range(8):
        runs = []

        def program(runs=runs):
            runs.append(0)
            return torch.ones(2, device=DEVICE), len(runs) in (3, 5)  # in the order of the seed, both times

        try:
            schedules(program, seeds=[seed])
        except ValueError as error:
            said.append(str(error))
    assert said and all("the program gives two results in the same order" in sentence for sentence in said)


def test_a_difference_that_its_seed_does_not_give_again():
    """The program does more in one run, so its order and its result there are different."""
    runs = []

    def program():
        runs.append(0)
        x = torch.ones(2, device=DEVICE)
        return x + 1 if len(runs) == 5 else x

    with pytest.raises(
        ValueError, match="a different result in an order of seed 2, but the seed does not repeat that order"
    ):
        schedules(program, seeds=10)


def test_the_launch_mode_in_an_order():
    def program(mode):
        with torch.openreg.launch_mode(mode):
            return torch.ones(2, device=DEVICE)

    assert schedules(program, "async", seeds=3).passed
    with pytest.raises(RuntimeError, match="set_launch_mode: torch.openreg.schedules needs mode 'async'"):
        schedules(program, "inline")


def test_tolerances():
    state = []

    def program():
        state.append(0)
        return torch.ones(2, device=DEVICE) + 1e-7 * len(state)

    with pytest.raises(ValueError, match="gives two results in the same order"):
        schedules(program)
    assert schedules(program, seeds=5, rtol=1e-4).passed


def early(n, device=DEVICE):
    """Read on the current stream what a side stream may not have filled yet."""
    side = torch.openreg.Stream(device)
    with side:
        for value in (3.0, 4.0):  # the second has the memory of the first
            x = torch.full((n,), value, device=device)
            x += 1
            out = torch.zeros_like(x)
            del x
        x = torch.full((n,), 5.0, device=device)
    out = x * 1
    x.record_stream(current(device))
    return out


def early_in_a_pool(n, pool):
    with torch.openreg.use_mem_pool(pool):
        return early(n)


def early_in_a_graph(n):
    x, side, graph = torch.full((n,), 3.0, device=DEVICE), torch.openreg.Stream(), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = (x * 2).exp().log()
    side.wait_stream(current())
    with side:
        graph.replay()
    out = y * 1
    torch.openreg.synchronize()
    return out


def early_on_the_host(n):
    torch.full((n,), 7.0, pin_memory=True)  # the next tensor has its memory
    host = torch.empty(n, pin_memory=True)
    host.copy_(torch.ones(n, device=DEVICE), non_blocking=True)
    out = host.clone()
    torch.full((n,), 8.0, pin_memory=True)
    return out


class Cycle:
    """Memory that Python's collector frees."""

    def __init__(self, x):
        self.x, self.itself = x, self


def early_beside_garbage(n):
    for value in range(3):
        Cycle(torch.full((n,), float(value), device=DEVICE))
    return early(n)


def offloaded(n):
    """Saved tensors on the host: without record_stream() on the way there, and without wait_stream() on the way back."""
    side = torch.openreg.Stream()

    def pack(x):
        side.wait_stream(current())
        with side:
            host = torch.empty(x.shape, pin_memory=True)
            host.copy_(x, non_blocking=True)
        return host

    def unpack(host):
        with side:
            x = host.to(DEVICE, non_blocking=True)
        x.record_stream(current())
        return x

    w = torch.full((n,), 0.5, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = w.sin().exp().square().sum()
    y.backward()
    return w.grad.cpu()


STALE = {
    "device": early,
    "second device": lambda n: early(n, "openreg:1"),
    "pool": lambda n: early_in_a_pool(n, POOL),
    "graph": early_in_a_graph,
    "host": early_on_the_host,
    "garbage": early_beside_garbage,
    "offloading": offloaded,
}
POOL = torch.openreg.MemPool()


@pytest.mark.parametrize("n", [64, 50_000])  # a block of a page, and pages
@pytest.mark.parametrize("kind", STALE)
def test_memory_that_is_read_too_early_holds_the_same_in_each_run(kind, n):
    """Otherwise the program would give two results in one order."""
    with torch.openreg.Stream():
        kept = [torch.full((n,), 2.0, device=DEVICE) for _ in range(3)]  # so that its pages are not empty
        freed = [torch.full((n,), float(i), device=DEVICE) for i in range(40)]
    random.Random(0).shuffle(freed)
    while freed:
        freed.pop()
    for seeds in (range(16), range(32, 48)):
        found(STALE[kind], n, seeds=seeds)
    assert all(x[-1] == 2 for x in kept)


# ---- bad use ----


def test_what_is_no_program():
    with pytest.raises(TypeError, match="schedules: expected a function to call, but got tensor"):
        schedules(torch.ones(1))

    async def coroutine():
        return torch.ones(1, device=DEVICE)

    with pytest.raises(
        TypeError, match="schedules: expected a program that runs when it is called, but got the corout"
    ):
        schedules(coroutine)
    assert schedules(lambda: asyncio.run(coroutine()), seeds=2).passed
    for seeds, error in ((0, ValueError), (-3, ValueError), ([], ValueError), ([-1], ValueError), ([2**64], ValueError),
                         ("20", TypeError), (2.5, TypeError), (True, TypeError), ([0.5], ValueError)):  # fmt: skip
        with pytest.raises(error, match="schedules: expected seeds to be a number of orders above 0, or a list"):
            schedules(lambda: None, seeds=seeds)
    for options in ({"rtol": float("nan")}, {"atol": -1}, {"rtol": "a"}, {"atol": True}):
        with pytest.raises(ValueError, match="schedules: expected [ra]tol to be a finite number, at least 0, but got"):
            schedules(lambda: None, **options)
    assert str(schedules(lambda: torch.ones(1, device=DEVICE), seeds=1)) == (
        "schedules: 1 order of 1 piece of work gives the same result"
    )
    with pytest.raises(ValueError, match="queues no work on openreg, so there is nothing to order"):
        schedules(lambda: torch.ones(2) + 1)


@pytest.mark.parametrize(
    "seeds", [np.int64(2), np.arange(2), torch.tensor(2), torch.arange(2), [np.uint8(0), 1]], ids=str
)
def test_seeds_of_every_type(seeds):
    report = schedules(lambda: torch.ones(1, device=DEVICE), seeds=seeds)
    assert report.orders == 2 and [type(seed) for seed in report.seeds] == [int, int]


def test_classes_of_the_programs_body():
    def program():
        class Pair:
            def __init__(self, x):
                self.x = x

        return Pair(torch.ones(2, device=DEVICE)), collections.namedtuple("Named", "a")(3)

    assert schedules(program, seeds=3).passed


def test_memory_that_is_freed_later_does_not_change_what_is_missing():
    def program():
        x, side = torch.zeros(32, device=DEVICE), torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        with side:
            x.add_(5)
        return (x * 1).cpu()

    report = schedules(program, seeds=50)
    assert "wait_stream()" in report.difference.missing and "record_stream" not in report.difference.missing


def test_what_the_program_raises_in_its_own_order():
    def program():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        schedules(program)
    assert not _C.order_on()


def test_inside_itself_and_inside_a_capture():
    with pytest.raises(RuntimeError, match="schedules: the orders of a program are being tried"):
        schedules(lambda: schedules(lambda: torch.ones(1, device=DEVICE)))
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = torch.ones(1, device=DEVICE)
        with pytest.raises(RuntimeError, match="schedules: the current stream is being captured"):
            schedules(lambda: torch.ones(1, device=DEVICE))
    graph.replay()
    assert y.item() == 1


# ---- pytest ----

SUITE = """
import pytest, torch

@pytest.fixture
def x(device):
    return torch.ones(8, device=device)

def test_right(x):
    assert x.mul_(2).sum() == 16

def test_wrong(x):
    host = torch.zeros(8, pin_memory=True)
    host.copy_(x.mul_(2), non_blocking=True)
    assert host.numpy().sum() == 16

@pytest.mark.xfail
def test_wrong_as_expected(x):
    test_wrong(x)

@pytest.mark.xfail(strict=True, raises=AssertionError)
def test_wrong_as_strictly_expected(x):
    test_wrong(x)

@pytest.mark.xfail(strict=True, raises=KeyError)
def test_wrong_in_another_way(x):
    test_wrong(x)

@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly(x):
    test_right(x)

def test_fails(x):
    assert x.sum() == 9

def test_is_skipped(x):
    pytest.skip("not today")

def test_without_work():
    pass
"""

STATE = """
import pytest, torch, unittest, warnings

@pytest.fixture(scope="class")
def state():
    warnings.warn("warned once")
    return {"x": torch.ones(4, device="openreg"), "runs": []}

@pytest.mark.usefixtures("device")
class TestState:
    @classmethod
    def setup_class(cls):
        cls.own = []

    def test_first(self, state, record_property, device):
        print("printed once")
        record_property("key", 1)
        state["runs"].append(1)
        self.own.append(1)
        assert state["x"].add_(1).sum() == 8 and state["runs"] == self.own == [1]

    def test_second(self, state):
        state["runs"].append(2)
        assert state["x"].add_(1).sum() == 8 + 4 * (state["runs"] == [1, 2])

    def test_third(self, state):
        assert state["runs"] == [1, 2] and state["x"].sum() == 12

def test_with_subtests(subtests, device):
    x = torch.ones(4, device=device)
    for i in range(2):
        with subtests.test(i=i):
            host = torch.zeros(4, pin_memory=True)
            host.copy_(x.mul_(2), non_blocking=True)
            torch.openreg.synchronize() if i else None
            assert host.numpy().sum() == 4 * 2 ** (i + 1)

class Case(unittest.TestCase):
    def test_case(self):
        for i in range(2):
            with self.subTest(i=i):
                assert torch.ones(4, device="openreg").sum() == 4

    @unittest.expectedFailure
    def test_wrong_as_expected_of_unittest(self):
        host = torch.zeros(8, pin_memory=True)
        host.copy_(torch.ones(8, device="openreg"), non_blocking=True)
        assert host.numpy().sum() == 8

def test_mode(device):
    with torch.openreg.launch_mode("sync"):
        torch.ones(4, device=device)
"""


def run_suite(folder, *options):
    return python("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--device", "openreg", *options,
                  cwd=folder, timeout=200)  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
def test_a_suite(tmp_path):
    """Classes keep their state, reports their content, subtests are seen, and what fails is expected where it says so."""
    (tmp_path / "test_state.py").write_text(textwrap.dedent(STATE))
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE))
    done = run_suite(tmp_path, "-v", "-rA", "--device-schedules", "10", "--junitxml=out.xml")
    out, xml = done.stdout, (tmp_path / "out.xml").read_text()
    failed = sorted(
        {
            line.split()[1].partition("::")[2].partition("[")[0]
            for line in out.splitlines()
            if line.startswith("FAILED ")
        }
    )
    assert failed == [
        "test_fails",
        "test_passes_unexpectedly",
        "test_with_subtests",
        "test_wrong",
        "test_wrong_in_another_way",
    ], out + done.stderr
    assert out.count("printed once") == 1 and out.count("UserWarning: warned once") == 1, out
    assert xml.count('<property name="key" value="1"') == 1, xml
    assert "5 failed, 7 passed, 1 skipped, 3 xfailed" in out and "XFAIL test_suite.py::test_wrong_as_expected" in out
    assert "XFAIL test_state.py::Case::test_wrong_as_expected_of_unittest" in out
    assert "XFAIL test_suite.py::test_wrong_as_strictly_expected" in out and out.count("[XPASS(strict)]") > 0
    assert "11 tests in" in out and "the result depends on the order in 6" in out
    assert "late: Memcpy DtoH (Device -> Pinned) on the default stream of openreg:0, launched at" in out
    assert "without work on the device: 1 test" in out
    assert "test_third[openreg]: fails when its orders are tried: " in out
    assert "test_mode[openreg]: fails when its orders are tried: RuntimeError: set_launch_mode: torch.openreg." in out
    assert "SUBFAIL" not in out, "a subtest that fails in an order alone"
    wrong = out.partition("__ test_wrong[openreg] __")[2]
    assert "raises _" not in out and not re.search("runs only after .*/_pytest/", out), "internals of pytest or ours"
    again = wrong.partition("To run this order again: ")[2].splitlines()[0].split()
    assert "2 failed" in run_suite(tmp_path, *again, "-k", "test_wrong[ or fails").stdout


def test_workers_report_together():
    plugin = SchedulesPlugin("5")
    for name, differs in (("one", False), ("other", True)):
        pages = {f"test_<{name}>": ("a < b", "a wait", "again", "<svg></svg>")} if differs else {}
        output = {"openreg_schedules": ({name: (5, differs)}, {name + " more": "queues no work"}, pages)}
        plugin.pytest_testnodedown(types.SimpleNamespace(workeroutput=output))
    plugin.pytest_testnodedown(types.SimpleNamespace())  # a worker that has crashed
    lines = []
    plugin.pytest_terminal_summary(
        types.SimpleNamespace(section=lines.append, line=lambda text, **_: lines.append(text))
    )
    assert lines[1:] == [
        "2 tests in 10 orders; the result depends on the order in 1",
        "without work on the device: 2 tests",
    ]
    page = PytestPage(Misuses(), "openreg", [], 2, 1, plugin.pytest_device_page()).html()
    order = ['<p class="verdict fail">2 tests on openreg, 1 failed; no misuse found',
             "FAIL test_&lt;other&gt;: the result depends on the order of the streams", "a &lt; b", "Missing: a wait", "<svg>",
             "To run this order again: again"]  # fmt: skip
    assert sorted(order, key=page.index) == order


@pytest.mark.parametrize("text", ["0", "-2", "5:5", "7:3", "-1:3", "many", "1:2:3", ""])
def test_a_suite_with_bad_options(text):
    from openreg_ops.testing.schedules import SchedulesPlugin

    with pytest.raises(
        pytest.UsageError, match="expected a number of orders above 0, or a range of seeds such as 17:18, but got"
    ):
        SchedulesPlugin(text)


def test_a_suite_on_another_device(pytestconfig, monkeypatch):
    import pytest_openreg_ops

    monkeypatch.setattr(pytestconfig.option, "device_schedules", "9")
    monkeypatch.setattr(pytestconfig.option, "on_device", "cpu", raising=False)
    with pytest.raises(pytest.UsageError, match="--device-schedules needs --device openreg"):
        pytest_openreg_ops.pytest_configure(pytestconfig)
