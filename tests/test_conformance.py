"""The runner of `python -m openreg_ops conformance`: it resumes, and outlives an operator that hangs or dies."""

from __future__ import annotations

import argparse
import json
import os
import signal

from openreg_ops.testing import conformance


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    return parser.parse_args(["--samples", "1", "--jobs", "1", *words])


def test_a_run_is_resumed_and_judged(tmp_path, capsys):
    words = ["--ops", "^(neg|abs)$", "--dtypes", "float32", "int64", "--out", str(tmp_path / "results.jsonl")]
    assert conformance.main(command(*words)) == 0
    assert "2 operators, 2 good, 0 not; 4 cases: 4 pass" in capsys.readouterr().out

    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:3]) + '\n{"operator": "ab')  # killed while writing
    assert conformance.main(command(*words)) == 0
    captured = capsys.readouterr()
    assert "2 of 4 cases are in" in captured.err and "4 cases: 4 pass" in captured.out
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5

    assert conformance.main(command("--ops", "no such operator")) == 2


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


def test_a_known_failure_that_passes_fails_the_run(capsys, monkeypatch):
    from openreg_ops.testing.known_failures import KNOWN_FAILURES, Known

    monkeypatch.setitem(KNOWN_FAILURES, "neg", Known("invented here"))
    record = {"operator": "neg", "dtype": "float32", "ran": {"forward": 6}, "failures": [], "notes": {}, "seconds": 0}
    assert not conformance.summarize([record])
    assert "neg float32 is a known failure but passes" in capsys.readouterr().out

    record["failures"] = [{"check": "forward", "kind": "value", "sample": 0, "message": "differs"}]
    assert conformance.summarize([json.loads(json.dumps(record))])
