"""The runner of `python -m openreg_ops conformance`: it resumes, and outlives an operator that hangs or dies."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from processes import forking

from openreg_ops.testing.known_failures import Known
from openreg_tools import backends
from openreg_tools.conformance import command as conformance
from openreg_tools.conformance import opinfo, sweep
from openreg_tools.conformance.report import Results
from openreg_tools.generate import child, search

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
    assert "2 operators, 2 good, 0 bad; 4 cases: 4 pass" in capsys.readouterr().out

    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:3]) + '\n{"operator": "ab')  # killed while writing
    assert conformance.main(command(*words)) == 0
    captured = capsys.readouterr()
    assert "2 of 4 cases are in" in captured.err and "4 cases: 4 pass" in captured.out
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5

    assert conformance.main(command("--ops", "no such operator")) == 2
    capsys.readouterr()
    assert conformance.main(command("--device", "maia", "--ops", "^add$")) == 2
    assert capsys.readouterr().err.startswith("conformance: cannot use device 'maia': ")


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
    worker = conformance.Worker(command("--timeout", "60"))
    try:
        assert worker.run("neg", "float32")["failures"] == []
        os.kill(worker.process.pid, signal.SIGSTOP)
        worker.arguments.timeout = 0.5
        (failure,) = worker.run("neg", "float32")["failures"]
        assert failure["kind"] == "timeout"

        worker.start()
        worker.arguments.timeout = 60
        os.kill(worker.process.pid, signal.SIGSEGV)
        (failure,) = worker.run("neg", "float32")["failures"]
        assert failure["kind"] == "crash" and "signal 11" in failure["message"]
        assert worker.run("neg", "float32")["failures"] == []
    finally:
        worker.stop()


def test_modules_and_optimizers_run_too(tmp_path, capsys):
    words = ["--ops", "^(nn.Tanh|optim.SGD|tanh)$", "--dtypes", "float32", "--out", str(tmp_path / "results.jsonl")]
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert conformance.main(command(*words, "--html", str(page), "--json", str(data), "--verbose")) == 0
    said = capsys.readouterr().out
    assert "3 operators, 3 good, 0 bad; 3 cases: 3 pass" in said
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
    return Results({"device": "openreg"}, list(records), {"neg": ["float32"], "abs": ["float32"]}, **options)


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


def test_a_known_failure_that_passes_fails_the_run():
    known = {"neg": Known("invented here", checks=("forward",), dtypes=("float32",))}
    passes = results(record(), known=known)
    assert not passes.good and "neg float32 is a known failure but passes" in passes.text()
    assert results(record([("forward", "value")]), known=known).good
    assert not results(record([("backward", "value")]), known=known).good
    assert results(record(), known=known, thorough=False).good


def test_regressions_are_told_from_old_failures():
    before = {("neg", "float32"): record([("forward", "value")]), ("abs", "float32"): record(name="abs")}
    same = results(record([("forward", "value")]), record(name="abs"), against=before)
    assert same.good and not results(*same.records).good
    worse = results(record([("forward", "value"), ("out", "crash")]), record(name="abs"), against=before)
    assert not worse.good and "REGRESSED neg float32: out [crash]" in worse.text()
    assert ">R</td>" in worse.html() and worse.dict()["regressions"][0]["new"] == ["out [crash]"]
    fixed = results(record(), record([("forward", "error")], name="abs"), against=before)
    assert "1 regressions, 1 cases fixed" in fixed.text() and not fixed.good


def test_against_a_saved_run(tmp_path, capsys):
    out, saved = tmp_path / "results.jsonl", tmp_path / "saved.jsonl"
    words = ["--ops", "^(neg|abs)$", "--dtypes", "float32", "--suites", "operators", "--out", str(out)]
    lines = [json.dumps(conformance.fingerprint(command(*words)))]
    out.write_text("\n".join([*lines, json.dumps(record()), json.dumps(record([("out", "value")], "abs"))]))  # resumed
    saved.write_text("\n".join(["{}", json.dumps(record()), json.dumps(record(name="abs"))]))
    assert conformance.main(command(*words, "--against", str(saved))) == 1
    assert "REGRESSED abs float32: out [value]" in capsys.readouterr().out
    assert conformance.main(command(*words, "--against", str(out))) == 0
    assert conformance.main(command(*words, "--against", str(tmp_path / "none"))) == 2
    assert "there is no results file" in capsys.readouterr().err


def test_a_device_with_other_random_numbers(monkeypatch):
    """Where the generator is another algorithm, random values are not compared, and all else is."""
    op = opinfo.database()["rand_like"]
    monkeypatch.setattr(opinfo.Comparison, "close", lambda self, *_: self.fail("value", "looked at"))
    assert sweep.check(op, torch.float32, "openreg", 1, ("forward",)).failures
    monkeypatch.setattr(type(backends.of_device("openreg")), "draws_as_cpu", False)
    report = sweep.check(op, torch.float32, "openreg", 1, ("forward",))
    assert not report.failures and report.ran["forward"]


# ---- options of the command that its processes need ----

# Other values than the defaults, of the options that a worker process gets.
SUITES = {"device": "openreg:1", "suites": ["modules"], "samples": 5, "checks": ["forward", "grad"], "threads": 3}
GENERATED = {"device": "openreg:1", "given": {"samples": None, "inputs": ["f32[3]"]}, "threads": 3}
# Options of the process that starts workers: which cases there are, how they are run, and what is written.
OF_PARENT = {
    "ops", "dtypes", "jobs", "timeout", "out", "fresh", "retry", "against", "verbose", "json", "html", "seed", "case",
    "modules", "worker", "generate", "help",
}  # fmt: skip


@pytest.mark.parametrize("worker, options", [(conformance.Worker, SUITES), (search.Child, GENERATED)])
def test_options_reach_the_worker(worker, options):
    """The process is started with each option that it needs, and every option belongs to one side."""
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    asked = parser.parse_args([])
    vars(asked).update(options)
    started = parser.parse_args(worker(asked).words()[1:])
    assert started.worker and {name: getattr(started, name) for name in options} == options
    assert bool(started.generate) == (worker is search.Child)
    assert {action.dest for action in parser._actions} == OF_PARENT | SUITES.keys() | GENERATED.keys()


def test_modules_reach_the_worker(monkeypatch):
    """Each process imports the packages of the devices, and the modules of --import once."""
    started = []

    class Started(Exception):
        pass

    def popen(command, **options):
        started.append(command)
        raise Started

    monkeypatch.setattr(subprocess, "Popen", popen)
    arguments = command("--import", "mine", "--import", "openreg_ops", "--import", "yours")
    with pytest.raises(Started):
        conformance.Worker(arguments).start()
    words = started[0]
    assert words[1:4] == ["-P", "-m", "openreg_tools"]
    assert [b for a, b in itertools.pairwise(words) if a == "--import"] == ["openreg_ops", "mine", "yours"]


def test_options_have_an_effect_in_the_worker(monkeypatch):
    """What the process was started with is what each case is checked with."""
    answers, seen = [], {}

    def check(name, dtype, device, samples, checks, at):
        seen.update(name=name, dtype=dtype, device=device, samples=samples, checks=list(checks))
        at("forward, sample 0")
        return opinfo.Report()

    monkeypatch.setattr(conformance, "serving", lambda: lambda **fields: answers.append(fields))
    monkeypatch.setattr(conformance, "check", check)
    monkeypatch.setattr(conformance, "dtypes_of", lambda suites: seen.update(suites=suites))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.update(threads=count))
    monkeypatch.setattr(sys, "stdin", io.StringIO("neg int64\n"))
    asked = command()
    vars(asked).update(SUITES)
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    assert conformance.main(parser.parse_args(conformance.Worker(asked).words()[1:])) == 0
    assert seen == {"name": "neg", "dtype": "int64", **SUITES}
    assert answers[0] == {"ready": True} and answers[1] == {"at": "forward, sample 0"}
    assert answers[2]["operator"] == "neg" and answers[2]["failures"] == []


def test_options_have_an_effect_in_the_process_of_generated_calls(monkeypatch):
    """Threads and samples, which the forked process has."""
    seen = {}

    class Served(BaseException):
        pass

    def ends(status):
        raise Served(status)

    monkeypatch.setattr(child, "serving", lambda: lambda **fields: None)
    monkeypatch.setattr(child, "_given", lambda given: seen.setdefault("given", given) and [])
    monkeypatch.setattr(child, "_limit_memory", lambda device: seen.update(device=device))
    monkeypatch.setattr(child, "_serve", lambda device, answer, has_infos: seen.update(served=device))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.update(threads=count))
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", ends)
    asked = command()
    vars(asked).update(GENERATED)
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    with pytest.raises(Served, match="0"):
        conformance.main(parser.parse_args(search.Child(asked).words()[1:]))
    assert seen == {"served": "openreg:1", **GENERATED}


def test_the_time_limit_of_the_device_follows_that_of_the_reference(monkeypatch):
    """A call that runs on the CPU first has the limit again on the device, and twice the CPU's time."""
    now, deadlines = [100.0], []
    worker = conformance.Worker(command("--timeout", "10"))
    worker.process = object()
    answers = iter([{"at": "cpu"}, {"at": "device"}, {"end": "equal"}])

    def read(until):
        deadlines.append(until)
        now[0] += 4
        return next(answers)

    monkeypatch.setattr(worker, "read", read)
    monkeypatch.setattr(worker, "send", lambda line: None)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    answer, *_, where = worker.exchange("{}", "end")
    assert answer == {"end": "equal"} and where == "device"
    assert deadlines == [110.0, 110.0, 108.0 + 10 + 2 * 8]
