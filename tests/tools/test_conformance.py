"""The runner of `python -m openreg_ops conformance`: it resumes, and outlives an operator that hangs or dies."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch
from processes import forking

from openreg_tools import backends
from openreg_tools.conformance import command as conformance
from openreg_tools.conformance import generate, outcomes, sweep
from openreg_tools.conformance.report import ConformanceReport
from openreg_tools.conformance.worker import Worker, on_workers
from openreg_tools.core import child, opinfo
from openreg_tools.core.options import Wrong

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Workers fork, for torch and its test database are much of what they cost."""
    monkeypatch.setattr(subprocess, "Popen", forking())


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    return parser.parse_args(["--device", "openreg", "--samples", "1", "--jobs", "1", *words])


def test_a_run_is_resumed_and_judged(tmp_path, capsys):
    words = ["--ops", "^(neg|abs)$", "--dtypes", "float32", "int64", "--out", str(tmp_path / "results.jsonl")]
    assert conformance.main(command(*words)) == 0
    assert "2 operators: 2 passed; 4 cases: 4 pass" in capsys.readouterr().out

    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:3]) + '\n{"operator": "ab')  # killed while writing
    assert conformance.main(command(*words)) == 0
    captured = capsys.readouterr()
    assert "2 of 4 cases are in" in captured.err and "4 cases: 4 pass" in captured.out
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ops", "no such operator"], "nothing matches --ops 'no such operator'"),
        (["--ops", "logdet", "--dtypes", "int64"], "nothing that matches --ops 'logdet' has one of the dtypes int64"),
        (
            ["--ops", "nn.functional.reluu"],
            "nothing matches --ops 'nn.functional.reluu'; did you mean 'nn.functional.relu'?",
        ),
        (["--ops", "no such operator", "--generate", "1"], "nothing matches --ops 'no such operator'"),
        (["--device", "maia"], "cannot use device 'maia'"),
        (["--device", "opnreg"], "unknown device 'opnreg'; available: cpu, meta, openreg"),
        (["--against", "no/such/file"], "there is no results file no/such/file"),
        (["--seed", "1"], "--seed is the seed of generated calls: add --generate N"),
        (["--generate", "1", "--suites", "operators"], "leave out --suites"),
    ],
)
def test_what_cannot_be_done(words, message):
    with pytest.raises(Wrong, match=message):
        conformance.main(command(*words))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_error_or_an_interrupt_no_item_is_taken(kind, monkeypatch):
    taken, begun, go_on, ended = [], threading.Event(), threading.Event(), threading.Event()

    def work(worker, item):
        taken.append(item)
        begun.set()
        if kind is ValueError:
            raise ValueError
        go_on.wait(60)

    def interrupted(thread):
        begun.wait(60)
        raise KeyboardInterrupt

    if kind is KeyboardInterrupt:
        monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(kind):
        on_workers(range(3), [SimpleNamespace(stop=ended.set)], work)
    go_on.set()
    assert ended.wait(60) and taken == [0]


def test_an_interrupted_run_says_how_it_goes_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conformance, "run", interrupted)
    path = tmp_path / "results.jsonl"
    assert conformance.main(command("--ops", "^neg$", "--out", str(path))) == 130
    captured = capsys.readouterr()
    assert f"stopped; the same command continues from {path}" in captured.err and not captured.out
    assert len(path.read_text().splitlines()) == 1  # the header


def test_a_worker_that_hangs_or_dies_costs_one_case():
    worker = Worker(command("--timeout", "60"))
    try:
        assert conformance.run_case(worker, "neg", "float32")["failures"] == []
        hung = worker.child.process
        os.kill(hung.pid, signal.SIGSTOP)
        worker.arguments.timeout = 0.5
        (failure,) = conformance.run_case(worker, "neg", "float32")["failures"]
        assert failure["kind"] == "timeout" and hung.poll() == -signal.SIGKILL, "a hung worker is ended"

        worker.start()
        worker.arguments.timeout = 60
        os.kill(worker.child.process.pid, signal.SIGSEGV)
        (failure,) = conformance.run_case(worker, "neg", "float32")["failures"]
        assert failure["kind"] == "crash" and "signal 11" in failure["message"]
        assert conformance.run_case(worker, "neg", "float32")["failures"] == []
    finally:
        worker.stop()


def test_modules_and_optimizers_run_too(tmp_path, capsys):
    words = ["--ops", "^(nn.Tanh|optim.SGD|tanh)$", "--dtypes", "float32", "--out", str(tmp_path / "results.jsonl")]
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert conformance.main(command(*words, "--html", str(page), "--json", str(data), "--verbose")) == 0
    said = capsys.readouterr().out
    assert "3 operators: 3 passed; 3 cases: 3 pass" in said
    assert all(len(line) <= 80 for line in said.splitlines() if not line.startswith("results in"))
    ran = {case["operator"]: set(case["ran"]) for case in json.loads(data.read_text())["cases"]}
    assert (
        ran["nn.Tanh"] == {"train", "eval", "graph"}
        and ran["optim.SGD"] == {"step", "graph"}
        and "forward" in ran["tanh"]
    )
    assert page.read_text().count('<td class="pass" title=') == 3


