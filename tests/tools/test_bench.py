"""`python -m openreg_ops bench`: the two sides of each case compute the same, and the report says what was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import threading
import types
from pathlib import Path

import pytest
import torch

from openreg_ops import inductor
from openreg_ops.tools import bench, bench_compiled, bench_graphs, bench_operators, bench_scaling, bench_steps, timing


def options(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


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
    assert found == [[1] * 5] * 2 and calls == [0, 1] + [1, 0, 0, 1] * 2 + [1, 0]
    del calls[:]
    found = timing.alternate([lambda: calls.append(0), lambda: calls.append(1)], budget=1000, patience=1)
    assert found == [[1]] * 2 and calls == [0, 1, 1, 0]  # a round takes longer than the patience


def test_the_interval_holds_the_median_of_the_ratios():
    steady = timing.compared([1.0] * 101, [1.1] * 101)
    assert (steady.reference, steady.measured, steady.low, steady.high, steady.noise) == (1, 1.1, 1.1, 1.1, 0)
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        noise = torch.randn(101, generator=generator).mul(0.2).exp().tolist()
        found = timing.compared([1.0] * 101, noise)
        inside += found.low <= 1 <= found.high
    assert inside >= 180, "of 200 intervals of 95 % confidence"
    slowed = timing.compared([1.0, 2.0, 3.0] * 20, [2.0, 4.0, 6.0] * 20)  # a busy machine slows both sides
    assert (slowed.low, slowed.ratio, slowed.high) == (2, 2, 2)


def test_no_target_is_reached_in_noise():
    def found(low, high):
        return timing.Comparison(1.0, (low + high) / 2, low, high)

    assert timing.verdict(found(0.9, 1.0), 1.0) == "reached" and timing.verdict(found(1.01, 1.1), 1.0) == "missed"
    assert timing.verdict(found(0.8, 1.1), 1.0) == "too noisy to tell, 0.80 to 1.10"
    average = timing.mean([found(1.9, 2.1), found(0.45, 0.55)])
    assert average.ratio == pytest.approx(1) and average.low == pytest.approx(1 - (0.05**2 + 0.1**2) ** 0.5 / 2)


def test_regressions(tmp_path, capsys):
    def results(ratio, noise, name="add"):
        case = {"name": name, "size": "64", "ratio": ratio, "low": ratio - noise, "high": ratio + noise}
        other = {"name": "swiglu", "dtype": "float32", "forward": {"ratio": 1.0, "low": 0.9, "high": 1.1}}
        return {"cases": [case, other]}

    earlier = tmp_path / "earlier.json"
    assert timing.report(results(1.0, 0.1), options("--json", str(earlier))) == 0
    against = options("--against", str(earlier))
    assert timing.report(results(1.15, 0.1), against) == 0  # within the noise
    assert "0 of 2 figures are slower" in capsys.readouterr().out
    assert timing.report(results(1.3, 0.1), against) == 1
    said = capsys.readouterr().out
    assert "slower: add, 64: 1.30 (1.20 to 1.40), was 1.00 (0.90 to 1.10)" in said and "1 of 2 figures" in said
    assert timing.report(results(1.3, 0.1), options("--json", "-", "--against", str(earlier))) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == results(1.3, 0.1)  # alone, for a program to read
    assert "slower: add, 64: 1.30" in said.err and "1 of 2 figures" in said.err
    assert timing.report({"cases": [results(1.0, 0.1, "mul")["cases"][0]]}, against) == 2
    assert "has none of these figures" in capsys.readouterr().err
    for words, sentence in (
        (("--against", "no such file"), 'takes "best" or a file that --json wrote, but got no such file'),
        (("--against", "best"), "--against best is for the suite operators, but got device"),
    ):
        assert bench.main(options(*words)) == 2 and sentence in capsys.readouterr().err


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
    assert 0 < bench.import_seconds(1) < 60
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(bench.subprocess.CalledProcessError):
        bench.import_seconds(1)


def test_peak_memory():
    def call():
        return torch.empty(1000, device="openreg"), torch.empty(24, dtype=torch.uint8, device="openreg")

    kept = torch.empty(10**6, device="openreg")
    assert 4024 <= bench_operators.peak(call) < 4024 + 2 * 512 and kept.numel() == 10**6


# ---- the report ----


def found(reference, measured):
    """A comparison without noise."""
    return timing.Comparison(reference, measured, measured / reference, measured / reference)


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
    monkeypatch.setattr(bench, "import_seconds", lambda rounds: rounds / 100)
    monkeypatch.setattr(bench, "in_a_fresh_process", lambda name, given: found(given.rounds, 2 * given.rounds))
    words = ("--rounds", "9", "--only", "add", "mm", "step", "import", "--json", str(tmp_path / "report.json"))
    assert bench.main(options(*words)) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    cases = [(case["name"], case["size"], case["ratio"]) for case in report["cases"]]
    assert cases == [("add", "64", 2), ("mm", "64", 2), ("add", "1M", 2), ("mm", "1M", 2), ("MLP step", "step", 2)]
    assert twice == [9, 9, 4, 4] and report["cases"][-1]["cpu_s"] == 9
    assert report["summary"] == pytest.approx({"64": 2, "1M": 2, "step": 2, "import_s": 0.05})
    assert re.search(r"^add +64 +1 us +2 us +2.00$", said, re.M)
    assert re.search(r"64 elements +geometric mean +2.00 +target 0.95: missed", said)
    assert re.search(r"training step +ratio +2.00 +target 1.05: missed", said)
    assert re.search(r"import +adds seconds +0.05 +target 0.15: reached", said)
    assert bench.main(options("--rounds", "2", "--only", "relu", "--json", "-")) == 0
    said = capsys.readouterr()
    assert [case["cpu_s"] for case in json.loads(said.out)["cases"]] == [1e-6, 1e-6] and "relu" in said.err
    assert bench.torch.__version__ in said.err and twice[4:] == [2, 3]


def test_every_case_of_the_device_is_the_default(monkeypatch, capsys, twice):
    monkeypatch.setattr(bench, "import_seconds", lambda rounds: 0.5)
    monkeypatch.setattr(bench, "in_a_fresh_process", lambda name, given: found(1, 1))
    monkeypatch.setattr(bench, "SIZES", {"64": (8, 8)})
    assert bench.main(options("--rounds", "3")) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^{name} +64 ", said, re.M) for name in bench.CASES) and "target 0.15: missed" in said


def test_a_name_that_is_no_case(capsys):
    for suite, name in (("device", "add"), ("operators", "swiglu"), ("compiled", "mlp-step")):
        assert bench.main(options(suite, "--only", name, "no such", "nor this")) == 2
        said = capsys.readouterr().err
        assert said.startswith("bench: no case no such, nor this; there are ") and name in said


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
    assert f"({torch.backends.cpu.get_cpu_capability()})" in timing.machine()


def test_report_of_operators(monkeypatch, capsys, tmp_path, small):
    def alternate(calls, budget):
        assert len([call() for call in calls]) == 2
        return [[3e-3], [2e-3]]

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
    assert swiglu["dtype"] == "float32" and swiglu["forward"]["faster"] == pytest.approx(1.5)
    assert swiglu["forward"]["bandwidth"] == pytest.approx(3 * elements * 4 / 0.002 / 8e6)
    assert swiglu["training"]["bandwidth"] == pytest.approx((3 + 5) * elements * 4 / 0.002 / 8e6)
    assert swiglu["missed"] == ["faster 1.50, target 2.00"]
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
    monkeypatch.setattr(bench_operators, "crash", lambda *cell: "")
    sides = []

    def alternate(calls, budget, patience):
        sides.append(len(calls))
        results = [call() for call in calls]
        assert all(type(each) is type(results[0]) for each in results)
        return [[3e-3] * 9, [1e-3] * 9, *[[2.5e-3] * 9] * (len(calls) - 3), [2e-3] * 9]

    monkeypatch.setattr(bench_operators, "alternate", alternate)
    threads = torch.get_num_threads()
    words = ("--against", "best", "--only", "rms_norm", "quantize_rowwise", "--json", str(tmp_path / "best.json"))
    assert bench.main(options("operators", *words)) == 0 and torch.get_num_threads() == threads
    said, report = capsys.readouterr().out, json.loads((tmp_path / "best.json").read_text())
    tables = 1 if threads == 1 else 2
    assert sides == [4] * 6 * tables + [3] * 3 * tables or sides == ([4] * 6 + [3] * 3) * tables
    assert len(re.findall(r"^rms_norm( +0.50 c){6} *$", said, re.M)) == tables
    assert len(re.findall(r"^quantize_rowwise( +0.50 c){3} *$", said, re.M)) == tables
    assert "geometric mean 0.50, target 1.80: missed" in said
    assert f"rms_norm, bfloat16, training, {threads} threads: 0.50 to 0.50" in said
    assert {case["ratio"] for case in report["cases"]} == {2.0} and {c["best"] for c in report["cases"]} == {"compiled"}


def test_report_without_a_contender_that_crashes(monkeypatch, capsys, tmp_path, small):
    monkeypatch.setattr(torch, "compile", lambda body, **_: pytest.fail("its code must not run in this process"))
    monkeypatch.setattr(bench_operators, "crash", lambda *cell: "crashed, SIGSEGV")
    monkeypatch.setattr(bench_operators, "alternate", lambda calls, *_, **__: [[3e-3] * 9, [2e-3] * 9])
    words = ("--against", "best", "--only", "quantize_rowwise", "adamw_step_", "--dtype", "bfloat16")
    assert bench.main(options("operators", *words, "--json", str(tmp_path / "best.json"))) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "best.json").read_text())
    assert re.search(r"^quantize_rowwise +1.50 e\* *$", said, re.M)
    assert re.search(r"^adamw_step_ +1.50 e *$", said, re.M)
    assert "failed:\nquantize_rowwise, bfloat16, forward, 1 threads: crashed, SIGSEGV\n" in said
    assert {(each["name"], each.get("compiled")) for each in report["cases"]} == {
        ("quantize_rowwise", "crashed, SIGSEGV"),
        ("adamw_step_", None),
    }


@pytest.mark.processes
def test_crash_of_a_contender(monkeypatch):
    for code, reason in (
        ("print", ""),
        ("raise ValueError", "ValueError: ('rms_norm', 1)"),
        ("import os; os.abort() or print", "crashed, SIGABRT"),
    ):
        monkeypatch.setattr(bench_operators, "TRIAL", code)
        assert bench_operators.crash("rms_norm", 1) == reason


@pytest.mark.parametrize("training", [False, True])
def test_trial_of_a_contender(monkeypatch, small, training):
    calls = []

    def compile(body, **_):
        return lambda *inputs: calls.append(inputs) or body(*inputs)

    monkeypatch.setattr(torch, "compile", compile)
    bench_operators.trial("swiglu", "bfloat16", training, torch.get_num_threads())
    assert calls and {each.dtype for inputs in calls for each in inputs} == {torch.bfloat16}
    assert all(each.requires_grad == training for inputs in calls for each in inputs)


@pytest.mark.parametrize("case", bench_operators.CASES, ids=lambda case: case.name)
def test_contenders_compute_the_same(monkeypatch, small, case):
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    sides = bench_operators.contenders(case)
    assert ("compiled" in sides) == (case.name != "adamw_step_")
    if case.fused:
        inputs = case.inputs(torch.float32)
        torch.testing.assert_close(sides["fused"](*inputs), sides["eager"](*inputs))


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_in_a_fresh_process():
    result = bench.in_a_fresh_process("step", options("--rounds", "3"))
    assert result.reference > 0 and result.measured > 0
    with pytest.raises(RuntimeError, match="the process that measures no-such ended with 2"):
        bench.in_a_fresh_process("no-such", options("--rounds", "3"))


def test_bandwidth_of_a_copy(small):
    assert 1e6 < bench_operators.copy_bandwidth() < 1e13


def test_report_of_compiled_graphs(monkeypatch, capsys, twice):
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)
    monkeypatch.setattr(bench_compiled, "compile_time", lambda rounds: found(rounds, 1.05 * rounds))
    monkeypatch.setattr(bench_compiled, "decomposition", lambda name, body, shapes, rounds: found(3e-6, 1e-6 * rounds))
    assert bench.main(options("compiled", "--rounds", "100", "--only", "sum", "compile-time", "against-eager")) == 0
    said = capsys.readouterr().out
    assert re.search(r"^sum +1 us +2 us +2.00 +target 1.05: missed$", said, re.M)
    assert re.search(r"^compile-time +5 s +5.25 s +1.05 +target 1.10: reached$", said, re.M)
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
    assert bench_compiled.run(types.SimpleNamespace(only=None, rounds=1, json=None, against=None)) == 0
    said = capsys.readouterr().out
    assert made == ["cpu", "openreg"] and re.search(r"^one .*1.00 +target 1.50: reached", said, re.M)
    assert re.search(r"^compile-time +3 s", said, re.M) and "against-eager" in said and "rms_norm, alone" in said


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
    monkeypatch.setattr(bench, "in_a_fresh_process", lambda name, given: asked.append(name) or found(2.0, 1.0))
    monkeypatch.setattr(bench_steps, "measure", lambda name, rounds: found(1.0, rounds))
    path = tmp_path / "steps.json"
    assert bench.main(options("steps", "--json", str(path))) == 0
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    assert asked == [case["name"] for case in report["cases"]] == list(bench_steps.CASES)
    assert re.search(r"^lstm +2 s +1 s +0.50 +target 1.00: reached$", said, re.M) and "launch mode inline" in said
    assert bench.main(options("steps", "--only", "mlp", "--rounds", "3", "--against", str(path))) == 1
    said = capsys.readouterr().out
    assert re.search(r"^mlp +1 s +3 s +3.00 +target 0.97: missed$", said, re.M) and "slower: mlp, inline: 3.00" in said
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
    with pytest.raises(RuntimeError, match="no-such in 2 processes ended with 1"):
        bench_scaling.among(2, "no-such", 1000, 3)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("device", bench_scaling.DEVICES)
def test_bytes_of_a_tensor(device):
    assert 16 < bench_scaling.bytes_of_a_tensor(device) < 10_000


def test_report_of_scaling(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_scaling, "measure", lambda name, size, rounds: found(size * 1e-9, size * 2e-9))
    monkeypatch.setattr(bench_scaling, "among", lambda count, name, size, rounds: found(1e-3, count * 1e-3))
    monkeypatch.setattr(bench_scaling, "bytes_of_a_tensor", lambda device: 500 if device == "cpu" else 400)
    monkeypatch.setattr(bench, "import_seconds", lambda rounds: 0.2)
    picture = tmp_path / "pictures" / "scaling.png"
    words = ("--plot", str(picture), "--json", str(tmp_path / "scaling.json"))
    assert bench.main(options("scaling", *words)) == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "scaling.json").read_text())
    assert picture.read_bytes().startswith(b"\x89PNG") and f"picture: {picture}" in said
    assert re.search(r"^add +1,000 elements +1 us +2 us +2.00$", said, re.M)
    assert re.search(r"^all-reduce +4 processes +1 ms +4 ms +4.00$", said, re.M)
    assert len(report["cases"]) == sum(len(sizes) + 3 for _, sizes, _ in bench_scaling.CASES.values())
    assert (
        "400 on the device: 0.80, target 1.20: reached" in said
        and "0.20 s to import torch, target 0.15: missed" in said
    )
    assert bench.main(options("scaling", "--only", "memory")) == 0 and "picture" not in capsys.readouterr().out


def test_the_picture_shows_microseconds(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    curves = {"add": {"size": [(10, 2e-6, 3e-6), (100, 4e-6, 5e-3)], "processes": []}}
    assert bench_scaling.draw(tmp_path / "it.png", curves) == f"picture: {tmp_path / 'it.png'}"
    monkeypatch.undo()
    (figure,) = closed
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
    monkeypatch.setattr(bench_graphs, "seconds_of_a_node", lambda rounds: 2e-7)
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
    assert 0 < bench_graphs.seconds_of_a_node(3) < 1e-3
