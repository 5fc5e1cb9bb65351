"""`python -m openreg_ops bench`: the two sides of each case compute the same, and the report says what was measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from openreg_ops import inductor
from openreg_ops.tools import (
    bench,
    bench_compiled,
    bench_graphs,
    bench_operators,
    bench_report,
    bench_scaling,
    bench_steps,
    timing,
)
from openreg_tools.forms import Wrong


def options(*words, processes="1"):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([*words, *(["--processes", processes] if processes else [])])


def moved_steps(monkeypatch, optimizer):
    """The optimizers that are made from here on."""
    made = []

    class Recorded(getattr(torch.optim, optimizer)):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, optimizer, Recorded)
    return made


def parameters(optimizer):
    return [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]


def same_training(monkeypatch, make):
    """Steps of both devices, from the same model on the same data, leave the same parameters."""
    made = moved_steps(monkeypatch, "SGD")
    for device in ("cpu", "openreg"):
        step = make(device)
        before = [p.clone() for p in parameters(made[-1])]
        step(), step()
        assert all(not torch.equal(a, b) for a, b in zip(before, parameters(made[-1]), strict=True))
    on_cpu, on_device = (parameters(each) for each in made)
    assert {p.device.type for p in made[1].param_groups[0]["params"]} == {"openreg"}
    torch.testing.assert_close(on_device, on_cpu)


# ---- what is timed ----


@pytest.mark.parametrize("name", bench.CASES)
def test_small_operators(name):
    x = torch.randn(8, 8)
    on_cpu, on_device = bench.CASES[name](x)(), bench.CASES[name](x.to("openreg"))()
    if name == "empty":
        assert on_device.shape == on_cpu.shape == (8, 8) and on_device.device.type == "openreg"
    elif name == "item":
        assert on_cpu == on_device == x[-1, -1].item()
    else:
        assert on_device.device.type == "openreg"
        torch.testing.assert_close(on_device.cpu(), on_cpu)


def test_training_step(monkeypatch):
    same_training(monkeypatch, bench.training_step)


@pytest.fixture
def small(monkeypatch):
    sizes = dict(BATCH=2, SEQUENCE=8, WIDTH=64, VOCABULARY=50, HEADS=4, ROWS=16, COPY=2**16)
    for name, value in sizes.items():
        monkeypatch.setattr(bench_operators, name, value)


OF_VALUES = [case for case in bench_operators.CASES if case.name not in ("dropout_add", "adamw_step_")]


@pytest.mark.parametrize("case", OF_VALUES, ids=lambda case: case.name)
def test_operators(small, case):
    """Forward, and the gradients that `training` times, whose cotangents are all one here."""
    torch.manual_seed(0)
    host = list(case.inputs(torch.float32))
    device = bench_operators.on_device(host)
    expected, actual = case.eager(*host), case.operator(*device)
    if case.name == "quantize_rowwise":  # eager arithmetic may round a value to its neighbour
        assert (actual[0].cpu().int() - expected[0].int()).abs().max() <= 1
        expected, actual = expected[1], actual[1]
    to_host = torch.utils._pytree.tree_map(lambda t: t.cpu(), actual)
    torch.testing.assert_close(to_host, type(to_host)(expected) if isinstance(to_host, tuple) else expected)
    if case.backward_bytes is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", torch.ones_like)
            of_host = bench_operators.training(case.eager, host)()
            of_device = bench_operators.training(case.operator, device)()
        assert len(of_host) == sum(t.is_floating_point() for t in torch.utils._pytree.tree_leaves(host)) - (
            2 if case.name == "rotary_embedding" else 0  # its table is a tuple, which wants no gradient
        )
        torch.testing.assert_close([g.cpu() for g in of_device], list(of_host), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", bench_operators.CASES, ids=lambda case: case.name)
def test_inputs_are_of_the_dtype(small, case):
    found = [x for x in torch.utils._pytree.tree_leaves(case.inputs(torch.bfloat16)) if isinstance(x, torch.Tensor)]
    steps = [x.__self__ for x in case.inputs(torch.bfloat16) if callable(x) and not isinstance(x, torch.Tensor)]
    found += [p for optimizer in steps for group in optimizer.param_groups for p in group["params"]]
    assert found and {x.dtype for x in found if x.is_floating_point()} == {torch.bfloat16}


def test_dropout(small):
    case = next(case for case in bench_operators.CASES if case.name == "dropout_add")
    host = [torch.randn(64, 64), torch.randn(64, 64)]
    for function, inputs in ((case.eager, host), (case.operator, bench_operators.on_device(host))):
        x, residual = (t.cpu() for t in inputs)
        added = function(*inputs).cpu() - residual
        kept = added.abs() > 1e-6
        torch.testing.assert_close(added[kept], x[kept] / 0.9, rtol=1e-3, atol=1e-5)
        assert 0.85 < kept.float().mean() < 0.95


def test_adamw(small):
    case = next(case for case in bench_operators.CASES if case.name == "adamw_step_")
    host, device = case.inputs(torch.float32)
    of_host, of_device = ([p for g in each.__self__.param_groups for p in g["params"]] for each in (host, device))
    for p, q in zip(of_host, of_device, strict=True):
        q.data.copy_(p), q.grad.copy_(p.grad)
    with torch.profiler.profile() as profile:
        case.eager(host, device), case.operator(host, device)
    called = {event.key for event in profile.key_averages()}
    assert {"aten::_fused_adamw_", "openreg::adamw_step_"} <= called  # the faster of torch's own
    torch.testing.assert_close([q.detach().cpu() for q in of_device], [p.detach() for p in of_host])
    assert len(of_host) == 16 and {p.device.type for p in of_device} == {"openreg"}


@pytest.mark.parametrize("name", bench_compiled.CASES)
def test_compiled(monkeypatch, name):
    """Both devices compute the same, without the compiler, which test_compile.py holds to eager mode."""
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    make, _target = bench_compiled.CASES[name]
    if name.endswith("-step"):
        same_training(monkeypatch, make)
    else:
        torch.testing.assert_close(make("openreg")().cpu(), make("cpu")(), rtol=1e-4, atol=1e-4)


def test_a_transformer_is_causal():
    torch.manual_seed(0)
    model, tokens, _ = bench_compiled.transformer()
    changed = tokens.clone()
    changed[:, 40:] = 0
    same = torch.isclose(model(tokens), model(changed), atol=1e-5).all(-1)
    assert same[:, :40].all() and not same[:, 40:].all()


@pytest.mark.parametrize("name", bench_compiled.DECOMPOSABLE)
def test_decompositions(monkeypatch, name):
    """The first of both sides is timed with the operator's kernels, the second decomposed."""
    sides = []

    def compiled(body, fullgraph):
        sides.append(name in inductor.decompositions)
        return body

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(
        bench_compiled, "compare", lambda kernels, decomposed, rounds: (kernels(), decomposed(), rounds)
    )
    default = set(inductor.decompositions)
    for body, *shapes in bench_compiled.DECOMPOSABLE[name]:
        small = [(*(min(n, 64) for n in shape[:-1]), shape[-1]) if shape == (2048, 1024) else shape for shape in shapes]
        assert bench_compiled.decomposition(name, body, small, 7) == (None, None, 7)
        assert inductor.decompositions == default
    assert sides == [False, True] * 2