def record(failures=(), name="neg", dtype="float32"):
    made = [{"check": check, "kind": kind, "sample": 0, "message": "differs"} for check, kind in failures]
    return {"operator": name, "dtype": dtype, "ran": {"forward": 6}, "failures": made, "notes": {}, "seconds": 0}


def results(*records, **options):
    return ConformanceReport({"device": "openreg"}, list(records), **options)


def test_the_page_lists_the_options_of_the_run_in_words():
    header = {"device": "openreg", "checks": ["forward", "out"]}
    page = ConformanceReport(header, [record()]).html()
    assert "checks: forward out" in page and "['" not in page and "&#x27;" not in page and "None" not in page


def test_a_row_for_each_operator_and_a_mark_for_each_dtype():
    """Only operators in which something failed; no mark for a dtype that did not run."""
    failed = [("forward", "value")]
    records = [record(failed), record(failed, "abs"), record([], "abs", "int64"), record([], "sgn")]
    lines = [line.split() for line in results(*records).text().splitlines()]
    rows = lines[lines.index(["operator", "f32", "i64"]) :]
    assert rows[1:3] == [["abs", "F", "."], ["neg", "F"]] and ["sgn", "."] not in lines
    assert "something differed" not in results(record()).text()


def test_graphs_are_counted(tmp_path, capsys):
    """Reports what is captured in every dtype, and why the rest is not, except shapes that depend on values."""
    words = ["--ops", "^(neg|item|nonzero|narrow|linspace.tensor_overload)$", "--dtypes", "float32", "int64"]
    words += ["--suites", "operators", "--checks", "graph", "--samples", "3", "--out", str(tmp_path / "results.jsonl")]
    assert conformance.main(command(*words)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "capture 1 of 3 operators whose results' shapes do not depend on values" in said and "33.3 %" in said
    assert "narrow: aten::_local_scalar_dense: the host would read a value of the device" in said and "(2 of 6)" in said
    assert "linspace.tensor_overload: aten::_local_scalar_dense" in said and "nonzero:" not in said

    differs = record([("graph, sample 0, valid", "crash")], name="abs")
    text = " ".join(results(differs, {**record(), "ran": {"graph": 2}}, record(name="optim.SGD")).text().split())
    assert "1 of 2 operators" in text and "50.0 %" in text and "abs: differs, see below" in text
    assert "optimizers" not in text, "what did not run is not counted"


def test_the_summary_is_the_last_paragraph():
    for made in (results(record()), results(record([("forward", "value")]), record(name="abs"))):
        last = made.text().rpartition("\n\n")[2].splitlines()
        assert " ".join(last) == made.summary() and all(line == line.strip() for line in last)


def test_failures_name_their_dtypes_in_the_order_of_the_columns():
    order = [dtype for dtype in opinfo.DTYPES if dtype in ("float32", "bfloat16", "complex64", "bool")]
    failed = [record([("forward", "value")], dtype=dtype) for dtype in sorted(order)]
    assert (
        order != sorted(order) and f"\n      {', '.join(order)}; {sorted(order)[0]} sample 0" in results(*failed).text()
    )


def test_regressions_are_told_from_old_failures():
    before = {("neg", "float32"): record([("forward", "value")]), ("abs", "float32"): record(name="abs")}
    same = results(record([("forward", "value")]), record(name="abs"), against=before)
    assert same.passed and not results(*same.records).passed
    worse = results(record([("forward", "value"), ("out", "crash")]), record(name="abs"), against=before)
    assert not worse.passed and "REGRESSED neg float32: out [crash]" in worse.text()
    assert ">R</td>" in worse.html() and worse.dict()["regressions"][0]["new"] == ["out [crash]"]
    page = worse.html()
    order = ["verdict fail", "REGRESSED neg", "FAIL neg: out [crash], in 1 case", "<table"]
    assert sorted(order, key=page.index) == order and '<td class="regressed"' in page
    fixed = results(record(), record([("forward", "error")], name="abs"), against=before)
    assert "1 regressions, 1 cases fixed" in fixed.text() and not fixed.passed


def test_against_a_saved_run(tmp_path, capsys):
    out, saved = tmp_path / "results.jsonl", tmp_path / "saved.jsonl"
    words = ["--ops", "^(neg|abs)$", "--dtypes", "float32", "--suites", "operators", "--out", str(out)]
    lines = [json.dumps(conformance.fingerprint(command(*words)))]
    out.write_text("\n".join([*lines, json.dumps(record()), json.dumps(record([("out", "value")], "abs"))]))  # resumed
    saved.write_text("\n".join(["{}", json.dumps(record()), json.dumps(record(name="abs"))]))
    assert conformance.main(command(*words, "--against", str(saved))) == 1
    assert "REGRESSED abs float32: out [value]" in capsys.readouterr().out
    assert conformance.main(command(*words, "--against", str(out))) == 0


def test_a_device_with_other_random_numbers(monkeypatch):
    """Where the generator is another algorithm, random values are not compared, and all else is."""
    op = opinfo.database()["rand_like"]
    monkeypatch.setattr(outcomes.Comparison, "close", lambda self, *_: self.fail("value", "looked at"))
    assert sweep.check(op, torch.float32, "openreg", 1, ("forward",)).failures
    monkeypatch.setattr(type(backends.of_device("openreg")), "draws_as_cpu", False)
    report = sweep.check(op, torch.float32, "openreg", 1, ("forward",))
    assert not report.failures and report.ran["forward"]


# ---- what a worker is asked ----


class Asked:
    """In place of the parent of a worker process."""

    def __init__(self, *requests):
        self.requests, self.answers = requests, []

    def serve(self, work):
        for request in self.requests:
            work(request, self.answers.append)


def test_options_reach_the_case(monkeypatch):
    """The worker checks the case that it is asked for, with the samples and checks of the command."""
    seen = {}

    def check(*arguments):
        seen.update(zip(("name", "dtype", "device", "samples", "checks"), arguments, strict=False))
        arguments[-1]("forward, sample 0")
        return outcomes.Tally()

    class Answers(Worker):
        def ask(self, request, steps=False):
            parent = Asked(request)
            monkeypatch.setattr(child, "parent", lambda: parent)
            conformance.serve("openreg:1")
            assert parent.answers[0] == {"at": "forward, sample 0"} and not steps
            return parent.answers[1]

    monkeypatch.setattr(conformance, "check", check)
    record = conformance.run_case(Answers(command("--samples", "5", "--checks", "forward", "grad")), "neg", "int64")
    assert seen == {"name": "neg", "dtype": "int64", "device": "openreg:1", "samples": 5, "checks": ("forward", "grad")}
    assert record["operator"] == "neg" and record["dtype"] == "int64" and record["failures"] == []


def test_options_reach_the_process(monkeypatch):
    """It is started with the device, the threads, the packages of the devices, and the modules of --import once."""
    started = []

    class Started(Exception):
        pass

    def popen(command, **options):
        started.extend(command)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", popen)
    words = "--device openreg:1 --threads 3 --import mine --import openreg_ops --import yours".split()
    with pytest.raises(Started):
        Worker(command(*words)).start()
    assert started[1:4] == ["-P", "-m", "openreg_tools"]
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    got = parser.parse_args(started[5:])
    assert got.worker and (got.device, got.threads) == ("openreg:1", 3)
    assert got.modules == ["openreg_ops", "mine", "yours"]
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(child, "parent", lambda: Asked({"load": []}))
    got.modules = []
    assert conformance.main(got) == 0 and threads == [3]


@pytest.mark.parametrize("words, seed", [([], 0), (["--seed", "0"], 0), (["--seed", "5"], 5)], ids=str)
def test_options_reach_the_generated_calls(monkeypatch, words, seed):
    seen = {}
    monkeypatch.setattr(generate, "listed", lambda device: ["aten::abs", "aten::neg", "aten::neg_"])
    monkeypatch.setattr(generate, "search", lambda given, names: seen.update(vars(given), names=names))
    monkeypatch.setattr(conformance, "write", lambda report, given, verbose: int(verbose))
    words = [*words, "--generate", "7", "--ops", "neg", "--timeout", "9", "--threads", "3", "--verbose"]
    assert conformance.main(command(*words)) == 1
    expected = {
        "generate": 7,
        "seed": seed,
        "names": ["aten::neg", "aten::neg_"],
        "timeout": 9,
        "threads": 3,
        "jobs": 1,
    }
    assert {name: seen[name] for name in expected} == expected and seen["device"].startswith("openreg")


@pytest.mark.parametrize("steps, ends", [(True, None), (False, "timeout")])
def test_the_time_limit(monkeypatch, steps, ends):
    """It is for a whole case, or for each step that the worker announces."""
    now = [0.0]
    said = [(7, {"at": "cpu"}), (9, {"at": "device"}), (8, {"end": "equal"}), (0, None)]

    class Slow:
        def send(self, request):
            pass

        def read(self, seconds):
            after, answer = said.pop(0)
            if after > seconds:
                raise child.Hung("no result")
            now[0] += after
            return answer

        def stop(self):
            pass

    worker = Worker(command("--timeout", "10"))
    worker.child = Slow()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = worker.ask({}, steps)
    assert found == {"end": "equal"} if steps else (found["ended"], found["at"]) == (ends, "cpu")