def test_decompositions_of_a_model_agree_with_the_operators():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    norm = torch.nn.functional.rms_norm
    torch.testing.assert_close(bench_compiled._norm(x, weight), norm(x, (8,), weight, 1e-6))
    total, normed = bench_compiled._norm_of_sum(x, residual, weight)
    torch.testing.assert_close((total, normed), (x + residual, norm(x + residual, (8,), weight, 1e-6)))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(bench_compiled._swiglu_of_halves(x), torch.nn.functional.silu(gate) * up)
    heads = torch.randn(4, 512, 3 * 1024)
    table = bench_operators.angles(torch.float32)
    q, k, _v = heads.view(4, 512, 3, 16, 64).unbind(2)
    expected = sum(bench_operators.rotary_embedding(each.transpose(1, 2), *table) for each in (q, k))
    torch.testing.assert_close(bench_compiled._rotary_of_heads(heads, *table), expected)


# ---- how it is timed ----


def test_rounds_alternate():
    calls = []
    sides = [lambda: calls.append("cpu"), lambda: calls.append("device")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUND", 0)  # one call for each batch
        found = timing.compare(*sides, 4)
    assert calls[:6] == ["cpu"] * 3 + ["device"] * 3 and calls[6:15] == ["cpu"] * 9
    assert calls[15:] == ["device", "cpu", "cpu", "device"] * 2
    assert found.reference > 0 and found.measured > 0 and found.low <= found.ratio <= found.high


def test_a_batch_is_short():
    calls = []
    event = threading.Event()

    def slow():
        calls.append(event.wait(0.001))

    timing.compare(slow, slow, 2)
    assert len(calls) < 6 + 9 + 4 * 8


def test_calls_alternate(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    calls = []
    found = timing.alternate([lambda: calls.append(0), lambda: calls.append(1)], budget=0)
    assert found == [[1] * 6] * 2 and calls == [0, 1] + [1, 0, 0, 1] * 3
    del calls[:]
    found = timing.alternate([lambda: calls.append(0), lambda: calls.append(1)], budget=1000, patience=1)
    assert found == [[1]] * 2 and calls == [0, 1, 1, 0]  # a round takes longer than the patience


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_a_call_ends_with_its_work(monkeypatch, mode):
    """In async mode, a call that only gives the device work returns before the work ends."""
    events = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: events.append("clock") or len(events))
    sides = [lambda: events.append("cpu"), lambda: events.append("device")]
    with torch.openreg.launch_mode(mode):
        timing.alternate(sides, budget=0)
        wait = ["wait"] if mode == "async" else []
        device, cpu = ["clock", "device", *wait, "clock"], ["clock", "cpu", "clock"]
        assert events == ["cpu", "device", *wait, "clock"] + (device + cpu + cpu + device) * 3 + ["clock"]
        del events[:]
        monkeypatch.setattr(timing.timeit, "default_timer", lambda: 0.0)
        monkeypatch.setattr(timing, "ROUND", 0)
        timing.batches(*sides, 2)
    assert events[15 + len(wait) :] == [
        "device",
        "clock",
        "wait",
        "clock",
        "cpu",
        "cpu",
        "device",
        "clock",
        "wait",
        "clock",
    ]


def test_the_interval_holds_the_median_of_the_ratios():
    steady = timing.compared([1.0] * 101, [1.1] * 101)
    assert (steady.reference, steady.measured, steady.low, steady.high) == (1, 1.1, 1.1, 1.1)
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        noise = torch.randn(101, generator=generator).mul(0.2).exp().tolist()
        found = timing.compared([1.0] * 101, noise)
        inside += found.low <= 1 <= found.high
    assert inside >= 180, "of 200 intervals of 95 % confidence"
    slowed = timing.compared([1.0, 2.0, 3.0] * 20, [2.0, 4.0, 6.0] * 20)  # a busy machine slows both sides
    assert (slowed.low, slowed.ratio, slowed.high) == (2, 2, 2)
    for n in range(1, 12):
        inside = 0
        for _ in range(400):
            noise = torch.randn(n, generator=generator).mul(0.2).exp().tolist()
            found = timing.compared([1.0] * n, noise)
            inside += found.low <= 1 <= found.high
        assert inside >= 370, f"of 400 intervals of {n} rounds"
    assert (found.low, found.high) != (0.0, math.inf)
    assert (timing.values([3.0] * 5 + [4.0]).measured, timing.values([3.0] * 5 + [4.0]).high) == (3, 4)


def test_no_target_is_reached_in_noise():
    def found(low, high):
        return timing.Comparison(1.0, (low + high) / 2, low, high)

    assert timing.verdict(found(0.9, 1.0), 1.0) == "reached" and timing.verdict(found(1.01, 1.1), 1.0) == "missed"
    assert timing.verdict(found(0.8, 1.1), 1.0) == "too noisy to tell, 0.80 to 1.10"
    assert timing.verdict(found(0.4, 0.8), 0.5, inverse=True) == "too noisy to tell, 1.25 to 2.50"
    assert timing.verdict(found(1e-7, 3e-7), 2e-7, "{:.0e}".format) == "too noisy to tell, 1e-07 to 3e-07"
    average = timing.mean([found(1.9, 2.1), found(0.45, 0.55)])
    assert average.ratio == pytest.approx(1) and average.low == pytest.approx(
        math.exp(-math.hypot(math.log(2 / 1.9), math.log(0.5 / 0.45)) / 2)
    )
    assert 0 < timing.mean([found(0.1, 3.9), found(0.01, 0.99)]).low
    lopsided = timing.Comparison(1.0, 1.03, 1.02, 1.09)
    assert timing.mean([lopsided]) == lopsided  # its own interval, not a symmetric one
    few = timing.compared([1.0] * 5, [0.5] * 5)
    for each in (few, timing.mean([few]), timing.mean([few, lopsided])):
        assert timing.verdict(each, 0.7) == timing.verdict(each, 0.1) == "too few rounds to tell"


@pytest.fixture
def earlier(tmp_path):
    """Writes the JSON of a run, in which add has the given ratio and other cases a ratio of 1, and returns its path."""

    def write(ratio=1.0, noise=0.1, names=("add", "mul"), **head):
        cases = [{"name": names[0], "size": "64", "ratio": ratio, "low": ratio - noise, "high": ratio + noise}]
        for name in names[1:]:
            cases.append({"name": name, "dtype": "float32", "forward": {"ratio": 1.0, "low": 0.9, "high": 1.1}})
        average = {"name": "geometric mean", "ratio": ratio, "low": ratio, "high": ratio, "of": list(names)}
        results = {"suite": "device", "threads": torch.get_num_threads(), "mode": "inline", "processor": "a"}
        results |= {"torch": "2.0", "dtype": None}
        results |= {"processes": 6, "cases": [*cases, average]}
        path = tmp_path / f"earlier{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(results | head))
        return str(path)

    return write


def again(path, *words):
    """`bench --against earlier.json`, of a run in which every process finds what is in `path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_report, "in_a_process", lambda *_, **__: json.loads(Path(path).read_text()))
        return bench.main(options(*words, processes=None))


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (1.14, 0), (1.3, 1), (0.5, 0)])
def test_regressions(earlier, capsys, ratio, status):
    """The interval is the range of six processes, here 0.1 wide."""
    before, runs = earlier(), [json.loads(Path(earlier(ratio)).read_text()) for _ in range(6)]
    for i, run in enumerate(runs):
        run["cases"][0]["ratio"] += (i - 2.5) / 50
        del run["cases"][-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_report, "in_a_process", lambda *_, **__: runs.pop())
        words = ("--json", "-", "--against", before)
        assert bench.main(options(*words, "--only", "add", "mul", processes=None)) == status
    said = capsys.readouterr()
    low, high = f"{ratio - 0.05:.2f}", f"{ratio + 0.05:.2f}"
    assert f"against {before}: {status} of 2 figures slower beyond the noise, 0 missing" in said.err
    assert re.search(rf"^add, 64 +{ratio:.2f}  {low} to {high}$", said.err, re.M)
    slower = f"slower: add, 64: {ratio:.2f} ({low} to {high}), was 1.00 (0.90 to 1.10)"
    assert (slower in said.err) == bool(status)
    case = json.loads(said.out)["cases"][0]  # alone, for a program to read
    assert (case["low"], case["high"]) == (pytest.approx(ratio - 0.05), pytest.approx(ratio + 0.05))


def test_a_missing_figure_is_a_regression(earlier, capsys):
    before, now = earlier(names=("add", "mul", "mm")), earlier()
    assert again(now, "--against", before) == 1
    said = capsys.readouterr().out
    assert "0 of 2 figures slower beyond the noise, 1 missing" in said
    assert f"missing: mm, float32, forward is in {before}, but was not measured in every process" in said
    assert again(now, "--only", "add", "--against", before) == 0  # the others were not asked for
    assert again(earlier(processor="b"), "--against", now) == 0
    assert f"{now} was measured on a, so a difference may be the processor's" in capsys.readouterr().out
    assert again(earlier(names=("sum",)), "--against", before) == 1
    assert "0 of 0 figures slower beyond the noise, 3 missing" in capsys.readouterr().out
    assert again(earlier(names=("sum",)), "--only", "add", "--against", before) == 1
    assert "0 of 0 figures slower beyond the noise, 1 missing" in capsys.readouterr().out
    assert again(earlier(torch="3.0"), "--against", now) == 0
    assert f"{now} was measured with torch 2.0, so a difference may be PyTorch's" in capsys.readouterr().out


def test_a_figure_of_some_processes_is_missing(earlier, capsys):
    before, runs = earlier(), [json.loads(Path(earlier(9.0)).read_text()) for _ in range(6)]
    for run in runs[1:]:
        del run["cases"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_report, "in_a_process", lambda *_, **__: runs.pop())
        assert bench.main(options("--only", "add", "--against", before, processes=None)) == 1
    said = capsys.readouterr().out
    assert f"missing: add, 64 is in {before}, but was not measured in every process" in said and "1 missing" in said


def test_nothing_to_compare_does_not_pass(earlier):
    before = json.loads(Path(earlier()).read_text())["cases"]
    before[0]["left_out"] = {"eager": "slow"}
    path = earlier(cases=before)
    with pytest.raises(Wrong, match=f"no figure of {path} could be compared"):
        again(earlier(9.0, names=("add",)), "--only", "add", "--against", path)


def test_selected_figures():
    def chosen(*words):
        given = options(*words, "--against", "a")
        return [name for name in names if bench_report.selected(given, name)]

    names = ["add, 64", "add-c, 64", "swiglu, float32, 2, forward", "swiglu, float16, 1, forward", "geometric mean, 64"]
    assert chosen() == names and chosen("--threads", "2") == names
    assert chosen("--only", "add") == names[:1] and chosen("--dtype", "float32") == names[2:3]
    assert (
        chosen("operators", "--threads", "1", "--against", "best", "a") == names and names
    )  # the last --against counts
    given = options("operators", "--threads", "1", "--against", "best", "a")
    assert [name for name in names if bench_report.selected(given, name)] == names[3:4]


def test_figures_that_mean_something_else_are_not_compared(capsys, earlier):
    """Another contender failed, so the ratio is against another one."""
    before = json.loads(Path(earlier()).read_text())["cases"]
    before[0]["left_out"] = {"compiled": "crashed"}
    assert again(earlier(9.0), "--against", earlier(cases=before)) == 1
    said = capsys.readouterr().out
    assert "not compared: add, 64, which does not mean the same" in said and "slower: add" not in said
    assert "slower: geometric mean" in said
    runs = [{"cases": [{"name": "add", "ratio": 1.0, "left_out": {"eager": "slow"}} if n else {"name": "add", "ratio": 2.0}]}
            for n in range(6)]  # fmt: skip
    assert bench_report.together(runs)["cases"] == [{"name": "add", "ratio": 1.0, "left_out": {"eager": "slow"}}]


def test_a_mean_of_other_cases_is_another_figure(earlier, capsys):
    before = earlier(1.0, names=("add", "mul"))
    assert again(earlier(2.0, names=("add", "mul")), "--against", before) == 1
    assert "slower: geometric mean: 2.00" in capsys.readouterr().out
    assert again(earlier(2.0, names=("add",)), "--only", "add", "--against", before) == 1
    said = capsys.readouterr().out
    assert "slower: add, 64: 2.00" in said and "geometric mean: " not in said and "1 of 1 figure slower" in said


HEAD = {
    "suite": "device",
    "threads": 1,
    "mode": "inline",
    "processor": "a",
    "torch": "2",
    "dtype": None,
    "processes": 6,
}
FIGURE = {"name": "add", "ratio": 2.0, "low": 1.0, "high": 3.0}
NO_REPORTS = {
    "text": "garbage",
    "dict": "{}",
    "list": "[]",
    "number": "3",
    "deep": "[" * 100_000,
    "earlier version": json.dumps({"torch": "2.13.0", "threads": 1, "cases": [FIGURE]}),
    "cases": json.dumps(HEAD | {"cases": 3}),
    "no name": json.dumps(HEAD | {"cases": [{"ratio": 1, "low": 1, "high": 1}]}),
    "nan": json.dumps(HEAD | {"cases": [FIGURE | {"ratio": math.nan}]}),
    "low": json.dumps(HEAD | {"cases": [FIGURE | {"low": 4.0}]}),
    "high": json.dumps(HEAD | {"cases": [FIGURE | {"high": math.inf}]}),
    "string": json.dumps(HEAD | {"cases": [FIGURE | {"high": "7"}]}),
    "left out": json.dumps(HEAD | {"cases": [FIGURE | {"left_out": None}]}),
    "processes": json.dumps(HEAD | {"cases": [FIGURE], "processes": True}),
}


@pytest.mark.parametrize("text", NO_REPORTS.values(), ids=NO_REPORTS)
def test_a_file_that_is_no_report(tmp_path, monkeypatch, text):
    monkeypatch.setattr(bench_report, "in_a_process", lambda *_, **__: pytest.fail("measures before it reads the file"))
    path = tmp_path / "earlier.json"
    path.write_text(text)
    with pytest.raises(
        Wrong, match="expected a file from --json of this version, but got .*/earlier.json; write it again"
    ):
        bench.main(options("--against", str(path)))


def test_runs_that_cannot_be_compared(earlier, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_report, "in_a_process", lambda *_, **__: pytest.fail("measures before it reads the file"))
    before = earlier()
    for path, words, processes, why in (
        (earlier(dtype="bfloat16"), (), None, "was measured with --dtype bfloat16; pass this option, too"),
        (earlier(suite="graphs"), (), None, "was measured with the suite graphs, and this run has device"),
        (
            earlier(threads=77),
            (),
            None,
            rf"was measured with --threads 77, and this run has {torch.get_num_threads()};",
        ),
        (earlier(mode="async"), (), None, "was measured with OPENREG_LAUNCH_MODE async, and this run has inline"),
        (earlier(processes=1), (), None, r"\.json has 1 process; use --processes 6 or more, the default with --json"),
        (before, (), "5", "times differ from process to process, and this run has 5 processes; use --processes 6"),
        (
            before,
            ("--only", "relu", "mm"),
            None,
            "has no figures that the options select, but add, 64, mul, float32, forward",
        ),
        (earlier(cases=[]), (), None, "has no ratio with an interval, and only these are compared"),
        (before, ("--json", before), None, f"--json would overwrite {before}, which --against compares with"),
        (
            str(tmp_path / "none"),
            (),
            None,
            'takes "best" or a file that --json wrote, but .*/none cannot be read: No such file',
        ),
    ):
        with pytest.raises(Wrong, match=why):
            bench.main(options("--against", path, *words, processes=processes))


def test_options_that_do_not_fit(capsys, tmp_path):
    for words, why in (
        (("--against", "best"), "--against best is for the suite operators, but got device"),
        (("operators", "--against", "best", "a", "b"), '--against takes "best" and one file, but got best a b'),
        (("--dtype", "bfloat16"), "the suite device does not use --dtype; operators does"),
        (
            ("operators", "--rounds", "3"),
            "the suite operators does not use --rounds; device, compiled, steps, graphs, scaling do",
        ),
        (("steps", "--plot", str(tmp_path / "a.png")), "the suite steps does not use --plot; scaling does"),
    ):
        with pytest.raises(Wrong, match=re.escape(why)):
            bench.main(options(*words))
    for words, why in (
        (("--json", str(tmp_path)), "is a folder; name a file in it"),
        (("--json", str(tmp_path / "no" / "a")), "there is no folder"),
        (("--json", ""), "expected the name of a file, but got ''"),
        (("scaling", "--plot", "a.foo"), "expected a file that ends with .png, .svg or .pdf, but got 'a.foo'"),
        (("scaling", "--plot", str(tmp_path / "no" / "a.png")), "there is no folder"),
        (("--threads", "99999999999"), "expected at most 1024 threads, but got 99999999999"),
        (("--processes", "0"), "expected a number above 0"),
    ):
        with pytest.raises(SystemExit):
            options(*words)
        assert why in capsys.readouterr().err


def test_several_processes_are_one_report(monkeypatch, capsys, tmp_path):
    asked = []

    def in_a_process(given, only, report, about, shows):
        asked.append((about, only, shows))
        n = len(asked)
        cell = {"cpu_s": float(n), "openreg_s": n / 2, "ratio": n / 10, "low": 0.0, "high": 9.0, "target": 0.5}
        cases = [{"name": "swiglu", "dtype": "float32", "bandwidth": n / 4, "missed": ["a"], "forward": cell}]
        cases.append({"name": "slow", "ratio": n / 1, "best": "eager" if n < 3 else "fused"})  # without an interval
        cases += [{"name": "sometimes", "ratio": 1.0, "low": 0.9, "high": 1.1}] if n != 4 else []
        return {
            "suite": "device",
            "threads": 1,
            "load": 9.0,
            "import_s": n / 1,
            "processes": 1,
            "cases": cases[:: n % 2 * 2 - 1],
        }

    monkeypatch.setattr(bench_report, "in_a_process", in_a_process)
    path = tmp_path / "it.json"
    assert bench.main(options("--only", "add", "--json", str(path), processes=None)) == 0
    said, written = capsys.readouterr().out, json.loads(path.read_text())
    assert asked == [(f"process {n} of 6", ["add"], n == 1) for n in range(1, 7)]
    assert (
        written["processes"] == 6 and written["import_s"] == 3.5 and written["load"] != 9.0 and written["threads"] == 1
    )
    swiglu, slow, sometimes = written["cases"]
    ends = {"ratio": pytest.approx(0.35), "low": pytest.approx(0.1), "high": pytest.approx(0.6)}
    assert swiglu["forward"] == {"cpu_s": 3.5, "openreg_s": 1.75, "target": 0.5, **ends}
    assert swiglu["bandwidth"] == 3.5 / 4 and swiglu["missed"] == ["a"]
    assert slow == {"name": "slow", "ratio": 3.5, "best": ["eager", "fused"], "low": 1.0, "high": 6.0}
    assert sometimes == {"name": "sometimes", "ratio": 1.0, "only_in": 5}
    line = "swiglu, float32, forward +0.35  0.10 to 0.60   target 0.50: too noisy to tell, 0.10 to 0.60"
    assert re.search(f"^{line}$", said, re.M) and re.search("^sometimes +1.00$", said, re.M)
    assert "6 processes one after the other" in said and "process 6 of 6 took" in said
    del asked[:]
    assert bench.main(options("--only", "add", processes="5")) == 0
    said = capsys.readouterr().out  # five are too few
    assert re.search("^swiglu, float32, forward +0.30 +target 0.50: too few processes to tell$", said, re.M)


def test_more_processes_make_the_interval_narrower():
    """It holds the median with 95 % confidence, so with many processes it is not the range."""
    runs = [{"cases": [{"name": "add", "ratio": float(n)}]} for n in range(1, 101)]
    (case,) = bench_report.together(runs)["cases"]
    assert case == {"name": "add", "ratio": 50.5, "low": 40.0, "high": 61.0}


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
def test_a_signal_ends_all_processes(how, tmp_path):
    """Of the parent alone, as a terminal or a CI's time limit sends it."""
    words = [sys.executable, "-P", "-m", "openreg_ops", "bench", "graphs", "--only", "chain", "--rounds", "100000"]
    mark = {"OPENREG_TEST_MARK": str(tmp_path)}
    with subprocess.Popen([*words, "--processes", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=os.environ | mark) as parent:  # fmt: skip
        said = [parent.stdout.readline() for _ in range(5)]  # the child prints its head
        parent.send_signal(how)
        _out, errors = parent.communicate(timeout=60)
    assert "chain" not in "".join(said) and "nodes" in said[-1]
    assert (parent.returncode, errors) == ((130, "bench: interrupted\n") if how == signal.SIGINT else (143, ""))
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if _holds(path, str(tmp_path))]
    assert not left


def _holds(path, text):
    try:
        return text in path.read_text(errors="replace")
    except OSError:  # the process ended, or is another user's
        return False


@pytest.mark.processes
def test_a_suite_in_its_own_process(capsys):
    given = options("graphs", "--rounds", "6")
    report = bench_report.Report(given, "a test")
    found = bench_report.in_a_process(given, ["chain"], report, "a try")
    assert found["suite"] == "graphs" and [case["name"] for case in found["cases"]] == ["chain"]
    assert found["cases"][0]["low"] <= found["cases"][0]["ratio"] <= found["cases"][0]["high"]
    assert found["processor"] == report.results["processor"] and "chain" not in capsys.readouterr().out
    with pytest.raises(Wrong, match="(?s)a try ended with 2:.*no case 'no-such'; there are 'chain'"):
        bench_report.in_a_process(given, ["no-such"], report, "a try")


@pytest.fixture
def started(monkeypatch):
    """Commands of processes, which are not started. Each prints two lines and writes [7]."""
    commands = []

    class Popen(contextlib.nullcontext):
        stdout, returncode = ("one\n", "two\n"), 0

        def __init__(self, words, **_):
            super().__init__(self)
            commands.append(words)
            Path(words[words.index("--json") + 1]).write_text("[7]")

    monkeypatch.setattr(bench_report.subprocess, "Popen", Popen)
    return commands


@pytest.mark.parametrize(
    ("terminal", "shows", "expected"),
    [
        (True, False, ["\r\x1b[Kit: one", "\r\x1b[Kit: two", "\r\x1b[K"]),
        (False, False, []),
        (True, True, ["one\n", "two\n"]),
        (False, True, ["one\n", "two\n"]),
    ],
)
def test_what_a_process_shows(started, terminal, shows, expected):
    shown = []
    report = types.SimpleNamespace(
        log=types.SimpleNamespace(isatty=lambda: terminal), say=lambda text, end: shown.append(text)
    )
    assert bench_report.in_a_process(options("steps"), None, report, "it", shows) == [7] and shown == expected


def test_a_process_gets_the_options(started):
    report = types.SimpleNamespace(log=types.SimpleNamespace(isatty=lambda: False))
    for words, expected in (
        (("operators", "--against", "best", "earlier.json", "--dtype", "float64", "--seconds", "3"),
         "operators --processes 1 --json F --seconds 3.0 --dtype float64 --against best"),
        (("scaling", "--threads", "2", "--rounds", "7", "--plot", "-", "--against", "earlier.json"),
         "scaling --processes 1 --json F --rounds 7 --threads 2 --plot -"),
        (("device", "--only", "add", "mul"), "device --processes 1 --json F --only add mul"),
    ):  # fmt: skip
        given = options(*words)
        bench_report.in_a_process(given, given.only, report, "it")
        words = started.pop()[5:]
        words[words.index("--json") + 1] = "F"
        assert " ".join(words) == expected


def test_compile_time_leaves_the_first_round_out(monkeypatch):
    """The first round loads the compiler."""
    now = [0.0]
    times = {"cpu": iter((100, 1, 2, 9)), "openreg": iter((200, 30, 40, 50))}

    def step_of(_model):
        def make(device):
            def step():
                now[0] += next(times[device])

            return step

        return make

    monkeypatch.setattr(bench_compiled, "step_of", step_of)
    monkeypatch.setattr(bench_compiled.time, "perf_counter", lambda: now[0])
    found = bench_compiled.compile_time(3)
    assert (found.reference, found.measured) == (2, 40)


@pytest.mark.processes
def test_seconds_of_an_import(monkeypatch):
    monkeypatch.setattr(bench, "LEAST", 1)
    assert 0 < bench.import_seconds().measured < 60
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(bench.subprocess.CalledProcessError):
        bench.import_seconds()


def test_peak_memory():
    def call():
        return torch.empty(1000, device="openreg"), torch.empty(24, dtype=torch.uint8, device="openreg")

    kept = torch.empty(10**6, device="openreg")
    assert 4024 <= bench_operators.peak(call) < 4024 + 2 * 512 and kept.numel() == 10**6


# ---- the report ----


def found(reference, measured):
    """A comparison without noise."""
    return timing.Comparison(reference, measured, measured / reference, measured / reference)


def case_of(only, reference, measured):
    """What the process of a case finds."""
    return {"cases": [{"name": only[0], **bench_report.entry(found(reference, measured))}]}


@pytest.fixture
def twice(monkeypatch):
    """Every comparison finds that the device takes twice the time; returned: the rounds of each."""
    rounds = []

    def compare(cpu, device, count):
        cpu(), device()
        rounds.append(count)
        return found(1e-6, 2e-6)

    for module in (bench, bench_compiled):
        monkeypatch.setattr(module, "compare", compare)
    return rounds


def test_report_of_the_device(monkeypatch, capsys, tmp_path, twice):
    monkeypatch.setattr(bench, "import_seconds", lambda: timing.values([0.05] * 6))
    monkeypatch.setattr(bench, "in_a_process", lambda given, only, *_: case_of(only, given.rounds, 2 * given.rounds))
    words = ("--rounds", "9", "--only", "add", "mm", "step", "import", "--json", str(tmp_path / "report.json"))
    assert bench.main(options(*words)) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    cases = [(case["name"], case["size"], case["ratio"]) for case in report["cases"]]
    assert cases == [
        ("add", "64", 2),
        ("mm", "64", 2),
        ("add", "1M", 2),
        ("mm", "1M", 2),
        ("step", "step", 2),
        ("geometric mean", "64", pytest.approx(2)),
        ("geometric mean", "1M", pytest.approx(2)),
    ]
    assert twice == [9, 9, 6, 6] and report["cases"][4]["cpu_s"] == 9 and report["import_s"] == 0.05
    assert [case.get("target") for case in report["cases"]] == [None] * 4 + [1.05, 0.95, 1.05]
    assert re.search(r"^add +64 +1 us +2 us +2.00$", said, re.M)
    assert re.search(r"64 elements +geometric mean +2.00 +target 0.95: missed", said)
    assert re.search(r"training step +ratio +2.00 +target 1.05: missed", said)
    assert re.search(r"import +adds seconds +0.05 +target 0.15: reached", said)
    assert bench.main(options("--rounds", "2", "--only", "relu", "--json", "-")) == 0
    said = capsys.readouterr()
    assert [case["cpu_s"] for case in json.loads(said.out)["cases"]] == [1e-6, 1e-6] and "relu" in said.err
    assert bench.torch.__version__ in said.err and twice[4:] == [2, 2]
    assert [case["name"] for case in json.loads(said.out)["cases"]] == ["relu", "relu"]  # without a mean of one


def test_every_case_of_the_device_is_the_default(monkeypatch, capsys, twice):
    monkeypatch.setattr(bench, "import_seconds", lambda: timing.values([0.5] * 6))
    monkeypatch.setattr(bench, "in_a_process", lambda given, only, *_: case_of(only, 1, 1))
    monkeypatch.setattr(bench, "SIZES", {"64": (8, 8)})
    assert bench.main(options("--rounds", "3")) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^{name} +64 ", said, re.M) for name in bench.CASES) and "target 0.15: missed" in said


def test_a_name_that_is_no_case():
    for suite, name in (("device", "add"), ("operators", "swiglu"), ("compiled", "mlp-step")):
        with pytest.raises(Wrong, match=f"no case 'no such', 'nor this'; there are .*'{name}'"):
            bench.main(options(suite, "--only", name, "no such", "nor this"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the settings are of processors with AVX2")
def test_no_side_has_wider_instructions(monkeypatch):
    from torch._inductor import config

    for name in timing.SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    with config.patch({"cpp.march": None}):
        for limit in ("", "avx512"):
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
            timing.limit_instructions()
            assert config.cpp.march is None and not set(timing.SETTINGS) & set(os.environ)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        timing.limit_instructions()
        assert config.cpp.march == "x86-64-v3" and os.environ["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "SSE41"
        for name in timing.SETTINGS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
        timing.limit_instructions()
        assert config.cpp.march == "x86-64-v2" and os.environ["ONEDNN_MAX_CPU_ISA"] == "SSE41"


def test_report_of_operators(monkeypatch, capsys, tmp_path, small):
    def alternate(calls, budget):
        assert len([call() for call in calls]) == 2
        return [[3e-3] * 6, [2e-3] * 6]

    monkeypatch.setattr(bench_operators, "alternate", alternate)
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_operators, "copy_bandwidth", lambda: 8e6)
    words = ("--only", "swiglu", "quantize_rowwise", "linear_cross_entropy", "--threads", "1")
    assert bench.main(options("operators", *words, "--json", str(tmp_path / "report.json"))) == 0
    torch.set_num_threads(threads)
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    by_name = {case["name"]: case for case in report["cases"]}
    assert list(by_name) == ["swiglu", "quantize_rowwise", "linear_cross_entropy"] and report["threads"] == 1
    swiglu, elements = by_name["swiglu"], 2 * 8 * 64
    assert swiglu["dtype"] == "float32" and swiglu["forward"]["ratio"] == pytest.approx(1 / 1.5)
    assert swiglu["training"]["target"] == 0.5 and "target" not in swiglu["forward"]
    assert swiglu["forward"]["bandwidth"] == pytest.approx(3 * elements * 4 / 0.002 / 8e6)
    assert swiglu["training"]["bandwidth"] == pytest.approx((3 + 5) * elements * 4 / 0.002 / 8e6)
    assert swiglu["missed"] == ["faster 1.50, target 2.00"] and swiglu["undecided"] == []
    assert "training" not in by_name["quantize_rowwise"] and by_name["quantize_rowwise"]["missed"][1].startswith(
        "bandw"
    )
    loss = by_name["linear_cross_entropy"]
    assert "bandwidth" not in loss["forward"] and 0 < loss["training"]["memory"] < 10
    assert re.search(r"^swiglu +3.0ms +2.0ms +1.50 +0.77 +\| +3.0ms +2.0ms +1.50 +2.05 +MISSED faster 1.50", said, re.M)
    assert bench.main(options("operators", "--only", "swiglu", "--dtype", "bfloat16", "--json", "-")) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["dtype"] == "bfloat16"


def test_report_against_the_best(monkeypatch, capsys, tmp_path, small):
    """Eager takes 3 ms, the compiled function 1 ms, and the operator 2 ms."""
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    monkeypatch.setattr(bench_operators, "left_out", lambda *cell: {})
    sides = []

    def alternate(calls, budget, patience):
        sides.append(len(calls))
        results = [call() for call in calls]
        assert all(type(each) is type(results[0]) for each in results)
        return [[3e-3] * 9, *[[2.5e-3] * 9] * (len(calls) - 3), [1e-3] * 9, [2e-3] * 9]

    monkeypatch.setattr(bench_operators, "alternate", alternate)
    threads = torch.get_num_threads()
    words = ("--against", "best", "--only", "rms_norm", "quantize_rowwise", "--json", str(tmp_path / "best.json"))
    assert bench.main(options("operators", *words)) == 0 and torch.get_num_threads() == threads
    said, report = capsys.readouterr().out, json.loads((tmp_path / "best.json").read_text())
    tables = 1 if threads == 1 else 2
    assert sides == ([4] * 6 + [3] * 3) * tables
    assert len(re.findall(r"^rms_norm( +0.50 c){6} *$", said, re.M)) == tables
    assert len(re.findall(r"^quantize_rowwise( +0.50 c){3} *$", said, re.M)) == tables
    assert "geometric mean 0.50, target 1.80: missed" in said
    assert f"rms_norm, bfloat16, training, {bench_report.plural(threads, 'thread')}: 0.50, missed" in said
    *cells, average = report["cases"]
    assert {case["ratio"] for case in cells} == {2.0} and {case["best"] for case in cells} == {"compiled"}
    assert (
        average["name"] == "geometric mean"
        and average["ratio"] == pytest.approx(2)
        and report["suite"] == "operators, against the best"
    )


def test_report_without_contenders_that_fail(monkeypatch, capsys, tmp_path, small):
    monkeypatch.setattr(torch, "compile", lambda body, **_: pytest.fail("its code must not run in this process"))

    def left_out(case, dtype, training, threads):
        slow = {"eager": "not done in 120 s"} if case.name == "swiglu" else {}
        return {"compiled": "crashed, SIGSEGV", **slow} if case.compiles else {}

    monkeypatch.setattr(bench_operators, "left_out", left_out)
    monkeypatch.setattr(bench_operators, "alternate", lambda calls, *_, **__: [[3e-3] * 9, [2e-3] * 9])
    words = ("--against", "best", "--only", "quantize_rowwise", "adamw_step_", "swiglu", "--dtype", "bfloat16")
    assert bench.main(options("operators", *words, "--threads", "1", "--json", str(tmp_path / "best.json"))) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "best.json").read_text())
    assert re.search(r"^quantize_rowwise +1.50 e\* *$", said, re.M) and re.search(r"^swiglu +- \* +- \* *$", said, re.M)
    assert re.search(r"^adamw_step_ +1.50 e *$", said, re.M) and "every cell with a number is at least 1.00" in said
    assert "failed:\nswiglu, bfloat16, forward, 1 thread, compiled: crashed, SIGSEGV\n" in said
    assert "swiglu, bfloat16, training, 1 thread, eager: not done in 120 s\n" in said
    assert {(each["name"], str(each.get("left_out"))) for each in report["cases"]} == {
        ("quantize_rowwise", "{'compiled': 'crashed, SIGSEGV'}"),
        ("adamw_step_", "None"),
        ("geometric mean", "None"),
    }


def test_slow_cells_are_not_in_the_mean(monkeypatch, capsys, small):
    monkeypatch.setattr(bench_operators, "left_out", lambda *cell: {})
    times = iter([[[3e-3] * 9, [1e-3] * 9]] * 2 + [[[100.0], [1.0]]] * 3)
    monkeypatch.setattr(bench_operators, "alternate", lambda calls, *_, **__: next(times))
    monkeypatch.setattr(bench_operators, "functions", lambda case, names: {"eager": case.eager})
    words = ("--against", "best", "--only", "swiglu", "rms_norm", "--dtype", "float32", "--threads", "1")
    assert bench.main(options("operators", *words)) == 0
    said = capsys.readouterr().out
    assert "geometric mean 3.00 (2 cells with too few rounds left out), target 1.80: reached" in said
    assert "behind, or undecided:\nswiglu, float32, forward, 1 thread: 100.00, too few rounds to tell\n" in said
    assert bench.main(options("operators", *words[:3], "adamw_step_", *words[5:])) == 0
    assert "geometric mean" not in capsys.readouterr().out  # of no cell


@pytest.mark.processes
def test_contenders_that_are_left_out(monkeypatch):
    """One that fails does not take the others with it."""
    case = next(case for case in bench_operators.CASES if case.name == "rms_norm")
    monkeypatch.setattr(bench_operators, "LIMIT", 3)
    define = "def run(case, cell, names):\n for name in names:\n  if name in FAILS: {}\n  print(name, flush=True)\n"
    for fails, how, why in (
        ((), "pass", None),
        (("fused",), "raise ValueError(7)", "ValueError: 7"),
        (("eager", "compiled"), "os.abort()", "crashed, SIGABRT"),
        (("eager",), "os.system('sleep 61.5')", "not done in 3 s"),
        (("eager", "fused", "compiled"), "print('other words', flush=True), os._exit(7)", "ended with 7"),
    ):
        code = f"import os, sys, time; FAILS = {fails}; exec({define.format(how)!r}); run"
        monkeypatch.setattr(bench_operators, "TRIAL", code)
        assert bench_operators.left_out(case, 1) == dict.fromkeys(fails, why)
        slow = subprocess.run(["pgrep", "-f", "^sleep 61.5$"], capture_output=True)
        assert not slow.stdout, "what it started goes on"


@pytest.mark.processes
@pytest.mark.slow
def test_contenders_can_be_called():
    case = next(case for case in bench_operators.CASES if case.name == "adamw_step_")
    assert bench_operators.left_out(case, "float32", False, 1) == {}


@pytest.mark.parametrize("training", [False, True])
def test_trial_of_the_contenders(monkeypatch, capsys, small, training):
    calls = []

    def compile(body, **_):
        return lambda *inputs: calls.append(inputs) or body(*inputs)

    monkeypatch.setattr(torch, "compile", compile)
    bench_operators.trial("rms_norm", "bfloat16", training, torch.get_num_threads(), ["fused"])
    assert capsys.readouterr().out.split() == ["fused"] and not calls
    bench_operators.trial("swiglu", "bfloat16", training, torch.get_num_threads(), ["eager", "compiled"])
    assert capsys.readouterr().out.split() == ["eager", "compiled"]
    assert calls and {each.dtype for inputs in calls for each in inputs} == {torch.bfloat16}
    assert all(each.requires_grad == training for inputs in calls for each in inputs)


@pytest.mark.parametrize("case", bench_operators.CASES, ids=lambda case: case.name)
def test_contenders_compute_the_same(monkeypatch, small, case):
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    sides = bench_operators.functions(case, case.contenders)
    assert ("compiled" in sides) == (case.name != "adamw_step_")
    if case.fused:
        inputs = case.inputs(torch.float32)
        torch.testing.assert_close(sides["fused"](*inputs), sides["eager"](*inputs))


def test_bandwidth_of_a_copy(small):
    assert 1e6 < bench_operators.copy_bandwidth() < 1e13


def test_report_of_compiled_graphs(monkeypatch, capsys, twice):
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    monkeypatch.setattr(bench_compiled, "compile_time", lambda rounds: found(rounds, 1.05 * rounds))
    monkeypatch.setattr(bench_compiled, "decomposition", lambda name, body, shapes, rounds: found(3e-6, 1e-6 * rounds))
    assert bench.main(options("compiled", "--rounds", "100", "--only", "sum", "compile-time", "against-eager")) == 0
    said = capsys.readouterr().out
    assert re.search(r"^sum +1 us +2 us +2.00 +target 1.05: missed$", said, re.M)
    assert re.search(r"^compile-time +6 s +6.3 s +1.05 +target 1.10: reached$", said, re.M)
    assert re.search(r"^against-eager +1 us +2 us +2.00 +target 1.00: missed$", said, re.M)
    assert "softmax" not in said and "decomposed" not in said and twice == [100, 100]
    for rounds, quicker in (("2", True), ("4", False)):
        assert bench.main(options("compiled", "--rounds", rounds, "--only", "decompositions")) == 0
        said = capsys.readouterr().out
        for name in bench_compiled.DECOMPOSABLE:
            decomposed = name in inductor.decompositions
            words = "decomposed" if decomposed else "its kernels"
            assert re.search(rf"^{name}, in a model +3 us +{rounds} us", said, re.M)
            assert f"the default is {words}: {'the faster' if decomposed == quicker else 'the slower'}" in said


def test_every_case_of_compiled_graphs_is_the_default(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(bench_compiled, "CASES", {"one": (lambda device: made.append(device) or (lambda: None), 1.5)})
    monkeypatch.setattr(bench_compiled, "step_of", lambda *_, **__: lambda device: lambda: None)
    monkeypatch.setattr(bench_compiled, "compare", lambda *_: found(1.0, 1.0))
    monkeypatch.setattr(bench_compiled, "compile_time", lambda rounds: found(rounds, rounds))
    monkeypatch.setattr(bench_compiled, "decomposition", lambda *_: found(1.0, 2.0))
    monkeypatch.setattr(bench_compiled, "NAMES", ("one", "compile-time", "against-eager", "decompositions"))
    assert bench_compiled.run(options("compiled", "--rounds", "60")) == 0
    said = capsys.readouterr().out
    assert made == ["cpu", "openreg"] and re.search(r"^one .*1.00 +target 1.50: reached", said, re.M)
    assert re.search(r"^compile-time +6 s", said, re.M) and "against-eager" in said and "rms_norm, alone" in said


# ---- steps and scaling ----


@pytest.mark.parametrize("name", sorted({*bench_steps.CASES} - {"transformer"}))
def test_steps(monkeypatch, name):
    same_training(monkeypatch, bench_steps.CASES[name][0])


@pytest.fixture
def checkout(monkeypatch):
    """Use the demo of the checkout: an installed copy of the package has none beside it."""
    for module in (bench_steps, bench_graphs):
        monkeypatch.setattr(module, "DEMO", Path(__file__).parents[2] / "examples" / bench_steps.DEMO.name)


def test_the_transformer_is_the_demos(monkeypatch, checkout):
    losses = []
    demo = bench_steps.runpy.run_path(str(bench_steps.DEMO))

    class Run(demo["Run"]):
        def __init__(self, vocabulary, device, dtype):
            super().__init__(vocabulary, device, dtype)
            losses.append(self.losses)

    monkeypatch.setattr(bench_steps.runpy, "run_path", lambda path: demo | {"Run": Run, "BATCH": 2, "CONTEXT": 16})
    for device in ("cpu", "openreg"):
        step = bench_steps.transformer(device)
        step(), step()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_report_of_steps(monkeypatch, capsys, tmp_path, checkout):
    asked = []
    monkeypatch.setattr(bench_steps, "in_a_process", lambda given, only, *_: asked.append(*only) or case_of(only, 2, 1))
    monkeypatch.setattr(bench_steps, "measure", lambda name, rounds: found(1.0, rounds))
    path = tmp_path / "steps.json"
    assert bench.main(options("steps", "--json", str(path))) == 0
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    assert asked == [case["name"] for case in report["cases"]] == list(bench_steps.CASES)
    assert re.search(r"^lstm +2 s +1 s +0.50 +target 1.00: reached$", said, re.M) and "launch mode inline" in said
    assert bench.main(options("steps", "--only", "mlp", "--rounds", "3")) == 0
    assert re.search(r"^mlp +1 s +3 s +3.00 +target 0.97: missed$", capsys.readouterr().out, re.M)
    monkeypatch.setattr(bench_steps, "DEMO", tmp_path / "absent.py")
    assert bench.main(options("steps", "--only", "transformer", "mlp")) == 0
    assert "transformer    not measured: it is the model of absent.py, which a checkout has" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted({*bench_scaling.CASES} - {"all-reduce"}))
def test_both_sides_of_scaling(name):
    make, sizes, _unit = bench_scaling.CASES[name]
    assert sorted(sizes) == list(sizes) and len(sizes) == 4
    on_cpu, on_device = (make(device, sizes[0])() for device in bench_scaling.DEVICES)
    if name != "step":  # which test_steps compares
        assert on_device.device.type == "openreg"
        torch.testing.assert_close(on_device.cpu(), on_cpu)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_meet():
    result = bench_scaling.among(2, "all-reduce", 1000, 3)
    assert result.reference > 0 and result.measured > 0
    with pytest.raises(Wrong, match="no-such: its 2 processes ended with .*1.*; see above"):
        bench_scaling.among(2, "no-such", 1000, 3)


@pytest.mark.processes
def test_no_process_waits_for_one_that_failed(monkeypatch, tmp_path):
    """Rank 1 ends at once; rank 0 would wait for it."""
    program = tmp_path / "it"
    program.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/$RANK\n[ $RANK = 0 ] && exec sleep 60\nwhile [ ! -s {tmp_path}/0 ]; do sleep 0.1; done\nexit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(bench_scaling.sys, "executable", str(program))
    with pytest.raises(Wrong, match="add: its 2 processes ended with killed, 3; see above"):
        bench_scaling.among(2, "add", 1000, 3)
    assert not Path("/proc", (tmp_path / "0").read_text().strip()).exists()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("device", bench_scaling.DEVICES)
def test_bytes_of_a_tensor(device):
    assert 16 < bench_scaling.bytes_of_a_tensor(device) < 10_000


def test_report_of_scaling(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_scaling, "measure", lambda name, size, rounds: found(size * 1e-9, size * 2e-9))
    monkeypatch.setattr(bench_scaling, "among", lambda count, name, size, rounds: found(1e-3, count * 1e-3))
    monkeypatch.setattr(bench_scaling, "bytes_of_a_tensor", lambda device: 500 if device == "cpu" else 400)
    monkeypatch.setattr(bench, "import_seconds", lambda: timing.values([0.2] * 6))
    picture = tmp_path / "scaling.png"
    words = ("--plot", str(picture), "--json", str(tmp_path / "scaling.json"))
    assert bench.main(options("scaling", *words)) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "scaling.json").read_text())
    assert picture.read_bytes().startswith(b"\x89PNG") and f"picture: {picture}" in said
    assert re.search(r"^add +1,000 elements +1 us +2 us +2.00$", said, re.M)
    assert re.search(r"^all-reduce +4 processes +1 ms +4 ms +4.00$", said, re.M)
    assert len(report["cases"]) == sum(len(sizes) + 3 for _, sizes, _ in bench_scaling.CASES.values()) + 1
    assert report["cases"][-1] == {"name": "memory", "ratio": 0.8, "low": 0.8, "high": 0.8, "target": 1.2}
    assert (
        "400 on the device: 0.80, target 1.20: reached" in said
        and "0.20 s to import torch, target 0.15: missed" in said
    )
    assert bench.main(options("scaling", "--only", "memory")) == 0 and "picture" not in capsys.readouterr().out
    assert (
        bench.main(options("scaling", "--only", "add", "--plot", "-")) == 0 and "picture" not in capsys.readouterr().out
    )
    picture.unlink()
    monkeypatch.setattr(bench_report, "in_a_process", lambda *_, **__: report)
    assert bench.main(options("scaling", "--plot", str(picture), processes="2")) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and f"picture: {picture}" in capsys.readouterr().out


def test_the_picture_shows_microseconds(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    curves = {"add": {"size": [(10, 2e-6, 3e-6), (100, 4e-6, 5e-3)], "processes": []}}
    assert bench_scaling.draw(str(tmp_path / "it.png"), curves) == f"picture: {tmp_path / 'it.png'}"
    monkeypatch.undo()
    (figure,) = closed
    said = bench_scaling.draw(str(tmp_path / "no" / "it.png"), curves)
    assert said == f"no picture: {tmp_path / 'no' / 'it.png'} cannot be written: No such file or directory"
    monkeypatch.chdir(tmp_path)
    assert bench_scaling.draw(None, curves) == "picture: out/scaling.png" and Path("out/scaling.png").exists()
    shown, hidden = figure.axes
    lines = {line.get_label(): line for line in shown.lines}
    assert shown.get_visible() and not hidden.get_visible() and shown.get_ylabel() == "microseconds"
    for name, times in {"cpu": [2, 4], "openreg": [3, 5000]}.items():
        assert list(lines[name].get_xdata()) == [10, 100] and list(lines[name].get_ydata()) == pytest.approx(times)
    pyplot.close(figure)


# ---- graphs ----


@pytest.mark.parametrize("name", ["chain", "mlp-step"])
def test_a_replay_computes_what_the_cpu_does(monkeypatch, name):
    make = bench_graphs.CASES[name][0]
    eager, call = make("cpu"), make("openreg")
    for _ in range(2):
        expected = eager()
        torch.testing.assert_close(call().cpu(), expected, rtol=1e-4, atol=1e-5)
    results = []
    graph, replay = bench_graphs.captured(lambda: results.append(call()))
    assert len(graph._nodes()) >= 50
    replay()
    torch.testing.assert_close(results[0].cpu(), eager(), rtol=1e-4, atol=1e-5)


def test_report_of_graphs(monkeypatch, capsys, tmp_path, checkout):
    monkeypatch.setattr(bench_graphs, "measure", lambda name, rounds: (found(1.0, 0.4), 100))
    monkeypatch.setattr(bench_graphs, "seconds_of_a_node", lambda rounds: timing.values([2e-7] * 6))
    assert bench.main(options("graphs", "--json", str(tmp_path / "graphs.json"))) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "graphs.json").read_text())
    assert re.search(r"^chain +100 +1 s +400 ms +0.40 +target 0.30: missed$", said, re.M)
    assert re.search(r"^mlp-step +100 .* 0.40 +target 0.50: reached$", said, re.M)
    assert re.search(r"^a node +200 ns +target 150 ns: missed$", said, re.M) and report["node_s"] == 2e-7
    assert [case["name"] for case in report["cases"]] == list(bench_graphs.CASES)


def test_a_replay_is_measured():
    result, nodes = bench_graphs.measure("chain", 3)
    assert nodes >= 50 and result.reference > 0 and result.measured > 0
    assert result.low <= result.ratio <= result.high


def test_seconds_of_a_node(monkeypatch):
    monkeypatch.setattr(bench_graphs, "NODES", 20)
    assert 0 < bench_graphs.seconds_of_a_node(3).measured < 1e-3
